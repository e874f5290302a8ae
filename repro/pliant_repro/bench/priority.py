"""`pliant bench priority`: sync modes beside stock DDP and beside the bound, over the rates of the links.

Every rate is a contest of its own between contenders that live through all of them: the links are set and measured, DDP's
bucket size is chosen, all warm up, and all take turns. The bound follows from what the links were measured to carry with all
nodes sending at once, not from what they were set to. `bench.priority_cells` turns measurements into the cells of the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro import contest, profiles
from pliant_repro.bench import priority_cells
from pliant_repro.bench.priority_cells import DDP, DDP_DEFAULT, PLAIN, LinkSetting
from pliant_repro.bench.ssh_hosts import BASE_PORT, Host, host_identities, hosts_of_ranks, ssh_starter
from pliant_repro.bench.train import PROGRAM, TrainingTask
from pliant_repro.contest import Answer, Contender, Placement, Progress, Timings, check_choice, check_least, quantile
from pliant_repro.lab import iperf
from pliant_repro.lab.hosts import Lab
from pliant_repro.lab.rates import format_rate, parse_rate
from pliant_repro.scaling_model import Layer

MODES = ("baseline", "slicing", "priority", "fifo", "auto", "ddp")
"""The first five are what `pliant.join(sync=)` takes."""
SLICED = ("slicing", "priority", "auto")
"""Modes in which the size of a slice is a choice."""
BUCKETS_MB = (25.0, 5.0, 1.0)
"""Bucket sizes of DDP for a model of full size, beside its default."""
JUMBO = 9000
"""Bytes of a packet in the lab, about as on the paper's network, so that headers matter as little as there."""
LEAD, PROBED = 3, 5
"""Steps of a window that are not timed; timed steps with each bucket size."""
SAMPLE_S, START_S, PATIENCE_S = 0.010, 180.0, 60.0
MEASURED = (
    "hooks at forwards and gradients of a run that sends nothing, all stretched by how much longer the program's "
    "thread runs, or waits for its core, in a run that sends"
)


# --- options ---


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorityOptions:
    """Options of `pliant bench priority`: one sweep of a model over rates and modes.

    Raises (when made):
        ConfigError: a value is not possible; the message says which are.
    """

    model: str = "resnet50"
    """A profile's name (paced), a network's name (real), or module:function (real)."""
    nodes: int = 4
    rates: tuple[int | None, ...] = (100_000_000, 200_000_000, 400_000_000)
    """Bits per second; None means no limit."""
    modes: tuple[str, ...] = ("baseline", "slicing", "priority", "ddp")
    compute: str = "paced"
    slices: tuple[int | None, ...] = (None,)
    """Parameters per slice; None means tuned while running."""
    batch: int = 0
    """Samples of a replica's step; 0 means the model's own choice."""
    size: int = 0
    """Pixels or words of a sample, if compute is real; 0 means the model's own choice."""
    repeat: int = 5
    iters: int = 30
    warmup: int = 10
    hosts: tuple[Host, ...] = ()
    """Machines to use over ssh; empty means namespaces on this one."""
    utilisation: bool = False
    """Also sample what the first host sends, every 10 ms."""

    def __post_init__(self) -> None:
        check_choice("--compute", self.compute, ("paced", "real"))
        if not self.modes:
            raise ConfigError(f"--modes is empty: use some of {', '.join(MODES)}")
        for mode in self.modes:
            check_choice("--modes", mode, MODES)
        if not 2 <= self.nodes <= 64:
            raise ConfigError(f"--nodes {self.nodes}: use 2 to 64; one node sends nothing")
        if not self.rates:
            raise ConfigError("--rate is empty: use rates such as 100,200,400mbit, or none")
        check_least(
            ("--repeat", self.repeat, 1), ("--iters", self.iters, 2), ("--warmup", self.warmup, 2),
            ("--batch", self.batch, 0), ("--size", self.size, 0),
        )  # fmt: skip
        self._check_model()

    def _check_model(self) -> None:
        if ":" in self.model:
            if self.compute == "paced":
                raise ConfigError(f"--model {self.model}: a function's model computes for real; add --compute real")
            module, _, function = self.model.partition(":")
            if not re.fullmatch(r"[A-Za-z_][\w.]*", module) or not function.isidentifier():
                raise ConfigError(f"--model {self.model!r}: use module:function, such as mypackage.models:build")
        elif self.compute == "paced":
            profiles.profile(self.model)
        else:
            profiles.check_trained(self.model)

    @property
    def samples(self) -> int:
        """Samples of a replica's step, for throughput; 0 means the network's own choice, which only the workers know."""
        return self.batch or (profiles.PUBLISHED_BATCH if self.compute == "paced" else 0)

    def profile(self) -> profiles.Profile:
        """Return the profile at its scale and batch; only if compute is paced."""
        return profiles.scaled(profiles.profile(self.model, batch=self.batch or profiles.PUBLISHED_BATCH))

    def layers(self) -> list[Layer] | None:
        """Return what the bound needs; None if it has to be measured."""
        return profiles.layers_of(self.profile()) if self.compute == "paced" else None

    def bucket_sizes_mb(self) -> list[float | None]:
        """Return the bucket sizes that DDP is tried with: its default, and sizes that cut a scaled model as the full one."""
        scale = profiles.SCALES.get(self.model, 1.0) if self.compute == "paced" else 1.0
        return [None, *(size / scale for size in BUCKETS_MB)]


def parse_rates(text: str) -> tuple[int | None, ...]:
    """Parse `100,200,400mbit` or `1gbit,none`: a number without a unit has that of the next word with one.

    Raises:
        ConfigError: the text has another form.
    """
    rates: list[int | None] = []
    unit = ""
    for word in reversed([word.strip() for word in text.split(",") if word.strip()]):  # a rate may come twice
        if re.fullmatch(r"[\d.]+", word):
            if not unit:
                raise ConfigError(f"--rate {text!r}: {word} has no unit; use 100,200,400mbit")
            word += unit
        elif found := re.fullmatch(r"[\d.]+([kmg]bit)", word.lower()):
            unit = found[1]
        rates.append(parse_rate(word))
    return tuple(reversed(rates))


def parse_slices(text: str) -> tuple[int | None, ...]:
    """Parse `auto`, or parameters per slice such as `1k,2k,50k,1m`.

    Raises:
        ConfigError: the text has another form.
    """
    slices: list[int | None] = []
    for word in contest.split_words(text.lower()):
        found = re.fullmatch(r"(\d+)([km]?)", word)
        if word == "auto":
            slices.append(None)
        elif found and int(found[1]) > 0:
            slices.append(int(found[1]) * {"": 1, "k": 1000, "m": 1_000_000}[found[2]])
        else:
            raise ConfigError(f"--slice {word!r}: use auto, or parameters per slice such as 1k,2k,50k")
    if not slices:
        raise ConfigError("--slice is empty: use auto, or parameters per slice such as 1k,2k,50k")
    return tuple(slices)


# --- contenders ---


@dataclass(frozen=True, slots=True)
class PriorityEntry:
    """One line of the contest."""

    label: str
    mode: str
    job: Contender
    slice_params: int | None = None
    """Parameters per slice; None means tuned, or no choice in this mode."""
    bucket_cap_mb: float | None = None
    """Bucket size of DDP; None means its default."""
    purpose: str = ""

    @property
    def options(self) -> dict[str, object]:
        """Options of a command. With a bucket size of its own DDP is tuned in full: a static graph, which sums in another
        order in the first step. With its default buckets it has the bits that all our modes must have."""
        if self.mode != DDP:
            return {}
        static = self.bucket_cap_mb is not None
        return {"bucket_cap_mb": self.bucket_cap_mb, "static_graph": static, "purpose": self.purpose}


def make_contender(
    options: PriorityOptions,
    folder: Path,
    lab: Lab | None,
    name: str,
    mode: str,
    number: int,
    slice_bytes: int | None = None,
    in_flight_bytes: int | None = None,
    trace: str = "",
) -> Contender:
    """Make the processes of one mode, one rank per node of the lab or per slot of the hosts; not started yet."""
    ours = mode not in (DDP, PLAIN)
    ranks = hosts_of_ranks(options.hosts)
    join = {"sync": mode, "slice_bytes": slice_bytes, "in_flight_bytes": in_flight_bytes}
    task = TrainingTask(
        side="pliant" if ours else mode,
        num_workers=options.nodes,
        model=options.model,
        compute=options.compute,
        batch=options.batch,
        size=options.size,
        lead=LEAD,
        rendezvous=f"tcp://{lab.addresses[0] if lab else ranks[0].host}:{BASE_PORT}",
        ddp={"broadcast_buffers": False, "gradient_as_bucket_view": True},
        join=join if ours else {},
        wrap={"sync_buffers": False},  # as DDP's broadcast_buffers=False
    ).to_json()
    if lab is not None:
        placement = Placement(num_workers=options.nodes, folder=folder, lab=lab)
        strategy, pinned = "AUTO" if ours else "", options.compute == "real"
        return placement.contender(name, PROGRAM, task, strategy=strategy, pinned=pinned, trace=trace)
    control = folder / f"{name}.sock"
    starters = [ssh_starter(host, rank, control) for rank, host in enumerate(ranks)]
    environs = host_identities(options.hosts, number) if ours else []
    setup = {"program": PROGRAM, "task": task, "environs": environs, "ifaces": [host.iface for host in ranks]}
    return Contender(name, options.nodes, starters, control, {**setup, "trace": trace})


def make_entries(
    options: PriorityOptions, folder: Path, lab: Lab | None, cleanup: contextlib.ExitStack
) -> list[PriorityEntry]:
    """Make a contender for each mode and slice size, and one that sends nothing if compute is real."""
    asked = [(mode, size) for mode in options.modes for size in (options.slices if mode in SLICED else (None,))]
    if options.compute == "real":
        asked.append((PLAIN, None))
    entries = []
    for number, (mode, size) in enumerate(asked):
        label = mode if size is None else f"{mode}/{size}"
        slice_bytes = None if size is None else 4 * size
        job = make_contender(options, folder, lab, label.replace("/", "-"), mode, number, slice_bytes)
        entries.append(PriorityEntry(label, mode, cleanup.enter_context(job), size))
    return entries


# --- one contest ---


@dataclass(slots=True)
class PriorityRecord(Timings):
    """Measurements of an entry at one rate; `cpu_s` has one value per repeat."""

    warmup_s: list[float] = field(default_factory=list)
    """Seconds of each step from the change to this rate on, before the first repeat."""
    tx_bytes: list[list[float]] = field(default_factory=list)
    """Bytes that each rank's host sent in a step, by the kernel's count; one list per repeat."""
    busy: list[float] = field(default_factory=list)
    """The share of the processors' time that was used, by any process; one per repeat."""
    compute_s: list[float] = field(default_factory=list)
    """How long the slowest rank's own thread ran, or was ready to, in a step; one per repeat."""
    waited_s: list[float] = field(default_factory=list)
    """How long rank 0 waited for the network in a step, where it knows; one per repeat."""
    losses: list[float] = field(default_factory=list)
    """The mean of all ranks' losses in each step at this rate, timed or not."""
    timed_losses: list[float] = field(default_factory=list)
    """The losses of the steps in `seconds`."""
    stats: dict[str, object] = field(default_factory=dict)
    """Rank 0's `sync_stats` at the end."""
    hashes: list[str] = field(default_factory=list)
    """Hashes of the parameters at the end, by rank."""
    hash_steps: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, bytes sent so far by the first host) during the timed steps of the last repeat, if asked for."""


def step_times_s(answers: Sequence[Answer], *, one_clock: bool) -> list[float]:
    """Return the seconds of each step, from the moments at which each rank began them and ended the last.

    If all ranks have one clock, a step lasts from the last rank's begin to the last rank's end, so that what one rank is
    late now and early next does not count twice. Else it is the slowest rank's own time.
    """
    marks = [contest.floats(answer["marks_s"]) for answer in answers]
    if one_clock:
        last = [max(moments) for moments in zip(*marks, strict=True)]
        return [after - before for before, after in itertools.pairwise(last)]
    own = [[after - before for before, after in itertools.pairwise(each)] for each in marks]
    return [max(times) for times in zip(*own, strict=True)]


def _mean_losses(answers: Sequence[Answer]) -> list[float]:
    ranks = [contest.floats(answer["losses"]) for answer in answers]
    return [sum(each) / len(each) for each in zip(*ranks, strict=True)]


@dataclass(frozen=True, slots=True)
class RateContest:
    """The contest at one rate."""

    options: PriorityOptions
    lab: Lab | None
    step_limit_s: float
    """Seconds that a step may take before it counts as hung."""
    progress: Progress

    def _run(self, entry: PriorityEntry, iterations: int, lead: int) -> list[Answer]:
        command = {"do": "run", "options": entry.options, "iterations": iterations, "lead": lead}
        return entry.job.ask(command, PATIENCE_S + self.step_limit_s * (iterations + LEAD))

    def hold(self, entries: Sequence[PriorityEntry]) -> dict[str, PriorityRecord]:
        """Warm all entries up, let them take turns, and ask for their parameters; return the records by label."""
        options = self.options
        one_clock = self.lab is not None

        by_label = {entry.label: entry for entry in entries}

        def take_turn(label: str, record: PriorityRecord, turn: int) -> None:
            entry = by_label[label]
            if turn == 0:
                answers = self._run(entry, options.warmup, lead=0)
                record.warmup_s = step_times_s(answers, one_clock=one_clock)
                record.losses = _mean_losses(answers)
            elif turn <= options.repeat:
                self.take_turn(entry, record, options.iters, sampled=self.lab if options.utilisation else None)
            else:
                answers = entry.job.ask({"do": "hash", "options": entry.options}, PATIENCE_S)
                record.hashes = [str(answer["hash"]) for answer in answers]
                record.hash_steps = cast(int, answers[0]["steps"])

        records = {label: PriorityRecord() for label in by_label}
        contest.interleave(records, options.repeat + 2, take_turn, self.progress)
        return records

    def take_turn(
        self, entry: PriorityEntry, record: PriorityRecord, iterations: int, sampled: Lab | None = None
    ) -> None:
        """Measure one window of one entry."""

        def sent() -> list[int]:
            return [cast(int, answer["tx_bytes"]) for answer in entry.job.ask({"do": "count"}, PATIENCE_S)]

        before, busy = sent(), contest.processor_times()
        with sampling(sampled) as samples:
            answers = self._run(entry, iterations, LEAD)
        record.busy.append(contest.busy_share(busy, contest.processor_times()))
        steps = iterations + LEAD
        record.tx_bytes.append([(now - then) / steps for then, now in zip(before, sent(), strict=True)])
        record.rounds.append(step_times_s(answers, one_clock=self.lab is not None))
        record.cpu_s.append(sum(contest.floats(answer["cpu_s"])[0] for answer in answers))
        record.compute_s.append(max(cast(float, answer["compute_s"]) for answer in answers))
        losses = _mean_losses(answers)
        record.losses += losses
        record.timed_losses += losses[-iterations:]
        first, last = (cast("dict[str, object]", answers[0][key]) for key in ("before", "after"))
        record.stats = last
        if "waited_s" in last:
            record.waited_s.append((cast(float, last["waited_s"]) - cast(float, first["waited_s"])) / steps)
        if samples:
            marks = contest.floats(answers[0]["marks_s"])
            record.samples = [(at_s - marks[0], sent) for at_s, sent in samples if marks[0] <= at_s <= marks[-1]]

    def choose_buckets(
        self, entries: Sequence[PriorityEntry], rate: int | None, remarks: list[str]
    ) -> tuple[list[PriorityEntry], dict[str, float]]:
        """Return the entries with DDP's default and, if another is faster, its best bucket size; and the step by size."""
        ddp = next((entry for entry in entries if entry.mode == DDP), None)
        if ddp is None:
            return list(entries), {}
        probed: dict[float | None, float] = {}
        for cap in self.options.bucket_sizes_mb():
            self.progress(f"ddp, buckets of {cap or 'default'} MiB", 0.0)
            trial = dataclasses.replace(ddp, bucket_cap_mb=cap, purpose="probe")
            record = PriorityRecord()
            try:
                self._run(trial, 2, lead=2)  # the first steps of a new model rebuild its buckets
                self.take_turn(trial, record, min(self.options.iters, PROBED))
            except LaunchError:
                break
            probed[cap] = quantile(record.seconds, 0.5)
        best = min(probed, key=lambda cap: probed[cap]) if probed else None
        shown = [entry for entry in entries if entry.mode != DDP]
        shown.append(dataclasses.replace(ddp, label=DDP_DEFAULT))
        if best is not None:
            shown.append(dataclasses.replace(ddp, bucket_cap_mb=best))
        named = {f"{cap:g}" if cap is not None else "default": step_s for cap, step_s in probed.items()}
        said = ", ".join(f"{name} {step_s * 1e3:.0f} ms" for name, step_s in named.items())
        remarks.append(f"{format_rate(rate)}: ddp by bucket size in MiB: {said}; best: {best or 'default'}")
        return shown, named


@contextlib.contextmanager
def sampling(lab: Lab | None) -> Iterator[list[tuple[float, int]]]:
    """Sample what the lab's first host has sent so far, every 10 ms, while the block runs; nothing without a lab."""
    samples: list[tuple[float, int]] = []
    if lab is None:
        yield samples
        return
    lab.tx_bytes(0)  # opens the counter
    over = threading.Event()

    def sample() -> None:
        due_s = time.monotonic()
        while not over.wait(max(0.0, due_s - time.monotonic())):
            samples.append((time.monotonic(), lab.tx_bytes(0)))
            due_s += SAMPLE_S

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


# --- the sweep ---


def run(options: PriorityOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Hold a contest at each rate, and return the result. Everything started is gone afterwards.

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
        entries = make_entries(options, folder, lab, cleanup)
        contest.start_all((entry.job for entry in entries), START_S, progress)
        layers = _find_layers(options, entries)
        for number, rate in enumerate(options.rates):

            def tell(what: str, fraction: float, number: int = number, rate: int | None = rate) -> None:
                progress(f"{format_rate(rate)}: {what}", (number + fraction) / len(options.rates))

            setting, shown, records, probed = _measure_rate(options, lab, rate, entries, layers, remarks, tell)
            cells = priority_cells.make_cells(setting, shown, records, probed)
            found += [{**one, "stage": number} for one in cells]
    return priority_cells.make_result(args, found, remarks)


def _find_layers(options: PriorityOptions, entries: Sequence[PriorityEntry]) -> tuple[Layer, ...]:
    """Return the model's layers: known if compute is paced, else as timed by the contender that sends nothing."""
    known = options.layers()
    if known is not None:
        return tuple(known)
    plain = next(entry for entry in entries if entry.mode == PLAIN)
    try:
        plain.job.ask({"do": "run", "iterations": 2, "lead": 1}, 300.0)
        rows = cast("list[list[float]]", plain.job.ask({"do": "layers"}, 300.0)[0]["layers"])
    except LaunchError as error:
        raise ConfigError(f"--model {options.model}: {error}") from None
    return tuple(Layer(forward_s, backward_s, int(size)) for forward_s, backward_s, size in rows)


def _measure_rate(
    options: PriorityOptions,
    lab: Lab | None,
    rate: int | None,
    entries: Sequence[PriorityEntry],
    layers: tuple[Layer, ...],
    remarks: list[str],
    progress: Progress,
) -> tuple[LinkSetting, list[PriorityEntry], dict[str, PriorityRecord], dict[str, float]]:
    if lab is not None:
        for host in range(lab.num_hosts):
            lab.set_rate(host, format_rate(rate))
    capacities = [_capacity(lab, rate, remarks, progress)]
    compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    num_bytes = sum(layer.num_bytes for layer in layers)
    # Several times what a step takes if nothing overlaps.
    limit_s = 4 * (compute_s + 2 * num_bytes * 8 / (rate or 10**8)) + 1
    contest_here = RateContest(options, lab, limit_s, progress)
    shown, probed = contest_here.choose_buckets(entries, rate, remarks)
    records = contest_here.hold(shown)
    if options.repeat > 1:
        capacities.append(_capacity(lab, rate, remarks, progress))
    known = [bits for bits in capacities if bits is not None]
    answered = (entry.job.ready_answers for entry in entries if entry.job.ready_answers)
    setting = LinkSetting(
        model=options.model,
        compute=options.compute,
        nodes=options.nodes,
        rate_bits_per_s=rate,
        capacity_bits_per_s=sum(known) / len(known) if known else None,
        capacity_from="iperf3, all nodes at once" if lab is not None else "as given",
        layers=stretch(layers, records) if options.compute == "real" else layers,
        layers_from="the profile" if options.compute == "paced" else MEASURED,
        num_bytes=next((cast(int, answers[0]["num_bytes"]) for answers in answered), 0),
        samples=options.samples,
    )
    return setting, shown, records, probed


def _capacity(lab: Lab | None, rate: int | None, remarks: list[str], progress: Progress) -> float | None:
    """Return what a link carries with all nodes sending; the nominal payload rate if that cannot be measured."""
    measured = None
    if lab is None:
        remarks[:] = dict.fromkeys([*remarks, "hosts are not shaped: --rate is taken as what they have"])
    else:
        progress("iperf3", 0.0)
        measured = iperf.mean_ring_rate(lab, remarks)
    return measured if measured is not None else rate * iperf.MTU_SHARE if rate else None


def stretch(layers: tuple[Layer, ...], records: Mapping[str, PriorityRecord]) -> tuple[Layer, ...]:
    """Return the layers with the times that they take while the same core also sends.

    All times grow by as much as the program's thread needs longer than where nothing is sent: running, or kept from it.
    """
    sends = [label for label in ("priority", "auto", "slicing", "fifo", DDP, DDP_DEFAULT) if label in records]
    alone_s, along_s = (
        min((quantile(records[label].compute_s, 0.5) for label in labels if records[label].compute_s), default=0.0)
        for labels in ([PLAIN] if PLAIN in records else [], sends[:1])
    )
    factor = max(1.0, along_s / alone_s) if alone_s else 1.0
    return tuple(Layer(each.forward_s * factor, each.backward_s * factor, each.num_bytes) for each in layers)
