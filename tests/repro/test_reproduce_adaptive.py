"""Figures 4 and 6 of KungFu: what is judged, what is drawn, and both programs at work in small."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from pliant_repro.figures import images
from pliant_repro.figures.figures import Options
from pliant_repro.figures.kungfu import fig4 as kungfu_fig4
from pliant_repro.figures.kungfu import fig6 as kungfu_fig6
from pliant_repro.figures.kungfu.fig4 import Course as Training
from pliant_repro.figures.kungfu.fig6 import Course as Provisioning

QUICK = Options(quick=True, device="cpu")
draws = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `experiments`")


# --- figure 4 ---


def training(
    mode: str, *, final: float = 0.96, epoch_s: float = 1.0, sizes: tuple[int, ...] = (8,), seed: int = 1
) -> Training:
    """Ten epochs of ten steps; the size of the batch in each epoch, the last one for the rest."""
    course = Training(mode, seed)
    for epoch in range(10):
        course.times_s.append((epoch + 1) * epoch_s)
        course.accuracies.append(final * min(1.0, 0.5 + 0.1 * epoch))
        for step in range(10 * epoch, 10 * epoch + 10):
            course.epoch_of[step] = epoch
            for rank in range(2):
                course.batches.setdefault(rank, {})[step] = sizes[min(epoch, len(sizes) - 1)]
    return course


def fig4(**adaptive: Any) -> dict[str, Any]:
    courses = [training("small"), training("large", final=0.5), training("adaptive", **adaptive)]
    return kungfu_fig4.result_of(courses, QUICK, judged=True)


GOOD: dict[str, Any] = {"epoch_s": 0.5, "sizes": (8, 8, 16, 32)}


@pytest.mark.parametrize(
    ("adaptive", "complaint"),
    [
        ({}, None),
        ({"final": 0.956}, None),
        ({"final": 0.950}, "adaptive ends with 95.00%"),
        ({"epoch_s": 0.85}, "not 20 % less"),
        ({"sizes": (8, 16, 8)}, "the batch has shrunk"),
        ({"sizes": (8,)}, "has never grown"),
    ],
    ids=str,
)
def test_fig4_is_ok_only_if_adaptive_is_as_accurate_and_faster(adaptive: dict[str, Any], complaint: str | None) -> None:
    result = fig4(**(GOOD | adaptive))
    assert result["ok"] is (complaint is None), result["remarks"]
    assert complaint is None or any(complaint in remark for remark in result["remarks"])


def test_fig4_needs_a_large_batch_that_is_worse() -> None:
    courses = [training("small"), training("large"), training("adaptive", **GOOD)]
    assert not kungfu_fig4.result_of(courses, QUICK, judged=True)["ok"]


def test_fig4_finds_traces_that_are_not_sound() -> None:
    twice = training("adaptive", sizes=(8, 16))
    for sizes in twice.batches.values():
        sizes[5] = sizes[6] = 12
        sizes.update(dict.fromkeys(range(7, 10), 12))
        sizes[9] = 14
    assert kungfu_fig4.trace_faults(twice) == ["adaptive, seed 1: the batch has changed twice in an epoch"]
    unlike = training("adaptive", sizes=(8, 16))
    unlike.batches[1][50] = 8
    assert kungfu_fig4.trace_faults(unlike) == ["adaptive, seed 1: not all workers had the same batch sizes"]
    assert kungfu_fig4.trace_faults(training("adaptive", **GOOD)) == []


# --- figure 6 ---


def fig6(sweep: dict[int, float], *stopped: int, done: bool = True) -> dict[str, Any]:
    rows = [(1, 1, 10.0), (2, 2, 18.0)]
    courses = [Provisioning(workers, done, [[1, 10.0]], rows, ["resize 1 -> 2 took 30ms"]) for workers in stopped]
    return kungfu_fig6.result_of(sweep, courses, QUICK)


@pytest.mark.parametrize(
    ("sweep", "stopped", "is_ok"),
    [
        ({1: 10, 2: 19, 3: 19, 4: 18}, (2, 2), True),
        ({1: 10, 2: 19, 3: 19, 4: 18}, (2, 3), True),  # within the threshold
        ({1: 10, 2: 19, 3: 15, 4: 15}, (2, 3), False),
        ({1: 10, 2: 19, 3: 19, 4: 18}, (2, 1), False),
        ({1: 10, 2: 19, 3: 19, 4: 18}, (2, 4), False),
        ({1: 10, 2: 19, 3: 26, 4: 26.5}, (3, 3), True),
        ({1: 10, 2: 20, 3: 30}, (3,), False),  # the end of the sweep: more might be better
        ({1: 10, 2: 10, 3: 10}, (1,), False),
    ],
    ids=str,
)
def test_fig6_is_ok_only_if_every_run_stops_where_it_should(
    sweep: dict[int, float], stopped: tuple[int, ...], is_ok: bool
) -> None:
    assert fig6(sweep, *stopped)["ok"] is is_ok


def test_fig6_the_best_of_a_plateau_is_its_beginning() -> None:
    assert kungfu_fig6.best_of({1: 10, 2: 19, 3: 19.3, 4: 19.8}) == 2
    assert kungfu_fig6.best_of({1: 10, 2: 10.5, 3: 10.7, 4: 30}) == 4
    assert kungfu_fig6.by_rule({1: 10, 2: 10.5, 3: 10.7, 4: 30}) == 1, "the rule looks one size ahead"
    assert not fig6({1: 10, 2: 19, 3: 15}, 2, done=False)["ok"]


@draws
@pytest.mark.parametrize("number", [4, 6])
def test_results_are_shown_and_drawn(number: int, tmp_path: Path) -> None:
    module = kungfu_fig4 if number == 4 else kungfu_fig6
    result = json.loads(json.dumps(fig4(**GOOD) if number == 4 else fig6({1: 10, 2: 19, 3: 15}, 2)))
    assert len(module.table(result).rows) == 3
    module.plot(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


# --- at work ---


@pytest.mark.processes
def test_the_program_of_fig4_grows_its_batch_on_all_workers(tmp_path: Path) -> None:
    images.save(images.from_scikit_learn(), tmp_path / "digits.npz")
    setting = kungfu_fig4.Setting(
        batch=8, epochs=3, lr=0.03, workers=2, words=("--digits", str(tmp_path / "digits.npz"))
    )
    course = kungfu_fig4._train("adaptive", 1, setting, (), tmp_path)
    assert kungfu_fig4.trace_faults(course) == []
    assert set(course.batches) == {0, 1}
    assert len(course.accuracies) == len(course.times_s) == 3
    assert any(line.startswith("Gradient Noise Scale: ") for line in course.lines)


@pytest.mark.processes
def test_the_program_of_fig6_takes_back_a_worker_that_finds_no_device(tmp_path: Path) -> None:
    # A step is so long that what a busy machine adds to it hardly counts: what counts is saved by a larger batch.
    words = ("--paced", "0.08", "--devices", "1", "--batch", "2", "--places", "16")
    setting = kungfu_fig6.Setting(runs=1, max_workers=2, change_step=6, sweep_steps=8, words=words, timeout_s=100)
    course = kungfu_fig6._provision(0, setting, tmp_path)
    assert (course.workers, course.done) == (1, True)
    assert {workers for _, workers, _ in course.rows} == {1, 2}
    assert any(line.startswith("resize 1 -> 2 took") for line in course.lines)
    header = (tmp_path / "run-0" / "out_0.csv").read_text().splitlines()[0]
    assert header == "global_step,sub_step,num_workers,duration,throughput,after_run_duration"
