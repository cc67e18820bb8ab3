"""Hand-written kernels for small models on CPUs."""
