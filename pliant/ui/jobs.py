"""Jobs as the page shows them, each with its timeline, its logs and its controls, and the thread that updates them."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pliant import record
from pliant.duration import span_text
from pliant.jobs.status import ClusterStatus, JobEvent
from pliant.record import Fact
from pliant.ui.timeline import JobTimeline, TimelineEvent

log = logging.getLogger(__name__)

MOST_READ_BYTES = 2 << 20
"""Most bytes of a file that are read in one poll, so that a page shows the beginning of a large record early."""
MOST_LINES = 2000
"""Lines that are kept of a log: the newest."""
MOST_LOGS = 50
POLL_S = 0.5
TERMINAL_CONTROLS = re.compile(
    r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
EVENT_KINDS = {
    "failed": "lost", "killed": "lost", "dropped": "lost", "decision": "decision", "fallback": "decision",
    "put-off": "decision", "finished": "end", "stopped": "end",
}  # fmt: skip
"""Kind of timeline event for each event of the scheduler; all others belong to the start of a job."""
NO_RECORD = "it writes no record that is known here: start it with --record FILE to see its curves"
NO_VALUES = "its program reports no loss: step.log(loss=loss) makes a curve of it"


# --- files that grow ---


class GrowingFile:
    """Reads the lines of a file that another program appends to. Incomplete lines are left for later.

    A link is not followed, unless `follow_links`: what others have put there may lead to files of others.
    """

    def __init__(self, path: Path, *, newest_bytes: int | None = None, follow_links: bool = False) -> None:
        self.path = path
        self._follow_links = follow_links
        self._newest_bytes = newest_bytes
        self._position = 0
        self._inode = -1
        self._in_long_line = False

    def lines(self) -> tuple[list[bytes], bool]:
        """Return the lines since the last call, and whether the file was replaced or truncated meanwhile."""
        try:
            status = self.path.stat(follow_symlinks=self._follow_links)
        except OSError:
            return [], False
        if not stat.S_ISREG(status.st_mode):
            return [], False
        is_new = self._inode not in (-1, status.st_ino) or status.st_size < self._position
        if is_new or self._inode == -1:
            self._inode, self._position = status.st_ino, 0
            if self._newest_bytes is not None:
                self._position = max(0, status.st_size - self._newest_bytes)
        if status.st_size <= self._position:
            return [], is_new
        try:
            with open(self.path, "rb", opener=None if self._follow_links else _open_itself) as file:
                file.seek(self._position)
                data = file.read(MOST_READ_BYTES)
        except OSError:
            return [], is_new
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == MOST_READ_BYTES:
            whole, self._in_long_line = len(data), True  # no line of ours is as long; its end is left out, too
            self._position += whole
            return [], is_new
        self._position += whole
        lines = data[:whole].splitlines()
        if lines and self._in_long_line:
            lines, self._in_long_line = lines[1:], False
        return lines, is_new

    @property
    def is_read(self) -> bool:
        """Whether all of the file has been read."""
        try:
            return self.path.stat(follow_symlinks=self._follow_links).st_size <= self._position
        except OSError:
            return True


def _open_itself(path: str, flags: int) -> int:
    """Open a file, but not one that a link points to, and do not wait for a pipe's other end."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class RecordFile(GrowingFile):
    """Reads the facts of a record while it is written."""

    def facts(self) -> tuple[list[Fact], bool]:
        """Return the facts since the last call, and whether another record has begun. Damaged lines are skipped."""
        lines, is_new = self.lines()
        return [fact for line in lines if (fact := record.parse(line)) is not None], is_new


class JobLog(Protocol):
    """Output of a program."""

    text: deque[str]
    """The newest lines."""
    num_lines: int
    """Number of lines so far."""

    def poll(self) -> None:
        """Read new lines. May take as long as a request."""


class LogTail:
    """The newest lines of a log file."""

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


def strip_controls(text: str) -> str:
    """Return text of others without control sequences that a terminal would obey; newlines and tabs stay."""
    return TERMINAL_CONTROLS.sub("", text)


# --- jobs ---


@dataclass(frozen=True, slots=True)
class JobControl:
    """Actions on a job that runs. Each returns a message for people, and may take as long as a request.

    Raises (from each):
        PliantError: it was refused, or there was no answer.
    """

    stop: Callable[[], str]
    """End the job after its step or round."""
    resize: Callable[[int], str] | None = None
    """Ask for a number of workers; None if somebody else decides on it."""


@dataclass(slots=True)
class ShownJob:
    """One job as far as it is known."""

    key: str
    name: str
    where: str
    """File or server from which the job is known."""
    record: RecordFile | None = None
    timeline: JobTimeline = field(default_factory=JobTimeline)
    logs: dict[str, JobLog] = field(default_factory=dict)
    control: JobControl | None = None
    command: str = ""
    reported_state: str = ""
    """State by whoever runs the job; empty if only its record is known."""
    reported_why: str = ""
    members: tuple[str, ...] = ()
    """Present workers by the job's config server."""
    devices: str = ""
    """Devices in a cluster, such as cpu=2."""
    tenant: str = ""
    """Who submitted it in a cluster that tenants share."""
    is_stored: bool = False
    """Whether the job store knows the job; then its state counts."""
    cluster_events: list[JobEvent] = field(default_factory=list)
    begun_s: float | None = None

    def read(self, lock: AbstractContextManager[object]) -> bool:
        """Read a part of its record, changing the timeline under `lock`; return whether there is more."""
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
        """Reason of the state, or a hint about what cannot be shown."""
        if self.reported_why:
            return self.reported_why
        if self.record is None:
            return "" if self.is_stored else NO_RECORD
        is_silent = self.timeline.federated is None and self.timeline.step > 0 and not self.timeline.values
        return NO_VALUES if is_silent else ""

    @property
    def step(self) -> int | None:
        """The last step or round; None if it is unknown."""
        if self.timeline.federated is not None:
            return self.timeline.federated.rounds
        return self.timeline.step if self.timeline.num_facts else None

    @property
    def started_s(self) -> float | None:
        return self.begun_s if self.begun_s is not None else self.timeline.began_s

    def age(self, now_s: float) -> str:
        """Return how long ago the job began, or how long it took."""
        if self.started_s is None:
            return "-"
        return span_text((now_s if self.control else self.timeline.last_s or now_s) - self.started_s)

    @property
    def events(self) -> list[TimelineEvent]:
        """Events of the record and of the scheduler, by time."""
        scheduled = [
            TimelineEvent(
                EVENT_KINDS.get(each.what, "start"), self.timeline.step_at(each.at), each.at, each.what, each.why
            )
            for each in self.cluster_events
        ]
        return sorted([*self.timeline.events, *scheduled], key=lambda event: event.time_s)

    @property
    def num_workers(self) -> int:
        return len(self.members) or self.timeline.num_workers

    @property
    def version(self) -> tuple[object, ...]:
        """A value that changes with everything a page shows of the job, except its logs."""
        timeline = self.timeline
        return id(timeline), timeline.num_facts, self.reported_state, self.reported_why, self.members, self.devices

    @property
    def workers(self) -> set[str]:
        """All workers that the job is known to have had, as HOST:PORT."""
        return set(self.members).union(*(view.workers for view in self.timeline.views))

    def add_logs(self, paths: Sequence[Path]) -> None:
        """Add log files that exist and are not known yet. Links are not followed: they may lead to files of others."""
        known = {each.path for each in self.logs.values() if isinstance(each, LogTail)}
        for path in dict.fromkeys(paths):
            if path not in known and len(self.logs) < MOST_LOGS and path.is_file() and not path.is_symlink():
                name = path.name if path.name not in self.logs else f"{path.parent.name}/{path.name}"
                self.logs[name] = LogTail(path)


def job_key(where: str) -> str:
    """Return the job's name in addresses of the page, which stays the same after a restart."""
    return hashlib.sha256(where.encode()).hexdigest()[:12]


# --- all jobs and clusters ---


@dataclass(slots=True)
class ShownCluster:
    """The devices of a job server."""

    where: str
    status: ClusterStatus | None = None
    jobs: list[str] = field(default_factory=list)
    """Keys of its jobs."""


@dataclass(slots=True)
class DashboardState:
    """All jobs and clusters that are known by now."""

    jobs: dict[str, ShownJob] = field(default_factory=dict)
    clusters: dict[str, ShownCluster] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Reason for each source that cannot be read."""

    def job(self, where: str, name: str) -> ShownJob:
        """Return the job that is known from `where`; add it if it is new."""
        key = job_key(where)
        if key not in self.jobs:
            self.jobs[key] = ShownJob(key, name, where)
        return self.jobs[key]

    def record(self, path: Path, name: str) -> ShownJob:
        """Return the job that writes this record; add it if it is new."""
        job = self.job(str(path), name)
        if job.record is None:
            job.record = RecordFile(path, follow_links=True)
        return job


class JobSource(Protocol):
    """A place where jobs are found."""

    def poll(self, known: DashboardState) -> None:
        """Update `known`. Problems of the source go to `known.problems`."""


class Watcher:
    """Polls all sources in a thread.

    Hold `lock` while reading a timeline, because the thread adds to it. Everything else in `known` is replaced as a
    whole.
    """

    def __init__(self, sources: Sequence[JobSource], poll_s: float = POLL_S) -> None:
        self._sources = sources
        self._poll_s = poll_s
        self._stopping = threading.Event()
        self.known = DashboardState()
        self.lock = threading.Lock()

    def poll(self) -> None:
        """Poll all sources once."""
        for source in self._sources:
            source.poll(self.known)
        unread = list(self.known.jobs.values())
        while unread and not self._stopping.is_set():
            unread = [job for job in unread if job.read(self.lock)]

    @contextmanager
    def running(self) -> Iterator[Watcher]:
        """Poll in a thread until the block ends."""
        thread = threading.Thread(target=self._run, name="pliant-watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.poll()
            except Exception:  # one damaged record must not end the page for the others
                log.exception("polling the jobs failed")
            self._stopping.wait(self._poll_s)
