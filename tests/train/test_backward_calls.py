"""A turn has one backward whose gradients are summed, however the sum is formed and whatever parameters have hooks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pliant.comm.transport import loopback_engines
from pliant.errors import TrainError
from pliant.train import backward_calls
from pliant.train.backward_watch import BackwardWatch
from pliant.train.gradients import GradientReducer

pytestmark = pytest.mark.timeout(30)

WAYS = {"only replica": (1,), "one worker": (3,), "a replica each": (1, 1, 1), "several": (1, 2)}


class Worker:
    """The model and the reducer of one worker, and the turns of its replicas."""

    def __init__(self, num_replicas: int, *, find_unused: bool) -> None:
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        model = torch.nn.ModuleList([self.first, self.second])
        self.reducer = GradientReducer(list(model.named_parameters()), num_replicas, find_unused=find_unused)
        self.watch = BackwardWatch(self.reducer)

    def loss(self, of: str) -> torch.Tensor:
        x = torch.ones(4, 2)
        return sum(({"a": self.first, "b": self.second}[each](x).square().sum() for each in of), torch.zeros(()))

    def take_turn(self, slot: int, act: Callable[[Worker], object]) -> bool:
        """Take a turn and return whether it had a backward that counts."""
        if self.watch is not self.reducer and self.reducer.num_replicas == 1:
            self.watch.begin_turn(begins_step=True)
        else:
            self.reducer.begin_turn(slot)
        with self.listening():
            act(self)
        return self.watch.handed_in

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        end = backward_calls.listen(self.watch.expect_backward)
        try:
            yield
        finally:
            end()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.reducer.no_sync = True
        try:
            yield
        finally:
            self.reducer.no_sync = False


def plain(worker: Worker) -> None:
    worker.loss("ab").backward()


@contextlib.contextmanager
def workers(blocks: Sequence[int], *, steps: int, find_unused: bool = False) -> Iterator[list[Worker]]:
    """Yield the workers of a job after so many ordinary steps: in the first one all parameters have hooks."""
    with loopback_engines("A" * len(blocks)) as engines:
        made = [Worker(sum(blocks), find_unused=find_unused) for _ in blocks]
        for worker, engine in zip(made, engines, strict=True):
            worker.reducer.enter_view(engine, blocks)
        for number in range(steps + 1):
            if sum(blocks) > 1:
                for worker in made:
                    worker.reducer.begin_pass()
            if number == steps:
                break
            for worker, count in zip(made, blocks, strict=True):
                assert all(worker.take_turn(slot, plain) for slot in range(count))
            for worker in made:
                worker.watch.end_turn()
                worker.reducer.wait()
                worker.reducer.end_pass()
                worker.reducer.end_step()
                if worker.reducer.waits_for_order:
                    worker.reducer.rebuild(made[0].reducer.ready_order)
                for parameter in worker.reducer.parameters:
                    parameter.grad = None
        yield made
        for worker in made:
            worker.reducer.close()


def backwards(*losses: str) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for loss in losses:
            worker.loss(loss).backward()

    return act


def no_sync_last(worker: Worker) -> None:
    plain(worker)
    with worker.no_sync():
        worker.loss("b").backward()


SECOND = {
    "a, b": backwards("a", "b"),
    "b, a": backwards("b", "a"),
    "a, both": backwards("a", "ab"),
    "b, both": backwards("b", "ab"),
    "both, a": backwards("ab", "a"),
    "both, b": backwards("ab", "b"),
    "both, then no_sync": no_sync_last,
}


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("act", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("blocks", WAYS.values(), ids=WAYS)
def test_a_second_backward_is_refused_everywhere(
    blocks: tuple[int, ...], act: Callable[[Worker], None], find_unused: bool, steps: int
) -> None:
    refused = pytest.raises(TrainError, match="(?i)add the losses and call backward once")
    with workers(blocks, steps=steps, find_unused=find_unused) as [*_, worker], refused:
        worker.take_turn(0, act)


def accumulate(worker: Worker) -> None:
    with worker.no_sync():
        worker.loss("a").backward()
        worker.loss("ab").backward()
    plain(worker)


def other_tensors(worker: Worker) -> None:
    other = torch.ones(2, requires_grad=True)
    other.sum().backward()
    torch.autograd.grad(worker.loss("a"), worker.first.weight)
    plain(worker)
    other.square().sum().backward()
    torch.autograd.grad(worker.loss("a"), worker.first.weight)


def checkpointed(worker: Worker) -> None:
    """A backward in which another runs, as with re-entrant checkpointing; here of what is no parameter."""
    x = torch.ones(4, 2, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=True).sum().add(worker.loss("ab")).backward()


ORDINARY = {each.__name__: each for each in (plain, accumulate, other_tensors, checkpointed)}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("act", ORDINARY.values(), ids=ORDINARY)
@pytest.mark.parametrize("blocks", WAYS.values(), ids=WAYS)
def test_one_backward_counts_whatever_else_the_turn_computes(
    blocks: tuple[int, ...], act: Callable[[Worker], None], steps: int
) -> None:
    with workers(blocks, steps=steps) as [*_, worker]:
        assert worker.take_turn(0, act)


@pytest.mark.parametrize("blocks", WAYS.values(), ids=WAYS)
def test_a_turn_that_only_accumulates_has_no_backward_that_counts(blocks: tuple[int, ...]) -> None:
    def act(worker: Worker) -> None:
        with worker.no_sync():
            plain(worker)

    with workers(blocks, steps=1) as [*_, worker]:
        assert not worker.take_turn(0, act)


def clip(worker: Worker) -> None:
    plain(worker)
    torch.nn.utils.clip_grad_norm_(worker.reducer.parameters, 0.01)


def clip_before_other_calls(worker: Worker) -> None:
    clip(worker)
    torch.ones((), requires_grad=True).backward()
    with worker.no_sync():
        torch.ones((), requires_grad=True).backward()


def clip_twice(worker: Worker) -> None:
    clip(worker)
    clip(worker)


CHANGED = {each.__name__: each for each in (clip, clip_before_other_calls)}


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("is_live", [False, True])
def test_the_only_replica_may_change_its_gradients(is_live: bool, steps: int, carried: bool) -> None:
    """They are its own, as `.grad` of a plain loop. A call of backward that reaches them again is still refused."""
    with workers((1,), steps=steps) as [worker]:
        if not is_live:
            worker.watch = worker.reducer  # type: ignore[assignment]
        for act in CHANGED.values():
            for parameter in worker.reducer.parameters:
                parameter.grad = torch.ones_like(parameter) if carried else None
            if not is_live:
                worker.reducer.begin_pass()
            assert worker.take_turn(0, act)
            (worker.reducer.end_turns if not is_live else worker.watch.end_turn)()
        with pytest.raises(TrainError, match="a second backward"):
            worker.take_turn(0, clip_twice)


def test_each_thread_is_told_of_its_own_calls() -> None:
    calls: list[str] = []
    original = torch.autograd.backward
    ends = [backward_calls.listen(lambda name=name: calls.append(name)) for name in ("first", "second")]  # type: ignore[misc]
    assert torch.autograd.backward is not original

    def elsewhere() -> None:
        torch.ones((), requires_grad=True).backward()
        end = backward_calls.listen(lambda: calls.append("elsewhere"))
        torch.autograd.backward(torch.ones((), requires_grad=True))
        end()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert calls == ["elsewhere"]
    ends[0]()
    ends[0]()
    torch.ones((), requires_grad=True).backward()
    assert calls == ["elsewhere", "second"]
    ends[1]()
    assert torch.autograd.backward is original


def test_somebody_else_may_wrap_backward_meanwhile() -> None:
    calls: list[str] = []
    original = torch.autograd.backward
    end = backward_calls.listen(lambda: calls.append("first"))
    ours = torch.autograd.backward

    def theirs(*args: object, **kwargs: object) -> None:
        calls.append("theirs")
        ours(*args, **kwargs)  # type: ignore[arg-type]

    torch.autograd.backward = theirs
    end()
    end = backward_calls.listen(lambda: calls.append("second"))
    torch.ones((), requires_grad=True).backward()
    assert calls == ["theirs", "second"]
    torch.autograd.backward = original  # they put back what they think was there
    end()
    end = backward_calls.listen(lambda: calls.append("third"))
    torch.ones((), requires_grad=True).backward()
    assert calls == ["theirs", "second", "third"]
    end()
    assert torch.autograd.backward is original
