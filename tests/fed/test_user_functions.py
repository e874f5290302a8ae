"""Data and models of the user's own: what their functions may give, and that their mistakes are one line each."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.data.task import Task
from pliant.fed.rounds.loop import simulate
from pliant.fed.rounds.storage import warn_too_few_clients
from pliant.jobs.schema import read_job
from pliant.yaml_source import YamlSource

ROOT = Path(__file__).parents[2]

SOURCE = """\
import numpy as np, torch
from torch import nn

X, Y = np.arange(48.0).reshape(24, 2), np.arange(24) % 3

def arrays(): return (X, Y), (X[:6], Y[:6])
def tensors(path): return [torch.from_numpy(X), torch.from_numpy(Y).float()], [X[:6], Y[:6].tolist()]
def pixels(): return (X.astype(np.uint8), np.array(["b", "a", "c"])[Y]), (X[:6].astype(np.uint8), ["a"] * 6)
def flat(): return X, Y
def short(): return (X, Y[1:]), (X, Y)
def halves(): return (X, Y + 0.5), (X, Y)
def below(): return (X, Y - 1), (X, Y)
def needs(a, b): return arrays()
def raises():
    return open("/no/such/file")
def nothing(): pass
class Bare: labels = torch.arange(3)
def bare(): return Bare(), Bare()
class Odd(Bare): classes, clients, inputs = ("a",), (), (lambda self, numbers: torch.zeros(1, 2))
def odd(): return Odd(), Odd()

def net(num_classes): return nn.Linear(2, num_classes)
def no_argument(): return nn.Linear(2, 3)
def no_module(num_classes): return "cnn"
def broken(num_classes):
    return nn.Linear(2, num_classes, bais=True)
def wide(num_classes): return nn.Linear(7, num_classes)
def narrow(num_classes): return nn.Linear(2, num_classes - 1)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_own.py").write_text(SOURCE)
    (tmp_path / "users_wrong.py").write_text("def load(:\n")
    (tmp_path / "users_late.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for name in ("users_own", "users_wrong", "users_late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def task_of(data: str, model: str = "users_own:net", path: str = "") -> Task:
    found = {"kind": data if ":" in data else f"users_own:{data}", "path": path, "clients": 3}
    return build_task(FedConfig.model_validate({"data": found, "model": model}))


def test_pairs_of_arrays_and_tensors_are_samples(own: Path) -> None:
    task = task_of("arrays")
    whole = torch.arange(48.0).reshape(24, 2)
    assert torch.equal(task.train.inputs(range(24)), whole)
    assert task.train.inputs([0]).dtype == torch.float32
    assert torch.equal(task.train.labels, torch.arange(24) % 3)
    assert (task.train.classes, task.num_test, task.num_clients) == (("0", "1", "2"), 6, 3)
    assert task.model()(task.test.inputs([0, 1])).shape == (2, 3)
    same = task_of("tensors", path="anything")
    assert torch.equal(same.train.inputs(range(24)), whole)
    assert torch.equal(same.train.labels, task.train.labels)


def test_pixels_are_scaled_and_names_are_classes(own: Path) -> None:
    task = task_of("pixels")
    assert np.allclose(task.train.inputs([0, 10]).numpy(), np.array([[0, 1], [20, 21]]) / 255)
    assert (task.train.classes, task.train.labels[:3].tolist(), task.test.labels[0]) == (("a", "b", "c"), [1, 0, 2], 0)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("flat", "data.kind 'users_own:flat': its train samples are ndarray, without 'labels': return training and test"),
        ("nothing", "data.kind 'users_own:nothing' gave NoneType: return training and test samples, each (inputs, labels)"),
        ("short", "data.kind 'users_own:short': train has 24 inputs and 23 labels: give one for each"),
        ("halves", "data.kind 'users_own:halves': a label is 0.5: number the classes from 0"),
        ("below", "data.kind 'users_own:below': a label is -1: number the classes from 0"),
        ("bare", "data.kind 'users_own:bare': its train samples are Bare, without 'classes': return"),
        ("odd", "data.kind 'users_own:odd': its train labels are 0 to 2, and there are 1 classes"),
        ("needs", "data.kind 'users_own:needs': missing a required argument: 'a'; it is called with nothing: return"),
        ("raises", "data.kind 'users_own:raises' failed: FileNotFoundError: [Errno 2] No such file or directory: "
                   "'/no/such/file' (at {own}/users_own.py:15)"),
        ("users_wrong:load", "data.kind 'users_wrong:load': users_wrong cannot be imported: SyntaxError: invalid syntax "
                             "(at {own}/users_wrong.py:1)"),
        ("users_late:load", "data.kind 'users_late:load': users_late cannot be imported: ZeroDivisionError: division by zero "
                            "(at {own}/users_late.py:2)"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_users_data_is_one_line(own: Path, data: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        task_of(data)
    assert str(refusal.value).startswith(told.replace("{own}", str(own)))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("no_argument", "model 'users_own:no_argument': too many positional arguments; it is called with the number of classes"),
        ("no_module", "model 'users_own:no_module' gave str: it is called with the number of classes: return a torch.nn.Module"),
        ("broken", "model 'users_own:broken' failed: TypeError: "),
        ("wide", "model 'users_own:wide' cannot be given a batch of shape [1, 2]: RuntimeError: mat1 and mat2"),
        ("narrow", "model 'users_own:narrow' gives [1, 2] for one sample: give a score for each of 3 classes"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_users_model_is_one_line(own: Path, model: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        task_of("arrays", f"users_own:{model}").model()
    assert str(refusal.value).startswith(told)
    assert "\n" not in str(refusal.value)
    if model == "broken":
        assert f"(at {own}/users_own.py:26)" in str(refusal.value)


def test_the_example_learns_and_the_guide_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = read_job(YamlSource.read(ROOT / "examples" / "federated" / "own.yml")).job
    monkeypatch.syspath_prepend(job.directory)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    history = simulate(job.config)
    del sys.modules["own"]
    assert history.final is not None
    assert history.final.accuracy > 0.85
    code = (ROOT / "examples" / "federated" / "own.py").read_text().partition("\n\n")[2]
    assert code in (ROOT / "docs" / "federated.md").read_text()


def test_more_participants_than_clients_are_refused_and_more_invitations_are_told_at_the_start(own: Path) -> None:
    def told(participants: int) -> list[str]:
        given = {"data": {"kind": "users_own:arrays", "clients": 3}, "model": "users_own:net", "rounds": 1}
        said: list[str] = []
        simulate(FedConfig.model_validate({**given, "participants": participants, "batching": 0}), say=said.append)
        return [line for line in said if line.startswith("warning")]

    all_of = "but there are 3 clients: each round invites all of them, and nobody is selected; "
    assert told(3) == []
    with pytest.raises(ConfigError, match="participants 4: the job has 3 clients; use 3 or less, or more clients"):
        told(4)
    over = FedConfig(participants=3, overcommit=2)
    asked = "warning: participants 3 x overcommit 2 is 6, "
    assert (
        warn_too_few_clients(over, 3)
        == f"{asked}{all_of}lower participants, or raise data.clients, or lower overcommit"
    )
    assert warn_too_few_clients(over, 6) == ""
