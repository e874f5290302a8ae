"""TensorBoard's event files, for training jobs and for federated ones. Needs the extra `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pliant.errors import ConfigError


class EventWriter:
    """Writes the events of one folder. The file is created with the first event."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError if TensorBoard's writer is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"TensorBoard's writer is missing ({error}): pip install 'pliant[tensorboard]'") from None
        self._make, self._folder = SummaryWriter, str(folder)
        self._writer: Any = None

    def add_scalars(self, values: Mapping[str, float | None], step: int) -> None:
        """Add numbers by name; unknown ones are left out."""
        for name, value in values.items():
            if value is not None:
                self._opened().add_scalar(name, value, step)

    def add_histogram(self, name: str, values: Any, step: int) -> None:
        self._opened().add_histogram(name, values, step)

    def flush(self) -> None:
        self._opened().flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> Any:
        if self._writer is None:
            try:
                self._writer = self._make(self._folder)
            except OSError as error:
                raise ConfigError(
                    f"TensorBoard's {self._folder}: {error.strerror}; give a folder to write to"
                ) from None
        return self._writer
