"""What others see of a running job, as far as somebody has asked for it: a page of metrics, TensorBoard, stalls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from pliant.adapt.monitors import StallDetector, wants_stall_detection
from pliant.cluster import Worker
from pliant.train.adapting.settings import Settings
from pliant.train.trainer import Trainer


def show(
    trainer: Trainer, settings: Settings, worker: Worker, stack: contextlib.ExitStack, say: Callable[[str], None]
) -> None:
    """Let `trainer` be seen until `stack` is closed; the page is at the worker's address."""
    adaptation, stalls = trainer.adaptation, None
    if wants_stall_detection():
        stalls = stack.enter_context(StallDetector(say))
        trainer.watched = trainer.crossing.watched = stalls.watch
    if settings.metrics:
        from pliant.train.adapting.metrics import Metrics

        metrics = Metrics.open(worker.host, worker.port, stalls)
        stack.callback(metrics.close)
        adaptation.on_view.append(metrics.work_in)
        adaptation.listeners.append(metrics.publish)
    if settings.tensorboard:
        from pliant.train.adapting.tensorboard import Scalars

        scalars = Scalars(settings.tensorboard)
        stack.callback(scalars.close)
        adaptation.listeners.append(scalars.publish)
