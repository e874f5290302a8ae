"""Measurements: ours beside its peers and beside what the hardware allows, taking turns in one run. `pliant.cli` shows them."""
