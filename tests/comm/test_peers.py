"""Who of a view is gone, and what that means for a collective: nothing, if it had finished it before it went."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pliant.comm.connection import PeerLink
from pliant.comm.frames import TAGGED, FrameKind, channel_tag
from pliant.comm.peers import Peers
from pliant.comm.plan import Spec
from pliant.comm.transport import view_of
from pliant.errors import ViewChanged, WorkerLost

SPEC = Spec("all_reduce", "x", (0, 1, 2), "float32", 10, "sum", True, -1)
AMONG_TWO = Spec("all_reduce", "y", (0, 2), "float32", 10, "sum", True, -1)


class Deaf:
    """Hears nothing."""

    def on_frame(self, link: PeerLink, frame: object, payload: bytes) -> None: ...
    def place_for(self, link: PeerLink, frame: object) -> None: ...
    def on_bulk(self, link: PeerLink, frame: object) -> None: ...


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Those of rank 0 in a view of three, which is number 4."""
    view = view_of("ABC", 4)
    found = Peers(view, 0)
    far_ends = []
    for rank in (1, 2):
        near, far = socket.socketpair()
        far_ends.append(far)
        link = PeerLink(rank, view.workers[rank], near, shared=False, receiver=Deaf(), unsent=set(), view=4)
        found.links[rank] = link
    yield found
    for link in found.links.values():
        link.close()
    for far in far_ends:
        far.close()


def finished(count: int) -> bytes:
    return TAGGED.pack(channel_tag(SPEC.channel), count)


def test_who_dies_is_missing_in_all_that_it_is_part_of(peers: Peers) -> None:
    assert peers.why_incomplete(SPEC, 0) is None
    peers.mark_lost(1, "killed")
    assert isinstance(peers.why_incomplete(SPEC, 0), WorkerLost)
    assert peers.why_incomplete(AMONG_TWO, 0) is None


def test_who_leaves_is_missing_in_what_it_had_not_finished(peers: Peers) -> None:
    peers.on_bye(peers.links[1], 4, finished(3))
    peers.mark_lost(1, "it left the job")
    assert peers.why_incomplete(SPEC, 2) is None
    assert isinstance(peers.why_incomplete(SPEC, 3), WorkerLost)


@pytest.mark.parametrize(("view", "missing"), [(3, True), (5, False)])
def test_who_leaves_from_another_view(peers: Peers, view: int, missing: bool) -> None:
    """From a later one: it had finished with ours. From an earlier one: what it tells is of that one."""
    peers.on_bye(peers.links[1], view, finished(3))
    peers.mark_lost(1, "it left the job")
    assert (peers.why_incomplete(SPEC, 0) is not None) is missing


def test_who_moves_on_can_still_be_lost(peers: Peers) -> None:
    assert isinstance(peers.on_moved(peers.links[2], finished(1)), ViewChanged)
    assert peers.why_incomplete(SPEC, 0) is None
    assert isinstance(peers.why_incomplete(SPEC, 1), ViewChanged)
    assert 2 not in peers.lost
    peers.mark_lost(2, "killed")
    assert isinstance(peers.why_incomplete(SPEC, 1), WorkerLost)


def test_all_who_are_there_are_told(peers: Peers) -> None:
    peers.mark_lost(1, "killed")
    peers.send_to_all(FrameKind.LOST, b"killed", piece=1)
    assert not peers.links[1].flush(0.0)
    assert peers.links[1].sent_bytes == 0
    assert not peers.links[2].flush(0.0)
    assert peers.links[2].sent_bytes > 0
