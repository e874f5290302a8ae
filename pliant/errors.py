"""Everything pliant raises, in one tree: a `ConfigError` ends a command with exit code 2, other errors with 1.

Messages carry the values and the next thing to do. Arguments are passed to `super().__init__`, so that every error
survives pickling.
"""

from __future__ import annotations

from collections.abc import Sequence

REFUSED_EXIT = 78
"""The exit code of a worker that the job refused; starting it again would change nothing."""
PROGRAM_EXIT = 79
"""The exit code of a worker whose program has a mistake that every other worker would make, too. It ends the job."""
LOST_PEER_EXIT = 80
"""The exit code of a worker that ended because it had lost another one: that one is the cause."""
SHADOW_EXIT = 81
"""The exit code of a new worker whose program cannot warm up alone (`train.shadow`). Its runner starts it again at once,
without a warm-up."""

GIVEN_UP_EXIT = 82
"""The exit code of a worker that was silent or busy for so long that the others have given it up. It is replaced."""
ENDED_EXIT = 83
"""The exit code of `pliant run` if somebody has ended the job before its last step, as with `pliant stop`."""


def reason(error: Exception) -> str:
    """Return why a file could not be read or written, in plain words."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


GIVEN_UP = "the others have given it up"
"""Why a worker is lost, as those say who were told by the config server."""


class PliantError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PliantError):
    """A value from the user is wrong; the message names it and the remedy."""


MAX_TOLD = 20
"""A wrong file is refused with at most this many of its mistakes; the others are counted."""


def refuse_file(mistakes: Sequence[str], remedy: str = "") -> ConfigError:
    """Return the error for a file with these mistakes, each of them a line with file and line number.

    Of many, the first are told and the rest are counted. `remedy` is one more line: what helps against all of them.
    """
    told = list(mistakes[:MAX_TOLD])
    if rest := len(mistakes) - len(told):
        told.append(f"and {rest} more mistake{'' if rest == 1 else 's'}")
    return ConfigError("\n".join([*told, *([remedy] if remedy else [])]))


class InvalidView(ConfigError):
    """These workers and runners cannot form a cluster."""


class NotLaunched(ConfigError):
    """This process was not started by `pliant run`."""


class CapacityError(ConfigError):
    """More workers were asked for than there are slots, ports or devices."""


class NoView(ConfigError):
    """The config server holds no view, so there is nothing to change."""


class NotWanted(ConfigError):
    """This worker is not in the wanted view, or was removed from it meanwhile: it must end."""


class ClusterCleared(ConfigError):
    """The wanted view has no workers: all must stop, and only a reset opens it again."""


class UnknownJob(ConfigError):
    """The cluster has no job of that name."""


class NotAllowed(ConfigError):
    """The token is known, and whoever has it may not do this: a job is another tenant's, or the server's owner is needed."""


class NameTaken(ConfigError):
    """The cluster has a job of that name already, running or ended."""


class StaleView(PliantError):
    """The view has moved on since it was read."""

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(expected, current)
        self.expected, self.current = expected, current

    def __str__(self) -> str:
        return (
            f"version {self.expected} was expected, but the server is at {self.current}: "
            "read the view again and repeat the change"
        )


class ServerUnavailable(PliantError):
    """The server cannot be reached, or cannot answer now; nothing is known to have changed."""


class OtherJob(ServerUnavailable):
    """The server keeps another job, or has lost this one; what it says is not for this job, and nothing has changed there."""


class PolicyFailed(PliantError):
    """A scheduling policy raised, or gave an answer that cannot be carried out."""


class LaunchError(PliantError):
    """A program could not be started, or ended badly."""


class LabError(PliantError):
    """A network namespace, link or queue could not be made."""


class TrainError(PliantError):
    """The training program asks for what the job cannot do; the message says what to write instead."""


class Unsliceable(TrainError):
    """Several replicas cannot take turns on this model."""


class NotDeterministic(TrainError):
    """An operator of the program has no deterministic kernel, so equal bits cannot be promised."""


class Refused(TrainError):
    """This worker would change the result by some bits, so the job refuses it."""


class MustBeReplaced(TrainError):
    """This worker cannot go on, but another one in its place can."""


class LoaderFailed(MustBeReplaced):
    """A loader process of this worker has died, or gives no batches."""


class CheckpointError(PliantError):
    """A checkpoint is torn, missing, or belongs to another experiment."""


class NoClient(PliantError):
    """No client of the federation can be picked now; later there may be one."""


class CommError(PliantError):
    """Base of what can go wrong between workers."""


class HandshakeRefused(CommError):
    """The other side is not who it should be."""


class WorkerLost(CommError):
    """A worker died, or has been silent for too long."""

    def __init__(self, worker: str, rank: int, why: str) -> None:
        super().__init__(worker, rank, why)
        self.worker, self.rank, self.why = worker, rank, why

    @property
    def may_live(self) -> bool:
        """Whether the others have given the worker up: it may be stopped, cut off or busy, and come back."""
        return any(word in self.why for word in ("silent for", "stalled", GIVEN_UP))

    def __str__(self) -> str:
        return f"lost worker {self.worker} (rank {self.rank}): {self.why}"


class CollectiveTimeout(CommError):
    """A collective did not end in time; says who had not contributed."""

    def __init__(self, name: str, timeout_s: float, missing: tuple[str, ...]) -> None:
        super().__init__(name, timeout_s, missing)
        self.name, self.timeout_s, self.missing = name, timeout_s, missing

    def __str__(self) -> str:
        waiting = ", ".join(self.missing) or "nobody in particular"
        return (
            f"{self.name!r} not done after {self.timeout_s:g} s, waiting for {waiting}: every rank must "
            "submit the same names; raise timeout_s if they are only slow"
        )


class Mismatch(CommError):
    """Ranks submitted different shapes, types or operations under one name."""


class NotStored(CommError):
    """The peer's store has nothing under that name and version."""


class EngineClosed(CommError):
    """The engine was closed before the call, or during it."""


class ViewChanged(CommError):
    """The worker has moved on to another view while this was in progress."""
