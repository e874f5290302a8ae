"""`pliant reproduce`: its list, what it judges, what it draws from a stored result, and one figure end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
from command import command
from gang import FULL
from pliant_repro.figures import launch
from pliant_repro.figures.catalog import FIGURES, find
from pliant_repro.figures.easyscale import SERIES, CopyCost, DeterminismCost, Memory, SameBits, SwitchCost
from pliant_repro.figures.figure import Options, save
from pliant_repro.figures.kungfu_adaptive import ResizeLatency
from pliant_repro.figures.launch import RunLog, Step, Task, Turn

from pliant.errors import ConfigError, LaunchError

QUICK = Options(quick=True, scale="tiny", device="cpu")
FORM = {"bench", "args", "ours", "peers", "cells", "machine", "ok", "remarks"}


def pliant(*words: str) -> Any:
    return command("reproduce", *words)


# The command line


def test_the_list_names_every_figure() -> None:
    answer = pliant("--list")
    assert answer.exit_code == 0
    assert [line.split()[0] for line in answer.stdout.splitlines()] == list(FIGURES)


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    answer = forked.run([forked.PLIANT, "reproduce", "easyscale-fig9", "nonsense"], cwd=Path.cwd(), timeout=60)
    assert answer.returncode == 2
    [line] = answer.stderr.splitlines()
    assert line.startswith("pliant: reproduce nonsense: unknown")
    assert all(name in line for name in FIGURES)


@pytest.mark.parametrize(
    "words",
    [("--quick", "--full"), ("--models", "alexnet"), ("--scale", "huge"), ("--device", "tpu"), ("--steps", "-1")],
    ids=" ".join,
)
def test_wrong_wishes_are_refused_before_anything_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    answer = pliant("easyscale-fig9", "--no-plot", "--out", str(tmp_path), *words)
    assert isinstance(answer.exception, ConfigError)


def test_all_is_every_figure_and_a_name_twice_is_one() -> None:
    assert find(["all"]) == list(FIGURES.values())
    assert find(["kungfu-fig7", "kungfu-fig7"]) == [FIGURES["kungfu-fig7"]]


# Runs of the training program


def log_of(turns: Sequence[Turn]) -> RunLog:
    """Return the log of one worker."""
    log = RunLog(Path())
    log.turns = {1: list(turns)}
    return log


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(LaunchError, match="is not in the zoo"):
        launch.train(Task(model="alexnet", steps=1), timeout_s=60)


def test_logs_of_several_workers_become_one(tmp_path: Path) -> None:
    first = [
        {"kind": "turn", "step": 0, "replica": 0, "loss": 1.5, "size": 2, "at_s": 10.0},
        {"kind": "state", "step": 0, "digest": "a", "at_s": 10.1},
        {"kind": "turn", "step": 1, "replica": 0, "loss": 1.0, "size": 2, "at_s": 10.5},
        {"kind": "change", "step": 1, "old_size": 2, "new_size": 1, "pause_s": 0.1, "lost": False, "at_s": 10.6},
    ]
    second = [{**first[0], "replica": 1, "rank": 1, "loss": 2.5, "memory_bytes": 7}, {**first[3], "pause_s": 0.3}]
    for pid, lines in ((2, first), (1, second)):
        (tmp_path / f"{pid}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tu')
    log = RunLog(tmp_path)
    log.read()
    log.read()
    assert [worker[0].replica for worker in log.workers] == [0, 1]
    assert log.steps[0].losses == {0: [1.5], 1: [2.5]}
    assert (log.steps[0].digests, log.steps[0].pids, log.last_step) == (["a"], {0: 2, 1: 1}, 0)
    assert log.peak_bytes() == 7
    assert log.step_times_s(skip=1) == [0.5]
    [change] = log.changes
    assert (change.new_size, change.pause_s) == (1, 0.3)


# What is judged. Each figure's claim must be able to fail.


def staged(changed_from: int | None = None) -> RunLog:
    """Six steps of fig. 9; from `changed_from` on other bits, with the same losses."""
    log = RunLog(Path())
    for step, size in enumerate([4, 4, 2, 2, 3, 3]):
        digest = "x" if changed_from is not None and step >= changed_from else f"{step}"
        log.steps[step] = Step({3: [float(step)]}, [digest], size)
    return log


@pytest.mark.parametrize(
    ("level", "changed_from", "complaint"),
    [
        ("D1", None, None),
        ("D1", 5, "D1 differs from DDP in stage 2, at step 5"),
        ("D1", 0, "D1 differs from DDP in stage 0, at step 0"),
        ("D0", 2, None),
        ("D0", None, "never differs"),
        ("D0", 1, "D0 differs from DDP in stage 0"),
        ("D1, unlike", None, "was not refused"),
    ],
    ids=str,
)
def test_fig9_is_ok_only_if_the_bits_say_so(level: str, changed_from: int | None, complaint: str | None) -> None:
    series = SameBits().compare(staged(changed_from), staged(), 6)
    found = SameBits().judge({"series": {level: series}}, 2)
    assert found == [] if complaint is None else any(complaint in text for text in found)


def test_fig9_holds_a_step_that_is_missing_for_different() -> None:
    lacking = staged()
    del lacking.steps[3]
    series = SameBits().compare(lacking, staged(), 6)
    assert series["same_bits"] == [True, True, True, False, True, True]


def memory_cell(replicas: int, ours: int, packed: int) -> dict[str, Any]:
    numbers = {"median_s": 0.1 * replicas, "iqr_s": 0.0, "replicas_per_s": 10.0}
    peers = {"packed": {**numbers, "memory_bytes": packed << 20}}
    return {"model": "resnet50", "replicas": replicas, "ours": {**numbers, "memory_bytes": ours << 20}, "peers": peers}


def test_fig10_is_ok_only_if_memory_stays() -> None:
    flat, growing = (
        [memory_cell(1, 500, 490), memory_cell(8, 510, 3900)],
        [memory_cell(1, 500, 490), memory_cell(8, 3000, 3900)],
    )
    assert Memory().judge("resnet50", flat, True) == Memory().judge("resnet50", flat, False) == []
    assert Memory().judge("resnet50", growing, True)
    assert Memory().judge("resnet50", growing, False)


def switching(on_s: float, off_s: float) -> RunLog:
    now_s, turns = 0.0, []
    for step in range(12):
        for replica in range(SwitchCost.replicas):
            now_s += off_s if step % 2 else on_s
            turns.append(Turn(step, replica, 1, now_s, switched=step % 2 == 0, switch_s=on_s - off_s))
    return log_of(turns)


def test_fig11_is_ok_only_if_the_switch_is_cheap() -> None:
    cheap, dear = (SwitchCost().cell("bert", switching(on_s, 0.100)) for on_s in (0.101, 0.110))
    assert cheap["ours"]["difference"] == pytest.approx(0.01)
    assert SwitchCost().judge([cheap]) == []
    assert SwitchCost().judge([dear]) == ["bert: the switch takes 9.1% of a micro-step"]


def test_fig12_is_ok_only_if_d1_is_cheap_in_some_round() -> None:
    fig12 = DeterminismCost()
    cheap = fig12.cell("bert", {"baseline": [[0.1]], "D1": [[0.101]], "D1+D2": [[0.5]]})
    dear = fig12.cell("vgg19", {"baseline": [[0.1], [0.1]], "D1": [[0.15], [0.14]], "D1+D2": [[0.5], [0.5]]})
    varying = fig12.cell("vgg19", {"baseline": [[0.1], [0.1]], "D1": [[0.15], [0.1]], "D1+D2": [[0.5], [0.5]]})
    assert fig12.judge([cheap]) == fig12.judge([varying]) == []
    assert "in every round" in fig12.judge([dear])[0]
    assert fig12.judge([cheap, dear])
    short = fig12.cell("neumf", {"baseline": [[0.1]] * 3, "D1": [[0.104], [0.2], [0.106]], "D1+D2": [[0.5]] * 3})
    assert fig12.judge([cheap, short]) == ["neumf: D1 costs 6.0%, at most 5%"]


def test_processes_that_take_turns_have_the_times_of_their_own_blocks() -> None:
    turns = [{"step": step, "at_s": at_s} for step, at_s in enumerate([1.0, 1.1, 1.2, 5.0, 5.2, 5.4, 9.0])]
    log = RunLog(Path(), "")
    log.turns = {1: [Turn(replica=0, size=1, **turn) for turn in turns]}  # type: ignore[arg-type]
    assert log.block_times_s(3) == [pytest.approx([0.1, 0.1]), pytest.approx([0.2, 0.2])]


def turns_of_8(copy_s: float, sync_s: float) -> RunLog:
    turns = [
        Turn(step, replica, 1, 0.0, took_s=sync_s if replica == 7 else copy_s)
        for step in range(5)
        for replica in range(8)
    ]
    return log_of(turns)


def test_fig13_is_ok_only_if_copies_are_cheap() -> None:
    ddp = log_of([Turn(step, 0, 8, 0.4 * step) for step in range(5)])  # 0.1 s with a device each
    good, bad = (CopyCost().cell("bert", turns_of_8(copy_s, 0.105), ddp, 2) for copy_s in (0.08, 0.12))
    assert CopyCost().judge([good]) == []
    assert CopyCost().judge([bad]) == ["bert: a replica that only copies takes 1.20x of a DDP worker's step"]


def printed(*lines: str) -> str:
    return "".join(f"[127.0.0.1.10000::stdout] {line}\n" for line in lines)


GROWN = ("resize 1 -> 2 took 38.2ms", "request to first step with 2 workers: 1.150s")
HERE, THERE = (*GROWN, "resize 2 -> 1 took 9.5ms"), ("resize 1 -> 4 took 90.0ms", "resize 4 -> 1 took 4.0ms")


def fig7(here: Sequence[str] = HERE, there: Sequence[str] = THERE) -> dict[str, Any]:
    figure = ResizeLatency()
    cells = [*figure.cells(2, "", printed(*here)), *figure.cells(4, " hosts", printed(*there))]
    return figure.result_of(cells, 1, QUICK)


@pytest.mark.parametrize(
    ("here", "there", "is_ok"),
    [
        (HERE, THERE, True),
        ((*GROWN, "resize 2 -> 1 took 50.1ms"), THERE, False),
        (("resize 1 -> 2 took 21.39s", "resize 2 -> 1 took 9.5ms"), THERE, False),
        (GROWN, THERE, False),
        (HERE, (), False),
    ],
)
def test_fig7_is_ok_only_if_resizes_are_faster_than_the_papers(
    here: Sequence[str], there: Sequence[str], is_ok: bool
) -> None:
    assert fig7(here, there)["ok"] is is_ok


def test_fig7_stands_beside_the_paper() -> None:
    schedule = ResizeLatency.artifact_schedule(4)
    assert schedule[:3] == [(10, 4), (20, 1), (30, 4)]
    assert schedule[-2:] == [(90, 4), (100, 0)]
    result = fig7()
    assert result["ours"]["until_joined"]["median_s"] == 1.15
    grow, shrink = result["cells"][2:]
    assert (grow["resize"], grow["ours"]["median_s"]) == ("1 -> 4 hosts", 0.09)
    assert grow["peers"]["paper"]["median_s"] == 20.39
    assert shrink["peers"]["paper"]["speedup"] == pytest.approx(10.03)


# From a stored result to a picture


def test_a_stored_result_is_drawn_again(tmp_path: Path) -> None:
    stored = fig7(GROWN)
    save(stored, tmp_path / "kungfu-fig7.json")
    answer = pliant("kungfu-fig7", "--replot", "--out", str(tmp_path), "--json", str(tmp_path / "all.json"))
    assert answer.exit_code == 1, answer.output  # its claim does not hold
    assert "the claim does not hold" in answer.stdout
    assert (tmp_path / "kungfu-fig7.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "all.json").read_text()) == json.loads(json.dumps(stored))


def test_a_damaged_result_is_not_drawn(tmp_path: Path) -> None:
    (tmp_path / "kungfu-fig7.json").write_text('{"bench": "easyscale-fig9"}')
    for name in ("kungfu-fig7", "easyscale-fig9"):  # another figure's, and none
        assert isinstance(pliant(name, "--replot", "--out", str(tmp_path)).exception, ConfigError)


# End to end


@pytest.mark.skipif(not FULL, reason="tens of seconds beside what smaller tests show: PLIANT_FULL=1")
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_fig9_with_real_processes() -> None:
    [d1] = [each for each in SERIES if each.name == "D1"]
    result = SameBits().measure(Options(quick=True, steps=2), [d1])
    assert result.keys() >= FORM
    assert result["ok"], result["remarks"]
    [cell] = result["cells"]  # type: ignore[misc]
    assert cell["series"]["D1"]["same_bits"] == [True] * 6
    assert cell["series"]["D1"]["workers"] == [4, 4, 2, 2, 3, 3]
