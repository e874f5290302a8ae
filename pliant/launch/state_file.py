"""What a runner tells of itself in a file (`--state-file`): its config server, and its workers' processes.

For a scheduler on the same machine, which may be killed and come back, and must then find everything again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pliant.child import start_ticks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker that lived when the file was written."""

    pid: int
    """Of the process, and of its group."""
    start_ticks: int
    """When it began: another process with the same id has another one."""
    slot: int

    @property
    def lives(self) -> bool:
        """Whether it does now; what is only waiting to be reaped holds no device."""
        return start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class RunnerState:
    """What the file says."""

    config_server: str
    version: int
    """Of the newest view that the runner has acted on: it starts nobody for an older one."""
    workers: Mapping[str, WorkerProcess]
    """By address."""


def write(path: Path, config_server: str, version: int, workers: Mapping[str, tuple[int, int]]) -> None:
    """Say where the config server is, which view was acted on, and each living worker's process and slot."""
    told = {
        name: asdict(WorkerProcess(pid, ticks, slot))
        for name, (pid, slot) in workers.items()
        if (ticks := start_ticks(pid)) is not None
    }
    draft = path.with_suffix(".draft")
    try:
        draft.write_text(json.dumps({"config_server": config_server, "version": version, "workers": told}))
        draft.replace(path)  # readers see all of it or nothing
    except OSError as error:
        log.warning("--state-file %s: %s", path, error.strerror)


def read(path: Path) -> RunnerState | None:
    """What the runner has written; None as long as it has not."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    workers = {name: WorkerProcess(**facts) for name, facts in value["workers"].items()}
    return RunnerState(value["config_server"], value["version"], workers)
