"""Frames, parcels, and who is given which unit: values only, no network."""

from __future__ import annotations

import ast
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.errors import CommError, TrainError
from pliant.fed.executors import greeting, parcels, wire
from pliant.fed.executors.handout import Give, Handout, Take
from pliant.fed.executors.wire import Decoder, Frame, Kind, encoded
from pliant.fed.work import Evaluation, Score, Trained, Training, Update, Weights

ON_THE_WIRE = sorted(Path(wire.__file__).parent.glob("*.py"))


def fed(decoder: Decoder, data: bytes, at_once: int = 1 << 30) -> list[Frame]:
    """What the decoder makes of `data`, of which so many bytes come at once."""
    found = []
    while data:
        room = decoder.room()
        count = min(len(room), len(data), at_once)
        room[:count] = data[:count]
        data = data[count:]
        if (frame := decoder.advance(count)) is not None:
            found.append(frame)
    return found


def member() -> Decoder:
    decoder = Decoder()
    decoder.body_limit, decoder.payload_limit = wire.BODY_BYTES, 10_000_000
    return decoder


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(pieces)


# Frames


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=6), st.integers(1, 5000))
def test_frames_arrive_as_they_were_sent_however_they_are_cut(sizes: list[int], at_once: int) -> None:
    payloads = [torch.arange(size, dtype=torch.int32).to(torch.uint8) for size in sizes]
    data = b"".join(joined(encoded(Kind.RESULT, {"id": i}, payload)) for i, payload in enumerate(payloads))
    found = fed(member(), data, at_once)
    assert [frame.body for frame in found] == [{"id": i} for i in range(len(sizes))]
    for frame, payload in zip(found, payloads, strict=True):
        assert (frame.payload is None and not len(payload)) or torch.equal(frame.payload, payload)


def test_a_large_payload_is_not_copied_to_be_sent() -> None:
    payload = torch.zeros(wire.CHUNK_BYTES + 1, dtype=torch.uint8)
    head, raw = encoded(Kind.MODEL, {}, payload)
    payload[7] = 9
    assert raw[7] == 9
    assert len(head) < 100


def test_received_payloads_are_aligned_as_torch_aligns() -> None:
    frames = fed(member(), joined(encoded(Kind.RESULT, {"id": 1}, torch.zeros(777, dtype=torch.uint8))) * 20)
    assert all(frame.payload is not None and frame.payload.data_ptr() % parcels.ALIGNMENT == 0 for frame in frames)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "begins no frame"),
        (pickle.dumps({"a": list(range(100))}, protocol=5), "begins no frame"),
        (wire.HEAD.pack(wire.MAGIC, 99, 0, 0), "unknown kind 99"),
        (wire.HEAD.pack(wire.MAGIC, Kind.RESULT, wire.BODY_BYTES + 1, 0), "are allowed"),
        (wire.HEAD.pack(wire.MAGIC, Kind.RESULT, 0, 10_000_001), "are allowed"),
        (wire.HEAD.pack(wire.MAGIC, Kind.RESULT, 3, 0) + b"{a}", "no JSON"),
        (wire.HEAD.pack(wire.MAGIC, Kind.RESULT, 3, 0) + b"[1]", "no JSON object"),
        (wire.HEAD.pack(wire.MAGIC, Kind.RESULT, 100_000, 0) + b"[" * 100_000, "no JSON"),
        (wire.HEAD.pack(wire.MAGIC, Kind.RESULT, 40, 0) + pickle.dumps([1] * 40)[:40], "no JSON"),
    ],
    ids=["http", "pickle", "kind", "body", "payload", "json", "list", "deep", "pickled-body"],
)
def test_what_is_no_frame_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(CommError, match=said):
        fed(member(), data)


def test_a_stranger_may_send_no_payload_and_little_else() -> None:
    assert fed(Decoder(), joined(encoded(Kind.HELLO, {"name": "a"})))
    with pytest.raises(CommError, match="allowed"):
        fed(Decoder(), joined(encoded(Kind.HELLO, {}, torch.zeros(1, dtype=torch.uint8))))
    with pytest.raises(CommError, match="allowed"):
        fed(Decoder(), joined(encoded(Kind.HELLO, {"name": "a" * wire.STRANGERS_BYTES})))


def test_nothing_on_the_wire_is_pickled() -> None:
    assert ON_THE_WIRE
    for path in ON_THE_WIRE:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [each for each in names if "pickle" in each.lower()], f"{path} imports {names}"
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save")), path


def test_a_proof_is_of_its_token_its_side_and_its_nonces() -> None:
    shown = greeting.proof("token", "server", "a b")
    assert greeting.is_proof(shown, "token", "server", "a b")
    for others in (("Token", "server", "a b"), ("token", "executor", "a b"), ("token", "server", "a c")):
        assert not greeting.is_proof(shown, *others)
    assert not greeting.is_proof(None, "token", "server", "a b")
    assert not greeting.is_proof("é", "token", "server", "a b")
    assert greeting.checked_nonce(greeting.nonce())
    for damaged in (None, 3, "", "a b" * 8, greeting.nonce() + "0"):
        with pytest.raises(CommError, match="nonce"):
            greeting.checked_nonce(damaged)


# Parcels

MODEL = Weights(
    [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(()), torch.randn(0, 4)],
    [torch.tensor(41), torch.tensor([True, False, True]), torch.randn(2, 2, dtype=torch.float64)],
)


def over_the_wire(body: dict[str, object], payload: torch.Tensor | None) -> Frame:
    (frame,) = fed(member(), joined(encoded(Kind.RESULT, body, payload)))
    return frame


def alike(a: Weights, b: Weights) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in zip(a.all, b.all, strict=True)
    )


def test_a_model_arrives_to_the_bit_and_equal_models_are_equal_bytes() -> None:
    layout, payload = parcels.packed(MODEL)
    frame = over_the_wire({"layout": layout.to_json()}, payload)
    found = parcels.unpacked(parcels.TensorLayout.from_json(frame.body["layout"]), frame.payload)
    assert alike(found, MODEL)
    assert len(found.parameters) == len(MODEL.parameters)
    assert all(each.data_ptr() % parcels.ALIGNMENT == 0 for each in found.all if each.numel())
    assert torch.equal(payload, parcels.packed(MODEL.clone())[1])
    changed = MODEL.clone()
    changed.parameters[0][0, 0] += 1
    assert not torch.equal(payload, parcels.packed(changed)[1])


def test_units_and_results_arrive_as_they_are() -> None:
    layout = parcels.TensorLayout.of(MODEL)
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
    assert parcels.unit_from_json(json.loads(json.dumps(parcels.unit_to_json(unit)))) == unit
    body, payload = parcels.done_to_json(done, layout)
    frame = over_the_wire(body, payload)
    found = parcels.done_from_json(frame.body, frame.payload, unit, layout)
    assert isinstance(found, tuple)
    for a, b in zip(found, done, strict=True):
        assert alike(a.update.change, b.update.change)
        assert (a.update.client, a.update.samples, a.utility) == (b.update.client, b.update.samples, b.utility)
        assert a.update.version == b.update.version
    assert found[0].update.loss == 1 / 3
    assert math.isnan(found[1].update.loss)
    test = Evaluation(0, 100)
    score = Score(100, 80, 99, 1e-17 + 1 / 7)
    assert parcels.unit_from_json(parcels.unit_to_json(test)) == test
    assert parcels.done_from_json(over_the_wire(*parcels.done_to_json(score, layout)).body, None, test, layout) == score


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
    layout = parcels.TensorLayout.of(MODEL)
    payload = torch.zeros(layout.change.num_bytes - missing, dtype=torch.uint8)
    with pytest.raises(CommError):
        parcels.done_from_json(body, payload, Training(1, (4,), (1,), 0.1), layout)


def test_a_change_of_another_model_does_not_leave() -> None:
    other = Update(4, Weights([torch.zeros(2)], []))
    with pytest.raises(TrainError, match="client 4"):
        parcels.done_to_json((Trained(other, 0.0),), parcels.TensorLayout.of(MODEL))
    halves = Update(4, Weights([torch.zeros(2, dtype=torch.float16)], []))
    with pytest.raises(TrainError, match="types"):
        parcels.done_to_json((Trained(halves, 0.0),), parcels.TensorLayout.of(Weights([torch.zeros(2)], [])))


@pytest.mark.parametrize(
    "value", [None, 3, [[]], [[["float32", -1]], []], [[["complex64", 1]], []], [[["float32", "x"]], []]]
)
def test_a_damaged_layout_is_refused(value: object) -> None:
    with pytest.raises(CommError, match="layout"):
        parcels.TensorLayout.from_json(value)


# Who is given what


def test_each_has_one_in_hand_before_anybody_has_one_ahead() -> None:
    handout = Handout()
    for executor in (1, 2, 3):
        handout.join(executor)
    handout.add(range(10))
    assert handout.next(10) == [Give(1, 0), Give(2, 1), Give(3, 2), Give(1, 3), Give(2, 4), Give(3, 5)]
    assert handout.next(10) == []
    assert handout.finish(2, 1) == []
    assert handout.next(10) == [Give(2, 6)]


def test_units_of_the_lost_are_done_first_and_who_comes_later_is_given_some() -> None:
    handout = Handout()
    handout.join(1)
    handout.add(range(6))
    handout.next(6)
    assert handout.leave(1) is None
    assert handout.next(6) == []
    handout.join(2)
    handout.join(3)
    assert handout.next(6) == [Give(2, 0), Give(3, 1), Give(2, 2), Give(3, 3)]


def test_the_idle_take_what_others_have_only_ahead() -> None:
    handout = Handout()
    handout.join(1)
    handout.join(2)
    handout.add(range(3))
    assert handout.next(3) == [Give(1, 0), Give(2, 1), Give(1, 2)]
    handout.finish(2, 1)
    assert handout.next(3) == [Take(1, 2), Give(2, 2)]
    # It had begun nevertheless: its result counts, and the other's, which comes later, does not.
    assert handout.finish(1, 2) == [Take(2, 2)]
    assert handout.finish(2, 2) is None
    handout.finish(1, 0)
    assert handout.num_open == 0
    assert handout.next(3) == []


def test_nothing_is_given_beyond_the_horizon() -> None:
    handout = Handout()
    handout.join(1)
    handout.add(range(5))
    assert handout.next(1) == [Give(1, 0)]
    assert handout.next(1) == []
    assert handout.next(2) == [Give(1, 1)]


def test_a_unit_that_takes_three_executors_is_given_up_and_one_ahead_is_not_to_blame() -> None:
    handout = Handout()
    handout.add([0, 1])
    for executor in (1, 2):
        handout.join(executor)
        handout.next(9)
        assert handout.leave(executor) is None
    handout.join(3)
    handout.next(9)
    assert handout.leave(3, blame=False) is None
    handout.join(4)
    handout.next(9)
    assert handout.leave(4) == 0


def test_a_unit_that_fails_three_times_is_given_up() -> None:
    handout = Handout()
    handout.add([0])
    handout.join(1)
    for expected in (None, None, 0):
        handout.next(9)
        assert handout.fail(1, 0) == expected


def test_what_is_dropped_is_taken_back() -> None:
    handout = Handout()
    handout.join(1)
    handout.add(range(3))
    handout.next(9)
    assert handout.drop_all() == [Take(1, 0), Take(1, 1)]
    assert handout.finish(1, 0) is None
    handout.add([7])
    assert handout.next(9) == [Give(1, 7)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_whatever_happens_every_unit_is_finished_once(count: int, events: list[tuple[int, int]]) -> None:
    """Executors come, go and finish in any order; at last one does what is left."""
    handout, finished = Handout(max_losses=1000), []
    handout.add(range(count))
    for what, who in events:
        if what == 0 and who not in handout.holding:
            handout.join(who)
        elif what == 1:
            handout.leave(who)
        elif handout.holding.get(who):
            unit = handout.holding[who][0]
            assert handout.finish(who, unit) is not None
            finished.append(unit)
        handout.next(1000)
        held = [unit for units in handout.holding.values() for unit in units]
        assert len(held) == len(set(held))
    if 9 not in handout.holding:
        handout.join(9)
    while handout.num_open:
        handout.next(1000)
        for who in list(handout.holding):
            for unit in list(handout.holding[who]):
                assert handout.finish(who, unit) is not None
                finished.append(unit)
    assert sorted(finished) == list(range(count))
