"""`pliant bench preemption`: how long what is urgent waits for what is already on its way.

A tiny first layer and a large last one: when the tiny gradient is ready, the large one is being sent. With priorities
it waits for at most what lies in the kernel's queues, once on its way to the owner and once on the way back: 2q/B. With
a FIFO it waits for all of it, T. And if the queues may hold more, priorities must get worse by as much as that says:
else something other than the order of sending would be the reason. How much they may hold is not how much they do
(TCP's window has a say), so the kernel is asked.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pliant.errors import LabError
from pliant.machine import Json, machine
from pliant_repro.bench import bounds as links
from pliant_repro.bench.priority import trace as traces
from pliant_repro.bench.priority.options import PriorityOptions
from pliant_repro.bench.priority.stage import Stage
from pliant_repro.bench.stats import Summary
from pliant_repro.lab.hosts import Lab
from pliant_repro.lab.rates import format_rate
from pliant_repro.scaling_model import transfer_s

Progress = Callable[[str, float], None]
MODEL = "pliant_repro.bench.preemption_model:build"
FIRST_PARAMETERS, LAST_PARAMETERS = 1_000, 2_500_000
ITEM_BYTES = 4
LATENCY = "latency"
"""The category of the model's own events in the trace: from a gradient to the new value."""
QUEUED = "queued"
"""The same: how many bytes, as the event's name, lay in the kernel's queues when the gradient was ready."""
FIRST_BACKWARD_S = 0.040
"""For so long the last layer's gradient is alone: the queues are full when the first layer's is ready."""
WIDE_BYTES = 4 << 20
MARGIN_S = 0.010
"""For what is neither wire nor queue: two wake-ups, a sum, an update."""
FIFO_SHARE = 0.9
ABOUT = (0.6, 1.2)
"""What is measured of a predicted delay counts as about that much. A queue is not full at every moment: less is likelier."""
LEAD = 5
"""Steps until sizes are tuned and the pipeline is steady."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way of sending."""

    label: str
    sync: str
    in_flight_bytes: int | None = None
    """None: tuned."""


WAYS = (Way("priority", "priority"), Way("fifo", "fifo"), Way("priority, wide", "priority", WIDE_BYTES))


@dataclass(frozen=True, slots=True)
class Found:
    """What one way was seen to do."""

    latencies_s: list[float]
    """Of each step."""
    in_flight_bytes: int
    """Allowed: q."""
    queued_bytes: float
    """What did lie in the kernel's queues."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What the links can do."""

    nodes: int
    bytes_per_s: float

    @property
    def first_s(self) -> float:
        """t_0: the first layer alone on the links."""
        return transfer_s(FIRST_PARAMETERS * ITEM_BYTES, self.nodes, self.bytes_per_s)

    @property
    def all_s(self) -> float:
        """T: everything."""
        return transfer_s((FIRST_PARAMETERS + LAST_PARAMETERS) * ITEM_BYTES, self.nodes, self.bytes_per_s)

    def queues_s(self, in_flight_bytes: float) -> float:
        """2q/B: what lies in the queues goes first, there and back."""
        return 2 * in_flight_bytes / self.bytes_per_s


def run(nodes: int, rate: int, iters: int, args: Mapping[str, object], progress: Progress) -> Json:
    """Measure all ways, one after the other; the result in the one form of all benches.

    Raises:
        LabError: no lab can be made here.
        LaunchError: a worker failed.
    """
    remarks: list[str] = []
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        lab = cleanup.enter_context(Lab(num_hosts=nodes, rate=format_rate(rate), mtu=9000).up())
        progress("iperf3", 0.0)
        wire = Wire(nodes, _capacity(lab, rate, remarks) / 8)
        options = PriorityOptions(
            model=MODEL, compute="real", nodes=nodes, rates=(rate,), modes=("priority",), trace=folder / "trace"
        )
        stage = Stage(options, folder, lab)
        cells = []
        for number, way in enumerate(WAYS):
            progress(way.label, (number + 1) / (len(WAYS) + 1))
            cells.append(cell(way, wire, _measure(stage, way, number, iters)))
    return result_of(wire, cells, args, remarks)


def _capacity(lab: Lab, rate: int, remarks: list[str]) -> float:
    """Bits per second with all nodes sending."""
    why_not = links.why_no_iperf()
    if not why_not:
        try:
            return links.measure_ring(lab).bits_per_s
        except LabError as error:
            why_not = str(error)
    remarks.append(why_not)
    return rate * links.MTU_SHARE


def _measure(stage: Stage, way: Way, number: int, iters: int) -> Found:
    name = f"way-{number}"
    with stage.job(name, way.sync, number, in_flight_bytes=way.in_flight_bytes) as job:
        job.start()
        job.ready(_PATIENCE_S)
        # One more: a step's parameter is used in the next one.
        answers = job.ask({"do": "run", "iterations": iters + 1, "lead": LEAD}, _PATIENCE_S + 10.0 * iters)
    facts = cast("Mapping[str, int]", answers[0]["after"])
    ranks = list(traces.collect(stage.folder).get(name, {}).values())
    return Found(latencies_s(ranks)[-iters:], facts["in_flight_bytes"], queued_bytes(ranks, iters))


def latencies_s(ranks: Sequence[Sequence[Json]]) -> list[float]:
    """Of each step: from the moment that the last rank has its gradient to that at which the last has its parameter."""
    spans = [
        [(cast(float, each["ts"]), cast(float, each["ts"]) + cast(float, each["dur"])) for each in events
         if each.get("cat") == LATENCY]
        for events in ranks
    ]  # fmt: skip
    return [(max(end for _, end in step) - max(begin for begin, _ in step)) / 1e6 for step in zip(*spans, strict=True)]


def queued_bytes(ranks: Sequence[Sequence[Json]], iters: int) -> float:
    """What lay in a rank's queues when its gradient was ready: the mean of all ranks and of the last steps."""
    counts = [
        [int(cast(str, each["name"])) for each in events if each.get("cat") == QUEUED][-iters:] for events in ranks
    ]
    every = [count for each in counts for count in each]
    return sum(every) / len(every)


def cell(way: Way, wire: Wire, found: Found) -> Json:
    """What one way took, beside what it may take."""
    seconds = found.latencies_s
    summary = Summary.of(seconds)
    return {
        "way": way.label,
        "mode": way.sync,
        "nodes": wire.nodes,
        "q_bytes": found.in_flight_bytes,
        "queued_bytes": found.queued_bytes,
        "t0_s": wire.first_s,
        "capacity_mbit": wire.bytes_per_s * 8e-6,
        "all_s": wire.all_s,
        "queues_s": wire.queues_s(found.in_flight_bytes),
        "queued_s": wire.queues_s(found.queued_bytes),
        "latency_s": summary.median,
        "latency_p90_s": summary.p90,
        "latencies_s": seconds,
        "num_steps": len(seconds),
    }


def judge(cells: Sequence[Json]) -> list[tuple[str, bool]]:
    """What must hold, with the figures, and whether it does."""
    narrow, fifo, wide = cells
    values = {name: cast(float, narrow[name]) for name in ("latency_s", "t0_s", "queues_s", "all_s")}
    bound_s = values["t0_s"] + values["queues_s"] + MARGIN_S
    fifo_s, least_s = cast(float, fifo["latency_s"]), FIFO_SHARE * values["all_s"]
    worse_s = cast(float, wide["latency_s"]) - values["latency_s"]
    predicted_s = cast(float, wide["queued_s"]) - cast(float, narrow["queued_s"])
    return [
        (
            f"priority: {values['latency_s'] * 1e3:.1f} ms, at most t_0 + 2q/B + 10 ms = {bound_s * 1e3:.1f} ms",
            values["latency_s"] <= bound_s,
        ),
        (f"fifo: {fifo_s * 1e3:.0f} ms, at least 0.9 T = {least_s * 1e3:.0f} ms", fifo_s >= least_s),
        (
            f"priority with up to {cast(int, wide['q_bytes']) / 2**20:g} MiB in flight: {worse_s * 1e3:.0f} ms more; predicted by "
            f"what lies in the queues: {predicted_s * 1e3:.0f} ms ({worse_s / predicted_s:.2f} of it)",
            ABOUT[0] <= worse_s / predicted_s <= ABOUT[1],
        ),
    ]


def result_of(wire: Wire, cells: Sequence[Json], args: Mapping[str, object], remarks: Sequence[str]) -> Json:
    """All of it in the one form."""
    verdicts = judge(cells)
    ours, fifo = (Summary.of(cast("list[float]", one["latencies_s"])) for one in cells[:2])
    bound_s = wire.first_s + cast(float, cells[0]["queues_s"])
    return {
        "bench": "preemption",
        "args": dict(args),
        "ours": {"median_s": ours.median, "iqr_s": ours.iqr},
        "peers": {"fifo": {"median_s": fifo.median, "iqr_s": fifo.iqr, "speedup": fifo.median / ours.median}},
        "bound": {"name": "t_0 + 2q/B", "median_s": bound_s, "fraction": bound_s / ours.median},
        "cells": list(cells),
        "verdicts": [{"text": text, "ok": ok} for text, ok in verdicts],
        "machine": machine(),
        "ok": all(ok for _, ok in verdicts),
        "remarks": list(remarks),
    }
