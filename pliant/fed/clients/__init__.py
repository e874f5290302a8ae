"""The clients of a simulation, without their samples: how fast their devices are, and when they are there."""
