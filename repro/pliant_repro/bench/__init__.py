"""The `pliant bench` measurements: ours beside its peers and beside what the hardware allows, interleaved in one run."""
