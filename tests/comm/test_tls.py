"""TLS between hosts: collectives work, a man in the middle is refused, and nobody on the wire can read along.

The wire is a proxy in the test: the view names the proxy's port, and rank 0 listens on another one with a socket
that it was given, as it gets one from a runner.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from certificates import make_certificate, tls_contexts
from frame_recorder import FrameRecorder
from gang import FULL, addresses, gang, job, joined, specs

from pliant.cluster import Worker
from pliant.comm import connection
from pliant.comm.connection import PeerLink
from pliant.comm.frames import FrameKind, header
from pliant.identity import WorkerSpec

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("fork_server", "no_leaks"),
]

MARK = 1234.5
"""An element of the tensors; sixteen of them in a row are easy to recognise on the wire."""
SEEN = torch.full((16,), MARK).numpy().tobytes()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Make two self-signed certificates, each with its key."""
    directory = tmp_path_factory.mktemp("certificates")
    return [make_certificate(directory, name) for name in ("job", "stranger")]


def reducing(
    rank: int,
    spec: WorkerSpec,
    tls: tuple[str, str],
    listener: socket.socket | None = None,
    patience_s: float = 20.0,
) -> str:
    """Reduce tensors of many sizes; return "right", or the error."""
    certificate, key = tls
    own = {"listen_fd": listener.detach()} if listener is not None else {}
    try:
        with joined(spec, tls_cert=certificate, tls_key=key, join_timeout_s=patience_s, **own) as engine:
            for length in (1, 1000, 3_000_007):
                tensor = torch.full((length,), MARK)
                engine.all_reduce(f"gradient {length}", tensor).wait(20)
                assert bool((tensor == engine.size * MARK).all()), f"wrong sum of {length}"
            several = [torch.full((200_003,), MARK) for _ in range(20)]
            for handle in [engine.all_reduce(f"several {i}", tensor) for i, tensor in enumerate(several)]:
                handle.wait(20)
            assert all(bool((tensor == engine.size * MARK).all()) for tensor in several)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "right"


@pytest.mark.parametrize("hosts", ["AB", "AABB", "ABC"] if FULL else ["AABB"])
def test_collectives_between_hosts(hosts: str, certificates: list[tuple[str, str]]) -> None:
    with job(reducing, specs(addresses(hosts)), certificates[0]) as started:
        assert started.results(60) == ["right"] * len(hosts)


def test_each_host_may_have_a_certificate_of_its_own(certificates: list[tuple[str, str]]) -> None:
    with gang(reducing, list(zip(specs(addresses("AB")), certificates, strict=True))) as started:
        assert started.results(60) == ["right"] * 2


@pytest.mark.parametrize("encrypted", [True, False], ids=["tls", "plain"])
def test_a_listener_on_the_wire_reads_nothing(encrypted: bool, certificates: list[tuple[str, str]]) -> None:
    """Without TLS the same proxy sees the numbers, which proves that it would have seen them."""
    outcomes, heard = through_a_proxy(certificates[0] if encrypted else ("", ""), stranger=None)
    assert outcomes == ["right"] * 2
    assert len(heard) > 12_000_000, "the collectives did not go this way"
    assert (SEEN in heard) is not encrypted


def test_a_man_in_the_middle_is_refused(certificates: list[tuple[str, str]]) -> None:
    outcomes, heard = through_a_proxy(certificates[0], stranger=certificates[1])
    assert "HandshakeRefused" in outcomes[1], outcomes
    assert "does not know this job's secret" in outcomes[1], outcomes
    assert "CommError" in outcomes[0], outcomes
    assert SEEN not in heard
    assert b"PLIANT" in heard, "the man in the middle did not even get to see the handshake"


def through_a_proxy(tls: tuple[str, str], stranger: tuple[str, str] | None) -> tuple[list[str], bytes]:
    """Run two workers with a proxy between them; return their outcomes and all bytes that went through it.

    With a `stranger`'s certificate the proxy terminates TLS and starts it anew; without one it passes bytes on.
    """
    members = specs(addresses("AB"))
    patience_s = 20.0 if stranger is None else 2.0  # rank 0 waits in vain for a rank 1 that was refused
    with (
        socket.create_server(("127.0.0.1", 0)) as real,
        proxy(members[0].worker.port, real.getsockname()[1], stranger) as heard,
        gang(reducing, [(members[0], tls, real, patience_s), (members[1], tls)]) as started,
    ):
        outcomes = started.results(60)
    return outcomes, bytes(heard)


@contextmanager
def proxy(port: int, target: int, stranger: tuple[str, str] | None) -> Iterator[bytearray]:
    heard = bytearray()
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", target), timeout=10)
                sockets.extend([client, server])
                if stranger is not None:
                    client, server = in_the_middle(client, server, stranger)
                    sockets.extend([client, server])
                for source, sink in ((client, server), (server, client)):
                    start(pump, source, sink)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard.extend(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def start(work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        thread.start()
        threads.append(thread)

    with socket.create_server(("127.0.0.1", port)) as listener:
        start(serve)
        try:
            yield heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for sock in sockets:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)
            for sock in sockets:
                sock.close()
    assert not any(thread.is_alive() for thread in threads), "a thread of the proxy does not end"


def in_the_middle(
    client: socket.socket, server: socket.socket, stranger: tuple[str, str]
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    as_server, as_client = tls_contexts(*stranger)
    return as_server.wrap_socket(client, server_side=True), as_client.wrap_socket(server)


def test_what_tls_has_already_decrypted_is_not_left_lying(
    certificates: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """epoll does not see decrypted bytes: a frame left there would wait for the next one, perhaps for ever."""
    record = 16384
    monkeypatch.setattr(connection, "READ_BYTES", 4 * record)
    sender, receiver = tls_pair(certificates[0])
    recorder = FrameRecorder()
    link = PeerLink(0, Worker("127.0.0.1", 1), receiver, shared=False, receiver=recorder, unsent=set())
    with sender:
        # A short record first, so that what a link reads in one turn ends within the fifth one: with the
        # payload's last byte. The frame behind it is decrypted along with it.
        sender.sendall(header(FrameKind.DEFINE, 0, length=1000) + bytes(1000))
        payload = bytes(3 * record + 15_800)
        sender.sendall(header(FrameKind.BCAST, 0, length=len(payload)) + payload + header(FrameKind.PING, 0, seq=77))
        with selectors.DefaultSelector() as waiting:
            waiting.register(receiver, selectors.EVENT_READ)
            while (FrameKind.PING, 77, b"") not in recorder.frames:
                assert waiting.select(2), f"nothing more to read, but only {recorder.frames} arrived"
                link.read(0.0)
    link.close()


def test_a_blocked_write_is_tried_again_in_full_though_less_may_be_written_at_once_now(
    certificates: list[tuple[str, str]],
) -> None:
    """Otherwise OpenSSL reports a bad write retry, and the connection is lost."""
    ends = tls_pair(certificates[0])
    recorder = FrameRecorder()
    sender, receiver = (
        PeerLink(0, Worker("127.0.0.1", 1), end, shared=False, receiver=recorder, unsent=set()) for end in ends
    )
    payload = memoryview(bytes(4 << 20))
    sender.send(0, header(FrameKind.BCAST, 0, seq=5, length=len(payload)), [payload], None)
    for _ in range(100):  # until nothing fits any more
        assert sender.flush(0.0)
    sender.limit_kernel_queue(8 << 10)
    while sender.flush(0.0):
        receiver.read(0.0)
    while not recorder.frames:
        receiver.read(0.0)
    assert [frame[:2] for frame in recorder.frames] == [(FrameKind.BCAST, 5)]
    sender.close()
    receiver.close()


def tls_pair(certificate: tuple[str, str]) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    ends = socket.socketpair()
    found: list[ssl.SSLSocket] = []
    server, client = tls_contexts(*certificate)
    accepting = threading.Thread(target=lambda: found.append(server.wrap_socket(ends[1], server_side=True)))
    accepting.start()
    ours = client.wrap_socket(ends[0])
    accepting.join(10)
    return ours, found[0]
