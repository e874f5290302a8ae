"""`pliant bench resize` and `pliant bench recover`: how long a running job stands still when its workers change.

The pause of a resize is that of the survivor who waited longest: from the end of its last step in the old view until it is
ready for the first one in the new view (`ViewChange.pause_s`). Beside it: the same until the next batch was loaded, how long
the first step then took, and how long it took from the request until new workers had committed a step.

The time of a recovery runs from just before `kill -9` is sent until the last survivor has the first batch of its next step.
Every rank is killed about equally often, rank 0 among them, at a random moment of its step. Then the bench asks for a
replacement, and goes on when that has joined.

These times are the job's view of a change. What users feel is in `felt`: the longest gap between two commits around each
change, and how many steps after it are slow (`commit_gaps`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from pliant.errors import LaunchError
from pliant.machine import Json
from pliant_repro.bench import commit_gaps
from pliant_repro.bench.commit_gaps import Event
from pliant_repro.bench.elastic import (
    ElasticJob,
    ElasticOptions,
    StepBegun,
    judge_median,
    members,
    step_times,
    summarise,
)
from pliant_repro.contest import Progress, form, quantile

SHRINK_S, GROW_S, REQUEST_S, RECOVER_S = 0.020, 0.100, 1.5, 0.300
"""Targets for the medians."""
SETTLED = 3
"""Steps of a new job, or of a worker before it is killed, that are not looked at."""


# --- resize ---


@dataclass(slots=True)
class Changes:
    """Measurements of the changes in one direction; one value for each of them."""

    pause_s: list[float] = field(default_factory=list)
    to_next_batch_s: list[float] = field(default_factory=list)
    first_step_s: list[float] = field(default_factory=list)
    request_to_switch_s: list[float] = field(default_factory=list)
    new_began_s: list[float] = field(default_factory=list)
    """From the request until the last new worker began its first step, if the job grew."""
    new_committed_s: list[float] = field(default_factory=list)
    """From the request until the last new worker had committed its first step."""

    def add(self, reports: Sequence[StepBegun], size: int, asked_s: float) -> None:
        """Add the change to `size` workers that the reports around it show."""
        first = [each for each in reports if each.change is not None and each.change[1] == size]
        if not first:
            raise LaunchError(f"nobody stayed when the job went to {size} workers")
        self.pause_s.append(max(each.change[2] for each in first if each.change is not None))
        self.to_next_batch_s.append(max(each.at_s - each.ended_s for each in first))
        self.first_step_s.append(max(_next_step(reports, each).at_s - each.at_s for each in first))
        self.request_to_switch_s.append(max(each.at_s for each in first) - asked_s)

    def add_new_workers(self, reports: Sequence[StepBegun], asked_s: float) -> None:
        """Add when the last new worker began its first step, and had committed it."""
        began = [each for each in reports if each.own == 0 and each.change is None and each.ended_s == 0.0]
        if not began:
            raise LaunchError("no new worker began a step")
        self.new_began_s.append(max(each.at_s for each in began) - asked_s)
        self.new_committed_s.append(max(_next_step(reports, each).at_s for each in began) - asked_s)

    def to_json(self) -> Json:
        return {
            **summarise(self.pause_s),
            "to_next_batch": summarise(self.to_next_batch_s),
            "first_step": summarise(self.first_step_s),
            "request_to_switch": summarise(self.request_to_switch_s),
        }


def _next_step(reports: Sequence[StepBegun], this: StepBegun) -> StepBegun:
    """Return the step that the same process began next."""
    later = (each for each in reports if each.pid == this.pid and each.at_s > this.at_s)
    return min(later, key=lambda each: each.at_s)


def run_resize(options: ElasticOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Resize a job to and fro, and return the result. Everything started is gone afterwards."""
    shrink, grow, events, failure = Changes(), Changes(), list[Event](), ""
    with ElasticJob(options) as job:
        try:
            resize_repeatedly(job, shrink, grow, events, progress)
        except LaunchError as error:
            failure = str(error)
    return resize_result(options, args, shrink, grow, events, job.reports, failure)


def resize_repeatedly(job: ElasticJob, shrink: Changes, grow: Changes, events: list[Event], progress: Progress) -> None:
    big, small, repeat = job.options.num_workers, job.options.small, job.options.repeat
    progress("starting", 0.0)
    job.wait_until_steady(big, SETTLED)
    with job.client() as resize:
        # The first pair is not counted: the warm process may not be up yet, and memory is touched for the first time.
        for number in range(repeat + 1):
            for kind, size, changes in (("shrink", small, shrink), ("grow", big, grow)):
                progress(f"{big + small - size} -> {size} workers", number / (repeat + 1))
                mark = len(job.reports)
                asked_s = resize(size)
                reports = job.wait_until_steady(size, job.options.after + 2, mark)
                if size == small:
                    job.wait_for_exits(reports, size)
                if number:
                    changes.add(reports, size, asked_s)
                    events.append(Event(kind, asked_s, time.monotonic()))
                if number and size == big:
                    changes.add_new_workers(reports, asked_s)
    progress("done", 1.0)


def resize_result(
    options: ElasticOptions,
    args: Mapping[str, object],
    shrink: Changes,
    grow: Changes,
    events: Sequence[Event],
    reports: Sequence[StepBegun],
    failure: str = "",
) -> Json:
    felt = _felt(options, reports, events, ("shrink", "grow"))
    missed = [
        failure,
        judge_median("shrink", shrink.pause_s, SHRINK_S),
        judge_median("grow", grow.pause_s, GROW_S),
        judge_median("request_to_first_step", grow.new_committed_s, REQUEST_S),
    ]
    missed = [text for text in [*missed, *_missed(felt)] if text]
    about = "a pause is that of the survivor who waited longest; the first change in each direction is not counted"
    sizes = (options.small, options.num_workers)
    return form(
        "resize",
        args,
        not missed,
        [about, *missed],
        ours=shrink.to_json(),
        shrink=shrink.to_json(),
        grow=grow.to_json(),
        request_to_first_step={**summarise(grow.new_committed_s), "until_it_began": summarise(grow.new_began_s)},
        step={str(size): summarise(step_times(reports, size), with_samples=False) for size in sizes},
        targets_s={"shrink": SHRINK_S, "grow": GROW_S, "request_to_first_step": REQUEST_S},
        **felt,
    )


def _felt(options: ElasticOptions, reports: Sequence[StepBegun], events: Sequence[Event], kinds: Sequence[str]) -> Json:
    """Return how the changes were felt, with the table and the verdicts."""
    found = commit_gaps.measure_changes(reports, events, commit_gaps.EXTRA_S[options.device], options.after)
    told = commit_gaps.judge(found, kinds)
    commits = commit_gaps.commit_times(reports)
    return {
        "felt": told.numbers,
        "felt_table": {"columns": list(commit_gaps.COLUMNS), "rows": [list(row) for row in told.rows]},
        "verdicts": [{"ok": holds, "text": text} for holds, text in told.verdicts],
        "slow_share": commit_gaps.slow_share(reports),
        "commits_s": sorted(commits.items()),
    }


def _missed(felt: Json) -> list[str]:
    verdicts = cast("list[Json]", felt["verdicts"])
    return [str(verdict["text"]) for verdict in verdicts if not verdict["ok"]]


# --- recover ---


@dataclass(slots=True)
class Recoveries:
    """Measurements of `pliant bench recover`; one value for each kill."""

    ranks: list[int] = field(default_factory=list)
    """The killed ranks."""
    recover_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    """The pause as the job measured it: from when a survivor noticed the loss."""
    replace_s: list[float] = field(default_factory=list)
    """From the request for a replacement to its first committed step."""
    steps_lost: int = 0
    """Steps that a survivor had committed before the kill and had to do again."""
    steps_of_the_dead: int = 0
    """Steps that only the killed worker had committed; they were done again, to the same bits."""
    events: list[Event] = field(default_factory=list)
    """The kills, and the requests for replacements."""
    failure: str = ""

    def add(self, before: Mapping[int, StepBegun], victim: int, killed_s: float, reports: Sequence[StepBegun]) -> None:
        """Add a recovery: `before` are the workers by rank before the kill, `reports` what came from then on."""
        after = first_steps_after_loss(reports, killed_s)
        self.ranks.append(victim)
        self.recover_s.append(max(each.at_s for each in after.values()) - killed_s)
        self.pause_s.append(max(each.change[2] for each in after.values() if each.change is not None))
        for pid, first in after.items():
            known = [each for each in (*before.values(), *reports) if each.pid == pid and each.at_s < first.at_s]
            last = max(known, key=lambda each: each.at_s)
            committed = last.step + (1 if first.ended_s > last.at_s else 0)
            self.steps_lost += max(0, committed - first.step)
        dead = before[victim].pid
        reached = max((each.step for each in reports if each.pid == dead), default=before[victim].step)
        self.steps_of_the_dead += max(0, reached - max(each.step for each in after.values()))


def first_steps_after_loss(reports: Sequence[StepBegun], killed_s: float) -> dict[int, StepBegun]:
    """Return, by process, the first step of each survivor after a loss."""
    found: dict[int, StepBegun] = {}
    for each in reports:
        if each.change is not None and each.change[3] and each.at_s > killed_s:
            found.setdefault(each.pid, each)
    return found


def run_recover(options: ElasticOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Kill workers of a running job, and return the result. Everything started is gone afterwards."""
    seen = Recoveries()
    with ElasticJob(options) as job:
        try:
            kill_repeatedly(job, seen, progress)
        except LaunchError as error:
            seen.failure = str(error)
    return recover_result(options, args, seen, job.reports)


def victims(num_workers: int, rng: random.Random) -> Iterator[int]:
    """Yield ranks at random without end, each of them once before any comes again."""
    while True:
        ranks = list(range(num_workers))
        rng.shuffle(ranks)
        yield from ranks


def kill_repeatedly(job: ElasticJob, seen: Recoveries, progress: Progress) -> None:
    size, repeat = job.options.num_workers, job.options.repeat
    rng = random.Random(0)
    progress("starting", 0.0)
    reports = job.wait_until_steady(size, SETTLED)
    ranks = victims(size, rng)
    with job.client() as resize:
        for number in range(repeat + 1):
            victim = next(ranks) if number else size - 1  # the first kill is not counted
            progress(f"killing rank {victim}", number / (repeat + 1))
            before, killed_s, mark = _kill(job, victim, rng, reports)

            def all_back(reports: Sequence[StepBegun], killed_s: float = killed_s) -> bool:
                return len(first_steps_after_loss(reports, killed_s)) == size - 1

            reports = job.wait_until(f"{size - 1} survivors at work", all_back, mark)
            if number:
                seen.add(before, victim, killed_s, reports)
            reports = job.wait_until_steady(size - 1, job.options.after + 2, mark)
            asked_s = resize(size)
            reports = job.wait_until_steady(size, job.options.after + 2, mark)
            if number:
                seen.events += [
                    Event("kill", killed_s, asked_s, before[victim].pid),
                    Event("replacement", asked_s, time.monotonic()),
                ]
                began = [each for each in reports if each.own == 1 and each.change is None]
                seen.replace_s.append(max(each.at_s for each in began) - asked_s)
    progress("done", 1.0)


def _kill(
    job: ElasticJob, victim: int, rng: random.Random, reports: Sequence[StepBegun]
) -> tuple[dict[int, StepBegun], float, int]:
    """Kill a rank at a random moment of its step; return the workers before, the time, and the number of reports."""
    times = step_times(reports, job.options.num_workers)
    step_s = quantile(times, 0.5) if times else 0.0
    pid = members(job.reports)[victim].pid
    is_next = lambda since: any(each.pid == pid for each in since)  # noqa: E731
    job.wait_until("the next step of the victim", is_next, len(job.reports))
    time.sleep(rng.random() * step_s)
    before, mark = members(job.reports), len(job.reports)
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return before, killed_s, mark


def recover_result(
    options: ElasticOptions, args: Mapping[str, object], seen: Recoveries, reports: Sequence[StepBegun]
) -> Json:
    felt = _felt(options, reports, seen.events, ("kill", "replacement"))
    missed = [seen.failure, judge_median("recover", seen.recover_s, RECOVER_S, ".0f")]
    missed.append(f"{seen.steps_lost} committed steps were done again" if seen.steps_lost else "")
    missed = [text for text in [*missed, *_missed(felt)] if text]
    pairs = list(zip(seen.ranks, seen.recover_s, strict=True))
    by_rank = {str(rank): summarise([s for who, s in pairs if who == rank]) for rank in sorted(set(seen.ranks))}
    ours = summarise(seen.recover_s)
    return form(
        "recover",
        args,
        not missed,
        missed,
        ours=ours,
        recover={**ours, "by_rank": by_rank},
        noticed_to_ready=summarise(seen.pause_s),
        replacement=summarise(seen.replace_s),
        steps_lost=seen.steps_lost,
        steps_of_the_dead=seen.steps_of_the_dead,
        killed_ranks=list(seen.ranks),
        step=summarise(step_times(reports, options.num_workers), with_samples=False),
        targets_s={"recover": RECOVER_S},
        **felt,
    )
