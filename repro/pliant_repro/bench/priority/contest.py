"""The contest of `pliant bench priority`: all sides live at once and take turns, so that what disturbs one disturbs all.

A side is a job of one worker per node (`bench.priority.worker`). Whoever waits for its turn is blocked, not spinning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from pliant.errors import LaunchError
from pliant_repro.bench import processors
from pliant_repro.bench.contest import Answer, Job, ToldJob
from pliant_repro.bench.priority.options import SLICED, PriorityOptions
from pliant_repro.bench.priority.stage import Stage
from pliant_repro.bench.priority.worker import LEAD
from pliant_repro.bench.stats import quantile
from pliant_repro.lab.hosts import Lab

Progress = Callable[[str, float], None]
SAMPLE_S = 0.010
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the contest."""

    label: str
    mode: str
    job: ToldJob
    slice_params: int | None = None
    """None: tuned, or no choice in this mode."""
    bucket_cap_mb: float | None = None
    """Of DDP; None: its default."""
    purpose: str = ""

    @property
    def options(self) -> dict[str, object]:
        return {"bucket_cap_mb": self.bucket_cap_mb, "purpose": self.purpose} if self.mode == "ddp" else {}


@dataclass(slots=True)
class Record:
    """What an entry did at one rate."""

    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of each step, repeat by repeat."""
    warmup_s: list[float] = field(default_factory=list)
    """Seconds of each step from the change to this rate on, before the first repeat."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of a step, all ranks together; one per repeat."""
    tx_bytes: list[list[float]] = field(default_factory=list)
    """What each rank's host sent in a step, by the kernel's count; one list per repeat."""
    busy: list[float] = field(default_factory=list)
    """The share of the processors' time that was used, by whomever; one per repeat."""
    compute_s: list[float] = field(default_factory=list)
    """How long the program's own thread ran, or would have, in a step; the slowest rank's; one per repeat."""
    waited_s: list[float] = field(default_factory=list)
    """How long rank 0 waited for the network in a step, where it knows; one per repeat."""
    losses: list[float] = field(default_factory=list)
    """The mean of all ranks' losses in each step at this rate, timed or not."""
    timed_losses: list[float] = field(default_factory=list)
    """Of the steps in `seconds`."""
    stats: dict[str, object] = field(default_factory=dict)
    """Rank 0's `sync_stats` at the end."""
    hashes: list[str] = field(default_factory=list)
    """Of the parameters at the end, by rank."""
    hash_steps: int = 0
    series: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, bytes sent so far by the first host) during the timed steps of the last repeat, where asked for."""
    failure: str = ""

    @property
    def seconds(self) -> list[float]:
        return [second for each in self.rounds for second in each]

    @property
    def median_s(self) -> float | None:
        return quantile(self.seconds, 0.5) if self.rounds and not self.failure else None


def step_times_s(marks: Sequence[Sequence[float]], *, one_clock: bool) -> list[float]:
    """The seconds of each step, from the moments at which each rank began them and ended the last.

    Where all ranks have one clock, a step lasts from the last rank's begin to the last rank's end, so that what one
    rank is late now and early next does not count twice. Else it is the slowest rank's own time.
    """
    if one_clock:
        last = [max(moments) for moments in zip(*marks, strict=True)]
        return [after - before for before, after in itertools.pairwise(last)]
    own = [[after - before for before, after in itertools.pairwise(each)] for each in marks]
    return [max(times) for times in zip(*own, strict=True)]


def enter(stage: Stage, cleanup: contextlib.ExitStack, progress: Progress) -> list[Entry]:
    """Start everyone who takes part, all at once, and wait for them."""
    options = stage.options
    entries: list[Entry] = []
    for mode in options.modes:
        slices = options.slices if mode in SLICED else (None,)
        for size in slices:
            label = mode if size is None else f"{mode}/{size}"
            side = stage.job(label.replace("/", "-"), mode, len(entries), None if size is None else 4 * size)
            entries.append(Entry(label, mode, cleanup.enter_context(side), size))
    if options.compute == "real":
        entries.append(Entry("plain", "plain", cleanup.enter_context(stage.job("plain", "plain", len(entries)))))
    for entry in entries:
        entry.job.start()
    for number, entry in enumerate(entries):
        progress(f"starting {entry.label}", number / len(entries))
        with contextlib.suppress(LaunchError):  # the job keeps its failure, and gives it at its first turn
            entry.job.ready(options.start_timeout_s)
    return entries


def hold(
    entries: Sequence[Entry],
    options: PriorityOptions,
    lab: Lab | None,
    patience_s: float,
    progress: Progress,
) -> dict[str, Record]:
    """Warm everyone up, let them take turns, and ask for their parameters; what each did, by label.

    Never raises for what a side does wrong: it is out then, and the others go on.
    """
    records = {entry.label: Record() for entry in entries}
    turns = options.repeat + 2
    for turn in range(turns):
        for position, entry in enumerate(entries):
            record = records[entry.label]
            if record.failure:
                continue
            progress(entry.label, (turn * len(entries) + position) / (turns * len(entries)))
            try:
                if turn == 0:
                    run = {"do": "run", "options": entry.options, "iterations": options.warmup, "lead": 0}
                    answers = entry.job.ask(run, _timeout_s(patience_s, options.warmup))
                    marks = [cast("list[float]", answer["marks_s"]) for answer in answers]
                    record.warmup_s = step_times_s(marks, one_clock=lab is not None)
                    record.losses = _losses(answers)
                elif turn < turns - 1:
                    sampled = lab if options.utilisation else None
                    take_turn(entry, record, options.iters, patience_s, sampled, one_clock=lab is not None)
                else:
                    answers = entry.job.ask({"do": "hash", "options": entry.options}, _PATIENCE_S)
                    record.hashes = [str(answer["hash"]) for answer in answers]
                    record.hash_steps = cast(int, answers[0]["steps"])
            except LaunchError as error:
                record.failure = str(error)
    return records


def _timeout_s(patience_s: float, iterations: int) -> float:
    return _PATIENCE_S + patience_s * (iterations + LEAD)


def take_turn(
    entry: Entry, record: Record, iterations: int, patience_s: float, sampled: Lab | None, *, one_clock: bool
) -> None:
    """One window of one entry, into its record."""
    sent = _counted(entry.job)
    busy = processors.times()
    run = {"do": "run", "options": entry.options, "iterations": iterations}
    with sampling(sampled) as samples:
        answers = entry.job.ask(run, _timeout_s(patience_s, iterations))
    record.busy.append(processors.busy_share(busy, processors.times()))
    steps = iterations + LEAD
    record.tx_bytes.append([(now - then) / steps for then, now in zip(sent, _counted(entry.job), strict=True)])
    marks = [cast("list[float]", answer["marks_s"]) for answer in answers]
    record.rounds.append(step_times_s(marks, one_clock=one_clock))
    record.cpu_s.append(sum(cast(float, answer["cpu_s"]) for answer in answers))
    record.compute_s.append(max(cast(float, answer["compute_s"]) for answer in answers))
    losses = _losses(answers)
    record.losses += losses
    record.timed_losses += losses[-iterations:]
    _note_stats(record, answers[0], steps)
    if samples:
        record.series = [(at_s - marks[0][0], sent) for at_s, sent in samples if marks[0][0] <= at_s <= marks[0][-1]]


def _losses(answers: Sequence[Answer]) -> list[float]:
    ranks = [cast("list[float]", answer["losses"]) for answer in answers]
    return [sum(each) / len(each) for each in zip(*ranks, strict=True)]


def _note_stats(record: Record, answer: Answer, steps: int) -> None:
    before, after = cast("dict[str, object]", answer["before"]), cast("dict[str, object]", answer["after"])
    record.stats = after
    if "waited_s" in after:
        record.waited_s.append((cast(float, after["waited_s"]) - cast(float, before["waited_s"])) / steps)


def _counted(job: Job) -> list[int]:
    return [cast(int, answer["tx_bytes"]) for answer in job.ask({"do": "count"}, _PATIENCE_S)]


@contextlib.contextmanager
def sampling(lab: Lab | None) -> Iterator[list[tuple[float, int]]]:
    """What the lab's first host has sent so far, every 10 ms, while the block runs; nothing without a lab."""
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


def probe_ddp(
    entry: Entry,
    caps: Sequence[float | None],
    iterations: int,
    patience_s: float,
    progress: Progress,
    *,
    one_clock: bool,
) -> dict[float | None, float]:
    """A few steps of DDP with each bucket size; the median step by size, without those that failed."""
    found: dict[float | None, float] = {}
    for cap in caps:
        progress(f"ddp, buckets of {cap or 'default'} MiB", 0.0)
        trial = dataclasses.replace(entry, bucket_cap_mb=cap, purpose="probe")
        record = Record()
        try:
            # The first steps of a new model rebuild its buckets.
            run = {"do": "run", "options": trial.options, "iterations": 2, "lead": 2}
            trial.job.ask(run, _timeout_s(patience_s, 4))
            take_turn(trial, record, iterations, patience_s, None, one_clock=one_clock)
        except LaunchError:
            break
        found[cap] = quantile(record.seconds, 0.5)
    return found
