"""The benches of training: their arithmetic, and each of them once for real at small size."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import forked
import pytest
import torch
from gang import FULL
from pliant_repro.bench import resize, train
from pliant_repro.bench.commit_gaps import Event
from pliant_repro.bench.elastic import ElasticJob, ElasticOptions, StepBegun, members, step_times, steps_in_view
from pliant_repro.bench.train import TrainOptions
from pliant_repro.contest import Rules, Timings

from pliant.errors import LaunchError


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What the workers of an elastic job tell


def begin(pid: int, step: int, *, size: int = 2, at_s: float, own: int = 9, **more: object) -> StepBegun:
    values = {"rank": pid, "worker": f"h:{pid}", "ended_s": at_s - 0.001, **more}
    return StepBegun(pid=pid, size=size, step=step, own=own, at_s=at_s, **values)  # type: ignore[arg-type]


def test_steps_are_counted_from_the_last_change_on() -> None:
    reports = [begin(0, 1, at_s=1), begin(1, 1, at_s=1), begin(0, 2, at_s=2, size=1, change=(2, 1, 0.01, False))]
    assert steps_in_view(reports, 2) == {"h:1": 1}
    assert steps_in_view(reports, 1) == {"h:0": 1}
    reports += [begin(0, 3, at_s=3, change=(1, 2, 0.01, False)), begin(0, 4, at_s=4), begin(2, 3, at_s=3, own=0)]
    assert steps_in_view(reports, 2) == {"h:0": 2, "h:1": 1, "h:2": 1}


def test_members_are_those_who_kept_up() -> None:
    reports = [begin(0, 4, at_s=1), begin(1, 4, at_s=1), begin(0, 9, at_s=2), begin(7, 8, at_s=2, rank=1)]
    assert {rank: each.pid for rank, each in members(reports).items()} == {0: 0, 1: 7}


def test_disturbed_steps_are_not_among_the_step_times() -> None:
    reports = [begin(0, step, at_s=step / 10) for step in range(3)]
    reports += [begin(0, 3, at_s=0.9, change=(3, 2, 0.6, False)), begin(0, 4, at_s=1.5), begin(0, 5, at_s=1.6)]
    assert step_times(reports, 2) == pytest.approx([0.1, 0.1, 0.1])
    assert step_times(reports, 3) == []


def test_the_survivor_who_waited_longest_counts() -> None:
    changes = resize.Changes()
    reports = [
        begin(0, 5, at_s=10.0, ended_s=9.97, change=(4, 2, 0.02, False)),
        begin(1, 5, at_s=10.1, ended_s=9.99, change=(4, 2, 0.01, False)),
        begin(0, 6, at_s=10.4),
        begin(1, 6, at_s=10.4),
    ]
    changes.add(reports, 2, asked_s=9.0)
    assert changes.pause_s == [0.02]
    assert changes.to_next_batch_s == pytest.approx([0.11])
    assert changes.first_step_s == pytest.approx([0.4])
    assert changes.request_to_switch_s == pytest.approx([1.1])
    with pytest.raises(LaunchError, match="nobody stayed"):
        changes.add(reports, 3, asked_s=9.0)


def test_newcomers_count_when_the_last_of_them_has_committed() -> None:
    seen = resize.Changes()
    reports = [begin(pid, 5, at_s=10.0 + pid, own=0, ended_s=0.0) for pid in (2, 3)]
    reports += [begin(pid, 6, at_s=20.0 + pid, own=1) for pid in (2, 3)]
    seen.add_new_workers(reports, asked_s=9.0)
    assert (seen.new_began_s, seen.new_committed_s) == ([4.0], [14.0])


@pytest.mark.parametrize(("again", "lost", "of_the_dead"), [(7, 0, 0), (6, 1, 1), (8, 0, 0)])
def test_a_committed_step_that_is_done_again_is_a_lost_one(again: int, lost: int, of_the_dead: int) -> None:
    seen = resize.Recoveries()
    before = {0: begin(0, 6, at_s=1.0), 1: begin(1, 6, at_s=1.0)}
    reports = [
        begin(1, 7, at_s=1.5),  # the victim
        begin(0, 7, at_s=1.5),  # had committed 7 steps
        begin(0, again, at_s=2.5, size=1, ended_s=1.4, change=(2, 1, 0.3, True)),
    ]
    seen.add(before, 1, 2.0, reports)
    assert seen.recover_s == [0.5]
    assert (seen.steps_lost, seen.steps_of_the_dead) == (lost, of_the_dead)


def test_a_step_of_which_the_optimizer_is_done_is_committed() -> None:
    seen = resize.Recoveries()
    before = {0: begin(0, 6, at_s=1.0), 1: begin(1, 6, at_s=1.0)}
    seen.add(before, 1, 2.0, [begin(0, 6, at_s=2.5, size=1, ended_s=1.9, change=(2, 1, 0.3, True))])
    assert seen.steps_lost == 1


def test_every_rank_is_killed_before_any_is_killed_again() -> None:
    ranks = list(itertools.islice(resize.victims(4, random.Random(1)), 12))
    assert [sorted(ranks[begin : begin + 4]) for begin in (0, 4, 8)] == [[0, 1, 2, 3]] * 3


# Verdicts


def timings(*seconds: float, failure: str = "") -> Timings:
    return Timings(rounds=[[second] for second in seconds], cpu_s=list(seconds), failure=failure)


@pytest.mark.parametrize(
    ("model", "num_workers", "theirs", "ok"),
    [
        ("resnet18", 1, 0.99, True),
        ("resnet18", 1, 0.97, False),
        ("resnet18", 4, 0.99, False),
        ("transformer", 2, 1.02, False),
        ("transformer", 2, 1.06, True),
        ("small", 2, 0.5, True),
    ],
)
def test_each_model_has_its_target(model: str, num_workers: int, theirs: float, ok: bool) -> None:
    side = "pytorch" if num_workers == 1 else "ddp_gloo"
    results = {"pliant": timings(1.0, 1.0), side: timings(theirs, theirs)}
    cell, remarks = train.make_cell(TrainOptions(model=model), num_workers, side, results)
    assert cell["ok"] is ok
    assert cell["peers"][side]["speedup"] == pytest.approx(theirs)  # type: ignore[index]
    assert bool(remarks) is not ok


def test_a_peer_that_failed_proves_nothing() -> None:
    results = {"pliant": timings(1.0), "ddp_gloo": timings(failure="ddp_gloo: died")}
    cell, _ = train.make_cell(TrainOptions(), 2, "ddp_gloo", results)
    assert cell["ok"] is False
    json.dumps(cell)


# Arguments


def test_the_commands_are_there_without_torch() -> None:
    code = (
        "import sys, pliant_repro.bench.resize, pliant_repro.bench.train;"
        "import pliant_repro.cli.bench; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


# The real ones


def _change_a_job(options: ElasticOptions) -> Any:
    shrink, grow, losses, events = resize.Changes(), resize.Changes(), resize.Recoveries(), list[Event]()
    with ElasticJob(options) as job:
        resize.resize_repeatedly(job, shrink, grow, events, lambda what, fraction: None)
        resize.kill_repeatedly(job, losses, lambda what, fraction: None)
        return shrink, grow, losses, events, list(job.reports)


@pytest.mark.processes
def test_a_real_job_is_resized_and_loses_a_worker() -> None:
    options = ElasticOptions(num_workers=2, small=1, repeat=1, after=3, model="small", batch=2, size=16)
    shrink, grow, losses, events, reports = forked.call(_change_a_job, options)
    resized = resize.resize_result(options, {}, shrink, grow, events, reports)
    assert [len(each.pause_s) for each in (shrink, grow)] == [1, 1]
    assert 0 < shrink.pause_s[0] <= shrink.to_next_batch_s[0] < shrink.request_to_switch_s[0]
    assert 0 < grow.new_began_s[0] < grow.new_committed_s[0]
    recovered = resize.recover_result(options, {}, losses, reports)
    assert losses.steps_lost == 0
    assert losses.pause_s[0] < losses.recover_s[0] < 5
    for kind, felt in {**resized["felt"], **recovered["felt"]}.items():  # type: ignore[dict-item]
        assert len(felt["gap"]["samples_s"]) == 1, kind
        assert felt["steps_after"] == [3], kind
        assert felt["gap"]["samples_s"][0] >= felt["switch"]["samples_s"][0] > 0, kind
    assert set(resized["felt"]) | set(recovered["felt"]) == {"shrink", "grow", "kill", "replacement"}  # type: ignore[arg-type]
    assert recovered["felt"]["kill"]["next"]["samples_s"][0] > losses.recover_s[0]  # type: ignore[index]
    json.dumps([resized, recovered])


@pytest.mark.skipif(not FULL, reason="tens of seconds beside what smaller tests show: PLIANT_FULL=1")
@pytest.mark.processes
def test_a_real_contest_of_trainings() -> None:
    options = TrainOptions(num_workers=(2,), model="small", rules=Rules(rounds=2, iterations=2, warmup=1))
    result = train.run(options, {"np": [2]}, lambda what, fraction: None)
    assert result["remarks"] == []
    [cell] = result["cells"]  # type: ignore[misc]
    assert cell["ours"]["num_samples"] == cell["peers"]["ddp_gloo"]["num_samples"] == 2
    assert cell["peers"]["ddp_gloo"]["speedup"] > 0
