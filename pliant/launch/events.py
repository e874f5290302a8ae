"""What can happen to a runner (events), what it can do about it (actions), and the queue in which events come in.

Events and actions are plain values: `supervisor` maps the one to the other. `EventQueue` is where other threads, signals and
the ends of processes meet, so that a runner waits in one place.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pliant.cluster import Membership, View, Worker
from pliant.progress_board import ProgramFailure

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BUSY, IDLE, DONE, STRANDED, FAILED = "busy", "idle", "done", "stranded", "failed"
"""The status of a host: it runs workers; it runs none yet, or none any more; all of them ended well; it runs none, and can
start none because the config server does not answer; one failed."""


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The wanted view, or the workers that train, are now these. `view` is None where the wanted view is unset."""

    view: View | None
    membership: Membership = field(default_factory=Membership)
    restored: int = 0
    """How often the config server was told of the job because it had forgotten it."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A local worker ended: its exit code, or minus the signal that killed it."""

    worker: Worker
    code: int
    joined: bool = True
    """Whether its program has called `pliant.join`."""
    out_of_memory: bool = False
    """Whether the kernel killed it because memory had run out."""
    failure: ProgramFailure | None = None
    """The error that has ended its program, as far as it could tell."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process of a local worker has been stopped (SIGSTOP) for too long."""

    worker: Worker
    for_s: float
    others_run: bool = True
    """Whether another worker of this host is not stopped."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A local worker that may not have begun to train does nothing at all: it neither runs nor waits for other workers."""

    worker: Worker
    for_s: float
    limit_s: float
    """How long it may."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A local worker could not be started."""

    worker: Worker
    why: str


@dataclass(frozen=True, slots=True)
class ServerContact:
    """The config server of the job does not answer any more, for the reason `why`; or it does again, if that is empty."""

    why: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The runner got SIGINT, SIGTERM or SIGHUP."""

    signum: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The time that -timeout allows is over."""

    timeout: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the whole job ended, as the head runner says; an empty cause means that its program has run to its end."""

    cause: str
    code: int


@dataclass(frozen=True, slots=True)
class RunnerGone:
    """The connection to the runner on `host` is lost, in a job that may go on without it."""

    host: str
    was_head: bool = False


@dataclass(frozen=True, slots=True)
class ReplacementAdded:
    """A replacement that was asked for is wanted, since the version `version` of the view."""

    worker: Worker
    version: int


@dataclass(frozen=True, slots=True)
class NotReplaced:
    """A replacement that was asked for will not come."""

    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class WarmProcessChanged:
    """The warm process has done its imports, has failed to, or has ended."""


Event = (
    StateChanged
    | Exited
    | Stopped
    | Idle
    | StartFailed
    | ServerContact
    | Interrupted
    | TimedOut
    | Verdict
    | RunnerGone
    | ReplacementAdded
    | NotReplaced
    | Tick
    | WarmProcessChanged
)


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start `worker`, as a member of `view`, on local slot `slot`."""

    worker: Worker
    view: View
    slot: int
    shadow: bool = False
    """Whether others train already, so that the worker warms up before they count on it."""


@dataclass(frozen=True, slots=True)
class TerminateWorker:
    """Ask a worker to end (SIGTERM)."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a worker and its children at once (SIGKILL)."""

    worker: Worker
    why: str = "did not end when told to"
    unless_ending: bool = False
    """If true, a worker is left alone whose program has ended, or has never joined."""


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the user that `worker` failed, with its last lines of output."""

    worker: Worker
    what: str
    how: str = "failed first"
    is_repeated: bool = False
    """Whether its last lines are shown once more, although they stand above."""


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Tell the config server that a worker is lost, at once: the other members wait for that."""

    worker: Worker
    why: str


@dataclass(frozen=True, slots=True)
class RequestReplacement:
    """Ask the config server for one more worker on this host."""


@dataclass(frozen=True, slots=True)
class SendStatus:
    """Tell the other hosts the status of this one."""

    status: str
    cause: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class ShowMessage:
    """Show a line to the user."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ExitRunner:
    """The job is over on this host: exit with `code`."""

    code: int


Action = (
    StartWorker
    | TerminateWorker
    | KillWorker
    | ReportLoss
    | RequestReplacement
    | ReportFailure
    | SendStatus
    | ShowMessage
    | ExitRunner
)


# --- where events come in ---


class EventQueue:
    """Events from other threads, signals, and ends of processes, waited for together."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._events: deque[Event] = deque()

    def post(self, event: Event) -> None:
        """Hand over an event, from any thread or a signal handler's frame."""
        self._events.append(event)
        with contextlib.suppress(OSError):  # full: the wait will end anyway; closed: nobody waits any more
            self._wake_write.send(b"\0")

    def watch(self, worker: Worker, pidfd: int) -> None:
        """Have `wait` return `worker` when the process behind `pidfd` ends."""
        self._selector.register(pidfd, selectors.EVENT_READ, worker)

    def forget(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)

    def wait(self, timeout_s: float | None) -> tuple[list[Event], list[Worker]]:
        """Wait for events; return them, and the workers that ended. Both are empty when the time is over."""
        ready = self._selector.select(timeout_s)
        ended = []
        for key, _ in ready:
            if key.data is not None:
                ended.append(key.data)
                continue
            with contextlib.suppress(BlockingIOError):
                while self._wake_read.recv(4096):
                    continue
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events, ended

    def close(self) -> None:
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP come in as events, until the end of the block."""
        with handle_signals(lambda signum: self.post(Interrupted(signum))):
            # Python runs handlers between bytecodes of the main thread; the descriptor ends the wait.
            wake = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(wake)


@contextlib.contextmanager
def handle_signals(put: Callable[[int], None]) -> Iterator[None]:
    """Call `put` with each signal that would end this program, within the block; under nohup, SIGHUP would not."""
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [signum for signum in ENDING_SIGNALS if signum != signal.SIGHUP or not under_nohup]
    before = {signum: signal.signal(signum, lambda number, _: put(number)) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
