"""A job's story: the facts of its record, one after the other, as what a page can draw. Pure.

Facts that were undone (a step after which a worker was lost, what came after the checkpoint that a run began with) are
undone here, too. Unknown kinds and damaged fields are passed over: a newer pliant may write more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pliant.record import Fact
from pliant.ui.federation import Federation
from pliant.ui.series import Series

MOST_EVENTS = 5000
MEASURED = ("noise_scale", "variance")
LR = "learning rate"
"""How decisions on it begin."""
WORKING_S = 30.0
"""A job whose record has grown within this time is held for running, where nobody knows better."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a curve should be read with."""

    kind: str
    """start, resize, lost, decision, refused, resumed, or end."""
    step: int | None
    """None: told by somebody who does not know the steps, such as a cluster."""
    time_s: float
    what: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one view, from a step on."""

    step: int
    workers: tuple[str, ...]
    """host:port by rank; made up of their ranks, where the record has no names."""
    replicas: int
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class Links:
    """Rates that were measured between hosts."""

    step: int
    hosts: tuple[str, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]


@dataclass(slots=True)
class Story:
    """What a record has told so far."""

    values: dict[str, Series] = field(default_factory=dict)
    """What the program has reported (the loss, say), by name and step."""
    figures: dict[str, Series] = field(default_factory=dict)
    """samples_per_s, step_s, batch_size (of all replicas together), workers, noise_scale, variance; by step."""
    times: Series = field(default_factory=Series)
    """When each step was done."""
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    crews: list[Crew] = field(default_factory=list)
    links: Links | None = None
    federation: Federation | None = None
    replicas: int = 1
    step: int = 0
    began_s: float | None = None
    last_s: float = 0.0
    over: bool = False
    num_facts: int = 0
    """Grows with each fact: whoever has drawn the story sees by it whether there is news."""

    @property
    def strategy(self) -> str:
        return self.crews[-1].strategy if self.crews else ""

    @property
    def unit(self) -> str:
        """What steps are called."""
        return "round" if self.federation is not None else "step"

    @property
    def num_workers(self) -> int:
        """Of the last step, or of the crew if it is newer."""
        told = self.figures["workers"].last if "workers" in self.figures else None
        return int(told) if told is not None else len(self.crews[-1].workers) if self.crews else 0

    def step_at(self, time_s: float) -> int | None:
        """The last step that was done by then; None: none was."""
        step = self.times.x_at(time_s)
        return None if step is None else int(step)

    def is_running(self, now_s: float) -> bool:
        return not self.over and self.num_facts > 0 and now_s - self.last_s < WORKING_S

    def tell(self, facts: Iterable[Fact]) -> None:
        """Hear some more."""
        for fact in facts:
            self.num_facts += 1
            self.began_s = fact.time_s if self.began_s is None else self.began_s
            self.last_s = max(self.last_s, fact.time_s)
            hear = _HEARERS.get(fact.kind)
            if hear is not None:
                hear(self, fact)

    # --- training ---

    def _start(self, fact: Fact) -> None:
        self.over = False
        self.replicas = max(1, _whole(fact.data, "replicas", self.replicas))
        workers = _whole(fact.data, "workers")
        # A file may hold several runs: the last one counts.
        self._undo(-1)
        self.links, self.federation, self.step = None, None, fact.step
        if isinstance(config := fact.data.get("config"), dict) and "participants" in config:
            target = _number(config.get("target"))
            self.federation = Federation(target=100 * target if target else None)
        what = f"starts on {_count(workers, 'worker')}" if workers else "starts"
        self._add(fact, "start", what)

    def _resumed(self, fact: Fact) -> None:
        self.over = False
        self._undo(fact.step)
        self._add(fact, "resumed", f"goes on from the checkpoint of step {fact.step}")

    def _undo(self, after: int) -> None:
        """The steps after this one have not happened."""
        for series in (*self.values.values(), *self.figures.values(), self.times):
            series.cut(after)
        self.crews = [crew for crew in self.crews if crew.step <= after]
        self.events = deque((event for event in self.events if (event.step or 0) <= after), MOST_EVENTS)
        self.step = after

    def _step(self, fact: Fact) -> None:
        self.step, data = fact.step, fact.data
        self.times.add(fact.step, fact.time_s)
        for name in ("samples_per_s", "step_s", "workers", *MEASURED):
            if (value := _number(data.get(name))) is not None and (value > 0 or name in MEASURED):
                self.figures.setdefault(name, Series()).add(fact.step, value)
        if (batch := _number(data.get("batch_size"))) is not None:
            self.figures.setdefault("batch_size", Series()).add(fact.step, batch * self.replicas)
        values = data.get("values")
        for name, given in values.items() if isinstance(values, dict) else ():
            if (value := _number(given)) is not None:
                self.values.setdefault(str(name), Series()).add(fact.step, value)
        if not self.crews and (workers := _whole(data, "workers")):
            self._nameless(fact.step, workers)

    def _nameless(self, step: int, workers: int) -> None:
        """As records were before they had names: ranks will do."""
        self.crews.append(Crew(step, tuple(f"rank {rank}" for rank in range(workers)), self.replicas))

    def _view(self, fact: Fact) -> None:
        old, new = _whole(fact.data, "old"), _whole(fact.data, "new")
        pause_s, lost = _number(fact.data.get("pause_s")) or 0.0, bool(fact.data.get("lost"))
        repeated = _whole(fact.data, "repeated")
        if lost:
            self._undo(fact.step)
        why = f"pause of {pause_s * 1e3:.0f} ms" + (f", {_count(repeated, 'step')} done again" if repeated > 1 else "")
        told = f"a worker was lost: {old} → {new}" if lost else f"{old} → {_count(new, 'worker')}"
        self._add(fact, "lost" if lost else "resize", told, why)
        if self.crews and self.crews[-1].workers[:1] == ("rank 0",) and new:
            self._nameless(fact.step, new)

    def _workers(self, fact: Fact) -> None:
        names = fact.data.get("workers")
        if not isinstance(names, list) or not names:
            return
        self.replicas = max(1, _whole(fact.data, "replicas", self.replicas))
        strategy = str(fact.data.get("strategy") or "")
        self.crews = [crew for crew in self.crews if crew.step < fact.step]
        self.crews.append(Crew(fact.step, tuple(map(str, names)), self.replicas, strategy))

    def _links(self, fact: Fact) -> None:
        hosts, rates = fact.data.get("hosts"), fact.data.get("bytes_per_s")
        if not isinstance(hosts, list) or not isinstance(rates, list) or len(rates) != len(hosts):
            return
        if not all(isinstance(row, list) and len(row) == len(hosts) for row in rates):
            return
        square = tuple(tuple(_number(rate) or 0.0 for rate in row) for row in rates)
        self.links = Links(fact.step, tuple(map(str, hosts)), square)

    def _decision(self, fact: Fact) -> None:
        decision = fact.data.get("decision")
        if not isinstance(decision, dict) or decision.get("kind") == "probe_links":
            return
        policy = str(fact.data.get("policy") or "policy")
        if decision.get("kind") == "set_topology" and self.crews:
            self.crews.append(_with_strategy(self.crews[-1], fact.step, decision.get("strategy")))
        refused = fact.kind == "refused"
        why = f"{policy}: {fact.data.get('why') if refused else decision.get('reason', '')}"
        self._add(fact, fact.kind, summary(decision) + (" cannot be done" if refused else ""), why)

    def _end(self, fact: Fact) -> None:
        self.over = True
        self._add(
            fact,
            "end",
            f"finished after {_count(self.federation.rounds, 'round')}"
            if self.federation
            else f"finished after step {fact.step}",
        )

    # --- federated ---

    def _federated(self, fact: Fact) -> None:
        if self.federation is None:
            self.federation = Federation()
        self.federation.tell(fact)
        self.step = self.federation.rounds

    def _add(self, fact: Fact, kind: str, what: str, why: str = "") -> None:
        self.events.append(Event(kind, fact.step, fact.time_s, what, why))


_HEARERS = {
    "start": Story._start,
    "resumed": Story._resumed,
    "step": Story._step,
    "view": Story._view,
    "workers": Story._workers,
    "links": Story._links,
    "decision": Story._decision,
    "refused": Story._decision,
    "round": Story._federated,
    "test": Story._federated,
    "end": Story._end,
}


def summary(decision: Mapping[str, Any]) -> str:
    """What was decided, in few words."""
    match decision.get("kind"):
        case "set_batch_size":
            return f"batch size {decision.get('size')} per replica"
        case "set_learning_rate":
            factor = _number(decision.get("factor"))
            return f"{LR} × {factor:.4g}" if factor is not None else LR
        case "resize":
            return f"asks for {_count(_whole(decision, 'workers'), 'worker')}"
        case "set_topology":
            return f"topology {strategy_text(decision.get('strategy'))}"
        case kind:
            return str(kind)


def strategy_text(strategy: object) -> str:
    """A strategy's name, or each rank's father, as `Observation.strategy` writes it."""
    if isinstance(strategy, list | tuple):
        return ",".join(map(str, strategy))
    return str(strategy or "")


def _with_strategy(crew: Crew, step: int, strategy: object) -> Crew:
    return Crew(step, crew.workers, crew.replicas, strategy_text(strategy))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(data: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
