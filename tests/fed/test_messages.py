"""Messages and the work queue: values, and a pair of connected sockets."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant import channel, fed
from pliant.channel import Channel
from pliant.errors import CommError, TrainError
from pliant.fed import messages
from pliant.fed.messages import Connection, FedMessage, Silent, TensorLayout
from pliant.fed.work import Evaluation, Score, Trained, Training, Update, Weights
from pliant.fed.work_queue import Assign, Unassign, WorkQueue
from pliant.fed.worker import MessageInbox

FED = Path(fed.__path__[0])
ON_THE_WIRE = [FED / f"{name}.py" for name in ("coordinator", "messages", "worker", "workers", "work_queue")]


# --- connections ---


@contextlib.contextmanager
def pair(silence_s: float = 20.0) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection."""
    socks = socket.socketpair()
    ends = [Connection(Channel(sock, b"k" * 32, is_connector=not i), silence_s) for i, sock in enumerate(socks)]
    for end in ends:
        end.allow(100_000_000)
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def test_large_payloads_pass_both_ways_at_once_and_are_aligned_as_torch_aligns(no_leaks: None) -> None:
    payload = torch.arange(5_000_000, dtype=torch.int32).view(torch.uint8)
    with pair() as ends:
        for end in ends:
            end.send("model", {"version": 1}, payload)
            end.send("unit", {"id": 1}, torch.zeros(777, dtype=torch.uint8))
        for end in ends:
            for type_, size in (("model", payload.numel()), ("unit", 777)):
                found = end.receive()
                assert found is not None
                assert found.type == type_
                assert found.payload is not None
                assert found.payload.data_ptr() % messages.ALIGNMENT == 0
                assert torch.equal(found.payload, payload if size > 777 else torch.zeros(777, dtype=torch.uint8))


def test_heartbeats_keep_a_connection_alive_and_silence_ends_it(no_leaks: None) -> None:
    with pair(silence_s=0.2) as (first, second):
        later = threading.Timer(0.6, second.send, ("unit", {"id": 1}))
        later.start()
        assert first.receive() == FedMessage("unit", {"type": "unit", "id": 1}, None)
        later.join()
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs):
        alone = Connection(Channel(ours, b"k" * 32, is_connector=True), 0.1)
        with pytest.raises(Silent, match="silent for 0.1 s"):
            alone.receive()
        alone.close()


def test_a_message_without_a_type_is_refused(no_leaks: None) -> None:
    ours, theirs = socket.socketpair()
    sender = Channel(theirs, b"k" * 32, is_connector=False)
    receiver = Connection(Channel(ours, b"k" * 32, is_connector=True), 20)
    sender.send({"id": 1})
    with pytest.raises(CommError, match="without a type"):
        receiver.receive()
    receiver.close()
    sender.close()


def test_a_unit_that_is_given_again_after_it_was_cancelled_is_done(no_leaks: None) -> None:
    """It was cancelled after it had been begun, so nobody has used up the mark."""
    with pair() as (ours, _):
        inbox = MessageInbox(ours)
        for type_ in ("unit", "cancel", "unit"):
            inbox.put(FedMessage(type_, {"id": 7}, None))
        inbox.put(FedMessage("unit", {"id": 8}, None))
        inbox.put(FedMessage("cancel", {"id": 8}, None))
        inbox.put(FedMessage("over", {}, None))
        assert [(m.type, m.body.get("id")) for m in (inbox.next(), inbox.next(), inbox.next()) if m] == [
            ("unit", 7),
            ("unit", 7),
            ("over", None),
        ]
        with pytest.raises(CommError, match="without a number"):
            inbox.put(FedMessage("unit", {}, None))


def test_nothing_on_the_wire_is_pickled() -> None:
    assert all(path.exists() for path in ON_THE_WIRE)
    for path in [*ON_THE_WIRE, Path(channel.__file__)]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [each for each in names if "pickle" in each.lower()], f"{path} imports {names}"
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")), path


# --- models, units, results ---


MODEL = Weights(
    [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(()), torch.randn(0, 4)],
    [torch.tensor(41), torch.tensor([True, False, True]), torch.randn(2, 2, dtype=torch.float64)],
)


def alike(a: Weights, b: Weights) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in zip(a.all, b.all, strict=True)
    )


def test_a_model_arrives_to_the_bit_and_equal_models_are_equal_bytes() -> None:
    layout, payload = messages.pack_model(MODEL)
    found = messages.unpack_model(TensorLayout.from_json(json.loads(json.dumps(layout.to_json()))), payload.clone())
    assert alike(found, MODEL)
    assert len(found.parameters) == len(MODEL.parameters)
    assert all(each.data_ptr() % messages.ALIGNMENT == 0 for each in found.all if each.numel())
    assert torch.equal(payload, messages.pack_model(MODEL.clone())[1])
    changed = MODEL.clone()
    changed.parameters[0][0, 0] += 1
    assert not torch.equal(payload, messages.pack_model(changed)[1])


def test_units_and_results_arrive_as_they_are() -> None:
    layout = TensorLayout.of(MODEL)
    end = Weights(
        [each + 1 for each in MODEL.parameters],
        [torch.tensor(42), MODEL.buffers[1].logical_not(), MODEL.buffers[2] * 3],
    )
    change = MODEL.change_to(end)
    unit = Training(3, (4, 9), (10, 7), 0.1 + 0.2)
    done = (
        Trained(Update(4, change, 20.0, 1 / 3, 2), 0.1),
        Trained(Update(9, change.clone(), 7.0, math.nan), math.inf),
    )
    assert messages.unit_from_json(json.loads(json.dumps(messages.unit_to_json(unit)))) == unit
    body, payload = messages.result_to_json(done, layout)
    found = messages.result_from_json(json.loads(json.dumps(body)), payload, unit, layout)
    assert isinstance(found, tuple)
    for a, b in zip(found, done, strict=True):
        assert alike(a.update.change, b.update.change)
        assert (a.update.client, a.update.samples, a.utility) == (b.update.client, b.update.samples, b.utility)
        assert a.update.version == b.update.version
    assert found[0].update.loss == 1 / 3
    assert math.isnan(found[1].update.loss)
    test = Evaluation(0, 100)
    score = Score(100, 80, 99, 1e-17 + 1 / 7)
    assert messages.unit_from_json(messages.unit_to_json(test)) == test
    sent = json.loads(json.dumps(messages.result_to_json(score, layout)[0]))
    assert messages.result_from_json(sent, None, test, layout) == score


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ({"trained": [[4, 1.0, 1.0, 0, 1.0]]}, 1),
        ({"trained": [[5, 1.0, 1.0, 0, 1.0]]}, 0),
        ({"trained": [[4, 1.0]]}, 0),
        ({"trained": [[4, "x", 1.0, 0, 1.0]]}, 0),
        ({"score": [1, 1, 1, 1.0]}, 0),
        ({}, 0),
    ],
)
def test_a_result_that_is_not_the_units_is_refused(body: dict[str, object], missing: int) -> None:
    layout = TensorLayout.of(MODEL)
    payload = torch.zeros(layout.change.num_bytes - missing, dtype=torch.uint8)
    with pytest.raises(CommError):
        messages.result_from_json(body, payload, Training(1, (4,), (1,), 0.1), layout)


def test_a_change_of_another_model_does_not_leave() -> None:
    other = Update(4, Weights([torch.zeros(2)], []))
    with pytest.raises(TrainError, match="client 4"):
        messages.result_to_json((Trained(other, 0.0),), TensorLayout.of(MODEL))
    halves = Update(4, Weights([torch.zeros(2, dtype=torch.float16)], []))
    with pytest.raises(TrainError, match="types"):
        messages.result_to_json((Trained(halves, 0.0),), TensorLayout.of(Weights([torch.zeros(2)], [])))


@pytest.mark.parametrize(
    "value", [None, 3, [[]], [[["float32", -1]], []], [[["complex64", 1]], []], [[["float32", "x"]], []]]
)
def test_a_damaged_layout_is_refused(value: object) -> None:
    with pytest.raises(CommError, match="layout"):
        TensorLayout.from_json(value)


# --- the work queue ---


def test_each_has_one_in_hand_before_anybody_has_one_ahead() -> None:
    work = WorkQueue()
    for worker in (1, 2, 3):
        work.join(worker)
    work.add(range(10))
    assert work.assign(10) == [Assign(1, 0), Assign(2, 1), Assign(3, 2), Assign(1, 3), Assign(2, 4), Assign(3, 5)]
    assert work.assign(10) == []
    assert work.finish(2, 1) == []
    assert work.assign(10) == [Assign(2, 6)]


def test_units_of_the_lost_are_done_first_and_who_comes_later_is_given_some() -> None:
    work = WorkQueue()
    work.join(1)
    work.add(range(6))
    work.assign(6)
    assert work.leave(1) is None
    assert work.assign(6) == []
    work.join(2)
    work.join(3)
    assert work.assign(6) == [Assign(2, 0), Assign(3, 1), Assign(2, 2), Assign(3, 3)]


def test_the_idle_take_what_others_have_only_ahead() -> None:
    work = WorkQueue()
    work.join(1)
    work.join(2)
    work.add(range(3))
    assert work.assign(3) == [Assign(1, 0), Assign(2, 1), Assign(1, 2)]
    work.finish(2, 1)
    assert work.assign(3) == [Unassign(1, 2), Assign(2, 2)]
    # It had begun nevertheless: its result counts, and the other's, which comes later, does not.
    assert work.finish(1, 2) == [Unassign(2, 2)]
    assert work.finish(2, 2) is None
    work.finish(1, 0)
    assert work.num_open == 0
    assert work.assign(3) == []


def test_nothing_is_given_beyond_the_horizon() -> None:
    work = WorkQueue()
    work.join(1)
    work.add(range(5))
    assert work.assign(1) == [Assign(1, 0)]
    assert work.assign(1) == []
    assert work.assign(2) == [Assign(1, 1)]


def test_a_unit_that_takes_three_workers_is_given_up_and_one_ahead_is_not_to_blame() -> None:
    work = WorkQueue()
    work.add([0, 1])
    for worker in (1, 2):
        work.join(worker)
        work.assign(9)
        assert work.leave(worker) is None
    work.join(3)
    work.assign(9)
    assert work.leave(3, blame=False) is None
    work.join(4)
    work.assign(9)
    assert work.leave(4) == 0


def test_a_unit_that_fails_three_times_is_given_up() -> None:
    work = WorkQueue()
    work.add([0])
    work.join(1)
    for expected in (None, None, 0):
        work.assign(9)
        assert work.fail(1, 0) == expected


def test_what_is_dropped_is_taken_back() -> None:
    work = WorkQueue()
    work.join(1)
    work.add(range(3))
    work.assign(9)
    assert work.drop_all() == [Unassign(1, 0), Unassign(1, 1)]
    assert work.finish(1, 0) is None
    work.add([7])
    assert work.assign(9) == [Assign(1, 7)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_whatever_happens_every_unit_is_finished_once(count: int, events: list[tuple[int, int]]) -> None:
    """Workers come, go and finish in any order; at last one does what is left."""
    work, finished = WorkQueue(max_losses=1000), []
    work.add(range(count))
    for what, who in events:
        if what == 0 and who not in work.holding:
            work.join(who)
        elif what == 1:
            work.leave(who)
        elif work.holding.get(who):
            unit = work.holding[who][0]
            assert work.finish(who, unit) is not None
            finished.append(unit)
        work.assign(1000)
        held = [unit for units in work.holding.values() for unit in units]
        assert len(held) == len(set(held))
    if 9 not in work.holding:
        work.join(9)
    while work.num_open:
        work.assign(1000)
        for who in list(work.holding):
            for unit in list(work.holding[who]):
                assert work.finish(who, unit) is not None
                finished.append(unit)
    assert sorted(finished) == list(range(count))
