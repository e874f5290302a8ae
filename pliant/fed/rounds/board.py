"""A federated job in TensorBoard, under FedScale's names: a view of the record, drawn anew when a job is resumed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from pliant.fed.history import Point, Round

log = logging.getLogger(__name__)


class Board:
    """Writes to a folder; without TensorBoard's writer, nothing."""

    def __init__(self, folder: Path) -> None:
        """Removes the events of an earlier run there: the writer cannot take single ones back."""
        self._folder = folder
        self._writer: Any = None

    def open(self) -> None:
        for old in self._folder.glob("events.out.tfevents.*"):
            old.unlink(missing_ok=True)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            log.info(
                "no TensorBoard events, as its writer is not installed (%s): pip install 'pliant[tensorboard]'", error
            )
            return
        self._writer = SummaryWriter(str(self._folder))

    def round(self, done: Round) -> None:
        minutes = int(done.clock_s / 60)
        if done.loss is not None:
            self._add("Train/round_to_loss", done.loss, done.round)
            self._add("Train/time_to_train_loss (min)", done.loss, minutes)
        self._add("Train/round_duration (min)", done.duration_s / 60, done.round)
        if self._writer is not None and done.client_s:
            self._writer.add_histogram(
                "Train/client_duration (min)", np.array([each / 60 for each in done.client_s]), done.round
            )

    def test(self, point: Point) -> None:
        self._add("Test/round_to_accuracy", point.accuracy, point.round)
        self._add("Test/time_to_test_accuracy (min)", point.accuracy, int(point.clock_s / 60))
        if point.loss is not None:
            self._add("Test/round_to_loss", point.loss, point.round)
        if point.epsilon is not None:
            self._add("Privacy/epsilon", point.epsilon, point.round)
        if self._writer is not None:
            self._writer.flush()

    def _add(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
