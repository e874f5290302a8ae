"""The connections of an HTTP server: how many may be open, how long a request may take to come, and one log line for a flood.

Uvicorn lets anybody hold connections open for ever without sending a request, and asyncio writes a traceback for each that
it has no descriptor for. Here whoever has not shown the token is a stranger. If there is no room for a new connection, the
oldest one of a stranger is closed; those that have shown the token stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any

import h11
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

HEADER_TIMEOUT_S = 10.0
"""How long the header of a request may take to come, TLS' handshake before it included."""
BODY_TIMEOUT_S = 10.0
BODY_GRACE_S = 1.0
"""Time beyond BODY_TIMEOUT_S after which the connection is closed, if nobody has answered that the body is late."""
LEAST_ROOM = 64
"""Descriptors that are left to the rest of the process, at least; a quarter of all, if that is more."""
BACKLOG = 1024
BURST = 64
"""Connections that are accepted before those that are open get their turn."""
RETRY_S = 0.1
"""How long nothing is accepted after the process has run out of descriptors."""
FLOOD = 100
"""Fewer connections without a request than this are not worth a line in the log: browsers open some in advance."""
GATHER_S = 1.0
"""How long those that come at the same time are counted before the first line."""
REPORT_S = 60.0
"""Time between two lines."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TRUST = "pliant.trust"
"""The key in a scope's extensions of what `trust_connection` calls."""


def most_connections() -> int:
    """Return how many connections a server may have open, by the limit on descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_descriptors = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(16, num_descriptors - max(LEAST_ROOM, num_descriptors // 4))


def trust_connection(scope: Scope) -> None:
    """Say that the sender of this request has shown the token: its connection is not closed to make room for others."""
    if trust := (scope.get("extensions") or {}).get(_TRUST):
        trust()


class LimitedProtocol(H11Protocol):
    """Uvicorn's protocol of one connection, which ends if a request does not come in time."""

    def __init__(self, acceptor: Acceptor, config: Config, state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, state, app_state)
        self._acceptor = acceptor
        self.is_open = False
        self._served = self.app
        self.app = self._serve
        self._late: asyncio.TimerHandle | None = None
        self._awaited: float | None = None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {**(scope.get("extensions") or {}), _TRUST: lambda: self._acceptor.trust(self)}
        with contextlib.suppress(ClientDisconnect):  # the client's doing: nobody is left to be answered
            await self._served(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_open = True
        self._acceptor.joined(self)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, if the answer can still be given, and end the connection.

        A request whose body goes on as nonsense is being answered already, or has been.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._release()  # the protocol of websockets notices itself when nobody answers
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._release()

    def _release(self) -> None:
        self._set_timer(None)
        self._acceptor.forget(self)

    def _watch(self) -> None:
        """Set the time by which what the client has begun must be there."""
        if self.transport.is_closing():
            self._set_timer(None)
        elif self.conn.their_state is h11.IDLE and (self.timeout_keep_alive_task is None or self.conn.trailing_data[0]):
            self._set_timer(HEADER_TIMEOUT_S)
        elif self.conn.their_state is h11.SEND_BODY:
            self._set_timer(BODY_TIMEOUT_S + BODY_GRACE_S)
        else:
            self._set_timer(None)

    def _set_timer(self, wait_s: float | None) -> None:
        if wait_s == self._awaited:
            return  # more of the same has come, or nothing is awaited
        if self._late is not None:
            self._late.cancel()
        self._awaited = wait_s
        self._late = None if wait_s is None else self.loop.call_later(wait_s, self._acceptor.end, self)


class Acceptor:
    """Accepts the connections of one listening socket. Lives on one event loop; has the methods of an asyncio server."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[Acceptor], LimitedProtocol],
        state: ServerState,
        *,
        tls: ssl.SSLContext | None,
        most: int,
    ) -> None:
        self._listener, self._make, self._state, self._tls, self._most = listener, make, state, tls, most
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[LimitedProtocol, asyncio.Task[None]] = {}
        """Connections whose clients have not shown the token, the oldest first, and the tasks that open them."""
        self._opening: set[asyncio.Task[None]] = set()
        self._unopened: set[LimitedProtocol] = set()
        """Connections that are not among those of the server's state yet, where their tasks may be a moment longer."""
        self._report = FloodReport(self._loop)

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is being opened any more."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def joined(self, protocol: LimitedProtocol) -> None:
        """Note that a connection is among those of the server's state now."""
        self._unopened.discard(protocol)

    def trust(self, protocol: LimitedProtocol) -> None:
        self._strangers.pop(protocol, None)

    def forget(self, protocol: LimitedProtocol) -> None:
        self._strangers.pop(protocol, None)

    def end(self, protocol: LimitedProtocol) -> None:
        """Close a connection at once, and count it."""
        self._report.count()
        task = self._strangers.pop(protocol, None)
        if protocol.is_open:
            self._state.connections.discard(protocol)
            protocol.transport.abort()
        elif task is not None:
            task.cancel()
            self._opening.discard(task)
            self._unopened.discard(protocol)

    def _accept(self) -> None:
        for _ in range(BURST):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause()
                    return
                continue  # it was gone before we came to it
            self._admit(sock)

    def _pause(self) -> None:
        """Accept nothing for a moment, and make room: the process has no descriptor left."""
        for protocol in list(self._strangers)[:BURST]:
            self.end(protocol)
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(RETRY_S, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _admit(self, sock: socket.socket) -> None:
        if len(self._state.connections) + len(self._unopened) >= self._most:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                self._report.count()
                sock.close()
                return
            self.end(oldest)
        sock.setblocking(False)
        protocol = self._make(self)
        task = self._loop.create_task(self._open(protocol, sock))
        self._strangers[protocol] = task
        self._opening.add(task)
        self._unopened.add(protocol)

        def opened(task: asyncio.Task[None]) -> None:
            self._opening.discard(task)
            self._unopened.discard(protocol)
            if not protocol.is_open:
                self._strangers.pop(protocol, None)
                sock.close()

        task.add_done_callback(opened)

    async def _open(self, protocol: LimitedProtocol, sock: socket.socket) -> None:
        timeout_s = None if self._tls is None else HEADER_TIMEOUT_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # it has gone, or its TLS handshake failed or took too long
            self._report.count()


class FloodReport:
    """Counts connections that were closed without a request, and logs their number at most once a minute."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._num_closed = 0
        self._timer: asyncio.TimerHandle | None = None

    def count(self) -> None:
        self._num_closed += 1
        if self._num_closed >= FLOOD and self._timer is None:
            self._timer = self._loop.call_later(GATHER_S, self._tell)

    def _tell(self) -> None:
        log.warning("%d connections were closed before they sent a request", self._num_closed)
        self._num_closed = 0
        self._timer = self._loop.call_later(REPORT_S, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        if self._num_closed >= FLOOD:
            self._tell()
