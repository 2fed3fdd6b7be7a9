"""A run of the benchmark: what is measured, in which order, by which processes."""
