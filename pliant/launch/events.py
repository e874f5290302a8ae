"""What can happen to a runner (events), and what it can do about it (actions): values only."""

from __future__ import annotations

from dataclasses import dataclass

from pliant.cluster import Membership, View, Worker

BUSY, IDLE, DONE, FAILED = "busy", "idle", "done", "failed"
"""How a host stands: has workers; has none yet, or no more; all of them ended well; one failed."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The wanted view is now this one."""

    view: View


@dataclass(frozen=True, slots=True)
class Rolled:
    """The workers that train are now these."""

    roll: Membership


@dataclass(frozen=True, slots=True)
class Exited:
    """A local worker ended: its exit code, or minus the signal that killed it."""

    worker: Worker
    code: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A local worker could not be started."""

    worker: Worker
    why: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The runner got SIGINT, SIGTERM or SIGHUP."""

    signum: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The time of -timeout is over."""

    timeout: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The head says how the whole job ended; an empty cause means well."""

    cause: str
    code: int


@dataclass(frozen=True, slots=True)
class RunnerGone:
    """The connection to the runner on `host` is gone, in a job that may go on without it."""

    host: str
    was_head: bool = False


@dataclass(frozen=True, slots=True)
class NotReplaced:
    """A replacement that was asked for will not come."""

    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """The warm process is up, or never will be."""


Event = (
    Arrived
    | Rolled
    | Exited
    | StartFailed
    | Interrupted
    | TimedOut
    | Verdict
    | RunnerGone
    | NotReplaced
    | Tick
    | Warmed
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start `worker`, as a member of `view`, on local slot `slot`."""

    worker: Worker
    view: View
    slot: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a worker to end (SIGTERM)."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker and its children at once (SIGKILL)."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Blame:
    """Tell the user that `worker` failed, with its last lines."""

    worker: Worker
    what: str
    how: str = "failed first"


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the config server that a worker is lost, at once: the others wait for that."""

    worker: Worker
    why: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Ask the config server for one more worker on this host."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the other hosts how this one stands."""

    status: str
    cause: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """It is over: exit with `code`."""

    code: int


Action = Start | Terminate | Kill | Report | Replace | Blame | Tell | Say | Finish
