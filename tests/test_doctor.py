"""`pliant doctor`: a healthy machine, models that can and cannot be time-sliced, and input that is neither."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.cli import doctor_machine, extras
from pliant.cli.main import main
from pliant.cluster import PortRange
from pliant.train import determinism

MODELS = """
import torch
import torch.distributed as dist
from torch import nn

class Shares(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x

def plain():
    return nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2))

def convolutions():
    return nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3), nn.AdaptiveAvgPool2d(2))

def collective():
    return nn.Sequential(nn.Linear(2, 2), Shares(), nn.SyncBatchNorm(2))

class Unpool(nn.Module):
    def forward(self, x):
        pooled, indices = nn.functional.max_pool1d(x, 2, return_indices=True)
        return nn.functional.max_unpool1d(pooled, indices, 2)

def unpools():
    return nn.Sequential(nn.Linear(4, 4), Unpool()), torch.randn(2, 4)

def steps():
    return nn.Linear(4, 4), lambda model: model(torch.randn(2, 4)).square().sum()

def wrong_batch():
    return nn.Linear(4, 4), torch.randn(2, 5)

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
    rows = {what: (state, found) for state, what, found in (line.split("\t") for line in out.splitlines())}
    assert list(rows) == [
        "python", "torch", "CUDA", "NCCL", "D0", "D1", "D2", "cores", "memfd", "shm", "abstract sockets", "ports",
        "ssh", *extras.USES,
    ]  # fmt: skip
    for what in ("python", "torch", "D0", "D1", "D2", "memfd", "abstract sockets"):
        assert rows[what][0] == "ok"
    for what, (state, told) in rows.items():
        assert ("->" in told) == (state != "ok"), f"{what}: what is not there has a remedy"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] is True
    assert {each["what"]: each["state"] for each in found["machine"]} == {what: row[0] for what, row in rows.items()}


BARE = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nowhere())
import os
os.geteuid = lambda: 1000
from pliant.cli.main import main
main()
"""


def test_a_machine_without_anything() -> None:
    """No torch, no optional package, no program, no root: findings with remedies, and no traceback."""
    blocked = ["torch", *extras.USES]
    command = [sys.executable, "-c", BARE.format(blocked=blocked), "doctor", "--json"]
    environ = {"PATH": "", "HOME": "/nowhere", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    found = {each["what"]: each for each in report["machine"]}
    assert report["ok"] is False
    for what in ("torch", "D1"):
        assert found[what]["state"] == "missing"
        assert found[what]["remedy"].startswith("pip install 'torch")
    for what in ("ssh", *extras.USES):
        assert found[what]["state"] == "warn", what
    assert found["flwr"]["remedy"] == "pip install 'flwr[simulation]<1.42,>=1.41'"
    assert {found[what]["state"] for what in ("python", "memfd", "cores")} == {"ok"}


def test_ports_and_shared_memory_that_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor_machine, "SERVERS", {"pliant serve": port})
        (found,) = doctor_machine._ports()
        assert (found.state, found.found.split(";")[0]) == ("warn", f"in use: {port} of `pliant serve`")
        monkeypatch.setattr(doctor_machine, "PortRange", lambda: PortRange(port, port))
        (found,) = doctor_machine._ports()
        assert found.remedy.startswith("pliant run -port-range")
    monkeypatch.setattr(doctor_machine, "LITTLE_SHM", 1 << 60)
    assert [each.state for each in doctor_machine._memory()] == ["ok", "ok", "warn"]


def test_a_torch_with_another_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism.order, "chain", lambda chunk, num_replicas: tuple(range(num_replicas)))
    code, out, _ = run("--replicas", "3")
    assert code == 1
    assert "missing\tD1\t" in out
    assert "ok\tD0\t" in out
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
    assert "models.py:8" in first["why"]
    assert second["module"] == "2"
    assert all(each["remedy"] for each in (first, second))
    assert found["verdicts"] == {
        "time-slicing": False, "D1": False, "D1 on GPUs": False, "D2": False, "D2 on GPUs of several kinds": False,
    }  # fmt: skip


def test_steps_on_a_device(run: Run, tmp_path: Path) -> None:
    code, out, err = run("models.py:unpools", "--device", "cpu", "--json", "found.json")
    assert code == 1, err
    assert "max_unpool2d (forward) has no deterministic kernel on cpu" in out
    assert 'allow=["max_unpool2d"]' in out
    assert "strict kernels on the CPU: no" in out
    assert re.search(
        r"a step on cpu \(forward and backward\): \d+\.\d ms free, \d+\.\d ms strict \(\d+\.\d\d times\)", out
    )
    found = json.loads((tmp_path / "found.json").read_text())
    (first,) = found["obstacles"]["strict kernels on the CPU"]
    assert (first["module"], first["type"]) == ("1", "Unpool")
    assert found["ok"] is False
    assert found["verdicts"]["time-slicing"] is True
    assert found["price"]["device"] == "cpu"
    assert min(found["price"]["free_ms"], found["price"]["strict_ms"]) > 0
    code, out, err = run("models.py:steps", "--device", "cpu")
    assert code == 0, err
    assert "strict kernels on the CPU: yes" in out


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
        (["models.py:plain", "--json", "absent/x.json"], "can be written"),
        (["--replicas", "0"], "use 1 or more"),
        (["--device", "cpu"], "name it as FILE.py:FUNCTION"),
        (
            ["models.py:plain", "--device", "cpu"],
            "needs a batch: let the function of models.py:plain return `model, batch`",
        ),
        (["models.py:plain", "--device", "tpu"], "use cpu or cuda"),
        (["models.py:wrong_batch", "--device", "cpu"], "failed: RuntimeError: mat1 and mat2 shapes"),
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
