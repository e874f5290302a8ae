"""`pliant bench resize`: how long a running job stands still when workers leave and when workers come.

The pause of a change is that of the survivor who waited longest: from the end of its last step in the old view to its
being ready for the first one in the new view (`ViewChange.pause_s` of the job). Beside it: the same until
the next batch was in hand, how long the first step then took, and how long it took from the request until
newcomers had committed a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.errors import LaunchError
from pliant.machine import Json, machine
from pliant_repro.bench.elastic import ElasticJob, ElasticOptions, brief, step_times, summary, within
from pliant_repro.bench.elastic_worker import Beginning

Progress = Callable[[str, float], None]

SHRINK_S, GROW_S, REQUEST_S = 0.020, 0.100, 1.5
"""What is to be reached, in the median."""
SETTLED = 3
"""Steps between changes."""


@dataclass(slots=True)
class Changes:
    """What was seen of changes in one direction; one value for each of them."""

    pause_s: list[float] = field(default_factory=list)
    to_next_batch_s: list[float] = field(default_factory=list)
    first_step_s: list[float] = field(default_factory=list)
    request_to_switch_s: list[float] = field(default_factory=list)

    def add(self, told: Sequence[Beginning], size: int, asked_s: float) -> None:
        """Note the change to `size` workers in what was told around it."""
        first = [each for each in told if each.change is not None and each.change[1] == size]
        if not first:
            raise LaunchError(f"nobody stayed when the job went to {size} workers")
        pauses = [each.change[2] for each in first if each.change is not None]
        self.pause_s.append(max(pauses))
        self.to_next_batch_s.append(max(each.at_s - each.ended_s for each in first))
        self.first_step_s.append(max(_next(told, each).at_s - each.at_s for each in first))
        self.request_to_switch_s.append(max(each.at_s for each in first) - asked_s)

    def to_json(self) -> Json:
        return {
            **summary(self.pause_s),
            "to_next_batch": summary(self.to_next_batch_s),
            "first_step": summary(self.first_step_s),
            "request_to_switch": summary(self.request_to_switch_s),
        }


@dataclass(slots=True)
class Seen:
    """All that was measured."""

    shrink: Changes = field(default_factory=Changes)
    grow: Changes = field(default_factory=Changes)
    newcomer_began_s: list[float] = field(default_factory=list)
    newcomer_committed_s: list[float] = field(default_factory=list)
    failure: str = ""

    def add_newcomers(self, told: Sequence[Beginning], asked_s: float) -> None:
        """Note when the newcomers (the last of them) began their first step, and had committed it."""
        began = [each for each in told if each.own == 0 and each.change is None and each.ended_s == 0.0]
        if not began:
            raise LaunchError("no newcomer began a step")
        self.newcomer_began_s.append(max(each.at_s for each in began) - asked_s)
        self.newcomer_committed_s.append(max(_next(told, each).at_s for each in began) - asked_s)


def _next(told: Sequence[Beginning], this: Beginning) -> Beginning:
    """The step that the same process began next."""
    later = (each for each in told if each.pid == this.pid and each.at_s > this.at_s)
    return min(later, key=lambda each: each.at_s)


def run(options: ElasticOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Resize a job to and fro; the result in the one form of all benches. Everything started is gone afterwards."""
    seen = Seen()
    with ElasticJob(options) as job:
        try:
            _resize_often(job, seen, progress)
        except LaunchError as error:
            seen.failure = str(error)
        told = list(job.told)
    return _result(options, args, seen, told)


def _resize_often(job: ElasticJob, seen: Seen, progress: Progress) -> None:
    big, small, repeat = job.options.num_workers, job.options.small, job.options.repeat
    progress("starting", 0.0)
    job.await_steady(big, SETTLED)
    with job.client() as resize:
        # The first time, the warm process may not be up yet, and memory is touched that later changes find in place.
        for number in range(repeat + 1):
            counts = number > 0
            for size in (small, big):
                progress(f"{big + small - size} -> {size} workers", number / (repeat + 1))
                mark = job.mark
                asked_s = resize(size)
                told = job.await_steady(size, SETTLED, mark)
                if size == small:
                    job.await_exits(told, size)
                if counts:
                    (seen.shrink if size == small else seen.grow).add(told, size, asked_s)
                if counts and size == big:
                    seen.add_newcomers(told, asked_s)
    progress("done", 1.0)


def _result(options: ElasticOptions, args: Mapping[str, object], seen: Seen, told: Sequence[Beginning]) -> Json:
    remarks = [
        "a pause is that of the survivor who waited longest; the first change in each direction is not counted",
    ]
    verdicts = {
        "shrink": (seen.shrink.pause_s, SHRINK_S),
        "grow": (seen.grow.pause_s, GROW_S),
        "request_to_first_step": (seen.newcomer_committed_s, REQUEST_S),
    }
    ok = not seen.failure
    if seen.failure:
        remarks.append(seen.failure)
    for name, (samples, target_s) in verdicts.items():
        if not within(samples, target_s):
            ok = False
            median_s = summary(samples)["median_s"]
            said = f"{median_s * 1e3:.1f} ms" if isinstance(median_s, float) else "not measured"
            remarks.append(f"{name}: {said}, to reach {target_s * 1e3:g} ms")
    shrink, grow = seen.shrink.to_json(), seen.grow.to_json()
    return {
        "bench": "resize",
        "args": dict(args),
        "ours": shrink,
        "shrink": shrink,
        "grow": grow,
        "request_to_first_step": {
            **summary(seen.newcomer_committed_s),
            "until_it_began": summary(seen.newcomer_began_s),
        },
        "step": {str(size): brief(step_times(told, size)) for size in (options.small, options.num_workers)},
        "targets_s": {name: target_s for name, (_, target_s) in verdicts.items()},
        "machine": machine(),
        "ok": ok,
        "remarks": remarks,
    }
