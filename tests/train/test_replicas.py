"""Who hosts which replicas, their buffers, and how samples are dealt to them, also when their number or their batch changes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampling import replica_batches
from torch.utils.data import TensorDataset

import pliant
from pliant.errors import ConfigError, TrainError
from pliant.train.context import DataPosition, ReplicaContext, seeded_rng
from pliant.train.events import Listeners, StepCommitted, ViewChange, ViewChanges
from pliant.train.replicas import ModelBuffers, Placement, Replicas, even_blocks, place_replicas
from pliant.train.sampling import LoaderOptions

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


# --- placement ---


@given(num_replicas=st.integers(1, 40), share=st.integers(1, 40))
def test_every_replica_has_one_host(num_replicas: int, share: int) -> None:
    size = min(num_replicas, share)
    placements = [place_replicas(num_replicas, size, rank) for rank in range(size)]
    hosted = [list(placement.hosted) for placement in placements]
    assert [replica for each in hosted for replica in each] == list(range(num_replicas))
    assert max(map(len, hosted)) - min(map(len, hosted)) <= 1
    for rank, each in enumerate(hosted):
        assert {placement.owner_of(replica) for placement in placements for replica in each} == {rank}


@pytest.mark.parametrize("blocks", [(3,), (2, 1), (4, 0), (1, 2, 1), ()], ids=str)
def test_blocks_that_do_not_place_every_replica_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(TrainError, match="do not place 4 replicas on 2 workers, one or more on each"):
        place_replicas(4, 2, 0, lambda size: blocks)


def test_a_program_may_want_other_blocks() -> None:
    assert place_replicas(4, 2, 1, lambda size: [3, 1]) == Placement((3, 1), 1)
    assert place_replicas(4, 2, 1, lambda size: [3, 1]).hosted == range(3, 4)
    assert even_blocks(5, 3) == (2, 2, 1)
    assert Placement().hosted == range(0)


# --- their buffers ---


class Mixed(torch.nn.Module):
    """Buffers of several types, sizes and memory formats, one of them without elements and one that is None."""

    flags: torch.Tensor
    mean: torch.Tensor
    count: torch.Tensor | None
    across: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.float64))
        self.register_buffer("across", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)[:, :, 1:])
        self.register_buffer("missing", None)
        self.register_buffer("short", torch.randn(3).bfloat16())
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex128))
        self.register_buffer("more", torch.randn(4))


def _values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def _are_equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def _overwrite(model: torch.nn.Module) -> None:
    for buffer in model.buffers():
        buffer.fill_(1)


def test_buffers_of_all_types_are_saved_and_loaded_and_travel() -> None:
    model = Mixed()
    buffers, before = ModelBuffers([model]), _values(model)
    saved = buffers.save()
    _overwrite(model)
    assert _are_equal(saved, before), "copies are no views of the buffers"
    packed, data = buffers.pack(saved), buffers.to_host(saved)
    in_order = b"".join(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in before)
    assert packed.numpy().tobytes() == in_order, "contexts of checkpoints have them in this order"
    assert len(data) == buffers.num_bytes == len(buffers.empty_on_host()) >= len(packed)
    assert torch.equal(buffers.pack(list(saved)), packed), "also from tensors of any other place"
    for found in (saved, buffers.unpack(packed), buffers.from_host(data.clone()), buffers.from_host(data)):
        _overwrite(model)
        buffers.load(found)
        assert _are_equal(_values(model), before)
    copy = buffers.from_host(data)
    data.zero_()
    assert _are_equal(copy, before), "what has come is a copy"
    assert model.across.stride() == Mixed().across.stride(), "the buffers themselves stay where they are"


def test_buffers_that_a_program_replaces_are_followed() -> None:
    model = Mixed()
    buffers, first = ModelBuffers([model]), ModelBuffers([model]).save()
    saved = buffers.save()
    model.mean, model.count = torch.randn(9, dtype=torch.float64), None
    model.missing = torch.ones(3)  # was never there: nobody swaps it
    assert buffers.names == ["flags", "mean", "empty", "across", "short", "wave", "more"]
    before = [each for name, each in model.named_buffers() if name != "missing"]
    again = buffers.save()
    assert _are_equal(again, before)
    assert _are_equal(buffers.unpack(buffers.pack(again)), before)
    assert _are_equal(buffers.from_host(buffers.to_host(again)), before)
    assert len(saved) == len(first) == len(again) + 1
    model.flags.data = torch.zeros(2, dtype=torch.bool)  # the same tensor with another shape
    assert _are_equal(buffers.save(), before)
    model.more = torch.randn(4)  # another tensor of the same kind
    kept = buffers.save()
    model.more = torch.randn(4)
    assert torch.equal(buffers.from_host(buffers.to_host(kept))[-1], kept[-1])


def test_a_model_without_buffers_has_nothing_to_swap() -> None:
    buffers = ModelBuffers([torch.nn.Linear(2, 2)])
    assert (buffers.save(), buffers.num_bytes, buffers.names) == ([], 0, [])
    assert buffers.unpack(buffers.pack([])) == buffers.from_host(buffers.to_host([])) == []
    buffers.load([])


# --- their data ---


def _replicas(
    count: int, num_samples: int, batch: int, stream: DataPosition | None = None, *, batch_size: int = 2
) -> Replicas:
    """All of them after so many batches."""
    made = Replicas(count, num_samples, LoaderOptions(batch_size=batch_size))
    stream = stream or DataPosition(batch=batch)
    made.contexts = [ReplicaContext(seeded_rng(replica, CPU), stream) for replica in range(count)]
    return made


def _rest(replicas: Replicas, epoch: int = 0) -> list[int]:
    """The samples that are left of the epoch."""
    stream = replicas.stream_of(0, epoch)
    return sorted(
        sample
        for replica in range(replicas.count)
        for batch in replica_batches(
            replicas.num_samples, replicas.count, replica, epoch, replicas.loading, stream.consumed
        )[stream.batch :]
        for sample in batch
    )


def test_batches_are_counted() -> None:
    replicas = _replicas(3, 24, batch=1)
    assert replicas.num_batches == 4
    assert replicas.batches_left(0) == 3
    assert replicas.batches_left(1) == 4, "of the next epoch"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_left_of_an_epoch_is_dealt_to_another_number(count: int) -> None:
    replicas = _replicas(3, 30, batch=2)
    left, states = _rest(replicas), [context.random for context in replicas.contexts]
    replicas.deal_to(count, epoch=0, step=7, device=CPU)
    assert replicas.count == len(replicas.contexts) == count
    assert set(_rest(replicas)) == set(left), "no sample is lost, and none comes twice but to fill up"
    stayed = min(count, 3)
    assert [context.random for context in replicas.contexts[:stayed]] == states[:stayed]
    fresh = [context.random.to_bytes() for context in replicas.contexts[3:]]
    assert len(set(fresh)) == len(fresh)


def test_newcomers_draw_alike_on_every_worker_and_differ_from_step_to_step() -> None:
    def drawn(step: int) -> bytes:
        replicas = _replicas(1, 30, batch=0)
        replicas.deal_to(2, epoch=0, step=step, device=CPU)
        return replicas.contexts[1].random.to_bytes()

    assert drawn(3) == drawn(3) != drawn(4)


def test_another_batch_size_deals_the_rest_anew() -> None:
    replicas = _replicas(2, 40, batch=4)
    left = _rest(replicas)
    replicas.set_batch_size(5, epoch=0)
    assert _rest(replicas) == left
    assert replicas.loading.batch_size == 5
    assert {context.stream for context in replicas.contexts} == {DataPosition(consumed=16)}
    assert replicas.batches_left(0) == 3


def test_a_batch_size_without_one_batch_is_refused_and_changes_nothing() -> None:
    replicas = Replicas(2, 8, LoaderOptions(batch_size=2, drop_last=True))
    replicas.contexts = [ReplicaContext(seeded_rng(0, CPU), DataPosition(batch=1))] * 2
    with pytest.raises(
        ConfigError, match="8 samples are too few for a batch of 5 for each of 2 replicas: decide for less"
    ):
        replicas.set_batch_size(5, epoch=0)
    assert replicas.loading.batch_size == 2
    assert replicas.contexts[0].stream == DataPosition(batch=1)


# --- changes of view ---


def test_occasional_listeners_are_called_when_they_are_due_or_woken() -> None:
    listeners, due, woken = Listeners(), list[int](), list[int]()
    listeners.add_occasional(lambda event: due.append(event.step), 4)
    listeners.add_occasional(lambda event: woken.append(event.step))
    for step in (1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 6, 7):  # steps 8 and 6 are taken back and done again
        if step == 2:
            listeners.wake()
        if not listeners.last_called < step < listeners.next_call:
            listeners.tell(StepCommitted(step, 0, step, 1, 0, 0.0, 0.0, {}))
    assert due == woken == [1, 2, 4, 8, 8, 6]


def test_a_change_ends_with_the_first_batch_and_tells_what_is_done_again() -> None:
    told: list[ViewChange] = []
    changes = ViewChanges([told.append])
    assert not changes.is_ending
    changes.begin(0.0, 4, lost=False)
    assert changes.is_ending
    changes.end(step=7, new_size=2)
    ended_s = changes.step_ended_s = time.monotonic()
    changes.note_loss(9)
    assert changes.since_s(is_planned=True) == ended_s < changes.since_s(is_planned=False)
    changes.begin(0.0, 2, lost=True)
    changes.end(step=7, new_size=1)
    assert not changes.is_ending
    assert told == changes.seen
    assert [(each.step, each.old_size, each.new_size, each.lost, each.repeated) for each in told] == [
        (7, 4, 2, False, 0),
        (7, 2, 1, True, 2),
    ]
    assert all(each.pause_s > 0 for each in told)


def test_each_committed_step_is_told_once_with_the_means_of_all_replicas(one_thread: None) -> None:
    heard: list[StepCommitted] = []
    with pliant.join(replicas=2) as job:
        job.on_commit(heard.append)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        data = TensorDataset(torch.randn(16, 2))
        model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = job.loader(data, batch_size=4)
        for _ in job.epochs(2):
            for step in loader:
                for (inputs,) in step:
                    model(inputs).sum().backward()
                    step.log(number=step.number + step.replica)
                assert step["number"] == step.number + 0.5
                if step.number:
                    job.report(loss=step.number)
                optimizer.step()
                optimizer.zero_grad()
    assert [(each.step, each.epoch, each.epoch_step) for each in heard] == [(1, 0, 1), (2, 0, 2), (3, 1, 1), (4, 1, 2)]
    assert [dict(each.values) for each in heard] == [
        {"number": number + 0.5, **({"loss": float(number)} if number else {})} for number in range(4)
    ]
    assert all(0 < each.compute_s < each.duration_s for each in heard)
    assert {(each.rank, each.num_workers) for each in heard} == {(0, 1)}


def test_a_state_that_is_read_within_a_pass_has_no_gradients_of_turns() -> None:
    """A worker that must leave in a pass writes the state before it; what turns have left in `.grad` is no part of that."""
    net = torch.nn.Linear(2, 1)
    with pliant.join(replicas=2) as job:
        model, optimizer = job.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in job.steps(2):
            for _ in step:
                with job.no_sync():
                    model(torch.ones(2)).sum().backward()
                assert net.weight.grad is not None
                assert job._run.need_trainer().state.read()["gradients"] == [None]
                model(torch.ones(2)).sum().backward()
                assert job._run.need_trainer().state.read()["gradients"] == [None]
            if step.number == 0:  # later it is known that the program clears them
                [[summed, _]] = job._run.need_trainer().state.read()["gradients"]
                assert torch.equal(summed, torch.full((1, 2), 2.0))
            optimizer.step()
            optimizer.zero_grad()
            assert job._run.need_trainer().state.read()["gradients"] == [None]
