"""Where jobs run: the seam between the live scheduler, which knows nothing of processes, and what starts them.

A ground starts the runner of a job, finds it again after the scheduler was killed, and says which devices its processes
are on. A run leaves all that is needed to find it in its directory, so there is nothing to be told but where that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pliant.sched.live.jobfile import JobSpec

Counts = Mapping[str, int]
"""How many devices of each type; types that are not there are 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One life of a job, from the start of its runner to the end of it. A job that was put off has several."""

    spec: JobSpec
    number: int
    """Never used twice in a cluster."""
    directory: Path
    """The job's, absolute, made by the scheduler; the record, the checkpoints and the log are the same in all runs."""

    @property
    def place(self) -> Path:
        """What is of this run alone: made by the ground, and its own."""
        return self.directory / f"run-{self.number}"

    @property
    def record(self) -> Path:
        return self.directory / "record.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def log(self) -> Path:
        """What the runner and the workers print, of all runs."""
        return self.directory / "log"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    code: int | None
    """The runner's exit code, minus the signal that killed it; None: nobody has seen it, as when its machine was lost."""
    at_s: float
    """Unix time."""


class Running(Protocol):
    """A run that was started. Used by one thread; no call may take longer than a request to a neighbour (0.1 s).

    Raises (from `resize` and `end`):
        ServerUnavailable: the runner cannot be told yet, or is gone; the scheduler comes again with the same.
        PliantError: it refuses, with the reason.
    """

    def resize(self, devices: Counts) -> None:
        """Want these devices, at least one, from now on; returns at once, `occupied` tells when it has come to pass."""

    def occupied(self) -> dict[str, int]:
        """The devices on which processes of it live, wanted or not. A process that is dying still counts, and so does one
        that the runner may be about to start because it has not yet heard that it is not wanted.
        """

    def drop(self) -> None:
        """Kill, at once, the workers on devices that are not wanted any more: the others will recover."""

    def end(self, *, kill: bool = False) -> None:
        """End in good order at the next step's boundary, with a checkpoint; or at once, as a lost machine would."""

    def ended(self) -> Ended | None:
        """None as long as anything of it lives."""


class Ground(Protocol):
    """A place with devices."""

    name: str
    """As in `pliant serve --on NAME`."""

    def devices(self) -> dict[str, int]:
        """What there is now; it may change."""

    def start(self, run: Run, devices: Counts) -> Running:
        """Start the job's program in a runner that watches, on these devices, with its newest checkpoint if it has one.

        Raises:
            PliantError: it cannot be started, with the reason; the job has then failed.
        """

    def adopt(self, run: Run) -> Running | None:
        """The run that an earlier scheduler has started, whether it still lives or has ended.
        None: `start` had not come far enough to start anything, or nothing is left to tell.
        """

    def close(self) -> None:
        """The scheduler ends; runs go on."""
