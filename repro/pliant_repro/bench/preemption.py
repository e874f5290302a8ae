"""`pliant bench preemption`: how long an urgent gradient waits for one that is already on its way.

A tiny first layer and a large last one: when the tiny gradient is ready, the large one is being sent. With priorities it waits
at most for what lies in the kernel's queues, once on its way to the owner and once on the way back: 2q/B. With a FIFO it waits
for everything, T. If the queues may hold more, priorities must get worse by as much as that predicts; otherwise something
other than the order of sending would be the reason. How much the queues may hold is not how much they do hold (TCP's window has
a say), so the kernel is asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from pliant.machine import Json
from pliant.train import trace
from pliant_repro.bench.priority import PriorityOptions, make_contender
from pliant_repro.contest import Progress, Summary, form
from pliant_repro.lab import iperf
from pliant_repro.lab.hosts import Lab
from pliant_repro.lab.rates import format_rate
from pliant_repro.scaling_model import transfer_s

FIRST_PARAMETERS, LAST_PARAMETERS = 1_000, 2_500_000
ITEM_BYTES = 4
LATENCY = "latency"
"""Trace category of the time from a gradient to the parameter's new value."""
QUEUED = "queued"
"""Trace category whose event names are the bytes in the kernel's queues when the gradient was ready."""
FIRST_BACKWARD_S = 0.040
"""So long is the last layer's gradient alone: the queues are full when the first layer's gradient is ready."""
WIDE_BYTES = 4 << 20
MARGIN_S = 0.010
"""Time for what is neither wire nor queue: two wake-ups, a sum, an update."""
FIFO_SHARE = 0.9
ABOUT = (0.6, 1.2)
"""Accepted ratio of measured to predicted delay. A queue is not full at every moment, so less is likelier than more."""
LEAD = 5
"""Steps until sizes are tuned and the pipeline is steady."""
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class PreemptionOptions:
    """Options of `pliant bench preemption`."""

    nodes: int
    rate: int
    """Bits per second that each node may send."""
    iters: int
    """Steps of each way of sending that count."""


@dataclass(frozen=True, slots=True)
class SendMode:
    """One way of sending."""

    label: str
    sync: str
    in_flight_bytes: int | None = None
    """None means tuned."""


SEND_MODES = (
    SendMode("priority", "priority"),
    SendMode("fifo", "fifo"),
    SendMode("priority, wide", "priority", WIDE_BYTES),
)


@dataclass(frozen=True, slots=True)
class Delays:
    """Measurements of one way of sending."""

    latencies_s: list[float]
    """One per step."""
    in_flight_bytes: int
    """Bytes that the queues may hold: q."""
    queued_bytes: float
    """Bytes that the queues did hold."""


@dataclass(frozen=True, slots=True)
class Links:
    """Capacity of the links between the nodes."""

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


def run(options: PreemptionOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Measure all ways of sending, one after the other, and return the result.

    Raises:
        LabError: no lab can be made here.
        LaunchError: a worker failed.
    """
    remarks: list[str] = []
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        lab = cleanup.enter_context(Lab(num_hosts=options.nodes, rate=format_rate(options.rate), mtu=9000).up())
        progress("iperf3", 0.0)
        bits_per_s = iperf.mean_ring_rate(lab, remarks)
        links = Links(options.nodes, (bits_per_s or options.rate * iperf.MTU_SHARE) / 8)
        cells = []
        for number, mode in enumerate(SEND_MODES):
            progress(mode.label, (number + 1) / (len(SEND_MODES) + 1))
            cells.append(make_cell(mode, links, _measure(options, folder, lab, mode, number)))
    return make_result(links, cells, args, remarks)


def _measure(options: PreemptionOptions, folder: Path, lab: Lab, mode: SendMode, number: int) -> Delays:
    name, iters = f"way-{number}", options.iters
    training = PriorityOptions(
        model=f"{__name__}:build", compute="real", nodes=options.nodes, rates=(options.rate,), modes=("priority",)
    )
    limit, trace_to = mode.in_flight_bytes, folder / name
    with make_contender(
        training, folder, lab, name, mode.sync, number, in_flight_bytes=limit, trace=str(trace_to)
    ) as job:
        job.start().ready(PATIENCE_S)
        # One step more: a step's parameter is used in the next one.
        answers = job.ask({"do": "run", "iterations": iters + 1, "lead": LEAD}, PATIENCE_S + 10.0 * iters)
    facts = cast("Mapping[str, int]", answers[0]["after"])
    ranks = [json.loads(Path(f"{trace_to}.{rank}.json").read_text())["traceEvents"] for rank in range(options.nodes)]
    return Delays(latencies_s(ranks)[-iters:], facts["in_flight_bytes"], mean_queued_bytes(ranks, iters))


def latencies_s(ranks: Sequence[Sequence[Json]]) -> list[float]:
    """Return, for each step, the time from when the last rank has its gradient until the last has its parameter."""
    spans = [[each for each in events if each.get("cat") == LATENCY] for events in ranks]
    moments = [[(float(str(e["ts"])), float(str(e["ts"])) + float(str(e["dur"]))) for e in events] for events in spans]
    steps = zip(*moments, strict=True)
    return [(max(end for _, end in step) - max(begin for begin, _ in step)) / 1e6 for step in steps]


def mean_queued_bytes(ranks: Sequence[Sequence[Json]], iters: int) -> float:
    """Return the mean over all ranks and the last steps of the bytes in the queues when the gradient was ready."""
    counts = [[int(str(each["name"])) for each in events if each.get("cat") == QUEUED][-iters:] for events in ranks]
    every = [count for each in counts for count in each]
    return sum(every) / len(every)


def make_cell(mode: SendMode, links: Links, found: Delays) -> Json:
    """Return what one way of sending took, beside what it may take."""
    summary = Summary.of(found.latencies_s)
    return {
        "way": mode.label,
        "mode": mode.sync,
        "nodes": links.nodes,
        "q_bytes": found.in_flight_bytes,
        "queued_bytes": found.queued_bytes,
        "t0_s": links.first_s,
        "capacity_mbit": links.bytes_per_s * 8e-6,
        "all_s": links.all_s,
        "queues_s": links.queues_s(found.in_flight_bytes),
        "queued_s": links.queues_s(found.queued_bytes),
        "latency_s": summary.median,
        "latency_p90_s": summary.p90,
        "latencies_s": found.latencies_s,
        "num_steps": len(found.latencies_s),
    }


def judge(cells: Sequence[Mapping[str, object]]) -> list[tuple[str, bool]]:
    """Return each claim with its figures, and whether it holds."""
    narrow, fifo, wide = (cast("Mapping[str, float]", one) for one in cells)
    latency_s, bound_s = narrow["latency_s"], narrow["t0_s"] + narrow["queues_s"] + MARGIN_S
    fifo_s, least_s = fifo["latency_s"], FIFO_SHARE * narrow["all_s"]
    worse_s, predicted_s = wide["latency_s"] - latency_s, wide["queued_s"] - narrow["queued_s"]
    share = worse_s / predicted_s
    return [
        (
            f"priority: {latency_s * 1e3:.1f} ms, at most t_0 + 2q/B + 10 ms = {bound_s * 1e3:.1f} ms",
            latency_s <= bound_s,
        ),
        (f"fifo: {fifo_s * 1e3:.0f} ms, at least 0.9 T = {least_s * 1e3:.0f} ms", fifo_s >= least_s),
        (
            f"priority with up to {wide['q_bytes'] / 2**20:g} MiB in flight: {worse_s * 1e3:.0f} ms more; predicted by "
            f"what lies in the queues: {predicted_s * 1e3:.0f} ms ({share:.2f} of it)",
            ABOUT[0] <= share <= ABOUT[1],
        ),
    ]


def make_result(links: Links, cells: Sequence[Json], args: Mapping[str, object], remarks: Sequence[str]) -> Json:
    verdicts = judge(cells)
    ours, fifo = (Summary.of(cast("list[float]", one["latencies_s"])) for one in cells[:2])
    bound_s = links.first_s + cast(float, cells[0]["queues_s"])
    return form(
        "preemption",
        args,
        all(ok for _, ok in verdicts),
        remarks,
        ours={"median_s": ours.median, "iqr_s": ours.iqr},
        peers={"fifo": {"median_s": fifo.median, "iqr_s": fifo.iqr, "speedup": fifo.median / ours.median}},
        bound={"name": "t_0 + 2q/B", "median_s": bound_s, "fraction": bound_s / ours.median},
        cells=list(cells),
        verdicts=[{"text": text, "ok": ok} for text, ok in verdicts],
    )


# --- in the worker processes ---


class TwoLayers(nn.Module):
    """A tiny layer, then a large one, and nearly nothing to compute.

    Backward makes the large gradient first, so it is on the wire when the tiny one, which the next forward needs first, is
    ready. The trace records how long each step's tiny gradient took to become the parameter's next value, and how much lay in
    the kernel's queues when it was ready.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((FIRST_PARAMETERS,), 0.5))
        self.last = nn.Parameter(torch.full((LAST_PARAMETERS,), 0.5))
        self._ready_s: float | None = None
        self.first.register_post_accumulate_grad_hook(lambda _: self._note_gradient())  # type: ignore[no-untyped-call]

    def _note_gradient(self) -> None:
        self._ready_s = time.monotonic()
        if trace.enabled():
            trace.event(QUEUED, str(queued_bytes()), self._ready_s)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = (self.first * inputs).mean()  # waits until the parameter is here
        if self._ready_s is not None:
            trace.event(LATENCY, "first", self._ready_s)
        if hidden.requires_grad:
            # The time of the first layer's backward pass.
            hidden.register_hook(lambda _: time.sleep(FIRST_BACKWARD_S))  # type: ignore[no-untyped-call]
        found: Tensor = self.last * hidden
        return found


def queued_bytes() -> int:
    """Return the bytes of this process's TCP connections that the kernel holds and nobody has acknowledged."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    (found,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4))
                    total += found
        except OSError:
            continue  # closed meanwhile, or it listens
    return total


def build() -> tuple[nn.Module, Tensor]:
    """Return the model and its inputs, as `--model module:function` wants them."""
    return TwoLayers(), torch.ones(1)
