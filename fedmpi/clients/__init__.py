"""A rank's clients: a model and its data on one device, offered to local rules as jobs."""
