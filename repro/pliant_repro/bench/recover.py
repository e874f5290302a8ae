"""`pliant bench recover`: kill -9, again and again, and how soon the survivors train on.

The time of a recovery runs from just before the signal is sent to the moment when the last survivor has the first batch
of its next step in hand. Every rank is killed about equally often, rank 0 among them, at a random moment of
its step. Then the bench asks for a replacement, and goes on when that has joined.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pliant.errors import LaunchError
from pliant.machine import Json, machine
from pliant_repro.bench.elastic import ElasticJob, ElasticOptions, brief, members, step_times, summary, within
from pliant_repro.bench.elastic_worker import Beginning
from pliant_repro.bench.stats import quantile

Progress = Callable[[str, float], None]

RECOVER_S = 0.300
"""What is to be reached, in the median."""
SETTLED = 3
"""Steps between a replacement's arrival and the next kill."""


@dataclass(slots=True)
class Recoveries:
    """What was seen; one value for each kill, in `ranks` who was killed."""

    ranks: list[int] = field(default_factory=list)
    recover_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    """As the job itself notes it: from when a survivor noticed the loss."""
    replace_s: list[float] = field(default_factory=list)
    """From the request for a replacement to its first committed step."""
    steps_lost: int = 0
    """Steps that a survivor had committed before the kill and had to do again."""
    steps_of_the_dead: int = 0
    """Steps that only the dead worker had committed; they were done again, to the same bits."""
    failure: str = ""

    def add(self, before: Mapping[int, Beginning], victim: int, killed_s: float, told: Sequence[Beginning]) -> None:
        """Note a recovery: who was there before it, and what was told from then on."""
        after = recovered(told, killed_s)
        self.ranks.append(victim)
        self.recover_s.append(max(each.at_s for each in after.values()) - killed_s)
        self.pause_s.append(max(each.change[2] for each in after.values() if each.change is not None))
        for pid, first in after.items():
            known = [each for each in (*before.values(), *told) if each.pid == pid and each.at_s < first.at_s]
            last = max(known, key=lambda each: each.at_s)
            committed = last.step + (1 if first.ended_s > last.at_s else 0)
            self.steps_lost += max(0, committed - first.step)
        dead = before[victim].pid
        reached = max((each.step for each in told if each.pid == dead), default=before[victim].step)
        self.steps_of_the_dead += max(0, reached - max(each.step for each in after.values()))


def recovered(told: Sequence[Beginning], killed_s: float) -> dict[int, Beginning]:
    """By process: the first step of each survivor after a loss."""
    found: dict[int, Beginning] = {}
    for each in told:
        if each.change is not None and each.change[3] and each.at_s > killed_s:
            found.setdefault(each.pid, each)
    return found


def run(options: ElasticOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Kill workers of a running job; the result in the one form of all benches. Everything started is gone afterwards."""
    seen = Recoveries()
    with ElasticJob(options) as job:
        try:
            _kill_often(job, seen, progress)
        except LaunchError as error:
            seen.failure = str(error)
        told = list(job.told)
    return _result(options, args, seen, told)


def victims(num_workers: int, rng: random.Random) -> Iterator[int]:
    """Ranks at random, each of them once before any comes again; rank 0 in the first round for sure."""
    while True:
        ranks = list(range(num_workers))
        rng.shuffle(ranks)
        yield from ranks


def _kill_often(job: ElasticJob, seen: Recoveries, progress: Progress) -> None:
    size, repeat = job.options.num_workers, job.options.repeat
    rng = random.Random(job.options.seed)
    progress("starting", 0.0)
    told = job.await_steady(size, SETTLED)
    ranks = victims(size, rng)
    with job.client() as resize:
        for number in range(repeat + 1):
            victim = next(ranks) if number else size - 1  # the first one is for practice
            progress(f"killing rank {victim}", number / (repeat + 1))
            before, killed_s, mark = _kill(job, victim, rng, told)
            told = job.await_that(f"{size - 1} survivors at work", partial(_all_back, killed_s, size - 1), mark)
            if number:
                seen.add(before, victim, killed_s, told)
            asked_s = resize(size)
            told = job.await_steady(size, SETTLED, mark)
            if number:
                began = [each for each in told if each.own == 1 and each.change is None]
                seen.replace_s.append(max(each.at_s for each in began) - asked_s)
    progress("done", 1.0)


def _all_back(killed_s: float, num_survivors: int, told: Sequence[Beginning]) -> bool:
    return len(recovered(told, killed_s)) == num_survivors


def _kill(
    job: ElasticJob, victim: int, rng: random.Random, told: Sequence[Beginning]
) -> tuple[dict[int, Beginning], float, int]:
    """Kill a rank at a random moment of its step; who was there, when it was, and how much had been told."""
    times = step_times(told, job.options.num_workers)
    step_s = quantile(times, 0.5) if times else 0.0
    pid = members(job.told)[victim].pid
    mark = job.mark
    job.await_that("the next step of the victim", lambda since: any(each.pid == pid for each in since), mark)
    time.sleep(rng.random() * step_s)
    before, mark = members(job.told), job.mark
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return before, killed_s, mark


def _result(options: ElasticOptions, args: Mapping[str, object], seen: Recoveries, told: Sequence[Beginning]) -> Json:
    remarks = []
    if seen.failure:
        remarks.append(seen.failure)
    median = summary(seen.recover_s)
    reached = within(seen.recover_s, RECOVER_S)
    if not reached:
        took_s = median["median_s"]
        said = f"{took_s * 1e3:.0f} ms" if isinstance(took_s, float) else "not measured"
        remarks.append(f"recover: {said}, to reach {RECOVER_S * 1e3:g} ms")
    if seen.steps_lost:
        remarks.append(f"{seen.steps_lost} committed steps were done again")
    by_rank = {
        str(rank): summary([took_s for who, took_s in zip(seen.ranks, seen.recover_s, strict=True) if who == rank])
        for rank in sorted(set(seen.ranks))
    }
    return {
        "bench": "recover",
        "args": dict(args),
        "ours": median,
        "recover": {**median, "by_rank": by_rank},
        "noticed_to_ready": summary(seen.pause_s),
        "replacement": summary(seen.replace_s),
        "steps_lost": seen.steps_lost,
        "steps_of_the_dead": seen.steps_of_the_dead,
        "killed_ranks": list(seen.ranks),
        "step": brief(step_times(told, options.num_workers)),
        "targets_s": {"recover": RECOVER_S},
        "machine": machine(),
        "ok": reached and not seen.steps_lost and not seen.failure,
        "remarks": remarks,
    }
