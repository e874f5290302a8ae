"""The guard: whatever differs between two workers is found, and named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pliant.comm.transport import loopback_engines
from pliant.train import guard
from pliant.train.context import DataPosition, ReplicaContext, seeded_rng
from pliant.train.guard import Guard, checksum_of, checksums
from pliant.train.wrapping import StateNamespace

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def make_state(models: int = 1) -> Any:
    """The parts of a job's state that are compared."""
    torch.manual_seed(3)
    made = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)) for _ in range(models)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in made]
    for model, optimizer in zip(made, optimizers, strict=True):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    contexts = [ReplicaContext(seeded_rng(replica), DataPosition()) for replica in range(3)]
    return SimpleNamespace(
        models=made,
        optimizers=optimizers,
        tracked={"scheduler": torch.optim.lr_scheduler.StepLR(optimizers[0], 3), "job.state": StateNamespace({"n": 1})},
        replicas=SimpleNamespace(contexts=contexts, num_loader_workers=0),
        averaging=None,
    )


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]), st.integers(1, 70), st.data())
def test_a_flipped_bit_changes_the_checksum(dtype: torch.dtype, length: int, data: Any) -> None:
    tensor = torch.arange(length).to(dtype)
    raw = tensor.view(torch.uint8)
    before = checksum_of(tensor)
    place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert checksum_of(tensor) != before
    assert 0 <= before < 2**64
    raw[place] ^= 1 << bit
    assert checksum_of(tensor) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (9,), (3, 4, 5)], ids=str)
def test_every_kind_of_tensor_has_a_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    assert checksum_of(tensor) == checksum_of(tensor.clone())
    if tensor.ndim > 1:
        assert checksum_of(tensor.transpose(0, 1)) == checksum_of(tensor.transpose(0, 1).contiguous())


def test_a_state_is_named_part_by_part() -> None:
    names = [name for name, _ in checksums(make_state())]
    assert names[:2] == ["0.weight", "0.bias"]
    assert "optimizer 0 state 0 exp_avg" in names
    assert "optimizer 0 param_groups 0 lr" in names
    assert "scheduler last_epoch" in names
    assert "job.state n" in names
    assert names[-1] == "the random state and data position of replica 2"
    assert len(names) == len(set(names))
    assert any(name.startswith("model 1 0.weight") for name, _ in checksums(make_state(2)))
    assert list(checksums(make_state())) == list(checksums(make_state()))


def _change_weight(state: Any) -> None:
    with torch.no_grad():
        state.models[0][1].weight[2, 3] += 1e-6


def _change_moment(state: Any) -> None:
    parameter = state.models[0][0].bias
    state.optimizers[0].state[parameter]["exp_avg"][1] *= 2


def _change_rate(state: Any) -> None:
    state.optimizers[0].param_groups[0]["lr"] = 0.05


def _change_counter(state: Any) -> None:
    state.tracked["job.state"].n = 2


def _draw(state: Any) -> None:
    state.replicas.contexts[1] = ReplicaContext(seeded_rng(9), DataPosition())


def compare(change: Any, step: int = 7) -> list[tuple[bool, str]]:
    """What two workers find, of which the second one's state was changed: whether checksums differ, and the complaint."""
    states = [make_state(), make_state()]
    change(states[1])
    guards = [Guard(state, 5) for state in states]
    for each in guards:
        each.enter_view()
        each.begin_step(step)
    found = [each.checksum() for each in guards]
    with loopback_engines(["a", "b"]) as engines, ThreadPoolExecutor(2) as pool:
        told = [pool.submit(each.compare, engine, found, step) for each, engine in zip(guards, engines, strict=True)]
        return [(found[0] != found[1], each.result(timeout=30)) for each in told]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_change_weight, "1.weight"),
        (_change_moment, "optimizer 0 state 1 exp_avg"),
        (_change_rate, "optimizer 0 param_groups 0 lr"),
        (_change_counter, "job.state n"),
        (_draw, "the random state and data position of replica 1"),
    ],
)
def test_the_first_difference_is_named_on_every_worker(change: Any, named: str) -> None:
    for differs, complaint in compare(change):
        assert differs
        assert complaint.startswith(
            f"the workers differ before step 7: {named} is not the same on a:10000 and b:10001; the usual causes: "
        )


def test_another_number_of_things_is_a_difference() -> None:
    def forget(state: Any) -> None:
        state.tracked["job.state"].more = 5

    for _, complaint in compare(forget):
        assert complaint.startswith("the workers differ before step 7")


def test_equal_states_are_no_difference_and_an_empty_checksum_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(lambda state: None) == [(False, "")] * 2
    monkeypatch.setattr(guard, "checksum_of", lambda tensor: 0)  # so the test of weights above can fail
    assert compare(_change_weight) == [(False, "")] * 2


def test_states_are_compared_at_times_and_in_the_first_step_of_a_view() -> None:
    due = []
    each = Guard(make_state(), 3)
    for step in range(8):
        if step == 5:
            each.enter_view()
        each.begin_step(step)
        due.append(each.checksum() != 0)
    assert due == [True, False, False, True, False, True, True, False]
    never = Guard(make_state(), 0)
    never.enter_view()
    never.begin_step(0)
    assert never.checksum() == 0
    averaging = make_state()
    averaging.averaging = object()
    other = Guard(averaging, 1)
    other.begin_step(0)
    assert other.checksum() == 0, "every worker has a model of its own"
