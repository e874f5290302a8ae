"""A unit's work, on whatever computes it: clients trained in turn or as one computation, or a part of a test.

`local` is what an executor calls; nothing here knows of rounds or of other processes.
"""
