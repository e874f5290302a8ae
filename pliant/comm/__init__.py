"""Collectives between the workers of a view: topologies and orders as pure values, and the engine that carries them out.

Tensors in, sums out: what a gradient, a replica or a step is, nobody knows here.
"""
