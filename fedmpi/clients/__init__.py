"""A rank's clients: a model and its data on one device, as jobs for local rules."""
