"""The state machine without its thread: submissions, frames and folds in any order give the same result."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from pliant.cluster import View
from pliant.comm.collective import Collectives
from pliant.comm.connection import PeerLink
from pliant.comm.frames import EXTRA, KIND, PIECE, Frame, FrameKind
from pliant.comm.handle import Handle
from pliant.comm.kernels import reducer
from pliant.comm.lending import Lending
from pliant.comm.memory import SharedMemory, Span
from pliant.comm.operations import Burst, Operation, compile_plan
from pliant.comm.plan import Spec, make_plan
from pliant.comm.submission import finish_in_place
from pliant.comm.topology import Strategy
from pliant.comm.transport import view_of
from pliant.errors import WorkerLost

LENGTH = 5000


class Rank:
    """The collectives of one rank with their links, driven by the test."""

    timeout_s = 0.0

    def __init__(self, view: View, rank: int) -> None:
        self.memory = SharedMemory()
        self.collectives = Collectives(view, rank, Lending(self.memory, None, mock.Mock()))
        self.unsent: set[PeerLink] = set()
        self._seqs: dict[int, int] = {}

    def wake(self) -> None: ...

    def missing(self, handle: Handle) -> tuple[str, ...]:
        return ()

    def on_frame(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        """Map a peer's memory, as `Connections` does."""
        assert frame[KIND] == FrameKind.ARENA
        link.map_arena(frame[PIECE], frame[EXTRA])
        self.collectives.memory_map.on_arena(link.rank, frame[PIECE])

    def submit(self, name: str, tensor: torch.Tensor, strategy: str = "STAR") -> Handle:
        """Begin an all-reduce of a tensor in shared memory, as `comm.submission` does."""
        view, rank = self.collectives.view, self.collectives.rank
        members = tuple(range(view.size))
        registered = self.collectives.specs.register(
            Spec("all_reduce", name, members, "float32", len(tensor), "sum", "ddp", -1)
        )
        plan = make_plan(registered.spec, rank, view.hosts, Strategy(strategy), 4, 4096)
        local = [other for other, host in enumerate(view.hosts) if host == view.hosts[rank]]
        program = registered.plans.setdefault(0, compile_plan(registered, plan, local.__contains__, 4))
        seq = self._seqs.get(registered.channel, 0)
        self._seqs[registered.channel] = seq + 1
        place = self.memory.locate(tensor)
        assert place is not None
        out: Span = self.collectives.memory_map.span((rank, *place), tensor.dtype, len(tensor))
        operation = Operation(program, seq, 0, out, [out], reducer("sum", tensor.dtype), tensor, finish_in_place)
        operation.burst = Burst(1)
        operation.handle = handle = Handle(name, self, operation)
        self.collectives.begin(operation)
        return handle

    def tensor(self, value: float) -> torch.Tensor:
        return self.memory.empty(LENGTH, torch.float32).fill_(value)

    def work(self) -> None:
        self.collectives.work(0.0)
        self.collectives.operations.notify_waiters(everything=True)

    def write(self) -> None:
        for link in list(self.unsent):
            if not link.flush(0.0):
                self.unsent.discard(link)

    def read(self) -> None:
        for link in self.collectives.peers.links.values():
            link.read(0.0)


@contextmanager
def ranks_on(hosts: str) -> Iterator[list[Rank]]:
    view = view_of(hosts)
    ranks = [Rank(view, rank) for rank in range(view.size)]
    for one, here in enumerate(ranks):
        for other, there in enumerate(ranks[:one]):
            shared = hosts[one] == hosts[other]
            for near, far, sock in zip((here, there), (other, one), socket.socketpair(), strict=True):
                link = PeerLink(far, view.workers[far], sock, shared=shared, receiver=near, unsent=near.unsent)
                link.enter_view(0, far, near.collectives)
                near.collectives.peers.links[far] = link
    yield ranks
    for rank in ranks:
        for link in rank.collectives.peers.links.values():
            link.close()
        rank.memory.close()


def settle(ranks: list[Rank]) -> None:
    """Let all ranks work until nothing is left to do."""
    for _ in range(50):
        for rank in ranks:
            rank.work()
            rank.write()
            rank.read()


@pytest.mark.parametrize("strategy", ["STAR", "RING", "CLIQUE", "BINARY_TREE"])
@pytest.mark.parametrize("hosts", ["AB", "AA", "AAB"])
def test_the_sum_is_the_same_in_whatever_order_things_happen(hosts: str, strategy: str) -> None:
    for seed in range(6):
        chance = random.Random(seed)
        with ranks_on(hosts) as ranks:
            tensors = [
                [rank.tensor(0.1 * (number + 1) + step) for step in range(3)] for number, rank in enumerate(ranks)
            ]
            sums = [sum((row[step] for row in tensors[1:]), tensors[0][step].clone()) for step in range(3)]
            handles: list[Handle] = []
            left = [list(range(3)) for _ in ranks]
            while any(left):
                number = chance.randrange(len(ranks))
                rank, steps = ranks[number], left[number]
                act = chance.choice(["submit", "work", "write", "read"])
                if act != "submit":
                    getattr(rank, act)()
                elif steps:
                    step = steps.pop(0)
                    handles.append(rank.submit(f"tensor {step % 2}", tensors[number][step], strategy))
            settle(ranks)
            assert all(handle.succeeded for handle in handles)
            for row in tensors:
                for step, total in enumerate(sums):
                    torch.testing.assert_close(row[step], total)
                    assert torch.equal(row[step], tensors[0][step])


def test_a_worker_that_one_peer_reports_lost_is_dropped_by_all() -> None:
    with ranks_on("ABC") as ranks:
        handles = [ranks[number].submit("x", ranks[number].tensor(1.0)) for number in (0, 1)]
        ranks[0].collectives.on_lost(2, "it was killed")
        settle(ranks[:2])
        assert [link.rank for link in ranks[1].collectives.links_to_drop] == [2]
        assert all(isinstance(handle.error, WorkerLost) for handle in handles)
        late = ranks[1].submit("y", ranks[1].tensor(1.0))
        assert isinstance(late.error, WorkerLost)
