"""The built-in data sets, one file per data set."""
