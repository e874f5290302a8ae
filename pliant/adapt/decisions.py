"""What a policy may answer. Decisions about the maths are recorded and replayed; those about resources change no bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pliant import record
from pliant.errors import ConfigError

MOST_BATCH = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One thing to be done at the end of a step, by all workers."""

    kind: ClassVar[str] = ""
    is_maths: ClassVar[bool] = False
    """Whether the result of the training depends on it."""
    reason: str
    """For people to read, with the figures that led to it."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SetBatchSize(Decision):
    """The batch of every replica has this many samples from now on; what is left of the epoch is dealt anew."""

    kind: ClassVar[str] = "set_batch_size"
    is_maths: ClassVar[bool] = True
    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= MOST_BATCH:
            raise ConfigError(f"SetBatchSize(size={self.size!r}): use a whole number from 1 to {MOST_BATCH}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetLearningRate(Decision):
    """Optimizers step with the program's learning rates, whatever its schedulers make of them, times this factor."""

    kind: ClassVar[str] = "set_learning_rate"
    is_maths: ClassVar[bool] = True
    factor: float
    """Of the program's own rate, not of the present one."""

    def __post_init__(self) -> None:
        if not isinstance(self.factor, int | float) or not 0 < self.factor < 1e6:
            raise ConfigError(f"SetLearningRate(factor={self.factor!r}): use a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize(Decision):
    """Ask for another number of workers; needs a job that is watched (`pliant run -w`)."""

    kind: ClassVar[str] = "resize"
    workers: int

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 0:
            raise ConfigError(f"Resize(workers={self.workers!r}): use a whole number, 0 to end the job")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTopology(Decision):
    """Who reduces to whom from now on."""

    kind: ClassVar[str] = "set_topology"
    strategy: str | tuple[int, ...]
    """A strategy's name, or each rank's father (a root names itself)."""

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str):
            return
        if not isinstance(self.strategy, Sequence) or not all(isinstance(father, int) for father in self.strategy):
            raise ConfigError(f"SetTopology(strategy={self.strategy!r}): use a strategy's name, or each rank's father")
        object.__setattr__(self, "strategy", tuple(self.strategy))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLinks(Decision):
    """Measure the rates between all workers at this boundary; policies are asked again with the result."""

    kind: ClassVar[str] = "probe_links"
    num_bytes: int = 1 << 18
    """Sent by each worker to each other."""

    def __post_init__(self) -> None:
        if isinstance(self.num_bytes, bool) or not isinstance(self.num_bytes, int) or self.num_bytes < 1024:
            raise ConfigError(f"ProbeLinks(num_bytes={self.num_bytes!r}): use 1024 or more")


KINDS: dict[str, type[Decision]] = {
    each.kind: each for each in (SetBatchSize, SetLearningRate, Resize, SetTopology, ProbeLinks)
}


def from_json(value: Mapping[str, Any]) -> Decision:
    """What `to_json` gave.

    Raises:
        ConfigError: no such decision, or fields that it does not have.
    """
    fields = dict(value)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise ConfigError(f"decision {kind!r} is not known: one of {', '.join(KINDS)}")
    try:
        return KINDS[kind](**fields)
    except TypeError as error:
        raise ConfigError(f"decision {kind!r} with {sorted(fields)}: {error}") from None


def maths_decisions(path: str) -> dict[int, list[Decision]]:
    """What a record says was decided about the maths, by step; enough to do the run again.

    A file may hold several runs: the last one counts. And what was undone by a crash does not.

    Raises:
        ConfigError: it is no record of a run.
    """
    found: dict[int, dict[str, Decision]] = {}
    facts = record.read(path)
    if not any(fact.kind in ("start", "resumed") for fact in facts):
        raise ConfigError(f"record {path}: no run begins in it; give a file that `--record` has written")
    for fact in facts:
        if fact.kind == "start":
            found = {}
        elif fact.kind == "resumed" or (fact.kind == "view" and fact.data.get("lost")):
            found = {step: decided for step, decided in found.items() if step <= fact.step}
        elif fact.kind == "decision":
            decision = from_json(fact.data.get("decision") or {})
            if decision.is_maths:
                found.setdefault(fact.step, {})[decision.kind] = decision
    return {step: list(decided.values()) for step, decided in found.items()}
