"""What is wrong in a soak: steps lost, wrong bits, hangs, leaks, strangers let in. Pure: what was seen in, findings out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pliant_repro.bench.elastic import StepBegun
from pliant_repro.bench.soak_plan import Fault

HANG_S = 20.0
"""So long may nobody begin a step, beside what the faults themselves take."""
OLD_S = 100.0
"""Memory and descriptors are judged of processes that were seen for at least this long."""
SETTLE_S = 40.0
"""A process needs so long after its start to have loaded what it needs."""
MORE_FDS = 20
"""A process may have so many more descriptors in its last quarter: connections to workers
that come and go, and memory shared with them. A leak with every change would soon be more."""
MOST_SHOWN = 20
"""Samples of a process that are in the result."""
MORE_BYTES, MORE_SHARE = 24 << 20, 0.1
"""A process may have grown by so much, or by this share of its memory, whichever is more."""
SLOW_KINDS = ("stop", "cut", "slow", "server", "runner")
"""Faults during which no step may be done."""

Digests = Sequence[tuple[str, str]]
"""Digests of stock DDP after every step: of parameters and optimizer, and of the buffers."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """A process at one moment."""

    role: str
    """What it is, such as `runner on h0`."""
    pid: int
    at_s: float
    num_fds: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """lost, wrong, hang, leak or other."""
    text: str


@dataclass(slots=True)
class StepTimes:
    """When each step was begun: by anybody for the first time, and for the last time by somebody who finished it.

    A worker that was frozen and has been given up may take a turn of an old step when it wakes up. It never finishes it.
    """

    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    before: dict[int, StepBegun] = field(default_factory=dict)
    """What each process has begun last."""

    def add(self, begun: StepBegun) -> None:
        """Add a report; those of one process come in order."""
        self.first_s[begun.step] = min(begun.at_s, self.first_s.get(begun.step, begun.at_s))
        before, self.before[begun.pid] = self.before.get(begun.pid), begun
        if before is not None and before.step + 1 == begun.step:
            self.last_s[before.step] = max(before.at_s, self.last_s.get(before.step, before.at_s))


def lost_steps(times: StepTimes) -> list[Finding]:
    """Return the steps that somebody has done again after another one had begun the next, so that they counted."""
    return [
        Finding("lost", f"step {step} was done again {last_s - next_s:.3f} s after step {step + 1} had begun")
        for step, last_s in sorted(times.last_s.items())
        if (next_s := times.first_s.get(step + 1)) is not None and last_s > next_s
    ]


def wrong_bits(reports: Iterable[StepBegun], expected: Digests) -> tuple[int, list[Finding]]:
    """Return how many digests were compared, and those that differ; buffers are compared on rank 0, as DDP has them."""
    compared, found = 0, []
    for each in reports:
        if not each.digest or each.step > len(expected):
            continue
        compared += 1
        state, buffers = expected[each.step - 1]
        if each.digest != state or (each.rank == 0 and each.buffers != buffers):
            what = "state" if each.digest != state else "buffers"
            found.append(
                Finding("wrong", f"after step {each.step} {each.worker} (rank {each.rank}) has another {what} than DDP")
            )
    return compared, found


def hangs(times: StepTimes, faults: Sequence[tuple[float, Fault]], end_s: float) -> list[Finding]:
    """Return the times, until `end_s`, in which nobody began a new step for longer than the faults explain."""
    found = []
    marks = [*sorted(times.first_s.values()), end_s]
    for before_s, next_s in itertools.pairwise(marks):
        silent_s = next_s - before_s
        if silent_s <= HANG_S:
            continue
        # Only faults that were under way in that time explain it.
        explained_s = sum(
            fault.lasts_s
            for at_s, fault in faults
            if fault.kind in SLOW_KINDS and at_s < next_s and at_s + fault.lasts_s > before_s
        )
        if silent_s > HANG_S + explained_s:
            found.append(
                Finding(
                    "hang", f"no new step for {silent_s:.1f} s from {before_s:.1f} on ({explained_s:g} s explained)"
                )
            )
    return found


def longest_silence_s(times: StepTimes) -> float:
    """Return the longest time in which nobody began a new step."""
    marks = sorted(times.first_s.values())
    return max((after - before for before, after in itertools.pairwise(marks)), default=0.0)


def memory(samples: Sequence[ProcessSample]) -> list[dict[str, object]]:
    """Return, of each process that lived long, at most `MOST_SHOWN` of its samples: seconds, descriptors and bytes."""
    found: list[dict[str, object]] = []
    for (role, pid), settled in _settled(samples):
        begun_s, every = settled[0].at_s, -(-len(settled) // MOST_SHOWN)
        shown = [[round(each.at_s - begun_s, 1), each.num_fds, each.rss_bytes] for each in settled[::every]]
        found.append({"process": role, "pid": pid, "samples": shown})
    return found


def _settled(samples: Sequence[ProcessSample]) -> list[tuple[tuple[str, int], list[ProcessSample]]]:
    """Return the samples of each process that was seen for long, without those of its beginning."""
    by_process: dict[tuple[str, int], list[ProcessSample]] = {}
    for sample in samples:
        by_process.setdefault((sample.role, sample.pid), []).append(sample)
    cut = {
        key: [each for each in listed if each.at_s >= listed[0].at_s + SETTLE_S] for key, listed in by_process.items()
    }
    return [(key, listed) for key, listed in cut.items() if listed and listed[-1].at_s - listed[0].at_s >= OLD_S]


def growth(samples: Sequence[ProcessSample]) -> list[Finding]:
    """Return the processes whose descriptors or memory have grown, of those that lived long."""
    found = []
    for (role, pid), settled in _settled(samples):
        quarter = max(1, len(settled) // 4)
        first, last = settled[:quarter], settled[-quarter:]
        seen = f"{role} (pid {pid}) in {settled[-1].at_s - settled[0].at_s:.0f} s"
        fds = [median(each.num_fds for each in part) for part in (first, last)]
        if fds[1] - fds[0] > MORE_FDS:
            found.append(Finding("leak", f"{seen}: from {fds[0]:g} to {fds[1]:g} descriptors"))
        rss = [median(each.rss_bytes for each in part) for part in (first, last)]
        if rss[1] - rss[0] > max(MORE_BYTES, MORE_SHARE * rss[0]):
            found.append(Finding("leak", f"{seen}: from {rss[0] / 1e6:.1f} to {rss[1] / 1e6:.1f} MB"))
    return found


def count(findings: Iterable[Finding]) -> Mapping[str, int]:
    """Return how many findings there are of each kind."""
    counts = dict.fromkeys(("lost", "wrong", "hang", "leak", "other"), 0)
    for each in findings:
        counts[each.kind] += 1
    return counts


def last_line(num_faults: int, num_steps: int, counts: Mapping[str, int]) -> str:
    """Return the one line that sums a soak up."""
    others = f", {counts['other']} other failures" if counts["other"] else ""
    return (
        f"{num_faults} faults, {num_steps} steps: {counts['lost']} lost steps, {counts['wrong']} wrong bits, "
        f"{counts['hang']} hangs, {counts['leak']} leaks{others}"
    )
