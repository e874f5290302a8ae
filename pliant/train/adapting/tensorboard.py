"""Scalars for TensorBoard: what each step says of the job, written by whoever is the first worker."""

from __future__ import annotations

from typing import Any

from pliant.adapt import Observation
from pliant.errors import ConfigError


class Scalars:
    """Writes to a folder. The file is begun with the first step that this worker is the first one at."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if TensorBoard's writer is not installed."""
        self._folder = folder
        self._make = _writer_class()
        self._writer: Any = None

    def publish(self, seen: Observation, rank: int) -> None:
        """The job after a step. (May be one of an adaptation's listeners.)"""
        if rank != 0:
            return
        if self._writer is None:
            try:
                self._writer = self._make(self._folder)
            except OSError as error:
                raise ConfigError(
                    f"--tensorboard {self._folder}: {error.strerror}; give a folder to write to"
                ) from None
        for name, value in scalars(seen).items():
            self._writer.add_scalar(name, value, seen.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def scalars(seen: Observation) -> dict[str, float]:
    """What is drawn, by name; nothing for what is not known."""
    found: dict[str, float | None] = {
        "job/step_seconds": seen.step_s,
        "job/samples_per_second": seen.samples_per_s,
        "job/workers": seen.num_workers,
        "maths/batch_size": seen.batch_size,
        "maths/global_batch": seen.global_batch,
        "maths/learning_rate_factor": seen.learning_rate_factor,
        "gradients/noise_scale": seen.noise_scale,
        "gradients/variance": seen.variance,
    }
    if seen.workers:
        found["network/strategy_bytes_per_second"] = min(worker.throughput for worker in seen.workers)
        found["network/egress_bytes"] = sum(worker.egress_bytes for worker in seen.workers)
    return {name: value for name, value in found.items() if value is not None}


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard's writer is missing ({error}): pip install 'pliant[tensorboard]', or leave --tensorboard out"
        ) from None
    return SummaryWriter
