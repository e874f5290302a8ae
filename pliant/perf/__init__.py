"""How long training must take, and how long it will: yardsticks and models. Pure arithmetic: no sockets, no clocks, no torch.

`limits` has the bounds of a step on a network, and is what this package offers by itself. `scaling` predicts a step on many
workers from steps on few; `goodput` predicts what a number of workers and a batch size are worth. Both are imported by
their own names, because they need NumPy, which takes its time to load.
"""

from pliant.perf.limits import Bounds, Layer, bounds, tictac_efficiency, transfer_s

__all__ = ["Bounds", "Layer", "bounds", "tictac_efficiency", "transfer_s"]
