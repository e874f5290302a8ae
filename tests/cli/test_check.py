"""`pliant check`: what is compared, what is said, and real programs, good and bad."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import forked
import pytest

from pliant.cli import check
from pliant.cli.check import (
    ADVICE,
    BEFORE,
    CheckedRun,
    ProgramChecker,
    RunShape,
    describe,
    first_difference,
    placements,
)
from pliant.cluster import View, Worker
from pliant.errors import PROGRAM_EXIT, LaunchError
from pliant.identity import CheckSettings, WorkerSpec, worker_spec
from pliant.launch.supervisor import NEVER_JOINED, TIMEOUT_EXIT

PROGRAM = """
import sys
import torch, pliant
from torch import nn

torch.manual_seed(0)
job = pliant.join(replicas=int(sys.argv[1]))
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job.wrap(model, optimizer)
data = torch.utils.data.TensorDataset(torch.randn(120, 4), torch.randint(0, 2, (120,)))
loader = job.loader(data, batch_size=4, shuffle=True)
counted = 0
for epoch in job.epochs(3):
    for step in loader:
        for x, y in step:
            counted += 1
            if "wrong" in sys.argv and counted > 7:
                optimizer.param_groups[0]["lr"] = 0.1 / counted
            if "put" in sys.argv:  # refused unless it is allowed
                torch.use_deterministic_algorithms(True)
                x = x.clone().put_(torch.tensor([0]), torch.ones(1), accumulate=False)
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
raise SystemExit("the whole training was done")
"""


def run_check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM)
    return forked.run([forked.PLIANT, "check", *words], cwd=folder, timeout=170)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_good_program_has_the_same_bits_everywhere(tmp_path: Path) -> None:
    words = ("--steps", "5", "--order", "ddp", "--allow", "put_", "--allow", "median", "--json", "found.json")
    ended = run_check(tmp_path, *words, "train.py", "2", "put", "--json")
    assert ended.returncode == 0, ended.stderr
    same, allowed = ended.stdout.splitlines()
    assert same.startswith("the same bits on 1 and 2 workers, and with a newcomer in the middle: 5 steps, ")
    assert allowed.startswith("bits not promised: median, put_ (allowed without a deterministic kernel)")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"]
    assert (found["replicas"], found["steps"]) == (2, 5)
    assert found["not_promised"] == ["median", "put_"]
    assert found["placements"] == ["1 worker", "2 workers", "1 worker and a newcomer"]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_port_that_counts_turns_is_found_with_step_and_tensor(tmp_path: Path) -> None:
    """On one worker the counter passes 7 in step 2, on three workers in step 7."""
    ended = run_check(tmp_path, "--steps", "4", "--workers", "3", "train.py", "3", "wrong")
    assert ended.returncode == 1, ended.stderr
    first, value, advice = ended.stdout.splitlines()
    assert first.startswith("not the same bits: step 2 differs between 1 worker and 3 workers in: 0.weight, and ")
    assert value == "  lr (SGD): 0.011111111111111112 on 1 worker, 0.1 on 3 workers"
    assert advice == f"look here: {ADVICE['optimizer']}"


# --- what is compared, on values ---


def an_outcome(placement: RunShape, *steps: dict[str, str], begin: str = "x") -> CheckedRun:
    digests = {BEFORE: {"w": f"sha256:{begin}"}, **dict(enumerate(steps))}
    return CheckedRun(placement, {"replicas": 3, "averaging": False}, digests, placement.grow_to or placement.workers)


ONE, THREE, GROWN = RunShape(1), RunShape(3), RunShape(1, grow_to=2)
STEP = {"w": "sha256:1", "lr (SGD)": "0.1", "ema count": "2", "torch's random state of replica 0": "sha256:3"}


@pytest.mark.parametrize(
    ("change", "advice", "where"),
    [
        ({"w": "sha256:2", "lr (SGD)": "0.2"}, "optimizer", THREE),
        ({"ema count": "3"}, "tracked", THREE),
        ({"torch's random state of replica 0": "sha256:4"}, "random", THREE),
        ({"w": "sha256:2"}, "state", THREE),
        ({"w": "sha256:2"}, "newcomer", GROWN),
    ],
)
def test_the_advice_fits_what_differs(change: dict[str, str], advice: str, where: RunShape) -> None:
    found = first_difference(an_outcome(ONE, STEP, STEP), an_outcome(where, STEP, {**STEP, **change}))
    assert found is not None
    assert (found.step, found.parts, found.advice) == (1, tuple(change), ADVICE[advice])
    assert f"step 1 differs between 1 worker and {where} in: {next(iter(change))}" in describe(found)
    assert first_difference(an_outcome(ONE, STEP), an_outcome(where, STEP)) is None


def test_other_beginnings_and_other_lengths_are_differences() -> None:
    found = first_difference(an_outcome(ONE, STEP), an_outcome(THREE, STEP, begin="y"))
    assert found is not None
    assert "the state before the first step differs" in describe(found)
    shorter = first_difference(an_outcome(ONE, STEP, STEP), an_outcome(THREE, STEP))
    assert shorter is not None
    assert (shorter.step, shorter.parts) == (1, ("the number of steps",))


def test_placements_follow_the_replicas() -> None:
    assert [str(each) for each in placements(4)] == ["4 workers", "2 workers", "1 worker and a newcomer"]
    assert [str(each) for each in placements(2)] == ["2 workers", "1 worker and a newcomer"]
    assert next(str(each) for each in placements(64)) == "8 workers"
    assert placements(1) == []


def fails(code: int = 0, output: str = "", *, steps: int = 0, facts: bool = True, where: RunShape = ONE) -> str:
    """The message about a run that ended like this."""
    outcome = an_outcome(where, *[STEP] * steps)
    outcome.code, outcome.output, outcome.most_workers = code, output, 1
    outcome.facts = outcome.facts if facts else None
    with pytest.raises(LaunchError) as raised:
        ProgramChecker(["train.py"], 10, "1m", (), Path(), lambda *_: None)._check(outcome)
    return str(raised.value)


def test_bad_programs_are_explained() -> None:
    assert fails(1, "Traceback\nValueError: no") == (
        "train.py failed on 1 worker with exit code 1; the last lines of its output:\n  Traceback\n  ValueError: no"
    )
    for never in (fails(PROGRAM_EXIT, f"[E] {NEVER_JOINED}", facts=False), fails(facts=False)):
        assert never.startswith("train.py ended on 1 worker without training: it has to call pliant.join")
    assert "without a single step" in fails()
    assert "did not do 10 steps on 1 worker within 1m, but 3" in fails(TIMEOUT_EXIT, steps=3)
    assert "before that one took part" in fails(steps=10, where=GROWN)
    lost = "x::stderr] NameError: y\n[I] lost 127.0.0.1.10001: exit code 1; not replaced\nall 1/1 finished"
    assert "failed on 1 worker and a newcomer, on one of them: lost 127" in fails(output=lost, steps=10, where=GROWN)
    drew = "pliant: a.py:1: TrainError: before the loop over step 3 the workers a and b drew different amounts"
    assert fails(PROGRAM_EXIT, drew).startswith("not the same bits on 1 worker: before the loop over step 3")
    differs = "pliant.errors.TrainError: step 3: the workers do not have the same state. b differs\n[E] more"
    assert fails(PROGRAM_EXIT, differs, steps=3, where=THREE) == (
        "not the same bits on 3 workers: step 3: the workers do not have the same state. b differs"
    )


def test_programs_that_depend_on_the_workers_by_design_are_told_so() -> None:
    outcome = an_outcome(ONE, STEP)
    for facts, message in (({"replicas": None, "averaging": False}, "replicas=N"), ({"averaging": True}, "averages")):
        outcome.facts = facts
        with pytest.raises(LaunchError, match=message):
            check._replicas(outcome, "train.py")


def test_what_is_written_so_far_is_read(tmp_path: Path) -> None:
    lines = [{"replicas": 3, "averaging": False, "digests": {}}, {"step": 0, "workers": 2, "digests": STEP}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1, "wor')
    outcome = CheckedRun(ONE)
    outcome.read(tmp_path)
    assert (outcome.num_steps, outcome.most_workers, outcome.steps[0]) == (1, 2, STEP)


def test_mistakes_in_the_command_end_with_2(pliant: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for words, said in (
        (("missing.py",), "missing.py"),
        (("--steps", "2", "train.py"), "--steps 2"),
        (("--workers", "0", "train.py"), "--workers 0"),
        (("--determinism", "D9", "train.py"), "D9"),
        (("--order", "fast", "train.py"), "use one of ddp, tree"),
        (("--timeout", "soon", "train.py"), "--timeout"),
        (("-m", "no.such_module"), "no.such_module"),
        ((), "PROGRAM"),
    ):
        code, _, err = pliant("check", *words)
        assert code == 2, (words, err)
        assert said in err


def test_settings_reach_the_workers() -> None:
    me, settings = Worker("10.0.0.1", 5), CheckSettings("/tmp/x", 7, 2, 4)
    spec = WorkerSpec(
        worker=me, view=View(0, (me,), (Worker("10.0.0.1", 9),)), secret=b"x" * 16, verify=0, check=settings
    )
    read = worker_spec(spec.to_environ())
    assert (read.check, read.verify) == (settings, 0)
    plain = worker_spec(replace(spec, check=None, verify=None).to_environ())
    assert (plain.check, plain.verify) == (None, None)


@pytest.mark.parametrize(("allowed", "advice"), [([], "seed"), (["put_"], "allowed")])
def test_a_program_that_does_not_repeat_itself_is_told_what_it_may_be(
    allowed: list[str], advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each run has other bits; the last one is that on one worker again."""

    def run(_: ProgramChecker, placement: RunShape) -> CheckedRun:
        outcome = an_outcome(placement, {"w": f"sha256:{placement}"})
        outcome.facts = {"replicas": 3, "averaging": False, "not_promised": allowed}
        return outcome

    monkeypatch.setattr(ProgramChecker, "run", run)
    report = check._check(["train.py"], 5, [3], "1m", (), tmp_path)
    assert (report["ok"], report["placements"][-1], report["not_promised"]) == (False, "1 worker again", allowed)
    assert report["text"].endswith(f"look here: {ADVICE[advice]}")
