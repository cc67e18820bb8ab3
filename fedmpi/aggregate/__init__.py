"""The collective: from the updates of every rank's clients to the mean, the votes and the new model."""
