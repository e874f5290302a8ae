"""Jobs as the page shows them: each with its timeline, its logs and what can be done to it; and the thread that updates them."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError
from pliant.fed.jobs import detached
from pliant.fed.jobs.folders import JobFolder
from pliant.record import Fact
from pliant.sched.live.client import ClusterStatus, LiveClient, Server
from pliant.ui.timeline import JobTimeline, TimelineEvent

log = logging.getLogger(__name__)


# --- files that grow ---


MOST_BYTES = 2 << 20
"""At one look: a large record is taken in over several, so that a page shows its beginning meanwhile."""
MOST_LINES = 2000
"""Of a log, the newest."""
_CONTROLS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colours, titles and movements of a terminal; none of it may reach the reader's."""


class GrowingFile:
    """A file's lines as they come; those that are not whole yet are left for later."""

    def __init__(self, path: Path, *, newest_bytes: int | None = None) -> None:
        self.path = path
        self._newest_bytes = newest_bytes
        self._at = 0
        self._inode = -1

    def lines(self) -> tuple[list[bytes], bool]:
        """What has come since the last look; and whether the file is another one now, or was begun anew."""
        try:
            status = self.path.stat()
        except OSError:
            return [], False
        is_new = self._inode not in (-1, status.st_ino) or status.st_size < self._at
        if is_new or self._inode == -1:
            self._inode, self._at = status.st_ino, 0
            if self._newest_bytes is not None:
                self._at = max(0, status.st_size - self._newest_bytes)
        if status.st_size <= self._at:
            return [], is_new
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read(MOST_BYTES)
        except OSError:
            return [], is_new
        whole = data.rfind(b"\n") + 1
        self._at += whole
        return data[:whole].splitlines(), is_new

    @property
    def is_read(self) -> bool:
        """Whether a look would bring nothing new."""
        try:
            return self.path.stat().st_size <= self._at
        except OSError:
            return True


class RecordFile:
    """The facts of a record as they come."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)

    @property
    def path(self) -> Path:
        return self._file.path

    def facts(self) -> tuple[list[Fact], bool]:
        """What has come since the last look, and whether it is the beginning of another record."""
        lines, is_new = self._file.lines()
        return [fact for line in lines if (fact := fact_in(line)) is not None], is_new

    @property
    def is_read(self) -> bool:
        return self._file.is_read


class LogTail:
    """The newest lines of what a program prints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GrowingFile(path, newest_bytes=256 << 10)
        self.text: deque[str] = deque(maxlen=MOST_LINES)
        self.num_lines = 0

    def poll(self) -> None:
        lines, is_new = self._file.lines()
        if is_new:
            self.text.clear()
        self.num_lines += len(lines)
        self.text.extend(line.decode(errors="replace") for line in lines)


def fact_in(line: bytes) -> Fact | None:
    """The fact on a line; None if there is none, as where a crash has cut it short."""
    try:
        value = json.loads(line)
        return Fact(value.pop("kind"), int(value.pop("step")), float(value.pop("time_s")), value)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def strip_controls(text: str) -> str:
    """What others have written, without what a terminal would obey; lines and tabs stay."""
    return _CONTROLS.sub("", text)


# --- jobs ---


ANSWER_S = 5.0
MOST_LOGS = 50
SHOWN_AS = {
    "failed": "lost", "killed": "lost", "dropped": "lost", "decision": "decision", "fallback": "decision",
    "put-off": "decision", "finished": "end", "stopped": "end",
}  # fmt: skip
"""What a cluster tells of a job, as a kind of event; all else is of its start."""
NO_RECORD = "it writes no record that is known here: start it with --record FILE to see its curves"
NO_VALUES = "its program reports no loss: job.report(loss=...) makes a curve of it"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """What was decided about a job, and why."""

    job: str
    at_s: float
    what: str
    why: str
    devices: Mapping[str, int]


class JobLog(Protocol):
    """Something that a program prints; the newest lines of it."""

    text: deque[str]
    num_lines: int
    """So far: grows with every line."""

    def poll(self) -> None:
        """Read what has come; may take as long as a request."""


class JobControl(Protocol):
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
class ShownJob:
    """One job, as far as it is known."""

    key: str
    name: str
    where: str
    """The file, or the server, that it is known from."""
    record: RecordFile | None = None
    timeline: JobTimeline = field(default_factory=JobTimeline)
    logs: dict[str, JobLog] = field(default_factory=dict)
    control: JobControl | None = None
    command: str = ""
    reported_state: str = ""
    """As whoever runs it says; empty: only its record is known."""
    reported_why: str = ""
    members: tuple[str, ...] = ()
    """Who is on the roll now, by the job's config server."""
    devices: str = ""
    """Such as cpu=2, in a cluster."""
    of_cluster: bool = False
    """Whether a cluster's server starts and ends it: then its word counts."""
    cluster_events: list[ClusterEvent] = field(default_factory=list)
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
                self.timeline = JobTimeline()
            self.timeline.add(facts)
        return bool(facts) and not self.record.is_read

    def state(self, now_s: float) -> str:
        if self.reported_state:
            return self.reported_state
        if self.timeline.over:
            return "finished"
        return "running" if self.timeline.is_running(now_s) else "silent" if self.timeline.num_facts else "waiting"

    @property
    def why(self) -> str:
        """What is to be said about it: by whoever runs it, or about what cannot be shown."""
        if self.reported_why:
            return self.reported_why
        if self.record is None:
            return "" if self.of_cluster else NO_RECORD
        is_silent = self.timeline.federated is None and self.timeline.step > 0 and not self.timeline.values
        return NO_VALUES if is_silent else ""

    @property
    def step(self) -> int | None:
        """Or round; None: nothing tells."""
        timeline = self.timeline
        return timeline.federated.rounds if timeline.federated is not None else timeline.step if timeline.num_facts else None

    @property
    def started_s(self) -> float | None:
        return self.begun_s if self.begun_s is not None else self.timeline.began_s

    @property
    def events(self) -> list[TimelineEvent]:
        """What its record tells, and what its cluster has decided about it, by time."""
        decided = [
            TimelineEvent(SHOWN_AS.get(each.what, "start"), self.timeline.step_at(each.at_s), each.at_s, each.what, each.why)
            for each in self.cluster_events
        ]
        return sorted([*self.timeline.events, *decided], key=lambda event: event.time_s)

    @property
    def num_workers(self) -> int:
        return len(self.members) or self.timeline.num_workers

    @property
    def version(self) -> tuple[object, ...]:
        """Changes with everything that a page shows of it, but for its logs."""
        return (id(self.timeline), self.timeline.num_facts, self.reported_state, self.reported_why, self.members, self.devices)


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


def add_logs(job: ShownJob, paths: Sequence[Path]) -> None:
    for path in paths:
        name = path.name if path.name not in job.logs else f"{path.parent.name}/{path.name}"
        if not any(isinstance(log, LogTail) and log.path == path for log in job.logs.values()):
            job.logs[name] = LogTail(path)


class ConfigServerControl:
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


class SchedulerControl:
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


class FederatedControl:
    """A federated job of this machine, through whoever minds it."""

    can_resize = False

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    def resize(self, workers: int) -> str:
        raise ConfigError("the executors of a federated job come and go by themselves: it cannot be resized by hand")

    def stop(self) -> str:
        detached.stop(self._folder)
        return "told to end after its round"


class RemoteLog:
    """What a job of a cluster on another machine has printed."""

    def __init__(self, server: Server, name: str, most_lines: int = 2000) -> None:
        self._server, self._name = server, name
        self._end, self._rest = 0, ""
        self.text: deque[str] = deque(maxlen=most_lines)
        self.num_lines = 0

    def poll(self) -> None:
        with LiveClient(self._server, timeout_s=ANSWER_S) as client:
            part = client.logs(self._name, self._end)
        self._end = part.end
        *lines, self._rest = (self._rest + part.text).split("\n")
        self.num_lines += len(lines)
        self.text.extend(lines)


# --- all jobs and clusters ---


@dataclass(slots=True)
class ShownCluster:
    """The devices of a server of `pliant serve`, and who has had them."""

    where: str
    status: ClusterStatus | None = None
    jobs: list[str] = field(default_factory=list)
    """The keys of its jobs."""


@dataclass(slots=True)
class DashboardState:
    """All that is known by now."""

    jobs: dict[str, ShownJob] = field(default_factory=dict)
    clusters: dict[str, ShownCluster] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """What cannot be looked at, and why."""

    def job(self, where: str, name: str) -> ShownJob:
        """The job that is known from there; a new one, if it was not."""
        key = key_of(where)
        if key not in self.jobs:
            self.jobs[key] = ShownJob(key, name, where)
        return self.jobs[key]

    def record(self, path: Path, name: str) -> ShownJob:
        """The job that writes this record."""
        job = self.job(str(path), name)
        if job.record is None:
            job.record = RecordFile(path)
        return job


class JobSource(Protocol):
    """A place to look at. It tells problems by `known`, and raises nothing but what is a mistake of ours."""

    def poll(self, known: DashboardState) -> None: ...


POLL_S = 0.5


class Watcher:
    """Hold `lock` while reading a timeline: the thread adds to it. All else in `known` is replaced as a whole, never half."""

    def __init__(self, sources: Sequence[JobSource], poll_s: float = POLL_S) -> None:
        self._sources = sources
        self._poll_s = poll_s
        self._stopping = threading.Event()
        self.known = DashboardState()
        self.lock = threading.Lock()
        self.polls = 0

    def poll(self) -> None:
        """Once, now."""
        for source in self._sources:
            source.poll(self.known)
        unread = list(self.known.jobs.values())
        while unread and not self._stopping.is_set():
            unread = [job for job in unread if job.read(self.lock)]
        self.polls += 1

    @contextmanager
    def running(self) -> Iterator[Watcher]:
        """Look until the block ends."""
        thread = threading.Thread(target=self._work, name="pliant-watcher", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            thread.join(timeout=10)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self.poll()
            except Exception:  # one odd record must not end the page for the others
                log.exception("a look at the jobs failed")
            self._stopping.wait(self._poll_s)
