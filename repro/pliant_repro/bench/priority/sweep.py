"""`pliant bench priority`: ways to synchronise, beside stock DDP and beside the bound, over the rates of the links.

Every rate is a contest of its own between sides that live through all of them: the links are set and measured, DDP's
bucket size is chosen, everyone warms up, and all take turns. The bound follows from what the links were measured
to carry with all nodes sending at once, not from what they were set to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError, LabError, LaunchError
from pliant.machine import Json, machine
from pliant_repro.bench import bounds as links
from pliant_repro.bench.priority import cells, contest
from pliant_repro.bench.priority import trace as traces
from pliant_repro.bench.priority.cells import DDP, DDP_DEFAULT, PLAIN, Ring
from pliant_repro.bench.priority.contest import Entry, Progress, Record
from pliant_repro.bench.priority.options import PriorityOptions
from pliant_repro.bench.priority.stage import Stage
from pliant_repro.bench.stats import quantile
from pliant_repro.lab.hosts import Lab
from pliant_repro.lab.rates import format_rate
from pliant_repro.profiles import SCALES
from pliant_repro.scaling_model import Layer

BUCKETS_MB = (25.0, 5.0, 1.0)
"""DDP's bucket sizes for a model of full size, beside its default."""

JUMBO = 9000
"""Bytes of a packet in the lab, about as on the paper's network, so that headers matter as little as there."""

PROFILED = "the profile"
MEASURED = (
    "hooks at forwards and gradients of a run that sends nothing, all stretched by how much longer the program's "
    "thread runs, or waits for its core, in a run that sends"
)
PROBED = 5
"""Timed steps with each of them."""


def caps_of(options: PriorityOptions) -> list[float | None]:
    """The bucket sizes that DDP is tried with: its default, and sizes that cut a scaled model as the full one."""
    scale = SCALES.get(options.model, 1.0) if options.compute == "paced" else 1.0
    return [None, *(size / scale for size in BUCKETS_MB)]


def run(options: PriorityOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Hold the contests; the result in the one form of all benches. Everything started is gone afterwards.

    Raises:
        LabError: no lab can be made here.
    """
    remarks: list[str] = []
    found: list[Json] = []
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        lab = None
        if not options.hosts:
            first = next((rate for rate in options.rates if rate is not None), None)
            lab = cleanup.enter_context(Lab(num_hosts=options.nodes, rate=format_rate(first), mtu=JUMBO).up())
        stage = Stage(options, folder, lab)
        with contextlib.ExitStack() as sides:  # ended before the lab and the folder, so that traces are complete
            entries = contest.enter(stage, sides, progress)
            layers = _layers(options, entries)
            for number, rate in enumerate(options.rates):

                def tell(what: str, fraction: float, number: int = number, rate: int | None = rate) -> None:
                    progress(f"{format_rate(rate)}: {what}", (number + fraction) / len(options.rates))

                there = _at_rate(options, lab, rate, entries, layers, remarks, tell)
                found += [{**one, "stage": number} for one in there]
        if options.trace is not None:
            _write_trace(options.trace, folder, remarks)
    return result_of(options, args, found, remarks)


def _layers(options: PriorityOptions, entries: Sequence[Entry]) -> tuple[Layer, ...]:
    """The model's layers: known where compute is paced, else as timed by the side that sends nothing."""
    known = options.layers()
    if known is not None:
        return tuple(known)
    plain = next(entry for entry in entries if entry.mode == PLAIN)
    try:
        plain.job.ask({"do": "run", "iterations": 2, "lead": 1}, 300.0)
        answers = plain.job.ask({"do": "layers"}, 300.0)
    except LaunchError as error:
        raise ConfigError(f"--model {options.model}: {error}") from None
    return cells.measured_layers(cast("list[list[float]]", answers[0]["layers"]))


def _at_rate(
    options: PriorityOptions,
    lab: Lab | None,
    rate: int | None,
    entries: Sequence[Entry],
    layers: tuple[Layer, ...],
    remarks: list[str],
    progress: Progress,
) -> list[Json]:
    if lab is not None:
        for host in range(lab.num_hosts):
            lab.set_rate(host, format_rate(rate))
    measured = [_capacity(lab, rate, remarks, progress)]
    patience_s = _patience_s(options, layers, rate)
    shown, probed = _choose_buckets(options, entries, patience_s, lab, remarks, rate, progress)
    records = contest.hold(shown, options, lab, patience_s, progress)
    if options.repeat > 1:
        measured.append(_capacity(lab, rate, remarks, progress))
    rates = [bits for bits in measured if bits is not None]
    ring = Ring(
        model=options.model,
        compute=options.compute,
        nodes=options.nodes,
        rate_bits_per_s=rate,
        capacity_bits_per_s=sum(rates) / len(rates) if rates else None,
        capacity_from="iperf3, all nodes at once" if lab is not None else "as given",
        layers=stretched(layers, records) if options.compute == "real" else layers,
        layers_from=PROFILED if options.compute == "paced" else MEASURED,
        num_bytes=next((cast(int, entry.job.told[0]["num_bytes"]) for entry in entries if entry.job.told), 0),
        samples=options.samples,
    )
    return cells_of(ring, shown, records, probed)


def cells_of(
    ring: Ring, shown: Sequence[Entry], records: Mapping[str, Record], probed: Mapping[str, float]
) -> list[Json]:
    """The cells of one rate. DDP has two: with its best buckets, and with its default ones."""
    peers = {name: records[name] for name in (DDP, DDP_DEFAULT) if name in records}
    if DDP_DEFAULT in peers and DDP not in peers:
        peers = {DDP: peers[DDP_DEFAULT], **peers}
    found = []
    for entry in shown:
        against = peers if entry.mode not in (DDP, PLAIN) else {}
        made = cells.cell(ring, entry, records[entry.label], against, entry.label if entry.mode == DDP else "")
        found.append({**made, "capacity_from": ring.capacity_from, "layers_from": ring.layers_from})
        if entry.mode == DDP:
            found[-1]["probe_s_by_bucket"] = dict(probed)
        if entry.label == DDP_DEFAULT and DDP not in records:
            found.append({**found[-1], "mode": DDP})
    return found


def _capacity(lab: Lab | None, rate: int | None, remarks: list[str], progress: Progress) -> float | None:
    """What a link carries with all nodes sending; the nominal payload rate where that cannot be measured."""
    nominal = rate * links.MTU_SHARE if rate else None
    why_not = links.why_no_iperf() if lab is not None else "hosts are not shaped: --rate is taken as what they have"
    if lab is None or why_not:
        remarks[:] = dict.fromkeys([*remarks, why_not])
        return nominal
    progress("iperf3", 0.0)
    try:
        return links.measure_ring(lab).bits_per_s
    except LabError as error:
        remarks.append(str(error))
        return nominal


def _patience_s(options: PriorityOptions, layers: Sequence[Layer], rate: int | None) -> float:
    """Seconds that a step may take before it counts as hung: several times what it would one after the other."""
    compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    num_bytes = sum(layer.num_bytes for layer in layers)
    return 4 * (compute_s + 2 * num_bytes * 8 / (rate or 10**8)) + 1


def _choose_buckets(
    options: PriorityOptions,
    entries: Sequence[Entry],
    patience_s: float,
    lab: Lab | None,
    remarks: list[str],
    rate: int | None,
    progress: Progress,
) -> tuple[list[Entry], dict[str, float]]:
    """The entries with DDP's default and, where another is faster, its best bucket size."""
    ddp = next((entry for entry in entries if entry.mode == DDP), None)
    if ddp is None:
        return list(entries), {}
    caps, few = caps_of(options), min(options.iters, PROBED)
    probed = contest.probe_ddp(ddp, caps, few, patience_s, progress, one_clock=lab is not None)
    best = min(probed, key=lambda cap: probed[cap]) if probed else None
    shown = [entry for entry in entries if entry.mode != DDP]
    shown.append(dataclasses.replace(ddp, label=DDP_DEFAULT))
    if best is not None:
        shown.append(dataclasses.replace(ddp, bucket_cap_mb=best))
    named = {f"{cap:g}" if cap is not None else "default": step_s for cap, step_s in probed.items()}
    said = ", ".join(f"{name} {step_s * 1e3:.0f} ms" for name, step_s in named.items())
    remarks.append(f"{format_rate(rate)}: ddp by bucket size in MiB: {said}; best: {best or 'default'}")
    return shown, named


def stretched(layers: tuple[Layer, ...], records: Mapping[str, Record]) -> tuple[Layer, ...]:
    """The layers with the times that they take while the same core also sends.

    By as much as the program's thread needs longer than where nothing is sent: running, or kept from it by others.
    """
    sends = [label for label in ("priority", "auto", "slicing", "fifo", DDP, DDP_DEFAULT) if label in records]
    alone_s, along_s = (
        min((quantile(records[label].compute_s, 0.5) for label in labels if records[label].compute_s), default=0.0)
        for labels in ([PLAIN] if PLAIN in records else [], sends[:1])
    )
    factor = max(1.0, along_s / alone_s) if alone_s else 1.0
    return tuple(Layer(each.forward_s * factor, each.backward_s * factor, each.num_bytes) for each in layers)


def _write_trace(path: Path, folder: Path, remarks: list[str]) -> None:
    found = traces.collect(folder)
    path.write_text(json.dumps(traces.merged(found)))
    sides = ", ".join(f"{side} ({len(ranks)} ranks)" for side, ranks in found.items()) or "nobody"
    remarks.append(f"traced: {sides}; tracing costs a little, so take times from a run without it")


def result_of(
    options: PriorityOptions, args: Mapping[str, object], found: Sequence[Json], remarks: Sequence[str]
) -> Json:
    """All cells in the one form; on top, ours at the rate where it is furthest from the bound."""
    ours = [one for one in found if one["mode"] == "priority"] or [one for one in found if one["mode"] != DDP]
    said = [*remarks, *cells.remarks_on(found)]
    fractions = {id(one): one["fraction_of_bound"] for one in ours}
    head = min(ours or found, key=lambda one: cast(float, fractions.get(id(one)) or 0.0))
    differ = any("parameters differ" in remark for remark in said)
    return {
        "bench": "priority",
        "args": dict(args),
        "ours": head["ours"],
        "peers": head["peers"],
        "bound": head["bound"],
        "cells": list(found),
        "machine": machine(),
        "ok": all(bool(one["ok"]) for one in found) and not differ,
        "remarks": said,
    }
