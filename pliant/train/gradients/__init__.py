"""Gradients of replicas: where they lie, how they are caught and summed, and what can be seen in them."""
