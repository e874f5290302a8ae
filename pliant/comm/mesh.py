"""How the workers of a view find each other: one authenticated connection for each pair.

Workers of one host meet on an abstract Unix socket (no file is left behind), the others over TCP.
Of each pair the higher rank connects. Strangers are refused and logged, by a thread of their own,
so that they can neither stop nor slow the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pliant.cluster import View, Worker
from pliant.comm import wire
from pliant.errors import CommError, ConfigError, HandshakeRefused

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""A stranger may keep a connection for this long."""
MAX_STRANGERS = 256
RETRY_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """How connections are made."""

    secret: bytes = field(repr=False)
    """What every worker of the job knows."""
    join_timeout_s: float = 60.0
    """How long to wait for all the others."""
    tls_cert: str = ""
    """Certificate file for TLS between hosts; self-signed will do, the secret vouches for it."""
    tls_key: str = ""
    """Its private key."""
    listen_fd: int | None = None
    """A listening TCP socket inherited from the runner."""


class Mesh:
    """The connections of one worker to all others of its view."""

    def __init__(self, view: View, me: Worker, config: MeshConfig) -> None:
        self._view = view
        self._me = me
        self._config = config
        self._rank = view.rank_of(me)
        self._arrived: queue.Queue[tuple[int, socket.socket]] = queue.Queue()
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._server_tls = self._client_tls = None
        if config.tls_cert:
            self._server_tls, self._client_tls = _tls_contexts(config)

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[int, socket.socket]]:
        """Connect to everybody; the sockets by rank. They are the caller's to close.

        Raises:
            CommError: somebody did not come within `join_timeout_s`; says who.
            HandshakeRefused: somebody would not have us.
        """
        try:
            self._listen()
            yield self._meet()
        finally:
            self._close()

    def is_local(self, rank: int) -> bool:
        return self._view.workers[rank].host == self._me.host

    # --- meeting ---

    def _meet(self) -> dict[int, socket.socket]:
        deadline_s = time.monotonic() + self._config.join_timeout_s
        found: dict[int, socket.socket] = {}
        try:
            if self._rank:
                with ThreadPoolExecutor(max_workers=min(32, self._rank)) as pool:
                    calls = {rank: pool.submit(self._connect, rank, deadline_s) for rank in range(self._rank)}
                    for rank, call in calls.items():
                        found[rank] = call.result()
            while len(found) < self._view.size - 1:
                left_s = deadline_s - time.monotonic()
                try:
                    rank, sock = self._arrived.get(timeout=max(0.001, left_s))
                except queue.Empty:
                    raise self._nobody_came(found) from None
                found[rank] = sock
        except BaseException:
            for sock in found.values():
                sock.close()
            raise
        return found

    def _nobody_came(self, found: Mapping[int, socket.socket]) -> CommError:
        missing = [str(w) for r, w in enumerate(self._view.workers) if r != self._rank and r not in found]
        return CommError(
            f"{self._me} waited {self._config.join_timeout_s:g} s for {', '.join(missing)} of view "
            f"{self._view.number}: is the runner on that host up, and the port reachable?"
        )

    def _connect(self, rank: int, deadline_s: float) -> socket.socket:
        """Call the worker until it answers; it may still be starting."""
        worker = self._view.workers[rank]
        while True:
            sock: socket.socket | None = None
            try:
                sock = self._dial(rank, worker, deadline_s)
                binding = _peer_certificate(sock)
                wire.greet(sock, self._config.secret, self._view.number, self._me, binding, deadline_s)
                return sock
            except HandshakeRefused as error:
                sock.close() if sock else None
                raise HandshakeRefused(f"{self._me} at {worker} (rank {rank}): {error}") from None
            except OSError as error:
                sock.close() if sock else None
                if self._closing or time.monotonic() + RETRY_S > deadline_s:
                    raise CommError(
                        f"{self._me} could not reach {worker} (rank {rank}) within {self._config.join_timeout_s:g} s "
                        f"({error}): is its runner up, and the port reachable?"
                    ) from None
                time.sleep(RETRY_S)

    def _dial(self, rank: int, worker: Worker, deadline_s: float) -> socket.socket:
        left_s = max(0.01, deadline_s - time.monotonic())
        if self.is_local(rank):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(left_s)
                sock.connect(_unix_name(worker, self._config.secret))
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((worker.host, worker.port), timeout=min(left_s, HANDSHAKE_S))
        if self._client_tls is not None:
            return self._client_tls.wrap_socket(sock)
        return sock

    # --- being met ---

    def _listen(self) -> None:
        self._listeners = [_unix_listener(self._me, self._config.secret), self._tcp_listener()]
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name="pliant-accept", daemon=True)
            thread.start()
            self._threads.append(thread)

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
                log.warning("%s cannot take a connection now: %s", self._me, error)
                time.sleep(RETRY_S)  # out of descriptors: asking again at once would only spin
                continue
            if self._closing:
                sock.close()
                continue
            if not self._strangers.acquire(blocking=False):
                busy = f"too many at once, {MAX_STRANGERS} have not said who they are"
                log.warning("%s refused a connection from %s: %s", self._me, address or "this host", busy)
                sock.close()
                continue
            threading.Thread(target=self._examine, args=(sock, address), name="pliant-hello", daemon=True).start()

    def _examine(self, sock: socket.socket, address: object) -> None:
        """Take a caller in, or turn it away."""
        deadline_s = time.monotonic() + HANDSHAKE_S
        rank: int | None = None
        try:
            binding = b""
            if self._server_tls is not None and sock.family != socket.AF_UNIX:
                sock.settimeout(HANDSHAKE_S)
                sock = self._server_tls.wrap_socket(sock, server_side=True)
                binding = _own_certificate(self._config.tls_cert)
            worker = wire.answer(sock, self._config.secret, self._view.number, binding, deadline_s)
            rank = self._admit(worker)
            if rank is None:
                wire.turn_away(sock, f"{worker} is not expected here, or already connected", deadline_s)
                raise HandshakeRefused(f"{worker} is not expected here, or already connected")
            wire.welcome(sock, deadline_s)
            self._arrived.put((rank, sock))
        except (HandshakeRefused, OSError, ValueError) as error:
            log.warning("%s refused a connection from %s: %s", self._me, address or "this host", error)
            sock.close()
            if rank is not None:
                with self._lock:
                    self._taken.discard(rank)
        finally:
            self._strangers.release()

    def _admit(self, worker: Worker) -> int | None:
        with self._lock:
            if worker not in self._view.workers:
                return None
            rank = self._view.rank_of(worker)
            if rank <= self._rank or rank in self._taken:
                return None
            self._taken.add(rank)
            return rank

    def _close(self) -> None:
        self._closing = True
        for listener in self._listeners:
            # A thread that blocks in accept() is woken by shutdown, not by close.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join(timeout=5)


def _unix_name(worker: Worker, secret: bytes) -> str:
    """An abstract address: it needs no file, and another job has another one even for the same port."""
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
    with open(path, encoding="ascii") as file:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first_certificate(file.read()))).digest()


def _first_certificate(pem: str) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return begin + pem.partition(begin)[2].partition(end)[0] + end


def _peer_certificate(sock: socket.socket) -> bytes:
    if isinstance(sock, ssl.SSLSocket):
        return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()
    return b""
