"""Training: replicas that take turns on a worker, their gradients, steps that count or do not, and the way into the next view.

`job` is what a program sees of it.
"""
