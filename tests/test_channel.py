"""One authenticated channel: both sides prove the secret, nothing on the way can be changed, strangers are bounded."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate, tls_contexts

from pliant import channel
from pliant.channel import Channel, ChannelServer, accept_handshake, connect_channel, connect_handshake, send_welcome
from pliant.errors import CommError, HandshakeRefused

pytestmark = pytest.mark.usefixtures("no_leaks")

SECRET = b"the secret of this job"
KEY = b"k" * 32
PATIENCE_S = 5.0


@contextlib.contextmanager
def pair(max_payload_bytes: int = 0) -> Iterator[tuple[Channel, Channel]]:
    """Two ends of a channel, as after a handshake."""
    ours, theirs = socket.socketpair()
    first, second = Channel(ours, KEY, is_connector=True), Channel(theirs, KEY, is_connector=False)
    second.max_payload_bytes = max_payload_bytes
    with contextlib.closing(first), contextlib.closing(second):
        yield first, second


@contextlib.contextmanager
def serving(**tls: Any) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = ChannelServer(listener, SECRET, echo, purpose="test", **tls)
    server.start()
    with contextlib.closing(server):
        yield listener.getsockname()[:2]


def echo(name: str, peer: Channel) -> None:
    peer.max_payload_bytes = 1 << 26
    while (message := peer.receive()) is not None:
        peer.send({"name": name, **message.body}, message.payload)


# --- messages ---


@pytest.mark.parametrize("num_bytes", [0, 1, 70_000, (5 << 20) + 3])
def test_bodies_and_payloads_arrive_as_sent(num_bytes: int) -> None:
    payload = os.urandom(num_bytes)
    with pair(max_payload_bytes=1 << 26) as (first, second):
        thread = threading.Thread(target=first.send, args=({"a": [1, "ü"]}, payload))
        thread.start()
        message = second.receive(PATIENCE_S)
        thread.join()
        assert message is not None
        assert message.body == {"a": [1, "ü"]}
        assert message.payload == payload
        second.send({"b": 2})
        assert first.receive(PATIENCE_S) == ({"b": 2}, b"")


def test_a_payload_arrives_in_the_memory_that_was_given_for_it() -> None:
    memory = bytearray(1000)
    with pair(max_payload_bytes=1000) as (sending, receiving):
        receiving.allocate = lambda size: memoryview(memory)[:size]
        sending.send({}, b"x" * 1000)
        assert receiving.receive(PATIENCE_S) is not None
    assert memory == b"x" * 1000


def record(*bodies: dict[str, object]) -> list[bytes]:
    """The bytes of these messages, one after the other, of one sender."""
    ours, theirs = socket.socketpair()
    found = []
    with theirs, contextlib.closing(Channel(ours, KEY, is_connector=True)) as sender:
        for body in bodies:
            sender.send(body, b"payload")
            found.append(theirs.recv(10_000))
    return found


@contextlib.contextmanager
def injected(*pieces: bytes) -> Iterator[Channel]:
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(Channel(theirs, KEY, is_connector=False)) as receiver:
        receiver.max_payload_bytes = 100
        for piece in pieces:
            ours.sendall(piece)
        ours.shutdown(socket.SHUT_WR)
        yield receiver


def test_nothing_can_be_altered_repeated_reordered_or_left_out() -> None:
    first, second = record({"n": 1}, {"n": 2})
    with injected(first, second) as receiver:
        assert [receiver.receive(), receiver.receive(), receiver.receive()] == [
            ({"n": 1}, b"payload"),
            ({"n": 2}, b"payload"),
            None,
        ]
    for at in (12, 20, 26, len(first) - 1):  # body, payload, MAC
        altered = bytearray(first)
        altered[at] ^= 1
        with injected(bytes(altered)) as receiver, pytest.raises(CommError, match="altered, repeated or left out"):
            receiver.receive()
    with injected(second) as receiver, pytest.raises(CommError, match="altered, repeated or left out"):
        receiver.receive()
    with injected(first, first) as receiver:
        receiver.receive()
        with pytest.raises(CommError, match="altered, repeated or left out"):
            receiver.receive()
    with injected(first[:-5]) as receiver, pytest.raises(CommError, match="ended in the middle"):
        receiver.receive()


def test_a_message_cannot_be_reflected_to_its_sender() -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Channel(ours, KEY, is_connector=True)) as sender:
        sender.send({"n": 1})
        theirs.sendall(theirs.recv(1000))
        with pytest.raises(CommError, match="altered, repeated or left out"):
            sender.receive(PATIENCE_S)


@pytest.mark.parametrize(("body", "payload"), [({"long": "x" * 2000}, b""), ({}, b"x" * 11)])
def test_sizes_are_bounded_before_anything_is_allocated(
    body: dict[str, object], payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_BODY_BYTES", 1000)
    with pair(max_payload_bytes=10) as (first, second):
        first.send(body, payload)
        with pytest.raises(CommError, match="was announced, where 1000 \\+ 10 are allowed"):
            second.receive(PATIENCE_S)


def test_what_is_no_json_object_is_refused() -> None:
    for text in (b"[1]", b"{", b"[" * 100_000):
        head = channel._HEAD.pack(len(text), 0)
        mac = hmac.new(KEY, b"c" + bytes(8) + head + text, hashlib.sha256).digest()
        with injected(head + text + mac) as receiver, pytest.raises(CommError, match="not JSON|not a JSON object"):
            receiver.receive()


def test_a_receiver_that_waits_is_woken_by_close_and_by_time() -> None:
    with pair() as (first, second):
        with pytest.raises(TimeoutError):
            second.receive(0.01)
        first.send({"still": "usable"})
        assert second.receive(PATIENCE_S) == ({"still": "usable"}, b"")
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(second.receive()))
        thread.start()
        second.close()
        thread.join(PATIENCE_S)
        assert seen == [None]
        with pytest.raises(CommError, match="the connection was lost"):
            first.send({"to": "nobody"}, bytes(10 << 20))


class SilentHost(socket.socket):
    """A connection whose other machine the kernel has given up: what keep-alive ends with, half a minute later."""

    def recv_into(self, *_: object) -> int:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def test_a_machine_that_is_gone_without_a_word_is_a_lost_connection_and_not_a_wait_in_vain() -> None:
    ours, theirs = socket.socketpair()
    silent = SilentHost(fileno=ours.detach())
    with theirs, contextlib.closing(Channel(silent, KEY, is_connector=True)) as channel:
        for timeout_s in (None, 1.0):
            with pytest.raises(CommError, match="the connection was lost: .*timed out"):
                channel.receive(timeout_s)


def test_half_a_message_and_then_silence_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "STALL_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(Channel(theirs, KEY, is_connector=False)) as receiver:
        ours.sendall(record({"n": 1})[0][:20])
        with pytest.raises(CommError, match="did not come for 0.05 s|was announced"):
            receiver.receive(PATIENCE_S)
    with pair() as (first, _), pytest.raises(CommError, match="took nothing for 0.05 s"):
        first.send({}, bytes(50 << 20))


# --- the handshake ---


def test_a_server_serves_several_clients_by_their_names() -> None:
    with serving() as address:
        clients = [connect_channel(address, SECRET, purpose="test", name=name) for name in ("a", "b")]
        for client, name in zip(clients, "ab", strict=True):
            client.max_payload_bytes = 100
            client.send({"x": 1}, b"data")
            assert client.receive(PATIENCE_S) == ({"name": name, "x": 1}, b"data")
            client.close()


def test_the_end_of_a_server_ends_its_clients() -> None:
    with serving() as address:
        client = connect_channel(address, SECRET, purpose="test", name="a")
        client.send({})
        client.receive(PATIENCE_S)
    with contextlib.closing(client):
        assert client.receive(PATIENCE_S) is None


def test_both_sides_say_that_the_secrets_differ(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as address:
        with pytest.raises(HandshakeRefused, match="does not know this job's secret: copy it"):
            connect_channel(address, b"another", purpose="test", name="eve", remedy="copy it")
        wait_for_log(caplog, "eve does not know this job's secret")


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while text not in caplog.text:
        assert time.monotonic() < deadline_s, caplog.text
        time.sleep(0.005)


def test_a_recorded_handshake_is_worth_nothing() -> None:
    """Whoever repeats a client's bytes meets another challenge."""
    heard: list[bytes] = []

    class Tapped(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            heard.append(bytes(data))
            super().sendall(data, flags)

    with serving() as address:
        with Tapped(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.connect(address)
            late_s = time.monotonic() + PATIENCE_S
            connect_handshake(sock, SECRET, purpose="test", name="a", deadline_s=late_s)
        with socket.create_connection(address, timeout=PATIENCE_S) as thief:
            thief.sendall(b"".join(heard))
            answer = b""
            while data := thief.recv(1000):
                answer += data
    assert b"does not know this job's secret" in answer


def test_strangers_cost_little_and_not_for_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(channel, "MAX_STRANGERS", 20)
    with serving() as address:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"PLIANX" + bytes(100)):
            with socket.create_connection(address, timeout=PATIENCE_S) as sock:
                sock.sendall(garbage)
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(100) == b""
        silent = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(channel.MAX_STRANGERS + 1)]
        for sock in silent:
            with sock, contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        wait_for_log(caplog, "others have not said who they are")
        wait_for_log(caplog, "not a pliant process")
        with contextlib.closing(connect_channel(address, SECRET, purpose="test", name="a")) as client:
            client.send({"still": "served"})
            assert client.receive(PATIENCE_S) == ({"name": "a", "still": "served"}, b"")


@pytest.mark.parametrize("has_tls", [False, True])
def test_who_knows_the_secret_gets_in_through_a_stream_of_strangers_and_the_log_stays_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, has_tls: bool
) -> None:
    monkeypatch.setattr(channel, "MAX_STRANGERS", 20)
    certificate, key = make_certificate(tmp_path, "job")
    server, client = tls_contexts(certificate, key) if has_tls else (None, None)
    der = ssl.PEM_cert_to_DER_cert(Path(certificate).read_text())
    with serving(tls=server, certificate=der) as address, contextlib.ExitStack() as stack:

        def crowd() -> None:
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))

        crowd()
        for name in "abc":
            peer = stack.enter_context(
                contextlib.closing(connect_channel(address, SECRET, purpose="test", name=name, tls=client))
            )
            crowd()
            peer.send({"still": "served"})
            assert peer.receive(PATIENCE_S) == ({"name": name, "still": "served"}, b"")
        wait_for_log(caplog, "further refusals are counted for 60 s")
        assert 50 <= len(caplog.messages) <= 54
    assert re.search(r"refused \d{3} more connections", caplog.messages[-1])


# --- TLS ---


def test_under_tls_the_handshake_covers_the_certificate(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "job")
    server, client = tls_contexts(certificate, key)
    der = ssl.PEM_cert_to_DER_cert(Path(certificate).read_text())
    payload = os.urandom(3 << 20)
    with serving(tls=server, certificate=der) as address:
        peer = connect_channel(address, SECRET, purpose="test", name="a", tls=client)
        peer.max_payload_bytes = 1 << 26
        thread = threading.Thread(target=peer.send, args=({"n": 1}, payload))
        thread.start()
        message = peer.receive(PATIENCE_S)
        thread.join()
        peer.close()
        assert message == ({"name": "a", "n": 1}, payload)
    # A man in the middle has a certificate of his own, and the two ends then disagree.
    with serving(tls=server, certificate=b"another") as address, pytest.raises(HandshakeRefused):
        connect_channel(address, SECRET, purpose="test", name="a", tls=client)


def test_a_caller_that_is_not_admitted_hears_why() -> None:
    ours, theirs = socket.socketpair()
    late_s = time.monotonic() + PATIENCE_S

    def refuse() -> None:
        name, _ = accept_handshake(theirs, SECRET, purpose="test", deadline_s=late_s)
        with pytest.raises(HandshakeRefused):
            channel.refuse(theirs, f"{name} is connected already", late_s)

    def welcome() -> None:
        accept_handshake(theirs, SECRET, purpose="test", deadline_s=late_s)
        send_welcome(theirs, late_s)

    with ours, theirs:
        for act in (refuse, welcome):
            thread = threading.Thread(target=act)
            thread.start()
            expected = pytest.raises(HandshakeRefused, match="a is connected already")
            with expected if act is refuse else contextlib.nullcontext():
                connect_handshake(ours, SECRET, purpose="test", name="a", deadline_s=late_s)
            thread.join()
