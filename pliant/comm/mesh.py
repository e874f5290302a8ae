"""How the workers of a job connect: one authenticated connection for each pair.

Workers of one host meet on an abstract Unix socket (no file is left behind), the others over TCP. Of each pair the
greater worker (by host, then port) connects, whatever their ranks. Every newcomer must prove that it knows the job's
secret (`pliant.channel`). Others are refused and logged on a thread of their own, so that they can neither stop nor slow
the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pliant.channel import accept_handshake, certificate_digest, connect_handshake, send_refusal, send_welcome
from pliant.cluster import Worker
from pliant.errors import CommError, ConfigError, HandshakeRefused

log = logging.getLogger(__name__)

PURPOSE = "worker"
HANDSHAKE_S = 5.0
"""Time limit of a handshake."""
MAX_STRANGERS = 256
"""Connections whose handshake is not done, at once; more are closed at once."""
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


class ConnectionOwner(Protocol):
    """The object that accepts workers that have proved to belong to this job."""

    def admit(self, worker: Worker) -> bool:
        """Return whether a newcomer may use this name: not if that worker is connected. May take a while."""

    def add_connection(self, worker: Worker, sock: socket.socket) -> None:
        """Take over an authenticated connection; raises CommError if it is too late for that."""


class Mesh:
    """The listening sockets of one worker, and its way to connect to others."""

    def __init__(self, me: Worker, config: MeshConfig, owner: ConnectionOwner) -> None:
        self._me = me
        self._config = config
        self._owner = owner
        self._admitting: set[Worker] = set()
        """Names that are being checked: of two newcomers under one name, the second has to wait."""
        self._admitted = threading.Condition()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._listeners: list[socket.socket] = []
        self._underway: set[socket.socket] = set()
        """Connections that are neither accepted nor closed yet."""
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._server_tls = self._client_tls = None
        if config.tls_cert:
            self._server_tls, self._client_tls = _tls_contexts(config)

    def open(self) -> None:
        """Listen; raises CommError if that is not possible."""
        self._listeners.append(_unix_listener(self._me, self._config.secret))
        try:
            self._listeners.append(self._tcp_listener())
        except BaseException:
            self.close()
            raise
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name="pliant-accept", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._closing = True
        for listener in self._listeners:
            # A thread that blocks in accept() is woken by shutdown, not by close.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def close_in_child(self) -> None:
        """In a forked child: close the parent's sockets."""
        for sock in [*self._listeners, *self._underway]:
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
                self._underway.add(sock)
                connect_handshake(
                    sock,
                    self._config.secret,
                    purpose=PURPOSE,
                    name=str(self._me),
                    deadline_s=min(deadline_s, time.monotonic() + HANDSHAKE_S),
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
                self._underway.discard(sock) if sock else None

    def _dial(self, worker: Worker, deadline_s: float) -> socket.socket:
        left_s = min(HANDSHAKE_S, max(0.01, deadline_s - time.monotonic()))
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

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(None)
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                log.warning("%s cannot accept a connection now: %s", self._me, error)
                time.sleep(RETRY_S)  # out of descriptors: trying again at once would only spin
                continue
            if self._closing:
                sock.close()
                continue
            if not self._strangers.acquire(blocking=False):
                busy = f"too many at once, {MAX_STRANGERS} have not said who they are"
                log.warning("%s refused a connection from %s: %s", self._me, address or "this host", busy)
                sock.close()
                continue
            threading.Thread(target=self._authenticate, args=(sock, address), name="pliant-hello", daemon=True).start()

    def _authenticate(self, sock: socket.socket, address: object) -> None:
        """Accept a newcomer or refuse it."""
        deadline_s = time.monotonic() + HANDSHAKE_S
        admitting: Worker | None = None
        self._underway.add(raw := sock)
        try:
            binding = b""
            if self._server_tls is not None and sock.family != socket.AF_UNIX:
                sock.settimeout(HANDSHAKE_S)
                sock = self._server_tls.wrap_socket(sock, server_side=True)
                self._underway.add(sock)
                binding = _own_certificate(self._config.tls_cert)
            name, _ = accept_handshake(
                sock, self._config.secret, purpose=PURPOSE, deadline_s=deadline_s, binding=binding
            )
            try:
                worker = Worker.parse(name)
            except ConfigError as error:
                raise _refuse(sock, f"not the name of a worker: {error}", deadline_s) from None
            if self._begin_admission(worker, deadline_s):
                admitting = worker
            if admitting is None or not self._owner.admit(worker):
                raise _refuse(sock, f"{worker} is not expected here, or already connected", deadline_s)
            send_welcome(sock, deadline_s)
            self._owner.add_connection(worker, sock)
        except (CommError, OSError, ValueError) as error:
            if not self._closing:
                log.warning("%s refused a connection from %s: %s", self._me, address or "this host", error)
            sock.close()
        finally:
            self._underway -= {raw, sock}
            if admitting is not None:
                with self._admitted:
                    self._admitting.discard(admitting)
                    self._admitted.notify_all()
            self._strangers.release()

    def _begin_admission(self, worker: Worker, deadline_s: float) -> bool:
        """Wait for the turn of this newcomer; False if no worker of this name may connect, because we connect to it."""
        with self._admitted:
            if worker <= self._me:
                return False
            while worker in self._admitting:
                if not self._admitted.wait(deadline_s - time.monotonic()):
                    return False
            self._admitting.add(worker)
            return True


def _refuse(sock: socket.socket, reason: str, deadline_s: float) -> HandshakeRefused:
    send_refusal(sock, reason, deadline_s)
    return HandshakeRefused(reason)


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
    """Return the digest of the first certificate in a PEM file."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    with open(path, encoding="ascii") as file:
        pem = begin + file.read().partition(begin)[2].partition(end)[0] + end
    return certificate_digest(ssl.PEM_cert_to_DER_cert(pem))


def _peer_certificate(sock: socket.socket) -> bytes:
    """Return the digest of the peer's certificate; empty without TLS."""
    if isinstance(sock, ssl.SSLSocket):
        return certificate_digest(sock.getpeercert(binary_form=True) or b"")
    return b""
