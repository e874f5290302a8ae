"""Policies: an observation of the job goes in, decisions come out. Pure: no torch, no sockets, no clocks.

Decisions about the maths (batch size, learning rate) are recorded and can be replayed. Decisions about resources
(workers, topology) never change the result of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

from pliant import record
from pliant.errors import ConfigError

MOST_BATCH = 1 << 20
LinkRates = tuple[tuple[float, ...], ...]
"""Bytes per second from worker i to worker j; 0 on the diagonal."""


# --- observations ---


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFigures:
    """Measurements of one worker's step before the last one: figures travel with the next step.

    All figures are 0 in the first step of a view.
    """

    name: str
    """Address of the worker, as host:port."""
    step_s: float = 0.0
    compute_s: float = 0.0
    """Time of the step without waiting for the network."""
    comm_bytes: float = 0.0
    """Bytes that the worker's collectives carried."""
    comm_s: float = 0.0
    """Time from the beginning of the first collective to the end of the last one."""
    egress_bytes: float = 0.0
    """Bytes sent to other hosts."""
    wait_s: float = 0.0
    """Time in which the program waited for other workers and the network."""
    gpu_bytes: float = 0.0
    """GPU memory that torch holds; 0 without a GPU."""
    gpu_use: float = 0.0
    """Share of the last second in which the worker's GPU computed, from 0 to 1; 0 if that cannot be measured."""

    @property
    def throughput(self) -> float:
        """Bytes per second of the collectives; 0 if there were none."""
        return self.comm_bytes / self.comm_s if self.comm_s > 0 else 0.0

    @property
    def host(self) -> str:
        return self.name.rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """State of the job after a step. All workers have agreed on it and see the same values."""

    step: int
    """Number of committed steps."""
    epoch: int = 0
    epoch_step: int = 0
    """Number of committed steps in this epoch."""
    steps_per_epoch: int = 0
    """Steps of an epoch with the present batch size."""
    time_s: float = 0.0
    """Time since the job began, by the first worker's clock."""
    view: int = 0
    """Number of the view; it grows with every change of the workers."""
    replicas: int = 1
    order: str = "ddp"
    """How the gradients of the replicas are added: ddp or tree."""
    batch_size: int = 1
    """Samples in the batch of one replica."""
    learning_rate_factor: float = 1.0
    """Factor that earlier decisions have put on the program's own learning rate."""
    strategy: str = "AUTO"
    noise_scale: float | None = None
    """Gradient noise scale in samples; None if it is not measured or not known yet."""
    gradient_sqr: float | None = None
    """Estimate of the squared length of the true gradient."""
    gradient_var: float | None = None
    """Trace of the covariance of one sample's gradient."""
    variance: float | None = None
    workers: tuple[WorkerFigures, ...] = ()
    may_resize: bool = True
    """Whether a `Resize` can be carried out; not under `pliant serve`, where the scheduler decides on workers."""
    link_rates: LinkRates | None = None
    """Rates measured at this boundary because a policy asked for it with ProbeLinks; None otherwise."""

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.replicas

    @cached_property
    def step_s(self) -> float:
        """Duration of the last step on the slowest worker."""
        return max((each.step_s for each in self.workers), default=0.0)

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s if self.step_s > 0 else 0.0


# --- decisions ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A change that all workers carry out at the end of a step."""

    kind: ClassVar[str] = ""
    is_maths: ClassVar[bool] = False
    """Whether the result of the training depends on it."""
    reason: str
    """Explanation for people, with the figures that led to the decision."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SetBatchSize(Decision):
    """Give every replica batches of `size` samples from now on; the rest of the epoch is partitioned again."""

    kind: ClassVar[str] = "set_batch_size"
    is_maths: ClassVar[bool] = True
    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= MOST_BATCH:
            raise ConfigError(f"SetBatchSize(size={self.size!r}): use a whole number from 1 to {MOST_BATCH}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetLearningRate(Decision):
    """Multiply the learning rates that the program and its schedulers set by `factor`."""

    kind: ClassVar[str] = "set_learning_rate"
    is_maths: ClassVar[bool] = True
    factor: float
    """Factor of the program's own rate, not of the rate in use now."""

    def __post_init__(self) -> None:
        if not isinstance(self.factor, int | float) or not 0 < self.factor < 1e6:
            raise ConfigError(f"SetLearningRate(factor={self.factor!r}): use a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize(Decision):
    """Ask for another number of workers. The job must be watched (`pliant run -w`)."""

    kind: ClassVar[str] = "resize"
    workers: int

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 0:
            raise ConfigError(f"Resize(workers={self.workers!r}): use a whole number, 0 to end the job")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTopology(Decision):
    """Change which worker reduces to which."""

    kind: ClassVar[str] = "set_topology"
    strategy: str | tuple[int, ...]
    """Name of a strategy, or the parent of each rank (a root names itself)."""

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str):
            return
        if not isinstance(self.strategy, Sequence) or not all(isinstance(parent, int) for parent in self.strategy):
            raise ConfigError(f"SetTopology(strategy={self.strategy!r}): use a strategy's name, or each rank's parent")
        object.__setattr__(self, "strategy", tuple(self.strategy))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLinks(Decision):
    """Measure the rates between all workers at this boundary, then ask the policies again with the result."""

    kind: ClassVar[str] = "probe_links"
    num_bytes: int = 1 << 18
    """Bytes that each worker sends to each other worker."""

    def __post_init__(self) -> None:
        if isinstance(self.num_bytes, bool) or not isinstance(self.num_bytes, int) or self.num_bytes < 1024:
            raise ConfigError(f"ProbeLinks(num_bytes={self.num_bytes!r}): use 1024 or more")


KINDS: dict[str, type[Decision]] = {
    each.kind: each for each in (SetBatchSize, SetLearningRate, Resize, SetTopology, ProbeLinks)
}


def decision_from_json(value: Mapping[str, Any]) -> Decision:
    """Return the decision that `Decision.to_json` has written.

    Raises:
        ConfigError: the kind is unknown, or the fields are not those of the kind.
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
    """Read from a record what was decided about the maths, by step. This is enough to repeat the run.

    If the file holds several runs, the last one counts. Decisions that a crash has undone are left out.

    Raises:
        ConfigError: the file is not the record of a run, or facts of it are missing.
    """
    found: dict[int, dict[str, Decision]] = {}
    gap: record.Fact | None = None
    facts = record.read(path)
    if not any(fact.kind in ("start", "resumed") for fact in facts):
        raise ConfigError(f"record {path}: no run begins in it; give a file that `--record` has written")
    for fact in facts:
        if fact.kind == "start":
            found, gap = {}, None
        elif fact.kind == "gap":
            gap = gap or fact
        elif fact.kind == "resumed" or (fact.kind == "view" and fact.data.get("lost")):
            found = {step: decided for step, decided in found.items() if step <= fact.step}
        elif fact.kind == "decision":
            decision = decision_from_json(fact.data.get("decision") or {})
            if decision.is_maths:
                found.setdefault(fact.step, {})[decision.kind] = decision
    if gap is not None:
        raise ConfigError(
            f"record {path}: {gap.data.get('lost')} facts before step {gap.step} are missing ({gap.data.get('why')}), decisions "
            "perhaps among them, so the run cannot be repeated from it; give a record without a gap"
        )
    return {step: list(decided.values()) for step, decided in found.items()}


# --- policies ---

Answer = Decision | Iterable[Decision] | None


class Policy:
    """Base class of policies: override the hooks you need, and return decisions from them.

    Every worker calls its own copy with the same observations; the decisions of the first worker count. Keep what must
    survive between calls in attributes whose name begins with `_`: workers that join later and resumed jobs begin with
    them. They must be values that JSON can hold, or objects that have only such values.
    """

    needs: Mapping[str, int] = {}
    """Monitors that must run, with their interval in steps: {"noise_scale": 1}."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def before_train(self, obs: Observation) -> Answer:
        """Called once, when the job begins, and not again when it is resumed."""

    def before_epoch(self, obs: Observation) -> Answer:
        """Called at the beginning of an epoch."""

    def before_step(self, obs: Observation) -> Answer:
        """Called before each step."""

    def after_step(self, obs: Observation) -> Answer:
        """Called after each step, with its figures."""

    def after_epoch(self, obs: Observation) -> Answer:
        """Called after the last step of an epoch."""

    def after_train(self, obs: Observation) -> Answer:
        """Called once, at the end; decisions have no effect."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a copy on another worker needs to continue like this one, as JSON types."""
        state = {name: value for name, value in vars(self).items() if name.startswith("_")}
        return {name: dict(vars(value)) if hasattr(value, "__dict__") else value for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            present = getattr(self, name, None)
            if hasattr(present, "__dict__"):
                vars(present).update(value)
            else:
                setattr(self, name, value)


class Policies:
    """Several policies that act as one.

    If two policies make the same kind of decision in one hook, the first one that is asked wins. A later hook of the
    same step may still change it. Hooks named `after_...` are called in reverse order, so that policies enclose each other.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        for each in policies:
            if not isinstance(each, Policy):
                raise ConfigError(f"{each!r} is no policy: derive it from pliant.Policy")
        self.policies = tuple(policies)

    def __len__(self) -> int:
        return len(self.policies)

    @property
    def needs(self) -> dict[str, int]:
        """Monitors that any of the policies needs, each at the shortest interval."""
        needs: dict[str, int] = {}
        for policy in self.policies:
            for monitor, interval in policy.needs.items():
                needs[monitor] = min(interval, needs.get(monitor, interval))
        return needs

    def ask(self, hook: str, obs: Observation) -> list[tuple[str, Decision]]:
        """Call one hook of all policies; return at most one decision of each kind, with the name of its policy."""
        asked = reversed(self.policies) if hook.startswith("after_") else self.policies
        found: dict[str, tuple[str, Decision]] = {}
        for policy in asked:
            call: Callable[[Observation], Answer] = getattr(policy, hook)
            answer = call(obs)
            for decision in (answer,) if isinstance(answer, Decision) else answer or ():
                if not isinstance(decision, Decision):
                    raise ConfigError(f"{policy.name}.{hook} answered {decision!r}: return decisions, or None")
                found.setdefault(decision.kind, (policy.name, decision))
        return list(found.values())

    def state_dict(self) -> list[dict[str, Any]]:
        return [policy.state_dict() for policy in self.policies]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        for policy, state in zip(self.policies, states, strict=True):
            policy.load_state_dict(state)


# --- schedules ---


def check_schedule(schedule: Mapping[int, int], *, least: int) -> dict[int, int]:
    """Return a schedule (a size by the step from which it holds) sorted by step.

    Raises:
        ConfigError: the schedule is empty, a number is not whole, or a size is below `least`.
    """
    for step, value in schedule.items():
        for number, smallest in ((step, 0), (value, least)):
            if isinstance(number, bool) or not isinstance(number, int) or number < smallest:
                raise ConfigError(
                    f"schedule entry {step!r}: {value!r}: use whole numbers, STEP from 0, SIZE from {least}"
                )
    if not schedule:
        raise ConfigError("the schedule is empty: give STEP: SIZE for one step or more")
    return dict(sorted(schedule.items()))


def latest_entry(schedule: Mapping[int, int], step: int) -> int | None:
    """Return the step of the last schedule entry that holds after `step` steps; None before the first entry."""
    return max((each for each in schedule if each <= step), default=None)
