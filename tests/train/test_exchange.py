"""What workers tell each other with a step: changes where they are few, whole contexts where they are many."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.train import exchange
from pliant.train.context import DataPosition, ReplicaContext, capture_rng, restore_rng, seeded_rng
from pliant.train.exchange import (
    CHANGES_BYTES,
    MAX_CHANGES,
    StepMessage,
    StepMessageCodec,
    apply_changes,
    encode_changes,
)
from pliant.train.step import TURN_BYTES, Turn, TurnRow
from pliant.train.sync import StepMeasurement, SyncConfig

BLOCKS = (2, 1, 3)


@given(st.binary(min_size=1, max_size=300), st.dictionaries(st.integers(0, 299), st.integers(0, 255), max_size=20))
def test_a_change_makes_the_new_out_of_the_old(before: bytes, changes: dict[int, int]) -> None:
    after = bytearray(before)
    for place, value in changes.items():
        after[place % len(before)] = value
    change = encode_changes(before, bytes(after))
    if change is None:
        assert len({place % len(before) // 8 for place in changes}) > MAX_CHANGES
    else:
        assert len(change) <= CHANGES_BYTES
        assert apply_changes(before, change.ljust(CHANGES_BYTES, b"\0")) == after


def test_what_does_not_fit_is_not_told() -> None:
    before = bytes(8 * (MAX_CHANGES + 1))
    assert encode_changes(before, b"\1" * 8 * MAX_CHANGES + bytes(8)) is not None
    assert encode_changes(before, b"\1" * len(before)) is None
    assert encode_changes(before, before + bytes(8)) is None, "of another length"
    assert encode_changes(bytes(1 << 20), bytes(1 << 20)) is None, "places beyond what a change can name"


def _contexts(seed: int, count: int) -> list[ReplicaContext]:
    return [ReplicaContext(seeded_rng(seed + each), DataPosition()) for each in range(count)]


class World:
    """Ranks that tell each other their rows, without a network."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self.rows = [StepMessageCodec(0) for _ in blocks]
        self.known = [_contexts(7, sum(blocks)) for _ in blocks]
        self.step = 0
        self.extras = 0
        """How often the extras of replicas took a round of their own."""
        begin = 0
        for each, count in zip(self.rows, blocks, strict=True):
            each.enter_view(blocks, range(begin, begin + count))
            begin += count

    def train(self, new: Sequence[ReplicaContext]) -> tuple[str, bool]:
        """One step after which the replicas' contexts are these; the name of the rows, and whether they were enough."""
        said = [
            StepMessage(
                self.step,
                40 + rank,
                SyncConfig(),
                StepMeasurement(),
                bytes([rank] * 5),
                [Turn(replica, slot, False, models=1 + replica).pack() for slot, replica in enumerate(each._hosted)],
                draws=rank,
                checksum=2**64 - 1 - rank,
            )
            for rank, each in enumerate(self.rows)
        ]
        [name] = {each.name for each in self.rows}
        mine = [{replica: new[replica] for replica in each._hosted} for each in self.rows]
        table = [
            bytes(each.pack(told, own, known).numpy())
            for each, told, own, known in zip(self.rows, said, mine, self.known, strict=True)
        ]
        complete = set()
        for each, own, known in zip(self.rows, mine, self.known, strict=True):
            heard, whole = each.read(table, own, known, 5)
            complete.add(whole)
            assert [replace(one, fits=True, has_extras=False) for one in heard] == said
            turns = [TurnRow.from_bytes(row).models for one in heard for row in one.turns]
            assert turns == list(range(1, 1 + sum(self.blocks)))
        if complete == {False}:
            rest = [bytes(each.pack_contexts(own).numpy()) for each, own in zip(self.rows, mine, strict=True)]
            for each, own, known in zip(self.rows, mine, self.known, strict=True):
                each.read_contexts(rest, own, known)
        if any(one.has_extras for one in heard):
            self.extras += 1
            sent = [
                each.pack_extras({replica: new[replica] for replica in each._hosted}, known)
                for each, known in zip(self.rows, self.known, strict=True)
            ]
            for each, own in zip(self.rows, mine, strict=True):
                each.read_extras(sent, own)
        expected = [(each.to_bytes(0), each.extra) for each in new]
        for rank, own in enumerate(mine):
            self.known[rank] = [own[replica] for replica in range(sum(self.blocks))]
            assert [(each.to_bytes(0), each.extra) for each in self.known[rank]] == expected, (
                f"rank {rank} believes something else"
            )
        self.step += 1
        [whole] = complete
        return name, whole

    def drawing(self, draws: dict[int, int]) -> list[ReplicaContext]:
        """What comes of the contexts when replicas draw so many numbers, and all take a batch."""
        new = []
        for replica, context in enumerate(self.known[0]):
            restore_rng(context.random)
            if replica in draws:
                torch.rand(draws[replica])
                [random.random() for _ in range(draws[replica])]
            new.append(ReplicaContext(capture_rng(), DataPosition(batch=context.stream.batch + 1)))
        return new


@pytest.mark.parametrize("blocks", [BLOCKS, (1, 1, 1, 1, 1, 1), (3,)], ids=str)
def test_whole_contexts_are_told_when_they_have_changed(blocks: tuple[int, ...]) -> None:
    world, last = World(blocks), sum(blocks) - 1
    assert world.train(world.drawing({0: 2})) == ("step", True), "newcomers have no contexts to compare with"
    assert world.train(world.drawing({})) == ("step", True), "the first numbers of a seed make all words new"
    assert world.train(world.drawing({0: 2})) == ("changes", True), "a few numbers move a position"
    assert world.train(world.drawing({last: 2000})) == ("changes", False), "the first time nobody could know"
    assert world.train(world.drawing({last: 2000})) == ("step", True)
    assert world.train(world.drawing({})) == ("step", True)
    assert world.train(world.drawing({})) == ("changes", True)


def test_changes_take_little_room() -> None:
    world = World((1,) * 6)
    own = {0: world.drawing({})[0]}
    said = StepMessage(0, 0, SyncConfig(), StepMeasurement(), b"", [Turn(0, 0, True).pack()])
    whole = world.rows[0].pack(said, own, world.known[0])
    world.train(world.drawing({}))
    assert len(world.rows[0].pack(said, own, world.known[0])) < 300 + TURN_BYTES < 10_000 < len(whole)


def test_what_own_data_have_kept_travels_when_it_has_changed() -> None:
    world = World(BLOCKS)
    for kept in ({}, {0: b"a"}, {0: b"a", 4: b"longer"}, {0: b"a", 4: b"longer"}, {4: b""}):
        new = world.drawing({})
        for replica, context in enumerate(new):
            new[replica] = context.at(replace(context.stream, extra=kept.get(replica, b"")))
        world.train(new)
    assert world.extras == 3, "not where nothing has changed"


def test_a_change_for_another_context_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    monkeypatch.setattr(exchange, "apply_changes", lambda before, change: before)
    world = World(BLOCKS)
    world.train(world.drawing({}))
    with pytest.raises(AssertionError, match="believes something else"):
        world.train(world.drawing({}))
