"""TensorBoard's event files, for training jobs and for federated ones. Needs the extra `tensorboard`."""

from __future__ import annotations

import importlib
import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pliant.errors import ConfigError
from pliant.files import DISK_ERRORS, LossCount


class EventWriter:
    """Writes the events of one folder. The file is created with the first event.

    A full or failing disk costs events and a warning. The file stays whole, and goes on when there is room again: that is
    why it is written here, with TensorBoard's own encoding, and not by its writer, which ends with its first error.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError if TensorBoard is not installed."""
        try:
            proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
            records = importlib.import_module("tensorboard.summary.writer.record_writer")
            summary = importlib.import_module("torch.utils.tensorboard.summary")
        except ImportError as error:
            raise ConfigError(f"TensorBoard's writer is missing ({error}): pip install 'pliant[tensorboard]'") from None
        self._summary: Any = summary
        self._event, self._encoder = proto.Event, records.RecordWriter
        self._folder = Path(folder)
        self._path = self._folder / f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = -1
        self._size = 0
        """The length of all events that were written whole."""
        self._losses = LossCount(f"TensorBoard's {folder}", "events")

    def add_scalars(self, values: Mapping[str, float | None], step: int) -> None:
        """Add numbers by name; unknown ones are left out."""
        for name, value in values.items():
            if value is not None:
                self._add(self._summary.scalar(name, value), step)

    def add_histogram(self, name: str, values: Any, step: int) -> None:
        self._add(self._summary.histogram(name, np.asarray(values), _histogram_bins()), step)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _add(self, summary: Any, step: int) -> None:
        try:
            if self._file < 0:
                self._open()
            self._write(self._event(wall_time=time.time(), step=int(step), summary=summary))
            self._losses.end()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise ConfigError(
                    f"TensorBoard's {self._folder}: {error.strerror}; give a folder to write to"
                ) from None
            self._losses.add(1, error)
            self.close()

    def _open(self) -> None:
        """Open the file and cut off what was written of an event in part."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if os.fstat(self._file).st_size < self._size:  # somebody has removed the file
            self._size = 0
        os.ftruncate(self._file, self._size)
        if not self._size:
            self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def _write(self, event: Any) -> None:
        record = io.BytesIO()
        self._encoder(record).write(event.SerializeToString())
        rest = record.getbuffer()
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(record.getbuffer())


def _histogram_bins() -> list[float]:
    """Return the limits of bins that TensorBoard's histograms have: each is a tenth wider than the one before."""
    above = [1e-12]
    while above[-1] * 1.1 < 1e20:
        above.append(above[-1] * 1.1)
    return [*(-limit for limit in reversed(above)), 0.0, *above]
