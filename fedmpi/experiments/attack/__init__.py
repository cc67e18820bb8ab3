"""Membership inference on finished runs.

rebuild, answers     restore a run's model and data; outputs and losses per sample
attackers            logistic regression on the outputs, threshold on the loss
command              `fedmpi attack`: attack run folders
membership           the attack as a measurement (--evaluate membership)
"""
