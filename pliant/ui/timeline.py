"""Timelines of jobs: the facts of a record, one after the other, as series and events that a page can draw. Pure.

Facts that were undone (a step after which a worker was lost, steps after the checkpoint that a run resumed from) are
undone here, too. Unknown kinds of facts and damaged fields are ignored, because a newer pliant may write more.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.duration import duration_text, span_text
from pliant.fed.participation import Participation, RoundClients
from pliant.record import Fact

# --- series of numbers ---


MOST_KEPT = 500_000
"""Most points of a series. Beyond that it is thinned to half, so that a job of a month fits into memory."""
Floats = NDArray[np.float64]
Point = tuple[float, float]


class Series:
    """Points with growing x, of which the end can be cut off again."""

    def __init__(self) -> None:
        self._x, self._y = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Iterator[Point]:
        return zip(self._x, self._y, strict=True)

    @property
    def last(self) -> float | None:
        return self._y[-1] if self._y else None

    def add(self, x: float, y: float) -> None:
        """Add a point in place of those at x or after it. A value that is not finite makes a gap."""
        if self._x and x <= self._x[-1]:
            self.cut(math.nextafter(x, -math.inf))
        self._x.append(x)
        self._y.append(y if math.isfinite(y) else math.nan)
        if len(self._x) > MOST_KEPT:
            kept = self.thinned(MOST_KEPT // 2)
            self._x, self._y = array("d", (x for x, _ in kept)), array("d", (y for _, y in kept))

    def part(self, begin: float, end: float) -> Series:
        """Return the points from `begin` to `end`, and one more on each side, so that a line reaches the edges."""
        first = max(0, bisect_left(self._x, begin) - 1)
        last = bisect_right(self._x, end) + 1
        found = Series()
        found._x, found._y = self._x[first:last], self._y[first:last]
        return found

    def x_at(self, y: float) -> float | None:
        """Return the last x whose y is not above `y`, for a series that never falls; None if there is none."""
        place = bisect_right(self._y, y)
        return self._x[place - 1] if place else None

    @property
    def average(self) -> float:
        """The mean of all y; 0 if there are none."""
        good = _finite(np.array(self._x), np.array(self._y))[1]
        return float(good.mean()) if len(good) else 0.0

    def cut(self, after: float) -> None:
        """Remove the points after this x."""
        keep = bisect_right(self._x, after)
        del self._x[keep:], self._y[keep:]

    def thinned(self, most: int) -> list[Point]:
        """Return `thin` of all points, without gaps."""
        # Copies: a view would keep the arrays from growing.
        return thin(np.array(self._x), np.array(self._y), most)

    def mean(self, most: int) -> list[Point]:
        """Return at most `most` points, each the mean of its neighbours."""
        x, y = _finite(np.array(self._x), np.array(self._y))
        if len(x) <= most:
            return _points(x, y)
        starts = np.unique(np.linspace(0, len(x), most, endpoint=False).astype(np.int64))
        counts = np.diff(np.append(starts, len(x)))
        return _points(x[starts], np.add.reduceat(y, starts) / counts)


def thin(x: Floats, y: Floats, most: int) -> list[Point]:
    """Return at most `most` of the points with the same outline, so that no spike is lost.

    Of each run of neighbours it keeps the first, the last, the least and the greatest.
    """
    x, y = _finite(x, y)
    if len(x) <= most:
        return _points(x, y)
    runs = max(1, most // 4)
    edges = np.linspace(0, len(x), runs + 1).astype(np.int64)
    kept = set()
    for begin, end in pairwise(edges.tolist()):
        part = y[begin:end]
        kept |= {begin, end - 1, begin + int(part.argmin()), begin + int(part.argmax())}
    places = np.fromiter(sorted(kept), np.int64)
    return _points(x[places], y[places])


def _finite(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    good = np.isfinite(y)
    return (x, y) if good.all() else (x[good], y[good])


def _points(x: Floats, y: Floats) -> list[Point]:
    return list(zip(x.tolist(), y.tolist(), strict=True))


# --- federated jobs ---


MOST_ROUNDS_KEPT, MOST_CLIENTS_KEPT = 50, 100_000
"""Most of the newest rounds whose clients are kept one by one, and most clients of these."""
OUTCOMES = ("invited", "aggregated", "cut", "lost")


@dataclass(slots=True)
class FederatedTimeline:
    """Timeline of a federated job, from its `round` and `test` facts."""

    rounds: int = 0
    clock_s: float = 0.0
    accuracy: Series = field(default_factory=Series)
    """Accuracy in per cent by hours of the virtual clock, like `top_5`."""
    top_5: Series = field(default_factory=Series)
    epsilon: Series = field(default_factory=Series)
    loss: Series = field(default_factory=Series)
    """Training loss by round, like the following series."""
    test_loss: Series = field(default_factory=Series)
    duration_s: Series = field(default_factory=Series)
    outcomes: dict[str, Series] = field(default_factory=dict)
    """Number of clients that were invited, aggregated, cut and lost."""
    clients: Participation = field(default_factory=Participation)
    """How clients took part."""
    recent: dict[int, RoundClients] = field(default_factory=dict)
    """Clients of the newest rounds."""
    workers: tuple[str, ...] = ()
    """Names of the worker processes."""
    work: dict[str, Series] = field(default_factory=dict)
    """round_s and test_s of real time, wait_s, gpu_bytes, gpu_use, by round."""
    slowest: dict[int, str] = field(default_factory=dict)
    """The worker for which the others waited longest, in each of the newest rounds."""
    target: float | None = None
    """Accuracy at which the job ends, in per cent."""

    def add(self, fact: Fact) -> None:
        """Add a round, or a test of the model."""
        number = _whole(fact.data, "round", fact.step)
        clock_s = _number(fact.data.get("clock_s"))
        self.clock_s = clock_s if clock_s is not None else self.clock_s
        if fact.kind == "test":
            self._test(fact, number)
        else:
            self._round(fact, number)

    def time_to(self, accuracy: float) -> float | None:
        """Return the hours of the virtual clock until an accuracy in per cent was first reached; None if it was not."""
        return next((hour for hour, reached in self.accuracy if reached >= accuracy), None)

    @property
    def best(self) -> float | None:
        return max((reached for _, reached in self.accuracy), default=None)

    def add_work(self, fact: Fact) -> None:
        """Add how long a round really took, and what the workers did meanwhile."""
        for name in ("round_s", "test_s", "wait_s", "gpu_bytes", "gpu_use"):
            if (value := _number(fact.data.get(name))) is not None:
                self.work.setdefault(name, Series()).add(fact.step, value)
        if slowest := fact.data.get("slowest"):
            self.slowest[fact.step] = str(slowest)
        if len(self.slowest) > RECENT_STEPS:
            del self.slowest[min(self.slowest)]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return how clients took part, and what the workers did in the newest rounds, in words."""
        facts = self.clients.figures().facts() if self.rounds else []
        recent = {name: series.part(self.rounds - RECENT_STEPS + 1, self.rounds) for name, series in self.work.items()}
        if "round_s" in recent:
            waits = f", in which workers wait {duration_text(recent['wait_s'].average)}" if "wait_s" in recent else ""
            tests = recent["test_s"].average if "test_s" in recent else 0.0
            facts.append(
                (
                    "in real time",
                    f"a round takes {duration_text(recent['round_s'].average)}{waits}, and tests {duration_text(tests)} of each",
                )
            )
        if self.slowest:
            [(name, times)] = Counter(self.slowest.values()).most_common(1)
            rounds = plural(len(self.slowest), "round")
            facts.append(("others wait for", f"worker {name} in {times} of the last {rounds} with several workers"))
        return [*facts, *_gpu_facts(recent)]

    def _test(self, fact: Fact, number: int) -> None:
        hour = self.clock_s / 3600
        for name, series, at, scale in (
            ("accuracy", self.accuracy, hour, 100.0),
            ("top_5", self.top_5, hour, 100.0),
            ("epsilon", self.epsilon, hour, 1.0),
            ("loss", self.test_loss, number, 1.0),
        ):
            if (value := _number(fact.data.get(name))) is not None:
                series.add(at, value * scale)

    def _round(self, fact: Fact, number: int) -> None:
        self.rounds = number
        for name, series in (("loss", self.loss), ("duration_s", self.duration_s)):
            if (value := _number(fact.data.get(name))) is not None:
                series.add(number, value)
        for name in OUTCOMES:
            told = fact.data.get(name)
            value = float(len(told)) if isinstance(told, list) else _number(told)
            if value is not None:
                self.outcomes.setdefault(name, Series()).add(number, value)
        for again in [each for each in self.slowest if each >= number]:
            del self.slowest[again]
        for again in [each for each in self.recent if each >= number]:  # a resumed job repeats them
            self.clients.remove(self.recent.pop(again))
        self.recent[number] = done = RoundClients.from_json(fact.data)
        self.clients.add(done)
        kept = sum(len(each.invited) for each in self.recent.values())
        while len(self.recent) > MOST_ROUNDS_KEPT or (kept > MOST_CLIENTS_KEPT and len(self.recent) > 1):
            kept -= len(self.recent.pop(min(self.recent)).invited)


# --- jobs ---


MOST_EVENTS = 5000
MOST_CALLS = 12
"""Calls of a stack that are shown. All are in the record."""
MEASURED = ("noise_scale", "variance")
PHASES = ("compute_s", "wait_s", "slowest", "slowest_s", "gpu_bytes", "gpu_use")
"""How the time of a step divides, whom the others waited for (a rank, with its own time), and what the GPUs did."""
RECENT_STEPS = 100
"""Steps for which the page and `pliant top` say whom the others waited for."""
LR = "learning rate"
"""Beginning of the text of decisions on the learning rate."""
WORKING_S = 30.0
"""A job whose record has grown within this time counts as running, if nothing else is known."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """An event that is marked on the curves."""

    kind: str
    """One of start, resize, lost, decision, refused, resumed, gap, stalled, end."""
    step: int | None
    """Step of the event; None if it is not known, as for events of a scheduler."""
    time_s: float
    what: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class ViewWorkers:
    """The workers of one view, from a step on."""

    step: int
    workers: tuple[str, ...]
    """host:port by rank."""
    replicas: int
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """Measured rates between hosts."""

    step: int
    hosts: tuple[str, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]


@dataclass(slots=True)
class JobTimeline:
    """Series and events of a job, from the facts of its record so far."""

    values: dict[str, Series] = field(default_factory=dict)
    """Values that the program reports, such as the loss, by name and step."""
    figures: dict[str, Series] = field(default_factory=dict)
    """samples_per_s, step_s, batch_size (of all replicas together), workers, noise_scale, variance, PHASES and other_s (the
    time of a step that neither the turns nor waiting have), by step."""
    times: Series = field(default_factory=Series)
    """Unix time of each step."""
    events: deque[TimelineEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    views: list[ViewWorkers] = field(default_factory=list)
    links: MeasuredLinks | None = None
    federated: FederatedTimeline | None = None
    replicas: int = 1
    step: int = 0
    began_s: float | None = None
    last_s: float = 0.0
    over: bool = False
    num_facts: int = 0
    """Number of facts so far, which shows whether the timeline has changed."""

    @property
    def unit(self) -> str:
        """Name of a step: `step` or `round`."""
        return "round" if self.federated is not None else "step"

    @property
    def speed(self) -> float | None:
        """Samples per second in the last step."""
        return self.figures["samples_per_s"].last if "samples_per_s" in self.figures else None

    @property
    def num_workers(self) -> int:
        """Number of workers in the last step, or in the view if no step is known."""
        told = self.figures["workers"].last if "workers" in self.figures else None
        return int(told) if told is not None else len(self.views[-1].workers) if self.views else 0

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return where the time of the newest steps went, whom the others waited for, and what the GPUs did, in words.

        Of a federated job, how its clients took part.
        """
        if self.federated is not None:
            return self.federated.facts
        recent = {name: series.part(self.step - RECENT_STEPS + 1, self.step) for name, series in self.figures.items()}
        facts = []
        means = {name: recent[name].average for name in ("compute_s", "wait_s", "other_s") if name in recent}
        if len(means) == 3 and (whole := sum(means.values())) > 0:
            shares = {name: f"{mean / whole:.0%}" for name, mean in means.items()}
            facts.append(
                (
                    "a step takes",
                    f"{duration_text(whole)}: {shares['compute_s']} in turns, {shares['wait_s']} waiting for other workers, "
                    f"{shares['other_s']} in the rest of the program",
                )
            )
        if self.views and "slowest" in recent:
            since = max(self.views[-1].step, self.step - RECENT_STEPS)
            ranks = [int(rank) for step, rank in recent["slowest"] if step > since and math.isfinite(rank)]
            own_s = recent["slowest_s"].last if "slowest_s" in recent else None
            facts += self._waited_for(ranks, own_s) if ranks else []
        return [*facts, *_gpu_facts(recent)]

    def _waited_for(self, ranks: Sequence[int], own_s: float | None) -> list[tuple[str, str]]:
        """Describe whom the others waited for most often in the newest steps of this view."""
        [(rank, times)] = Counter(ranks).most_common(1)
        workers = self.views[-1].workers
        name = workers[rank] if 0 <= rank < len(workers) else "unknown"
        own = "" if own_s is None else f"; without its waits, the last step of the slowest took {duration_text(own_s)}"
        return [("others wait for", f"rank {rank} ({name}) in {times} of the last {plural(len(ranks), 'step')}{own}")]

    def step_at(self, time_s: float) -> int | None:
        """Return the last step that was done by then; None if there was none."""
        step = self.times.x_at(time_s)
        return None if step is None else int(step)

    def is_running(self, now_s: float) -> bool:
        return not self.over and self.num_facts > 0 and now_s - self.last_s < WORKING_S

    def add(self, facts: Iterable[Fact]) -> None:
        """Add facts."""
        for fact in facts:
            self.num_facts += 1
            self.began_s = fact.time_s if self.began_s is None else self.began_s
            self.last_s = max(self.last_s, fact.time_s)
            handle = _HANDLERS.get(fact.kind)
            if handle is not None:
                handle(self, fact)

    # --- training ---

    def _start(self, fact: Fact) -> None:
        self.over = False
        self.replicas = max(1, _whole(fact.data, "replicas", self.replicas))
        workers = _whole(fact.data, "workers")
        # A file may hold several runs: the last one counts.
        self._undo(-1)
        self.links, self.federated, self.step = None, None, fact.step
        if isinstance(config := fact.data.get("config"), dict) and "participants" in config:
            target = _number(config.get("target"))
            self.federated = FederatedTimeline(
                target=100 * target if target else None, clients=Participation.of_start(fact.data)
            )
        what = f"starts on {plural(workers, 'worker')}" if workers else "starts"
        self._add(fact, "start", what)

    def _resumed(self, fact: Fact) -> None:
        self.over = False
        self._undo(fact.step)
        self._add(fact, "resumed", f"goes on from the checkpoint of step {fact.step}")

    def _undo(self, after: int) -> None:
        """Remove everything after this step, which was undone."""
        for series in (*self.values.values(), *self.figures.values(), self.times):
            series.cut(after)
        self.views = [view for view in self.views if view.step <= after]
        self.events = deque((event for event in self.events if (event.step or 0) <= after), MOST_EVENTS)
        self.step = after

    def _step(self, fact: Fact) -> None:
        self.step, data = fact.step, fact.data
        self.times.add(fact.step, fact.time_s)
        for name in ("samples_per_s", "step_s", "workers", *MEASURED, *PHASES):
            if (value := _number(data.get(name))) is not None and (value > 0 or name in (*MEASURED, *PHASES)):
                self.figures.setdefault(name, Series()).add(fact.step, value)
        step_s, compute_s, wait_s = (_number(data.get(name)) for name in ("step_s", "compute_s", "wait_s"))
        if step_s is not None and compute_s is not None and wait_s is not None:
            self.figures.setdefault("other_s", Series()).add(fact.step, max(0.0, step_s - compute_s - wait_s))
        if (batch := _number(data.get("batch_size"))) is not None:
            self.figures.setdefault("batch_size", Series()).add(fact.step, batch * self.replicas)
        values = data.get("values")
        for name, given in values.items() if isinstance(values, dict) else ():
            if (value := _number(given)) is not None:
                self.values.setdefault(str(name), Series()).add(fact.step, value)

    def _view(self, fact: Fact) -> None:
        old, new = _whole(fact.data, "old"), _whole(fact.data, "new")
        pause_s, lost = _number(fact.data.get("pause_s")) or 0.0, bool(fact.data.get("lost"))
        repeated = _whole(fact.data, "repeated")
        if lost:
            self._undo(fact.step)
        why = f"pause of {pause_s * 1e3:.0f} ms" + (f", {plural(repeated, 'step')} done again" if repeated > 1 else "")
        told = f"a worker was lost: {old} → {new}" if lost else f"{old} → {plural(new, 'worker')}"
        self._add(fact, "lost" if lost else "resize", told, why)

    def _workers(self, fact: Fact) -> None:
        names = fact.data.get("workers")
        if isinstance(names, list) and self.federated is not None:
            self.federated.workers = tuple(map(str, names))
            return
        if not isinstance(names, list) or not names:
            return
        self.replicas = max(1, _whole(fact.data, "replicas", self.replicas))
        strategy = str(fact.data.get("strategy") or "")
        self.views = [view for view in self.views if view.step < fact.step]
        self.views.append(ViewWorkers(fact.step, tuple(map(str, names)), self.replicas, strategy))

    def _links(self, fact: Fact) -> None:
        hosts, rates = fact.data.get("hosts"), fact.data.get("bytes_per_s")
        if not isinstance(hosts, list) or not isinstance(rates, list) or len(rates) != len(hosts):
            return
        if not all(isinstance(row, list) and len(row) == len(hosts) for row in rates):
            return
        square = tuple(tuple(_number(rate) or 0.0 for rate in row) for row in rates)
        self.links = MeasuredLinks(fact.step, tuple(map(str, hosts)), square)

    def _decision(self, fact: Fact) -> None:
        decision = fact.data.get("decision")
        if not isinstance(decision, dict) or decision.get("kind") == "probe_links":
            return
        policy = str(fact.data.get("policy") or "policy")
        if decision.get("kind") == "set_topology" and self.views:
            strategy = strategy_text(decision.get("strategy"))
            self.views.append(replace(self.views[-1], step=fact.step, strategy=strategy))
        refused = fact.kind == "refused"
        why = f"{policy}: {fact.data.get('why') if refused else decision.get('reason', '')}"
        self._add(fact, fact.kind, summary(decision) + (" cannot be done" if refused else ""), why)

    def _gap(self, fact: Fact) -> None:
        self._add(
            fact,
            "gap",
            f"{plural(int(_number(fact.data.get('lost')) or 0), 'fact')} missing",
            str(fact.data.get("why") or ""),
        )

    def _stall(self, fact: Fact) -> None:
        rank, worker = _whole(fact.data, "rank"), fact.data.get("worker")
        for_s = _number(fact.data.get("for_s")) or 0.0
        text = f"rank {rank} ({worker}) is stalled: {fact.data.get('what')} for {span_text(for_s)}"
        stack = fact.data.get("stack")
        calls = [call_text(str(line)) for line in stack] if isinstance(stack, list) else []
        self._add(fact, "stalled", text, " ← ".join(calls[:MOST_CALLS]))

    def _end(self, fact: Fact) -> None:
        self.over = True
        done = f"step {fact.step}" if self.federated is None else plural(self.federated.rounds, "round")
        self._add(fact, "end", f"finished after {done}")

    # --- federated ---

    def _federated(self, fact: Fact) -> None:
        if self.federated is None:
            self.federated = FederatedTimeline()
        self.federated.add(fact)
        self.step = self.federated.rounds

    def _work(self, fact: Fact) -> None:
        if self.federated is not None:
            self.federated.add_work(fact)

    def _add(self, fact: Fact, kind: str, what: str, why: str = "") -> None:
        self.events.append(TimelineEvent(kind, fact.step, fact.time_s, what, why))


_HANDLERS = {
    "start": JobTimeline._start,
    "resumed": JobTimeline._resumed,
    "step": JobTimeline._step,
    "view": JobTimeline._view,
    "workers": JobTimeline._workers,
    "links": JobTimeline._links,
    "decision": JobTimeline._decision,
    "refused": JobTimeline._decision,
    "gap": JobTimeline._gap,
    "stall": JobTimeline._stall,
    "round": JobTimeline._federated,
    "test": JobTimeline._federated,
    "work": JobTimeline._work,
    "end": JobTimeline._end,
}


def _gpu_facts(recent: Mapping[str, Series]) -> list[tuple[str, str]]:
    if "gpu_bytes" not in recent or not (held := recent["gpu_bytes"].last):
        return []
    facts = [("GPU memory", f"{held / 2**30:.1f} GiB held by torch, on the worker that holds most")]
    if "gpu_use" in recent:
        facts.append(("GPU use", f"{recent['gpu_use'].average:.0%} of the time, mean of the workers"))
    return facts


def summary(decision: Mapping[str, Any]) -> str:
    """Return a decision in few words."""
    match decision.get("kind"):
        case "set_batch_size":
            return f"batch size {decision.get('size')} per replica"
        case "set_learning_rate":
            factor = _number(decision.get("factor"))
            return f"{LR} × {factor:.4g}" if factor is not None else LR
        case "resize":
            return f"asks for {plural(_whole(decision, 'workers'), 'worker')}"
        case "set_topology":
            return f"topology {strategy_text(decision.get('strategy'))}"
        case kind:
            return str(kind)


def call_text(line: str) -> str:
    """Return a line of a stack in few words: `train.py:12 forward`."""
    found = re.fullmatch(r'\s*File "(?:.*/)?([^"]*)", line (\d+) in (.*)', line)
    return f"{found[1]}:{found[2]} {found[3]}" if found is not None else line.strip()


def strategy_text(strategy: object) -> str:
    """Return a strategy's name, or the parent of each rank, as `Observation.strategy` has it."""
    if isinstance(strategy, list | tuple):
        return ",".join(map(str, strategy))
    return str(strategy or "")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(data: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def clients_text(clients: Sequence[int], most: int = 40) -> str:
    """Return the numbers of clients, of very many the first."""
    more = f" and {len(clients) - most} more" if len(clients) > most else ""
    return ", ".join(map(str, clients[:most])) + more


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
