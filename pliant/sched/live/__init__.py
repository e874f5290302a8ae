"""The live scheduler behind `pliant serve`: jobs that really run, where they run, what is kept of them, and the API with its two ends."""
