"""What is known of a job while it runs: estimators of its gradients' noise, and stalls.

Values and small state machines; nothing here touches sockets or a training loop. `train.gradients.probing` feeds the estimators,
and `train.adapting.metrics` shows what they say.
"""

from pliant.monitor.ema import Ema
from pliant.monitor.noise import NoiseScale, Variance
from pliant.monitor.stall import StallDetector

__all__ = ["Ema", "NoiseScale", "StallDetector", "Variance"]
