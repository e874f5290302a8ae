"""What a worker lends leaves it when somebody asks: within a host through shared memory, between hosts piece by piece."""

from __future__ import annotations

import contextlib
import itertools
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from views import QUICK, on_all, subview

from pliant.comm import byte_copies, fetching, lending
from pliant.comm.byte_copies import ByteRun, copy_bytes
from pliant.comm.engine import Engine
from pliant.comm.fetching import WINDOW, cut_pieces
from pliant.comm.frames import FrameKind, header
from pliant.comm.memory import SharedMemory
from pliant.comm.transport import Transport, loopback_transports, view_of
from pliant.errors import CommError, Mismatch, NotStored, ViewChanged, WorkerLost

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(60)]

MANY = [3, 0, 70_001, 9, 400_000, 5]
"""Sizes: small tensors that share a piece, and one that is cut."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut what the tests lend into many pieces."""
    for module in (lending, fetching):
        monkeypatch.setattr(module, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(lending, "SMALL_BYTES", 256)
    monkeypatch.setattr(fetching, "GROUPED_BYTES", 64 << 10)
    monkeypatch.setattr(fetching, "AT_ONCE_BYTES", 1 << 10)


def some_tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made: list[torch.Tensor] = [torch.randn(size, generator=generator) for size in MANY]
    return [*made, torch.arange(5, dtype=torch.int16), torch.tensor(1.5, dtype=torch.float64), torch.ones(2, 3) > 0]


def like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(each) for each in tensors]


def all_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def socket_bytes(transport: Transport) -> int:
    return sum(link.sent_bytes for link in transport.connections.links.values())


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)  # pacing a poll with a deadline


# --- values ---


def test_pieces_cover_every_byte_once() -> None:
    chance = random.Random(7)
    for _ in range(200):
        sizes = [chance.choice([0, 1, 7, 1000, 70_000, 300_000]) for _ in range(chance.randrange(12))]
        pieces = cut_pieces(sizes, 128 << 10)
        assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
        assert pieces[-1][1] == sum(sizes)
        assert all(end - begin <= 128 << 10 for begin, end in pieces)
        large = {sum(sizes[:index]) for index, size in enumerate(sizes) if size > 64 << 10}
        assert large <= {begin for begin, _ in pieces}, "a large tensor begins a piece of its own"
        even = cut_pieces(sizes, 128 << 10, is_even=True)
        assert len(even) <= len(pieces)
        assert [begin for begin, _ in even] == [0, *(end for _, end in even[:-1])]
        assert even[-1][1] == sum(sizes)
        assert all(end - begin == 128 << 10 for begin, end in even[:-1])
    assert cut_pieces([0, 0], 9) == cut_pieces([0, 0], 9, is_even=True) == [(0, 0)]


def test_a_run_of_bytes_is_that_of_its_tensors() -> None:
    tensors = some_tensors()
    run = ByteRun(tensors)
    whole = b"".join(each.view(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
    assert run.num_bytes == len(whole)
    chance = random.Random(3)
    for _ in range(100):
        begin, end = sorted(chance.randrange(len(whole) + 1) for _ in range(2))
        parts = run.cut(begin, end)
        assert b"".join(part.numpy().tobytes() for part in parts) == whole[begin:end]
        # Into other tensors, whose borders lie elsewhere.
        at = chance.randrange(end - begin + 1)
        target = torch.zeros(end - begin, dtype=torch.uint8)
        copy_bytes([target[:at], target[at:]], parts)
        assert target.numpy().tobytes() == whole[begin:end]


# --- between workers ---


def test_within_a_host_no_tensor_goes_through_a_socket() -> None:
    workers = view_of("AAB").workers
    lent = some_tensors()
    size = ByteRun(lent).num_bytes
    with loopback_transports(workers, QUICK) as made:
        made[0].lend("state", lent)
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        assert made[0].lending.num_copied_bytes == 0, "nothing is copied before somebody asks"
        quiet = socket_bytes(made[0])
        out = like(lent)
        ranks[1].fetch([0], "state", out).wait()
        assert all_equal(out, lent)
        assert socket_bytes(made[0]) - quiet < 4096
        assert size - 256 <= made[0].lending.num_copied_bytes <= size
        assert ranks[0].counters().egress_bytes[str(workers[1])] == size
        quiet = socket_bytes(made[0])
        far = like(lent)
        ranks[2].fetch([0], "state", far).wait()
        assert all_equal(far, lent)
        assert size <= socket_bytes(made[0]) - quiet < size + 4096
        assert made[0].lending.num_copied_bytes <= size, "another host gets it from where it lies"


def test_what_lies_in_shared_memory_is_read_there() -> None:
    workers = view_of("AA").workers
    with loopback_transports(workers, QUICK) as made:
        shared = made[0].empty(100_000).fill_(3.0)
        made[0].lend("state", [shared])
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        out = torch.zeros(100_000)
        ranks[1].fetch([0], "state", [out]).wait()
        assert torch.equal(out, shared)
        assert made[0].lending.num_copied_bytes == 0


def test_many_fetch_at_once_from_several_and_share_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five workers on two hosts fetch from two, with more pieces under way than there are slots."""
    monkeypatch.setattr(lending, "NUM_SLOTS", 3)
    workers = view_of("AAAAABB").workers
    lent = [*some_tensors(), *some_tensors(1)]
    size = ByteRun(lent).num_bytes
    with loopback_transports(workers, QUICK) as made:
        for transport in made[:2]:
            transport.lend("state", lent)
        ranks = [transport.enter(subview(0, workers)) for transport in made]

        def fetch(engine: Engine) -> list[torch.Tensor]:
            out = like(lent)
            engine.fetch([0, 1], "state", out).wait()
            return out

        assert all(all_equal(out, lent) for out in on_all(ranks, fetch))
        assert sum(transport.lending.num_copied_bytes for transport in made) <= 5 * size
        for transport in made:
            transport.reclaim("state")
        on_all(ranks, Engine.barrier)
        for transport in made[:2]:
            until(lambda held=transport.lending: len(held._free) == 3)  # type: ignore[misc]


def test_targets_of_any_form() -> None:
    """Parameters, views with gaps, NumPy arrays."""
    workers = view_of("AB").workers
    with loopback_transports(workers, QUICK) as made:
        made[0].lend("state", [torch.arange(30_000.0), torch.arange(6.0)])
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        for engine in ranks:
            parameter, matrix = torch.nn.Parameter(torch.zeros(30_000)), torch.zeros(3, 2).t()
            engine.fetch([0], "state", [parameter, matrix]).wait()
            assert torch.equal(parameter.detach(), torch.arange(30_000.0))
            assert torch.equal(matrix, torch.arange(6.0).view(2, 3))


def test_what_is_not_there_or_has_another_size_changes_nothing() -> None:
    workers = view_of("AAB").workers
    with loopback_transports(workers, QUICK) as made:
        made[0].lend("state", [torch.ones(100_000)])
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        for engine in ranks:
            out = [torch.zeros(100_001)]
            with pytest.raises(Mismatch, match="400000 bytes, but 400004"):
                engine.fetch([0], "state", out).wait()
            with pytest.raises(NotStored):
                engine.fetch([0], "other", out).wait()
            assert not out[0].any()


# --- losses ---


class Gate:
    """Holds the copying thread of a transport."""

    def __init__(self, transport: Transport) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        transport.lending.copies.call(self._hold)
        assert self.reached.wait(10)

    def _hold(self) -> None:
        self.reached.set()
        self.open.wait(30)


def cut_off(transport: Transport) -> None:
    """End all connections of a transport, as if its process had ended."""
    for link in transport.connections.links.values():
        link.sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("hosts", ["AAA", "ABC"])
def test_a_lender_that_dies_ends_the_fetch_and_nothing_is_written_later(hosts: str) -> None:
    workers = view_of(hosts).workers
    lent = some_tensors()
    with loopback_transports(workers, QUICK) as made:
        for transport in made[:2]:
            transport.lend("state", lent)
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        gate = Gate(made[0])  # what it lends has not been copied, or not been read
        reading = Gate(made[2])
        out = like(lent)
        fetch = ranks[2].fetch([0, 1], "state", out)
        made[0]._call(partial(cut_off, made[0]))
        gate.open.set()
        reading.open.set()
        with contextlib.suppress(WorkerLost) if hosts == "ABC" else pytest.raises(WorkerLost, match="rank 0"):
            fetch.wait(10)  # between hosts it may have come already
        again = made[2].enter(subview(1, workers[1:]))
        made[1].enter(subview(1, workers[1:]))
        for each in out:
            each.zero_()
        again.fetch([0], "state", out).wait(10)
        assert all_equal(out, lent)


def test_a_lender_that_moves_on_tells_who_still_fetches() -> None:
    workers = view_of("AAB").workers
    lent = some_tensors()
    with loopback_transports(workers, QUICK) as made:
        made[0].lend("state", lent)
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        gate = Gate(made[0])
        near = ranks[1].fetch([0], "state", like(lent))
        until(lambda: len(made[0].lending._copied) == WINDOW)
        made[0].enter(subview(1, workers[:1]))
        gate.open.set()
        with pytest.raises(ViewChanged):
            near.wait(10)
        made[0].reclaim("")
        until(lambda: len(made[0].lending._free) == lending.NUM_SLOTS)
        assert not made[0].lending._read


def test_a_copy_that_has_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = view_of("AA").workers
    lent = some_tensors()
    with loopback_transports(workers, QUICK) as made:
        made[0].lend("state", lent)
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        with monkeypatch.context() as patch:
            patch.setattr(byte_copies, "copy_bytes", mock.Mock(side_effect=RuntimeError("cannot be pinned")))
            with pytest.raises(NotStored):
                ranks[1].fetch([0], "state", like(lent)).wait(10)
            until(lambda: len(made[0].lending._free) == lending.NUM_SLOTS)
        out = like(lent)
        ranks[1].fetch([0], "state", out).wait(10)
        assert all_equal(out, lent)


@pytest.mark.parametrize("is_silent", [False, True])
def test_memory_that_a_silent_worker_reads_is_never_used_again(is_silent: bool) -> None:
    """A worker that was only stopped may go on reading, and believe what it has read. One that has ended does not."""
    workers = view_of("AAA").workers
    lent = some_tensors()
    with loopback_transports(workers, QUICK) as made:
        made[0].lend("state", lent)
        ranks = [transport.enter(subview(0, workers[:2])) for transport in made[:2]]
        gate = Gate(made[1])  # it has been told where the pieces lie, and does not read them
        fetch = ranks[1].fetch([0], "state", like(lent))
        until(lambda: len(made[0].lending._read) == WINDOW)
        read = {id(slot) for slot in made[0].lending._read.values()}

        def drop() -> None:
            link = made[0].connections.links[workers[1]]
            made[0].connections._drop(link, "silent for 10 s")

        if is_silent:
            made[0]._call(drop)
        else:
            made[1]._call(partial(cut_off, made[1]))
        gate.open.set()
        with pytest.raises(CommError):
            fetch.wait(10)
        for transport in (made[0], made[2]):
            transport.enter(subview(1, [workers[0], workers[2]]))
        out = like(lent)
        engine = made[2].engine
        assert engine is not None
        engine.fetch([0], "state", out).wait(10)
        assert all_equal(out, lent)
        made[0]._call(lambda: None)
        held = made[0].lending
        usable = {id(slot) for slot in (*held._free, *held._copied.values())}
        assert usable.isdisjoint(read) == is_silent
        assert len(held._abandoned) == (WINDOW if is_silent else 0)


def test_a_piece_that_nobody_waits_for_is_returned() -> None:
    workers = view_of("AA").workers
    with loopback_transports(workers, QUICK) as made:
        for transport in made:
            transport.enter(subview(0, workers))
        returned: list[int] = []
        made[0].connections.on_returned = lambda _, seq: returned.append(seq)
        link = made[0].connections.links[workers[1]]
        made[0]._call(lambda: link.send_control(header(FrameKind.LENT, 0, seq=77)))
        on_all([transport.engine for transport in made], Engine.barrier)
        assert returned == [77]


# --- memory that is ready before it is needed ---


def test_tensors_are_allocated_from_what_was_set_aside() -> None:
    memory = SharedMemory()
    whole = memory.reserve(1 << 20)
    places = [memory.locate(memory.empty(60_000, torch.float32)) for _ in range(3)]
    assert {memory.locate(whole)} == {(0, 0)}
    kept = [memory.empty(60_000, torch.float32) for _ in range(4)]
    assert [place and place[0] for place in map(memory.locate, kept)] == [0] * 4
    assert places[0] == (0, 0)
    other = memory.empty(60_000, torch.float32), memory.empty(3, torch.float32)
    assert all((memory.locate(each) or (0, 0))[0] != 0 for each in other), "it is used up, or not for small ones"
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (*kept, *other))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "they do not overlap"
    memory.close()


def test_what_is_reserved_is_found_and_pinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = view_of("A").workers
    with loopback_transports(workers, QUICK) as made:
        pinned: list[int] = []
        staging = mock.Mock(pin=lambda flat: pinned.append((made[0].memory.locate(flat) or (-1, 0))[0]))
        made[0]._cuda = staging
        made[0].reserve([(50_000, torch.float32), (50_000, torch.float32)], num_bytes=1 << 20, pins=True)
        until(lambda: len(pinned) == 4)
        assert len(set(pinned)) == 3, "tensors, what is set aside, slots"
        arenas = len(made[0].memory.arenas)
        found = [made[0].empty(50_000), made[0].empty(50_000), made[0].empty(100_000)]
        assert {(made[0].memory.locate(each) or (-1, 0))[0] for each in found} <= set(pinned)
        assert len(made[0].memory.arenas) == arenas


def test_slots_are_pinned_by_the_peers_of_a_coming_view() -> None:
    """By those that use a GPU, before they have entered any view."""
    workers = view_of("AAAB").workers
    with loopback_transports(workers, QUICK) as made:
        pinned: list[list[int]] = [[] for _ in made]
        for transport, mine in zip(made, pinned, strict=True):
            transport._cuda = mock.Mock(pin_mapped=lambda arena, mine=mine: mine.append(arena.size))
        made[0].empty(50_000)  # of an older arena, which is nothing to lend from
        size = lending.NUM_SLOTS * lending.PIECE_BYTES
        made[1].reserve(pins=True)
        made[1]._call(lambda: None)
        made[0].reserve(pins=True)
        until(lambda: pinned[1] == [size] == pinned[0])
        lent, out = some_tensors(), like(some_tensors())
        made[0].lend("state", lent)
        ranks = [transport.enter(subview(0, workers)) for transport in made]
        ranks[2].fetch([0], "state", out).wait(10)
        assert all_equal(out, lent)
        made[2].reserve(pins=True)
        made[3].reserve(pins=True)
        on_all(ranks, Engine.barrier)
        assert pinned == [[size], [size], [], []], "whoever is in a view does not pin what it will not read"


def test_populated_memory_keeps_its_contents_and_costs_no_page_faults_later() -> None:
    memory = SharedMemory()
    whole = memory.empty_arena((64 << 20) + 64)
    whole[:3], whole[-1] = 7, 9
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.arenas[0].populate()
    populated = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert whole[:4].tolist() == [7, 7, 7, 0]
    assert whole[-1] == 9
    whole.fill_(1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - populated
    if populated == before and faults > 1000:
        pytest.skip("this kernel cannot populate memory")
    assert faults < 1000, "there are 16384 pages"
    memory.close()
