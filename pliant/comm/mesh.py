"""How the workers of a job connect: one authenticated connection for each pair.

Workers of one host meet on an abstract Unix socket (no file is left behind), the others over TCP. Of each pair the
greater worker (by host, then port) connects, whatever their ranks. Every newcomer must prove that it knows the job's
secret (`pliant.channel`); others can neither stop nor slow the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pliant import channel
from pliant.cluster import Worker
from pliant.errors import CommError, ConfigError, HandshakeRefused

if TYPE_CHECKING:
    from pliant.comm.transport import Transport

PURPOSE = "worker"
RETRY_S = 0.05
REMEDY = "another job's worker listens there, or PLIANT_SECRET (or the secret file) differs between the hosts"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """How connections are made."""

    secret: bytes = field(repr=False)
    """The secret that every worker of the job knows."""
    join_timeout_s: float = 60.0
    """How long to wait for all other workers."""
    tls_cert: str = ""
    """Certificate file for TLS between hosts. It may be self-signed, because the secret vouches for it."""
    tls_key: str = ""
    """File with the private key of the certificate."""
    listen_fd: int | None = None
    """A listening TCP socket inherited from the runner."""


class Mesh:
    """The listening sockets of one worker, and its way to connect to others. Newcomers go to the transport."""

    def __init__(self, me: Worker, config: MeshConfig, transport: Transport) -> None:
        self._me = me
        self._config = config
        self._transport = transport
        self._admitting: set[Worker] = set()
        """Names that are being checked: of two newcomers under one name, the second has to wait."""
        self._admitted = threading.Condition()
        self._servers: list[channel.HandshakeServer] = []
        self._connecting: set[socket.socket] = set()
        """Our connections to others whose handshake is not done."""
        self._closing = False
        self._server_tls = self._client_tls = None
        if config.tls_cert:
            self._server_tls, self._client_tls = _tls_contexts(config)

    def open(self) -> None:
        """Listen; raises CommError if that is not possible."""
        self._add_server(_unix_listener(self._me, self._config.secret), None)
        try:
            self._add_server(self._tcp_listener(), self._server_tls)
        except BaseException:
            self.close()
            raise
        for server in self._servers:
            server.start()

    def _add_server(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        certificate = _own_certificate(self._config.tls_cert) if tls is not None else b""
        server = channel.HandshakeServer(
            listener, self._config.secret, self._on_accepted, purpose=PURPOSE, owner=str(self._me), tls=tls,
            certificate=certificate,
        )  # fmt: skip
        self._servers.append(server)

    def close(self) -> None:
        self._closing = True
        for server in self._servers:
            server.close()

    def close_in_child(self) -> None:
        """In a forked child: close the parent's sockets."""
        for server in self._servers:
            server.close_in_child()
        for sock in self._connecting:
            sock.close()

    # --- connecting ---

    def connect(self, worker: Worker, deadline_s: float, given_up: Callable[[], bool]) -> socket.socket:
        """Connect to a worker, with retries because it may still be starting. The caller must close the socket.

        Raises:
            CommError: it did not answer in time, or the caller has given up.
            HandshakeRefused: it refused the connection.
        """
        while True:
            sock: socket.socket | None = None
            try:
                sock = self._dial(worker, deadline_s)
                self._connecting.add(sock)
                channel.connect_handshake(
                    sock,
                    self._config.secret,
                    purpose=PURPOSE,
                    name=str(self._me),
                    deadline_s=min(deadline_s, time.monotonic() + channel.HANDSHAKE_S),
                    binding=_peer_certificate(sock),
                    remedy=REMEDY,
                )
                return sock
            except HandshakeRefused as error:
                sock.close() if sock else None
                raise HandshakeRefused(f"{self._me} at {worker}: {error}") from None
            except OSError as error:
                sock.close() if sock else None
                if self._closing or given_up() or time.monotonic() + RETRY_S > deadline_s:
                    raise CommError(f"could not reach {worker}: {error}") from None
                time.sleep(RETRY_S)
            finally:
                self._connecting.discard(sock) if sock else None

    def _dial(self, worker: Worker, deadline_s: float) -> socket.socket:
        left_s = min(channel.HANDSHAKE_S, max(0.01, deadline_s - time.monotonic()))
        if worker.host == self._me.host:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(left_s)
                sock.connect(_unix_name(worker, self._config.secret))
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((worker.host, worker.port), timeout=left_s)
        if self._client_tls is not None:
            return self._client_tls.wrap_socket(sock)
        return sock

    # --- accepting ---

    def _tcp_listener(self) -> socket.socket:
        if self._config.listen_fd is not None:
            return socket.socket(fileno=self._config.listen_fd)
        family = socket.getaddrinfo(self._me.host, self._me.port, type=socket.SOCK_STREAM)[0][0]
        try:
            return socket.create_server((self._me.host, self._me.port), family=family, backlog=1024)
        except OSError as error:
            raise CommError(
                f"{self._me} cannot listen ({error.strerror}): choose other ports with -port-range"
            ) from None

    def _on_accepted(self, sock: socket.socket, name: str, key: bytes, deadline_s: float) -> None:
        """Welcome a newcomer that knows the secret, unless its name is wrong or in use."""
        try:
            worker = Worker.parse(name)
        except ConfigError as error:
            channel.refuse(sock, f"not the name of a worker: {error}", deadline_s)
        with self._admission(worker, deadline_s) as first:
            if not first or not self._transport.admit(worker):
                channel.refuse(sock, f"{worker} is not expected here, or already connected", deadline_s)
            channel.send_welcome(sock, deadline_s)
            self._transport.add_connection(worker, sock)

    @contextlib.contextmanager
    def _admission(self, worker: Worker, deadline_s: float) -> Iterator[bool]:
        """Wait for the turn of this newcomer; yield False if none of this name may connect, because we connect to it."""
        if worker <= self._me:
            yield False
            return
        with self._admitted:
            if not self._admitted.wait_for(lambda: worker not in self._admitting, deadline_s - time.monotonic()):
                yield False
                return
            self._admitting.add(worker)
        try:
            yield True
        finally:
            with self._admitted:
                self._admitting.discard(worker)
                self._admitted.notify_all()


def _unix_name(worker: Worker, secret: bytes) -> str:
    """Return an abstract address: it needs no file, and another job has another one even for the same port."""
    tag = hashlib.sha256(b"unix" + secret).hexdigest()[:16]
    return f"\0pliant-{worker.label}-{tag}"


def _unix_listener(me: Worker, secret: bytes) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_unix_name(me, secret))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise CommError(f"{me} is already running on this host ({error.strerror}): end the other one first") from None
    return listener


def _tls_contexts(config: MeshConfig) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        server.load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"PLIANT_TLS_CERT {config.tls_cert!r}, PLIANT_TLS_KEY {config.tls_key!r}: {error}") from None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    # No authority signs a job's certificates. The handshake's HMAC covers the certificate instead,
    # so a man in the middle would have to know the job's secret.
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    return server, client


def _own_certificate(path: str) -> bytes:
    """Return the first certificate in a PEM file."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    with open(path, encoding="ascii") as file:
        pem = begin + file.read().partition(begin)[2].partition(end)[0] + end
    return ssl.PEM_cert_to_DER_cert(pem)


def _peer_certificate(sock: socket.socket) -> bytes:
    """Return the digest of the peer's certificate; empty without TLS."""
    if isinstance(sock, ssl.SSLSocket):
        return channel.certificate_digest(sock.getpeercert(binary_form=True) or b"")
    return b""
