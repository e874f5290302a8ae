"""One connection: frames leave by priority, arrive whole however they are cut, and damage is noticed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pliant.cluster import Worker
from pliant.comm.connection import PeerLink
from pliant.comm.frames import HEADER, Frame, FrameKind, header
from pliant.errors import CommError

PEER = Worker("127.0.0.1", 10000)


class Ear:
    """Writes down what a link delivers."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, bytes]] = []
        self.place = bytearray()

    def on_frame(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        self.heard.append((frame[0], frame[5], payload))

    def place_for(self, link: PeerLink, frame: Frame) -> memoryview:
        self.place = bytearray(frame[8])
        return memoryview(self.place)

    def on_bulk(self, link: PeerLink, frame: Frame) -> None:
        self.heard.append((frame[0], frame[5], bytes(self.place)))


@pytest.fixture
def pair() -> Iterator[tuple[PeerLink, PeerLink, Ear]]:
    ours, theirs = socket.socketpair()
    ear = Ear()
    sender, receiver = (PeerLink(0, PEER, sock, shared=True, receiver=ear, unsent=set()) for sock in (ours, theirs))
    yield sender, receiver, ear
    sender.close()
    receiver.close()


def exchange(sender: PeerLink, receiver: PeerLink) -> None:
    more = True
    while more:
        more = sender.flush(0.0)
        receiver.read(0.0)


def test_control_overtakes_data_and_data_goes_by_priority(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, ear = pair
    sent = []
    for priority, seq in [(5, 1), (1, 2), (5, 3), (0, 4)]:
        head = header(FrameKind.BCAST, 0, seq=seq, length=3)
        sender.send(priority, head, [memoryview(b"abc")], lambda seq=seq: sent.append(seq))
    sender.send_control(header(FrameKind.PING, 0, seq=9))
    exchange(sender, receiver)
    assert [seq for _, seq, _ in ear.heard] == [9, 4, 2, 1, 3]
    assert sent == [4, 2, 1, 3]


def test_a_frame_that_has_begun_is_finished_before_a_more_urgent_one(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, ear = pair
    big = os.urandom(3_000_000)
    sender.send(5, header(FrameKind.BCAST, 0, seq=1, length=len(big)), [memoryview(big)], None)
    assert sender.flush(0.0), "the kernel takes only part of it"
    sender.send(0, header(FrameKind.BCAST, 0, seq=2, length=1), [memoryview(b"x")], None)
    sender.send_control(header(FrameKind.PING, 0, seq=3))
    exchange(sender, receiver)
    while len(ear.heard) < 3:
        receiver.read(0.0)
    assert [(kind, seq) for kind, seq, _ in ear.heard] == [(FrameKind.BCAST, 1), (FrameKind.PING, 3), (FrameKind.BCAST, 2)]
    assert ear.heard[0][2] == big


def test_frames_cut_at_every_byte_arrive_whole(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    ear = pair[2]
    stream = (
        header(FrameKind.PING, 0, seq=1)
        + header(FrameKind.LOST, 0, seq=2, length=5) + b"hello"
        + header(FrameKind.BCAST, 0, seq=3, length=4) + b"bulk"
        + header(FrameKind.BCAST, 0, seq=4, length=0)
    )  # fmt: skip
    mine, theirs = socket.socketpair()
    link = PeerLink(0, PEER, theirs, shared=False, receiver=ear, unsent=set())
    for byte in stream:
        mine.send(bytes([byte]))
        link.read(0.0)
    assert ear.heard == [(FrameKind.PING, 1, b""), (FrameKind.LOST, 2, b"hello"), (FrameKind.BCAST, 3, b"bulk"), (FrameKind.BCAST, 4, b"")]
    mine.close()
    with pytest.raises(EOFError):
        link.read(0.0)
    link.close()


def test_a_control_frame_larger_than_the_buffer(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, ear = pair
    text = os.urandom(1_000_000)
    sender.send_control(header(FrameKind.LOST, 0, seq=1, length=len(text)), text)
    exchange(sender, receiver)
    assert ear.heard == [(FrameKind.LOST, 1, text)]


def test_a_damaged_stream_is_noticed(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, _ = pair
    sender.send_control(HEADER.pack(FrameKind.LOST, 0, 0, 0, 0, 0, 0, 0, 1 << 40))
    sender.flush(0.0)
    with pytest.raises(CommError, match="the stream is damaged"):
        receiver.read(0.0)


def test_a_descriptor_travels_with_its_frame(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, ear = pair
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    sender.send_control(header(FrameKind.ARENA, 0, seq=1), fd=fd)
    exchange(sender, receiver)
    os.close(fd)
    assert ear.heard == [(FrameKind.ARENA, 1, b"")]
    received = receiver.fds.popleft()
    assert os.pread(received, 6, 0) == b"shared"
    os.close(received)


def test_a_frame_of_a_later_view_waits_until_it_is_entered(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, ear = pair
    sender.send_control(header(FrameKind.OFFER, 0, seq=1) + header(FrameKind.HEARTBEAT, 3, seq=2))
    sender.send_control(header(FrameKind.OFFER, 2, seq=3, length=3), b"abc")
    sender.send_control(header(FrameKind.OFFER, 3, seq=4) + header(FrameKind.HEARTBEAT, 0, seq=5))
    exchange(sender, receiver)
    assert receiver.paused
    assert ear.heard == [(FrameKind.OFFER, 1, b""), (FrameKind.HEARTBEAT, 2, b"")]
    member = Ear()
    receiver.enter_view(2, 0, member)
    receiver.read(0.0)
    assert receiver.paused
    assert member.heard == [(FrameKind.OFFER, 3, b"abc")]
    receiver.enter_view(3, 0, member)
    receiver.read(0.0)
    assert not receiver.paused
    assert member.heard == [(FrameKind.OFFER, 3, b"abc"), (FrameKind.OFFER, 4, b"")]
    assert ear.heard[2:] == [(FrameKind.HEARTBEAT, 5, b"")], "what is of another view is not for the member's ear"


def test_what_was_queued_in_one_view_leaves_before_the_next(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, ear = pair
    for seq in (1, 2):
        sender.send(9 - seq, header(FrameKind.BCAST, 0, seq=seq, length=3), [memoryview(b"abc")], None)
    sender.send_control(header(FrameKind.OFFER, 0, seq=3))
    sender.enter_view(1, 0, ear)
    sender.send_control(header(FrameKind.OFFER, 1, seq=4))
    sender.enter_view(2, 0, ear)
    sender.send(0, header(FrameKind.BCAST, 2, seq=5, length=1), [memoryview(b"x")], None)
    sender.send_control(header(FrameKind.OFFER, 2, seq=6))
    receiver.view = 2
    exchange(sender, receiver)
    assert [seq for _, seq, _ in ear.heard] == [3, 2, 1, 4, 6, 5]
    assert not sender.flush(0.0)


def test_the_rest_of_an_old_payload_goes_nowhere(pair: tuple[PeerLink, PeerLink, Ear]) -> None:
    sender, receiver, ear = pair
    big = b"x" * 3_000_000
    sender.send(0, header(FrameKind.BCAST, 0, seq=1, length=len(big)), [memoryview(big)], None)
    sender.flush(0.0)
    receiver.read(0.0)
    arrived = ear.place.count(b"x")
    assert 0 < arrived < len(big)
    member = Ear()
    receiver.enter_view(1, 0, member)
    sender.send_control(header(FrameKind.OFFER, 1, seq=2))
    exchange(sender, receiver)
    while not member.heard:
        receiver.read(0.0)
    assert ear.place.count(b"x") == arrived, "written after the view was left"
    assert member.heard == [(FrameKind.OFFER, 2, b"")]
