"""Membership inference on finished runs.

    rebuild, answers     a run's model and data again, and what it says of samples
    attackers            logistic regression on the answers, and a threshold of the loss
    command              the attack on run folders
    membership           the same as a measurement (--evaluate membership)
"""
