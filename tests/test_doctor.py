"""`pliant doctor`: a healthy machine, models that can and cannot be time-sliced, and input that is neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.cli import doctor
from pliant.cli.main import main
from pliant.train import fold_check

MODELS = """
import torch.distributed as dist
from torch import nn

class Shares(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x

def plain():
    return nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2))

def convolutions():
    return nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3), nn.AdaptiveAvgPool2d(1))

def collective():
    return nn.Sequential(nn.Linear(2, 2), Shares(), nn.SyncBatchNorm(2))

def breaks():
    raise RuntimeError("no weights\\nmore")

def leaves():
    raise SystemExit(3)

def number():
    return 3

def needs(width):
    return nn.Linear(width, 1)
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The program itself, in a directory with models.py: exit code, output, errors."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # so that the path is restored afterwards

    monkeypatch.setattr("pliant.cli.main.COMMANDS", ("doctor",))  # to make all of them takes 0.1 s each time

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pliant", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


@pytest.mark.usefixtures("no_leaks")
def test_this_machine(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--json", "found.json", "--replicas", "3")
    assert code == 0, out
    for line in ("python: yes", "memfd: yes", "abstract sockets: yes", "D1: yes", "D2: yes"):
        assert line in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] is True
    assert {each["what"] for each in found["machine"]} >= {"torch", "CUDA", "cores", "lab", "mpirun", *doctor.OPTIONAL}


def test_a_torch_with_another_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_check.order, "chain", lambda chunk, num_replicas: tuple(range(num_replicas)))
    code, out, _ = run("--replicas", "3")
    assert code == 1
    assert "D1: NO" in out
    assert "D0: yes" in out
    code, out, _ = run("models.py:plain", "--replicas", "3")
    assert code == 0, "it can be time-sliced"
    assert "D1: no" in out


def test_a_model_without_trouble(run: Run) -> None:
    code, out, _ = run("models.py:plain")
    assert code == 0
    assert "no" not in [line.split(": ")[1] for line in out.splitlines()]
    assert "D2 on GPUs of several kinds: yes" in out


def test_a_model_for_gpus_of_one_kind(run: Run) -> None:
    code, out, _ = run("models.py:convolutions")
    assert code == 0
    assert "0 and 1 more" in out
    for line in ("time-slicing: yes", "D1: yes", "D1 on GPUs: no", "D2: yes", "D2 on GPUs of several kinds: no"):
        assert line in out


def test_a_model_that_cannot_be_time_sliced(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("models.py:collective", "--json", "found.json")
    assert code == 1
    assert "time-slicing: no" in out
    assert "SyncBatchNorm" in out
    found = json.loads((tmp_path / "found.json").read_text())
    first, second = found["obstacles"]["time-slicing"]
    assert (first["module"], first["type"]) == ("1", "Shares")
    assert "models.py:7" in first["why"]
    assert second["module"] == "2"
    assert all(each["remedy"] for each in (first, second))
    assert found["verdicts"] == {
        "time-slicing": False, "D1": False, "D1 on GPUs": False, "D2": False, "D2 on GPUs of several kinds": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["models.py"], "is not FILE.py:FUNCTION"),
        (["models.py:"], "is not FILE.py:FUNCTION"),
        (["absent.py:build"], "no file absent.py"),
        (["models.py:absent"], "no function absent: it has Shares, plain"),
        (["models.py:breaks"], "RuntimeError: no weights"),
        (["models.py:leaves"], "SystemExit: 3"),
        (["models.py:number"], "returned a int"),
        (["models.py:needs"], "missing 1 required positional argument"),
        (["broken.py:build"], "cannot be imported: SyntaxError"),
        (["notes.txt:build"], "must end in .py"),
        (["models.py:plain", "--json", "absent/x.json"], "cannot be written"),
        (["--replicas", "0"], "at least 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line(run: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "notes.txt").write_text("hello")
    code, _, err = run(*arguments)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1
