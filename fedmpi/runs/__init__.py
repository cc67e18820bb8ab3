"""From a configuration to a run folder: options, checks, training, checkpoints, logs."""
