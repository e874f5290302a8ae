"""What leaves next on a connection: an order of values, without a socket."""

from __future__ import annotations

from pliant.comm.connection import Outbox


def push(outbox: Outbox, priority: int, payload: bytes, sent: list[bytes] | None = None) -> None:
    """Queue a frame; when it has gone, its payload is noted."""
    done = None if sent is None else lambda: sent.append(payload)
    outbox.data.push(priority, ([memoryview(b"<"), memoryview(payload)], done))


def drain(outbox: Outbox, at_once: int = 1 << 20) -> bytes:
    """All that leaves, as a kernel would take it that takes so much at once."""
    gone = b""
    while outbox.fill():
        taken = b"".join(outbox.views(at_once))
        gone += taken
        outbox.advance(len(taken))
    return gone


def test_control_goes_first_then_data_by_priority_then_age() -> None:
    outbox = Outbox()
    for priority, payload in [(5, b"c"), (1, b"a"), (5, b"d"), (1, b"b")]:
        push(outbox, priority, payload)
    outbox.add_control(b"con", b"trol", None)
    assert outbox
    assert drain(outbox) == b"control<a<b<c<d"
    assert not outbox


def test_who_sent_a_frame_hears_of_its_last_byte() -> None:
    for at_once in (1, 2, 3, 7):
        outbox, sent = Outbox(), list[bytes]()
        for payload in (b"abc", b"", b"de"):
            push(outbox, 0, payload, sent)
        heard = []
        gone = b""
        while outbox.fill():
            taken = b"".join(outbox.views(at_once))
            assert 0 < len(taken) <= at_once
            gone += taken
            outbox.advance(len(taken))
            heard.append((len(gone), len(sent)))
        assert gone == b"<abc<<de"
        assert sent == [b"abc", b"", b"de"]
        ends = (4, 5, 8)
        assert all(count == sum(end <= length for end in ends) for length, count in heard), heard


def test_what_has_begun_is_not_overtaken() -> None:
    outbox = Outbox()
    push(outbox, 5, b"slow")
    outbox.fill()
    outbox.advance(2)
    push(outbox, 0, b"urgent")
    outbox.add_control(b"control", b"", None)
    assert drain(outbox) == b"lowcontrol<urgent"


def test_what_was_queued_in_a_view_leaves_before_the_next() -> None:
    outbox = Outbox()
    push(outbox, 9, b"late")
    push(outbox, 1, b"early")
    outbox.add_control(b"old", b"", None)
    outbox.end_view()
    push(outbox, 0, b"new")
    outbox.add_control(b"word", b"", None)
    assert drain(outbox) == b"old<early<lateword<new"


def test_a_descriptor_goes_alone_and_before_what_may_speak_of_it() -> None:
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
