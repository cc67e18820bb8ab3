"""Starting runs: launcher (`--ranks N`), submit, arrays and supervisor (jobs), requeue (restarts), cancel, status."""
