"""What cannot be time-sliced is found without running it, and what can be is left in peace."""

from __future__ import annotations

import functools
import importlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as collectives
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_gather as fetch

from pliant.errors import Unsliceable
from pliant.train.obstacles import check, hetero, nondeterministic, obstacles


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        collectives.all_reduce(x)
        return x


def average(x: torch.Tensor) -> torch.Tensor:
    return deeper(x)


def deeper(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


class Direct(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.broadcast(x, 0)
        return x


class Aliased(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.share(x)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        fetch([x], x)
        return x


class InHelper(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return average(x)


class InFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AllReduce.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class ImportedInside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as d

        d.reduce_scatter_tensor(x, x)
        return x


class ImportedFromInside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed import barrier, get_rank

        get_rank()
        barrier()
        return x


class InLambda(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(lambda y: dist.all_reduce(y))(each) for each in x])


class Inherited(Direct):
    pass


class Innocent(nn.Module):
    """Uses words that look like collectives, and asks torch.distributed questions that are none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_available() and dist.is_initialized():
            x = x + dist.get_world_size() * 0
        return functools.reduce(torch.add, [x.gather(0, torch.zeros(1, dtype=torch.long)), x.broadcast_to(x.shape)])


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, args, out: dist.all_reduce(out))
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = functools.partial(average)  # type: ignore[method-assign]
    return layer


def without_source() -> nn.Module:
    space: dict[str, object] = {"__name__": "typed"}
    exec("import torch.distributed as d\nfrom torch import nn\n"
         "class Typed(nn.Module):\n    def forward(self, x):\n        return d.all_reduce(x)", space)  # fmt: skip
    return space["Typed"]()  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize(
    "make",
    [Direct, Aliased, InHelper, InFunction, ImportedInside, ImportedFromInside, InLambda, Inherited, hooked, patched,
     without_source],
)  # fmt: skip
def test_collectives_are_found(make: type[nn.Module]) -> None:
    (found,) = obstacles(nn.Sequential(nn.ReLU(), make()))
    assert found.module == "1"
    assert "torch.distributed." in found.why
    assert ".py:" in found.why or "<string>:" in found.why
    assert found.remedy


def complex_model() -> nn.Module:
    model = nn.Module()
    model.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def with_generator(kind: object) -> nn.Module:
    model = nn.Dropout()
    model.source = kind
    return model


@pytest.mark.parametrize(
    ("model", "why", "remedy"),
    [
        (nn.SyncBatchNorm(3), "over all ranks", "BatchNorm"),
        (nn.DataParallel(nn.Linear(1, 1)), "by itself", "bare model"),
        (nn.Embedding(3, 2, sparse=True), "sparse", "sparse=False"),
        (nn.EmbeddingBag(3, 2, sparse=True), "sparse", "sparse=False"),
        (nn.LazyLinear(3), "no shape", "one batch"),
        (nn.Linear(2, 2, device="meta"), "meta", "real device"),
        (complex_model(), "complex", "view_as_complex"),
        (with_generator(torch.Generator()), "generator", "default"),
        (with_generator(random.Random()), "generator", "default"),
        (with_generator(np.random.default_rng()), "generator", "default"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_other_obstacles(model: nn.Module, why: str, remedy: str) -> None:
    found = obstacles(nn.ModuleDict({"part": model}))
    assert found
    for each in found:
        assert each.module == "part"
        assert why in each.why
        assert remedy in each.remedy


class Wrapped(nn.parallel.DistributedDataParallel):
    """Without a process group, which takes seconds to make."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_distributed_data_parallel() -> None:
    (found,) = obstacles(Wrapped(nn.Linear(2, 2)))
    assert found.type == "Wrapped"
    assert "bare model" in found.remedy


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2, dtype=torch.complex64))  # copied, never summed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x @ x.transpose(0, 1), -1)


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x


def test_ordinary_models_pass() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Embedding(4, 2), nn.LSTM(2, 2),
        nn.TransformerEncoderLayer(4, 2, batch_first=True), Attention(), Innocent(), Gate(),
    )  # fmt: skip
    assert obstacles(model) == []
    check(model)


def test_check_lists_everything() -> None:
    with pytest.raises(Unsliceable) as caught:
        check(nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 2), Direct()))
    message = str(caught.value)
    assert "0 (SyncBatchNorm)" in message
    assert "2 (Direct)" in message
    assert len(message.splitlines()) == 3


def test_what_depends_on_the_kind_of_gpu() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.LSTM(2, 2), nn.Linear(2, 2), Attention(), nn.BatchNorm2d(2), Gate(), nn.ReLU()
    )
    found = hetero(model)
    assert [each.module for each in found] == ["0", "1", "2", "3"]
    assert "matmul" in found[3].why
    assert hetero(nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2), Gate())) == []


def test_what_cannot_be_repeated_on_cuda() -> None:
    model = nn.Sequential(
        nn.AdaptiveAvgPool2d(2),
        nn.Upsample(4, mode="bicubic"),
        nn.Upsample(4, mode="bilinear"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool3d((1, 1, 1)),
        nn.AdaptiveAvgPool2d((1, 2)),
    )
    assert [each.module for each in nondeterministic(model)] == ["0", "1", "6"]


INSTALLED = """
import torch.distributed as dist
from torch import nn

class Saves(nn.Module):
    def forward(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return 2 * x

    def save(self):
        dist.barrier()

class Sums(Saves):
    def scaled(self, x):
        return self._helper(x)

    def _helper(self, x):
        dist.all_reduce(x)
        return x
"""


def test_of_libraries_only_what_forward_reaches_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of transformers save themselves with a barrier, which training never calls."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_models.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(folder))
    installed = importlib.import_module("installed_models")
    assert obstacles(installed.Saves()) == []
    assert [each.module for each in obstacles(installed.Sums())] == [""]

    class Own(installed.Saves):  # type: ignore[misc]
        def step(self, x: torch.Tensor) -> None:
            dist.all_reduce(x)

    assert len(obstacles(Own())) == 1, "a program may call any method of its own"
