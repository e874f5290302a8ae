"""What is known of a job while it runs: estimators of its gradients' noise, one worker's figures, stalls.

Values and small state machines; nothing here touches sockets or a training loop. `train.probing` feeds the estimators,
and `train.metrics` shows what they say.
"""

from pliant.monitor.ema import Ema
from pliant.monitor.figures import Figures
from pliant.monitor.noise import NoiseScale, Variance
from pliant.monitor.stall import StallDetector

__all__ = ["Ema", "Figures", "NoiseScale", "StallDetector", "Variance"]
