"""The jobs that are shown: each with its story, its logs, and what can be done to it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError
from pliant.fed.jobs import detached
from pliant.fed.jobs.folders import JobFolder
from pliant.sched.live.client import LiveClient, Server
from pliant.ui.allocation import Happening
from pliant.ui.follow import LogFile, RecordFile
from pliant.ui.story import Event, Story

ANSWER_S = 5.0
MOST_LOGS = 50
SHOWN_AS = {
    "failed": "lost", "killed": "lost", "dropped": "lost", "decision": "decision", "fallback": "decision",
    "put-off": "decision", "finished": "end", "stopped": "end",
}  # fmt: skip
"""What a cluster tells of a job, as a kind of event; all else is of its start."""
NO_RECORD = "it writes no record that is known here: start it with --record FILE to see its curves"
NO_VALUES = "its program reports no loss: job.report(loss=...) makes a curve of it"


class Log(Protocol):
    """Something that a program prints; the newest lines of it."""

    text: deque[str]
    num_lines: int
    """So far: grows with every line."""

    def look(self) -> None:
        """Read what has come; may take as long as a request."""


class Control(Protocol):
    """What can be done to a job that runs. Both may take as long as a request.

    Raises:
        PliantError: it was refused, or nobody answers.
    """

    can_resize: bool

    def resize(self, workers: int) -> str:
        """Ask for so many workers; what was answered, for people."""

    def stop(self) -> str:
        """End it in good order, after its step; as `resize`."""


@dataclass(slots=True)
class Job:
    """One job, as far as it is known."""

    key: str
    name: str
    where: str
    """The file, or the server, that it is known from."""
    record: RecordFile | None = None
    story: Story = field(default_factory=Story)
    logs: dict[str, Log] = field(default_factory=dict)
    control: Control | None = None
    command: str = ""
    told_state: str = ""
    """As whoever runs it says; empty: only its record is known."""
    told_why: str = ""
    members: tuple[str, ...] = ()
    """Who is on the roll now, by the job's config server."""
    devices: str = ""
    """Such as cpu=2, in a cluster."""
    of_cluster: bool = False
    """Whether a cluster's server starts and ends it: then its word counts."""
    happenings: list[Happening] = field(default_factory=list)
    """What its cluster has decided about it."""
    begun_s: float | None = None
    looked: int = 0

    def read(self, lock: AbstractContextManager[object]) -> bool:
        """Take in some of what its record says by now, under `lock`; whether there is more."""
        if self.record is None:
            return False
        facts, is_new = self.record.facts()
        with lock:
            if is_new:
                self.story = Story()
            self.story.tell(facts)
        return bool(facts) and not self.record.is_read

    def state(self, now_s: float) -> str:
        if self.told_state:
            return self.told_state
        if self.story.over:
            return "finished"
        return "running" if self.story.is_running(now_s) else "silent" if self.story.num_facts else "waiting"

    @property
    def why(self) -> str:
        """What is to be said about it: by whoever runs it, or about what cannot be shown."""
        if self.told_why:
            return self.told_why
        if self.record is None:
            return "" if self.of_cluster else NO_RECORD
        is_silent = self.story.federation is None and self.story.step > 0 and not self.story.values
        return NO_VALUES if is_silent else ""

    @property
    def step(self) -> int | None:
        """Or round; None: nothing tells."""
        story = self.story
        return story.federation.rounds if story.federation is not None else story.step if story.num_facts else None

    @property
    def started_s(self) -> float | None:
        return self.begun_s if self.begun_s is not None else self.story.began_s

    @property
    def events(self) -> list[Event]:
        """What its record tells, and what its cluster has decided about it, by time."""
        decided = [
            Event(SHOWN_AS.get(each.what, "start"), self.story.step_at(each.at_s), each.at_s, each.what, each.why)
            for each in self.happenings
        ]
        return sorted([*self.story.events, *decided], key=lambda event: event.time_s)

    @property
    def num_workers(self) -> int:
        return len(self.members) or self.story.num_workers

    @property
    def version(self) -> tuple[object, ...]:
        """Changes with everything that a page shows of it, but for its logs."""
        return (id(self.story), self.story.num_facts, self.told_state, self.told_why, self.members, self.devices)


def key_of(where: str) -> str:
    """The job's name in addresses of the page: the same after a restart."""
    return hashlib.sha256(where.encode()).hexdigest()[:12]


def logs_beside(record: Path, extra: Sequence[Path] = ()) -> list[Path]:
    """The logs that belong to a record, as the cluster and federated jobs lay them out."""
    folder = record.parent
    found = [folder / "log", *sorted(folder.glob("*.log")), *sorted((folder.parent / "worker").glob("log_*"))]
    for each in extra:
        found += sorted(each.glob("*.log"))
    return [path for path in dict.fromkeys(found) if path.is_file()][:MOST_LOGS]


def add_logs(job: Job, paths: Sequence[Path]) -> None:
    for path in paths:
        name = path.name if path.name not in job.logs else f"{path.parent.name}/{path.name}"
        if not any(isinstance(log, LogFile) and log.path == path for log in job.logs.values()):
            job.logs[name] = LogFile(path)


class ByConfigServer:
    """A job of `pliant run -w`, through its config server."""

    can_resize = True

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def resize(self, workers: int) -> str:
        if workers < 1:
            raise ConfigError(f"{workers} workers: use 1 or more, or stop the job")
        with ConfigClient(self._url, self._token, timeout_s=ANSWER_S) as client:
            view = client.resize(workers)
        return f"asked for {workers} worker{'s' * (workers != 1)} (version {view.number})"

    def stop(self) -> str:
        with ConfigClient(self._url, self._token, timeout_s=ANSWER_S) as client:
            client.resize(0)
        return "told to end after its step"


class ByCluster:
    """A job of `pliant serve`; how many devices it has is the scheduler's business."""

    can_resize = False

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._name = server, name

    def resize(self, workers: int) -> str:
        raise ConfigError(f"{self._name} gets its devices from the cluster's policy: it cannot be resized by hand")

    def stop(self) -> str:
        with LiveClient(self._server, timeout_s=ANSWER_S) as client:
            client.stop(self._name)
        return "told to end after its step"


class ByKeeper:
    """A federated job of this machine, through whoever minds it."""

    can_resize = False

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    def resize(self, workers: int) -> str:
        raise ConfigError("the executors of a federated job come and go by themselves: it cannot be resized by hand")

    def stop(self) -> str:
        detached.stop(self._folder)
        return "told to end after its round"


class ClusterLog:
    """What a job of a cluster on another machine has printed."""

    def __init__(self, server: Server, name: str, most_lines: int = 2000) -> None:
        self._server, self._name = server, name
        self._end, self._rest = 0, ""
        self.text: deque[str] = deque(maxlen=most_lines)
        self.num_lines = 0

    def look(self) -> None:
        with LiveClient(self._server, timeout_s=ANSWER_S) as client:
            part = client.logs(self._name, self._end)
        self._end = part.end
        *lines, self._rest = (self._rest + part.text).split("\n")
        self.num_lines += len(lines)
        self.text.extend(lines)
