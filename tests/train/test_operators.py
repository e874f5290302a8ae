"""Operators without a deterministic kernel: the error that names them, `allow`, and the search that finds all of them.

`put_` and `max_unpool2d` have no deterministic kernel on the CPU, either.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pliant
from pliant.errors import ConfigError, NotDeterministic
from pliant.train import determinism, operators, trial
from pliant.train.operators import FoundOperator, check_allowed, explain, operator_name


@pytest.fixture
def strict() -> Iterator[None]:
    with trial._mode(is_strict=True):
        yield


def put(x: torch.Tensor) -> torch.Tensor:
    return x.clone().put_(torch.tensor([0]), torch.tensor([0.0]))


class Put(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return put(x)


class PutInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return put(grad)


class Attention(nn.Module):
    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.qkv(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Three blocks; the attention of the middle one calls `inner`."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor], outer: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": Attention(inner if n == 1 else torch.relu), "norm": nn.LayerNorm(4)})
            for n in range(3)
        )
        self.end = outer or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["norm"](block["attn"](x))  # type: ignore[index]
        return self.end(x)  # type: ignore[no-any-return]


def raised(call: Callable[[], object], *models: nn.Module) -> str:
    with pytest.raises(RuntimeError, match="deterministic implementation") as caught:
        call()
    explained = explain(caught.value, models)
    assert isinstance(explained, NotDeterministic)
    return str(explained)


@pytest.mark.parametrize(
    ("alert", "name", "overload"),
    [
        ("put_", "put_", "put_"),
        ("kthvalue CUDA", "kthvalue", "kthvalue.values"),
        ("median CUDA with indices output", "median", "median.dim_values"),
        ("_histc_cuda with floating point input", "histc", "histc"),
        ("cumsum_cuda_kernel", "cumsum", "cumsum"),
        ("max_unpooling2d_forward_out", "max_unpool2d", "max_unpool2d"),
        ("nll_loss2d_forward_out_cuda_template", "nll_loss2d", "nll_loss2d_forward"),
        ("ctc_loss_backward_gpu", "ctc_loss_backward", "_ctc_loss_backward"),
        ("upsample_bicubic2d_backward_out_cuda", "upsample_bicubic2d_backward", "upsample_bicubic2d_backward"),
        ("adaptive_avg_pool2d_backward_cuda", "adaptive_avg_pool2d_backward", "_adaptive_avg_pool2d_backward"),
        ("embedding_bag_backward_cuda_max", "embedding_bag_backward", "_embedding_bag_dense_backward"),
    ],
)
def test_names_of_alerts_stand_for_operators(alert: str, name: str, overload: str) -> None:
    assert operator_name(alert) == name
    assert f"aten::{overload}" in operators._overloads(alert)
    assert operators._overloads(name) == operators._overloads(alert)
    assert check_allowed([name]) == (name,)


def test_allowed_names_are_checked() -> None:
    assert check_allowed(["put_", "median CUDA with indices output", "put_"]) == ("median", "put_")
    for wrong in (["nonsense"], [""], [3]):
        with pytest.raises(ConfigError, match="torch has no such operator"):
            check_allowed(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"such as \['put_'\]"):
        check_allowed("put_")


@pytest.mark.usefixtures("strict")
def test_the_error_names_the_module_that_called_it() -> None:
    x = torch.randn(2, 4)
    inline = Model(put)
    text = raised(lambda: inline(x), inline)
    assert text.startswith("put_ has no deterministic kernel")
    assert "called by blocks.1.attn (Attention)" in text
    for remedy in ('allow=["put_"]', "pliant run --allow put_", 'determinism="D0"', "pliant doctor"):
        assert remedy in text
    nested = Model(Put())
    assert "called by blocks.1.attn.inner (Put)" in raised(lambda: nested(x), nested)
    assert "called by 1:blocks.1.attn.inner (Put)" in raised(lambda: nested(x), nn.Linear(1, 1), nested)
    checkpointed = Model(lambda x: checkpoint(PutInBackward.apply, x, use_reentrant=False))  # type: ignore[no-any-return]
    assert "blocks.1.attn" in raised(lambda: checkpointed(x).sum().backward(), checkpointed)
    assert "called by the program itself" in raised(lambda: put(x), inline)
    assert "called by the program itself" in raised(lambda: put(x))
    unpooling = Model(torch.relu, Unpool())
    compiled = torch.compile(unpooling, backend="eager")
    with pytest.raises(Exception, match="deterministic implementation") as caught:
        compiled(x)  # type: ignore[operator]
    assert str(explain(caught.value, [unpooling])).startswith("max_unpool2d has no deterministic kernel here")
    assert explain(RuntimeError("out of memory"), [inline]) is None
    assert explain(KeyboardInterrupt(), [inline]) is None


@pytest.mark.usefixtures("strict")
def test_the_error_of_a_backward_names_the_module_between_its_neighbours() -> None:
    x = torch.randn(2, 4)
    inline = Model(PutInBackward.apply)
    place = "called in the backward of blocks.1.attn (Attention), after blocks.1.attn.qkv and before blocks.1.attn.out"
    assert place in raised(lambda: inline(x).sum().backward(), inline)

    def with_casts() -> None:
        with torch.autocast("cpu"):
            loss = inline(x).sum()
        loss.backward()

    assert place in raised(with_casts, inline)
    end = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert "(called in a backward, after 0 (Linear))" in raised(
        lambda: PutInBackward.apply(end(x)).sum().backward(), end
    )
    x.requires_grad_()
    assert "(called in a backward, before 0 (Linear))" in raised(
        lambda: end(PutInBackward.apply(x)).sum().backward(), end
    )


def test_a_node_of_the_graph_is_found_by_the_name_of_the_alert() -> None:
    """As on CUDA, where the backward of pooling raises: the error is made here, the graph is real."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(3), nn.Conv2d(2, 2, 1), nn.AdaptiveAvgPool2d(2), nn.ReLU()
    )
    alert = "adaptive_avg_pool2d_backward_cuda"

    def _engine_run_backward(t_outputs: tuple[torch.Tensor, ...]) -> None:
        assert t_outputs
        raise RuntimeError(f"{alert} does not have a deterministic implementation, but you set ...")

    loss = model(torch.randn(1, 1, 8, 8)).sum()
    text = raised(lambda: _engine_run_backward((loss,)), model)
    assert text.startswith("adaptive_avg_pool2d_backward has no")
    assert "called in the backward of 3 (AdaptiveAvgPool2d)" in text, "the last one in forward is the first in backward"
    alert = "grid_sampler_2d_backward_cuda"
    assert "(called in a backward)" in raised(lambda: _engine_run_backward((loss,)), model)


@pytest.mark.usefixtures("strict")
def test_an_allowed_operator_passes_and_no_other() -> None:
    x, images = torch.randn(4), torch.randn(1, 1, 4, 4)
    pooled, indices = F.max_pool2d(images, 2, return_indices=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disallow = operators.allow(["put_"])
        operators.allow(["put_", "cumsum"])()  # another job of this process has come and gone
        try:
            expected = x.clone()
            expected[0] = 0.0
            assert torch.equal(put(x), expected)
            grad = torch.ones(3, requires_grad=True)
            PutInBackward.apply(grad).sum().backward()
            assert torch.equal(grad.grad, torch.tensor([0.0, 1.0, 1.0]))  # type: ignore[arg-type]
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            raised(lambda: F.max_unpool2d(pooled, indices, 2))
            with pytest.raises(IndexError):  # strict mode is on again after an error, too
                x.clone().put_(torch.tensor([9]), torch.tensor([0.0]))
            raised(lambda: F.max_unpool2d(pooled, indices, 2))
        finally:
            disallow()
    raised(lambda: put(x))  # the kernel is as it was


class Unpool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, indices = F.max_pool1d(x, 2, return_indices=True)
        return F.max_unpool1d(pooled, indices, 2)


def test_the_search_finds_all_operators_with_their_modules() -> None:
    torch.manual_seed(0)
    model = Model(lambda x: PutInBackward.apply(put(x)), nn.Sequential(Unpool(), nn.Linear(4, 4)))  # type: ignore[no-any-return]
    compute = trial.make_loss(torch.randn(2, 4), torch.device("cpu"))
    before = determinism.settings()
    found = trial.find_operators(model, compute)
    assert found == [
        FoundOperator("put_", "blocks.1.attn", "Attention", "forward"),
        FoundOperator("max_unpool2d", "end.0", "Unpool", "forward"),
        FoundOperator("put_", "blocks.1.attn", "Attention", "backward"),
    ]
    assert determinism.settings() == before
    assert all(parameter.grad is None for parameter in model.parameters())
    price = trial.measure_price(model, compute, torch.device("cpu"), found, rounds=1)
    assert price.free_ms > 0
    assert price.strict_ms > 0
    assert determinism.settings() == before
    assert trial.find_operators(Model(torch.relu), compute) == []
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trial.find_operators(model, trial.make_loss(torch.randn(2, 5), torch.device("cpu")))


def test_a_loss_for_any_batch_and_output() -> None:
    model, x, device = nn.Linear(3, 2), torch.randn(4, 3), torch.device("cpu")
    expected = model(x).mean()
    for given in (x, (x,), [x], {"input": x}, lambda model: model(x).mean()):
        assert torch.equal(trial.make_loss(given, device)(model), expected)
    y = model(x)
    assert torch.equal(trial.loss_of({"loss": y.sum(), "logits": y}), y.sum())
    assert torch.equal(trial.loss_of((y, None, y)), y.mean() + y.mean())
    with pytest.raises(ConfigError, match="step"):
        trial.loss_of((x, 3))


def test_a_job_says_what_it_does_not_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(**options: Any) -> None:
        with pliant.join(replicas=2, **options) as job, trial._mode(is_strict=True):
            model = Model(Put())
            job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in job.steps(2):
                for _ in step:
                    model(torch.ones(2, 4)).sum().backward()

    facts = tmp_path / "facts.jsonl"
    train(allow=["put_"], record=str(facts))
    assert capsys.readouterr().out.count("bits not promised: put_ (") == 1
    start = next(fact for fact in map(json.loads, facts.read_text().splitlines()) if fact["kind"] == "start")
    assert start["bits_not_promised"] == ["put_"]
    assert start["order"] == "ddp"
    with pytest.raises(NotDeterministic, match=r"put_ has no deterministic kernel .*blocks\.1\.attn\.inner \(Put\)"):
        train()
    with pytest.raises(NotDeterministic):
        train(allow=["cumsum"])
    with pytest.raises(RuntimeError):
        train(allow=["put_"], determinism="D0")  # D0 changes nothing in torch: the program itself is strict here
    assert "bits" not in capsys.readouterr().out.replace("bits not promised: cumsum", "")
    with pytest.raises(ConfigError, match="torch has no such operator"):
        pliant.join(allow=["putt"])
