"""The commands that this package adds to `pliant`: bench, demo, lab and reproduce."""
