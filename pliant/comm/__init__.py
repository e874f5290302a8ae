"""Collectives between the workers of a view: pure topologies, orders and plans, and the engine that carries them out.

The package knows tensors and ranks. It does not know what a gradient, a replica's state or a training step is.
"""
