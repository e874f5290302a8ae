"""One connection, without an engine: the order in which frames leave, how they arrive, and which peers are missing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from frame_recorder import FrameRecorder

from pliant.cluster import Worker
from pliant.comm.connection import Outbox, PeerLink
from pliant.comm.frames import HEADER, TAGGED, FrameKind, channel_tag, header
from pliant.comm.peers import Peers
from pliant.comm.plan import Spec
from pliant.comm.transport import view_of
from pliant.errors import CommError, ViewChanged, WorkerLost

PEER = Worker("127.0.0.1", 10000)
BCAST, PING, LOST, OFFER, HEARTBEAT = (
    FrameKind.BCAST, FrameKind.PING, FrameKind.LOST, FrameKind.OFFER, FrameKind.HEARTBEAT,
)  # fmt: skip

# --- the outbox ---


def push(outbox: Outbox, priority: int, payload: bytes, sent: list[bytes] | None = None) -> None:
    """Queue a frame; its payload is appended to `sent` when it has gone."""
    on_sent = None if sent is None else lambda: sent.append(payload)
    outbox.data.push(priority, ([memoryview(b"<"), memoryview(payload)], on_sent))


def drain(outbox: Outbox) -> bytes:
    gone = b""
    while outbox.fill():
        taken = b"".join(outbox.views(1 << 20))
        gone += taken
        outbox.advance(len(taken))
    return gone


def test_control_leaves_first_then_data_by_priority_then_age() -> None:
    outbox = Outbox()
    for priority, payload in [(5, b"c"), (1, b"a"), (5, b"d"), (1, b"b")]:
        push(outbox, priority, payload)
    outbox.add_control(b"con", b"trol", None)
    assert outbox
    assert drain(outbox) == b"control<a<b<c<d"
    assert not outbox


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
def test_on_sent_is_called_with_the_last_byte_of_a_frame(at_once: int) -> None:
    outbox, sent = Outbox(), list[bytes]()
    for payload in (b"abc", b"", b"de"):
        push(outbox, 0, payload, sent)
    gone = b""
    while outbox.fill():
        taken = b"".join(outbox.views(at_once))
        assert 0 < len(taken) <= at_once
        gone += taken
        outbox.advance(len(taken))
        assert len(sent) == sum(end <= len(gone) for end in (4, 5, 8))
    assert gone == b"<abc<<de"
    assert sent == [b"abc", b"", b"de"]


def test_a_descriptor_leaves_alone_and_before_what_may_refer_to_it() -> None:
    outbox = Outbox()
    outbox.add_control(b"first", b"", 7)
    outbox.add_control(b"second", b"", 8)
    outbox.add_control(b"about both", b"", None)
    seen = []
    while outbox.fill():
        seen.append((b"".join(outbox.views(100)), list(outbox.fds)))
        outbox.fds.clear()
        outbox.advance(outbox.num_bytes)
    assert seen == [(b"first", [7]), (b"second", [8]), (b"about both", [])]


# --- the link ---

Pair = tuple[PeerLink, PeerLink, FrameRecorder]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Yield both ends of a connection, and the recorder at the receiving end."""
    recorder, ends = FrameRecorder(), socket.socketpair()
    sender, receiver = (PeerLink(0, PEER, sock, shared=True, receiver=recorder, unsent=set()) for sock in ends)
    yield sender, receiver, recorder
    sender.close()
    receiver.close()


def exchange(sender: PeerLink, receiver: PeerLink) -> None:
    more = True
    while more:
        more = sender.flush(0.0)
        receiver.read(0.0)


def test_a_large_frame_is_finished_before_a_more_urgent_one(pair: Pair) -> None:
    sender, receiver, recorder = pair
    big, sent = os.urandom(3_000_000), list[int]()
    sender.send(5, header(BCAST, 0, seq=1, length=len(big)), [memoryview(big)], lambda: sent.append(1))
    assert sender.flush(0.0), "the kernel takes only part of it"
    sender.send(0, header(BCAST, 0, seq=2, length=1), [memoryview(b"x")], lambda: sent.append(2))
    sender.send_control(header(PING, 0, seq=3))
    exchange(sender, receiver)
    while len(recorder.frames) < 3:
        receiver.read(0.0)
    assert recorder.frames == [(BCAST, 1, big), (PING, 3, b""), (BCAST, 2, b"x")]
    assert sent == [1, 2]


def test_frames_cut_at_every_byte_arrive_whole() -> None:
    recorder, (mine, theirs) = FrameRecorder(), socket.socketpair()
    stream = (
        header(PING, 0, seq=1)
        + header(LOST, 0, seq=2, length=5) + b"hello"
        + header(BCAST, 0, seq=3, length=4) + b"bulk"
        + header(BCAST, 0, seq=4, length=0)
    )  # fmt: skip
    link = PeerLink(0, PEER, theirs, shared=False, receiver=recorder, unsent=set())
    for byte in stream:
        mine.send(bytes([byte]))
        link.read(0.0)
    assert recorder.frames == [(PING, 1, b""), (LOST, 2, b"hello"), (BCAST, 3, b"bulk"), (BCAST, 4, b"")]
    mine.close()
    with pytest.raises(EOFError):
        link.read(0.0)
    link.close()


def test_a_control_frame_may_be_larger_than_the_buffer_but_not_than_the_limit(pair: Pair) -> None:
    sender, receiver, recorder = pair
    text = os.urandom(1_000_000)
    sender.send_control(header(LOST, 0, seq=1, length=len(text)), text)
    exchange(sender, receiver)
    assert recorder.frames == [(LOST, 1, text)]
    sender.send_control(HEADER.pack(LOST, 0, 0, 0, 0, 0, 0, 0, 1 << 40))
    sender.flush(0.0)
    with pytest.raises(CommError, match="the stream is damaged"):
        receiver.read(0.0)


def test_a_descriptor_travels_with_its_frame(pair: Pair) -> None:
    sender, receiver, recorder = pair
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    sender.send_control(header(FrameKind.ARENA, 0, seq=1), fd=fd)
    exchange(sender, receiver)
    os.close(fd)
    assert recorder.frames == [(FrameKind.ARENA, 1, b"")]
    received = receiver.fds.popleft()
    assert os.pread(received, 6, 0) == b"shared"
    os.close(received)


def test_a_frame_of_a_later_view_waits_until_it_is_entered(pair: Pair) -> None:
    sender, receiver, recorder = pair
    sender.send_control(header(OFFER, 0, seq=1) + header(HEARTBEAT, 3, seq=2))
    sender.send_control(header(OFFER, 2, seq=3, length=3), b"abc")
    sender.send_control(header(OFFER, 3, seq=4) + header(HEARTBEAT, 0, seq=5))
    exchange(sender, receiver)
    assert receiver.paused
    assert recorder.frames == [(OFFER, 1, b""), (HEARTBEAT, 2, b"")]
    member = FrameRecorder()
    receiver.enter_view(2, 0, member)
    receiver.read(0.0)
    assert receiver.paused
    assert member.frames == [(OFFER, 3, b"abc")]
    receiver.enter_view(3, 0, member)
    receiver.read(0.0)
    assert not receiver.paused
    assert member.frames == [(OFFER, 3, b"abc"), (OFFER, 4, b"")]
    assert recorder.frames[2:] == [(HEARTBEAT, 5, b"")], "a frame of another view is not for the member"


def test_a_link_sends_what_was_queued_in_one_view_before_the_next(pair: Pair) -> None:
    sender, receiver, recorder = pair
    for seq in (1, 2):
        sender.send(9 - seq, header(BCAST, 0, seq=seq, length=3), [memoryview(b"abc")], None)
    sender.send_control(header(OFFER, 0, seq=3))
    sender.enter_view(1, 0, recorder)
    sender.send_control(header(OFFER, 1, seq=4))
    sender.enter_view(2, 0, recorder)
    sender.send(0, header(BCAST, 2, seq=5, length=1), [memoryview(b"x")], None)
    sender.send_control(header(OFFER, 2, seq=6))
    receiver.view = 2
    exchange(sender, receiver)
    assert [seq for _, seq, _ in recorder.frames] == [3, 2, 1, 4, 6, 5]
    assert not sender.flush(0.0)


def test_the_rest_of_a_payload_of_an_old_view_is_discarded(pair: Pair) -> None:
    sender, receiver, recorder = pair
    big = b"x" * 3_000_000
    sender.send(0, header(BCAST, 0, seq=1, length=len(big)), [memoryview(big)], None)
    sender.flush(0.0)
    receiver.read(0.0)
    arrived = recorder.place.count(b"x")
    assert 0 < arrived < len(big)
    member = FrameRecorder()
    receiver.enter_view(1, 0, member)
    sender.send_control(header(OFFER, 1, seq=2))
    exchange(sender, receiver)
    while not member.frames:
        receiver.read(0.0)
    assert recorder.place.count(b"x") == arrived, "written after the view was left"
    assert member.frames == [(OFFER, 2, b"")]


# --- peers that are gone ---

SPEC = Spec("all_reduce", "x", (0, 1, 2), "float32", 10, "sum", "ddp", -1)


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Yield the peers of rank 0 in a view of three, which is number 4."""
    view = view_of("ABC", 4)
    found, far_ends = Peers(view, 0), []
    for rank in (1, 2):
        near, far = socket.socketpair()
        far_ends.append(far)
        found.links[rank] = PeerLink(
            rank, view.workers[rank], near, shared=False, receiver=FrameRecorder(), unsent=set(), view=4
        )
    yield found
    for end in (*found.links.values(), *far_ends):
        end.close()


def finished(count: int) -> bytes:
    return TAGGED.pack(channel_tag(SPEC.channel), count)


@pytest.mark.parametrize(("view", "seq", "missing"), [(3, 0, True), (4, 2, False), (4, 3, True), (5, 9, False)])
def test_a_rank_that_leaves_is_missing_in_what_it_had_not_finished(
    peers: Peers, view: int, seq: int, missing: bool
) -> None:
    """Whoever leaves from a later view had finished with this one."""
    peers.on_bye(peers.links[1], view, finished(3))
    peers.mark_lost(1, "it left the job")
    assert isinstance(peers.why_incomplete(SPEC, seq), WorkerLost) is missing


def test_a_rank_that_moves_on_can_still_be_lost(peers: Peers) -> None:
    assert isinstance(peers.on_moved(peers.links[2], finished(1)), ViewChanged)
    assert peers.why_incomplete(SPEC, 0) is None
    assert isinstance(peers.why_incomplete(SPEC, 1), ViewChanged)
    assert 2 not in peers.lost
    peers.mark_lost(2, "killed")
    assert isinstance(peers.why_incomplete(SPEC, 1), WorkerLost)
