"""All that is known by now of jobs and clusters: what sources add to, and what is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pliant.sched.live.client import ClusterStatus
from pliant.ui.follow import RecordFile
from pliant.ui.jobs import Job, key_of


@dataclass(slots=True)
class Cluster:
    """The devices of a server of `pliant serve`, and who has had them."""

    where: str
    status: ClusterStatus | None = None
    jobs: list[str] = field(default_factory=list)
    """The keys of its jobs."""


@dataclass(slots=True)
class Seen:
    """All that is known by now."""

    jobs: dict[str, Job] = field(default_factory=dict)
    clusters: dict[str, Cluster] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """What cannot be looked at, and why."""

    def job(self, where: str, name: str) -> Job:
        """The job that is known from there; a new one, if it was not."""
        key = key_of(where)
        if key not in self.jobs:
            self.jobs[key] = Job(key, name, where)
        return self.jobs[key]

    def record(self, path: Path, name: str) -> Job:
        """The job that writes this record."""
        job = self.job(str(path), name)
        if job.record is None:
            job.record = RecordFile(path)
        return job


class Source(Protocol):
    """A place to look at. It tells problems by `seen`, and raises nothing but what is a mistake of ours."""

    def look(self, seen: Seen) -> None: ...
