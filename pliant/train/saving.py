"""When a job writes its state down, and where: asked for by the program, every so many steps, and when nobody is left.

Only the first worker writes. How checkpoints are written in the background is in `state.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pliant.train.job_state import JobState
from pliant.train.state import checkpoint
from pliant.train.trainer import Trainer


class Saving:
    """The checkpoints of one job."""

    def __init__(
        self, trainer: Trainer, state: JobState, directory: str, every: int, level: str, say: Callable[[str], None]
    ) -> None:
        self._trainer, self._state, self._level, self._say = trainer, state, level, say
        self._directory, self._every = directory, every
        """The job's own, empty if it has none; and after how many steps to write there, 0 for never."""
        self._asked: str | None = None
        """What to write with the step in progress: a path, or empty for the job's own directory."""
        self._writer: checkpoint.Writer | None = None
        self._written_to: Path | None = None

    def ask(self, path: str) -> None:
        """Write the step in progress once it is committed; between steps, at once."""
        if self._trainer.turn is not None:
            self._asked = path
        elif self._trainer.is_first:
            self._write(path)

    def committed(self) -> None:
        """A step is done by all replicas."""
        asked, self._asked = self._asked, None
        is_due = self._every and self._trainer.progress.step % self._every == 0
        if self._trainer.is_first and (asked is not None or is_due):
            self._write(asked or "")

    def write_last(self) -> None:
        """The job is told to end, or this is its last worker and it must go: keep what was reached."""
        if self._directory and self._trainer.is_first:
            self._write_whole("")  # a step that was torn meanwhile has been taken back
            self.flush()

    def flush(self) -> None:
        """Wait until nothing is being written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, path: str) -> None:
        if self._trainer.finish_sums():  # else the step does not count, and will be written when it does
            self._write_whole(path)

    def _write_whole(self, path: str) -> None:
        """Write the state as it is: that of the last step that counts."""
        directory = Path(path).parent if path else Path(self._directory or ".")
        if self._writer is None or self._written_to != directory:
            if self._writer is not None:
                self._writer.close()
            self._writer, self._written_to = checkpoint.Writer(directory, say=self._say), directory
        state = self._state.read()
        contexts = state.pop("contexts")
        self._writer.save(
            checkpoint.Checkpoint(
                step=self._trainer.progress.step,
                epoch=self._trainer.progress.epoch,
                num_replicas=self._trainer.replicas.count,
                meta={"torch": torch.__version__, "level": self._level},
                state=state,
                contexts=contexts,
            ),
            name=Path(path).name if path else None,
        )
