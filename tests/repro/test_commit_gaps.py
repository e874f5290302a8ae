"""How changes of workers are felt: gaps between commits, with made-up reports of a job."""

from __future__ import annotations

import json

import pytest
from pliant_repro.bench import commit_gaps
from pliant_repro.bench.commit_gaps import Event, feel_change
from pliant_repro.bench.elastic import StepBegun


def commits_of(
    *spans: tuple[int, int, int, float], changes: dict[int, tuple[int, int, float, bool]]
) -> list[StepBegun]:
    """Reports of one worker: (first step, last step, size, seconds of a step) after each other."""
    reports, at_s = [], 100.0
    for first, last, size, step_s in spans:
        for step in range(first, last + 1):
            reports.append(
                StepBegun(
                    pid=1,
                    worker="h:1",
                    rank=0,
                    size=size,
                    step=step,
                    own=9,
                    at_s=at_s + 0.001,
                    ended_s=at_s if step else 0.0,
                    change=changes.get(step),
                )
            )
            at_s += step_s
    return reports


def test_the_longest_gap_between_commits_counts() -> None:
    # 40 steps of 0.1 s on two workers; then one step that takes 0.3 s with the change, and steps of 0.2 s on one worker.
    spans = [(0, 39, 2, 0.1), (40, 40, 1, 0.3), (41, 80, 1, 0.2)]
    reports = commits_of(*spans, changes={40: (2, 1, 0.05, False)})
    commits = commit_gaps.commit_times(reports)
    assert commit_gaps.median_steps(reports, commits) == {2: pytest.approx(0.1), 1: pytest.approx(0.2)}
    [felt] = commit_gaps.measure_changes(reports, [Event("shrink", 103.8)], 0.02)["shrink"]
    assert (felt.before_s, felt.after_s) == (pytest.approx(0.1), pytest.approx(0.2))
    assert felt.gap_s == felt.switch_s == pytest.approx(0.3)
    assert felt.gap_limit_s == pytest.approx(1.5 * 0.2 + 0.02)
    assert felt.slowest_s == pytest.approx(0.2)
    assert (felt.num_slow, felt.num_steps) == (0, 20)


def test_a_slow_step_while_a_newcomer_warms_up_belongs_to_its_change() -> None:
    # Asked for at 102.05 s, in step 20; step 30 is slow, and the workers change at step 40 without any pause.
    spans = [(0, 29, 1, 0.1), (30, 30, 1, 0.9), (31, 39, 1, 0.1), (40, 80, 2, 0.1)]
    reports = commits_of(*spans, changes={40: (1, 2, 0.0, False)})
    [felt] = commit_gaps.measure_changes(reports, [Event("grow", 102.05)], 0.02)["grow"]
    assert (felt.gap_s, felt.switch_s) == (pytest.approx(0.9), pytest.approx(0.1))
    [later] = commit_gaps.measure_changes(reports, [Event("grow", 104.05)], 0.02)["grow"]
    assert later.gap_s == pytest.approx(0.1), "what was slow before the request does not count"


def test_slow_steps_after_a_change_are_counted_and_judged() -> None:
    spans = [(0, 39, 2, 0.1), (40, 45, 1, 0.2), (46, 47, 1, 0.9), (48, 90, 1, 0.2)]
    reports = commits_of(*spans, changes={40: (2, 1, 0.05, False)})
    found = commit_gaps.measure_changes(reports, [Event("shrink", 103.8)], 0.15)
    [felt] = found["shrink"]
    assert (felt.num_slow, felt.slowest_s) == (2, pytest.approx(0.9))
    told = commit_gaps.judge(found, ("shrink", "grow"), "gpt2 eager")
    assert [ok for ok, text in told.verdicts] == [False, False, False]
    assert told.verdicts[-1][1] == "gpt2 eager, grow: not measured"
    assert len(told.rows[0]) == len(commit_gaps.COLUMNS)
    json.dumps(told.numbers)
    quiet = commits_of((0, 39, 2, 0.1), (40, 90, 1, 0.2), changes={40: (2, 1, 0.05, False)})
    told = commit_gaps.judge(commit_gaps.measure_changes(quiet, [Event("shrink", 103.8)], 0.15), ("shrink",))
    assert [ok for ok, text in told.verdicts] == [True, True]
    assert commit_gaps.slow_share(reports) == {"2": 0.0, "1": pytest.approx(2 / 49)}


def test_a_kill_is_measured_to_the_end_of_the_next_step() -> None:
    spans = [(0, 39, 2, 0.1), (40, 40, 1, 0.8), (41, 59, 1, 0.1), (60, 90, 2, 0.1)]
    reports = commits_of(*spans, changes={40: (2, 1, 0.5, True), 60: (1, 2, 0.01, False)})
    dead = StepBegun(pid=7, worker="h:7", rank=1, size=2, step=39, own=9, at_s=103.9, ended_s=103.9)
    found = commit_gaps.measure_changes([*reports, dead], [Event("kill", 103.95, pid=7)], 0.02)
    [kill], [replacement] = found["kill"], found["replacement"]
    assert kill.next_s == pytest.approx(104.8 - 103.95)
    assert kill.next_limit_s == pytest.approx(1.1)
    assert replacement.gap_s == pytest.approx(0.1)
    told = commit_gaps.judge(found, ("kill", "replacement"))
    assert [ok for ok, text in told.verdicts] == [True] * 4, "the gap of a kill, 0.8 s, has no limit of its own"


def test_steps_of_the_next_change_do_not_count() -> None:
    commits = {step: step * 0.1 for step in range(10)} | {step: 10 + step * 0.1 for step in range(10, 20)}
    values = {"begin_s": 0.35, "step": 5, "sizes": (2, 1), "extra_s": 0.02}
    assert feel_change(commits, {1: 0.1}, before=10, **values).gap_s == pytest.approx(0.1)  # type: ignore[arg-type]
    assert feel_change(commits, {1: 0.1}, **values).gap_s > 10  # type: ignore[arg-type]
