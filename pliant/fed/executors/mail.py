"""An executor's end of the connection, in a thread of its own: it connects, proves itself, beats, and connects again.

Training goes on meanwhile in the main thread, which takes what came from `inbox`: so the next unit is there when one is
done, and the server hears of an executor however long a unit takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pliant.errors import CommError, ConfigError, HandshakeRefused
from pliant.fed.executors import greeting, wire
from pliant.fed.executors.wire import Frame, Kind, Link

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Between two attempts to reach the server."""
LARGEST_BYTES = 64 << 30
"""Of a model. The server is trusted: it has proved to know the token."""
LEAVING_S = 0.5
REFUSED = 2
GONE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where the server is, and what proves each to the other."""

    host: str
    port: int
    token: str = field(repr=False)
    ca: str = ""
    """Certificates (PEM) that the server's must be signed by; empty: no TLS."""
    patience_s: float = 60.0
    name: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Letter:
    """A frame, and of which connection it is: what belongs to an earlier one is void."""

    connection: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more will come."""

    code: int
    why: str


class Mail:
    def __init__(self, address: Address) -> None:
        self.inbox: queue.SimpleQueue[Letter | End] = queue.SimpleQueue()
        self.connection = 0
        """The number of the one that stands now."""
        self.cancelled: set[tuple[int, int]] = set()
        """Connections and their units that need not be begun. Another server's units have the same numbers."""
        self._address = address
        self._tls = _client_tls(address.ca)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._signals = -1

    def start(self) -> None:
        opened = threading.Event()
        threading.Thread(target=self._live, args=(opened,), name="pliant-fed-mail", daemon=True).start()
        opened.wait()

    def end_on_signals(self) -> None:
        """SIGTERM and SIGINT say goodbye and end the process at once, whatever its main thread, the caller, does."""
        self._signals, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the number is written to the pipe, which is read in the thread

    def send(self, connection: int, kind: Kind, body: dict[str, Any], payload: Tensor | None = None) -> None:
        """Nothing happens where that connection is gone."""

        def now() -> None:
            if self._link is not None and connection == self.connection:
                self._link.send(kind, body, payload)

        self._call(now)

    def leave(self, why: str) -> None:
        """Tell the server that, and hang up; waits for a moment until that is done."""
        gone = threading.Event()
        self._call(lambda: self._leave(why, gone))
        gone.wait(LEAVING_S)

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None, "started"
        with contextlib.suppress(RuntimeError):  # the thread has ended, which the inbox tells
            self._loop.call_soon_threadsafe(function)

    def _leave(self, why: str, gone: threading.Event) -> None:
        if self._link is None:
            gone.set()
            return
        self._link.send(Kind.LEAVE, {"why": why})
        self._link.hand_to(lambda frame: None, lambda _: gone.set())
        self._link.close()

    def _live(self, opened: threading.Event) -> None:
        try:
            asyncio.run(self._stay(opened))
        except Exception as error:
            log.exception("the connection's thread has failed")
            self.inbox.put(End(GONE, repr(error)))

    async def _stay(self, opened: threading.Event) -> None:
        loop = self._loop = asyncio.get_running_loop()
        if self._signals >= 0:
            loop.add_reader(self._signals, self._end_now)
        opened.set()
        seen_s, pause_s = loop.time(), FIRST_PAUSE_S
        while True:
            link = Link()
            try:
                welcome = await self._connect(link)
            except (HandshakeRefused, ssl.SSLCertVerificationError, ConfigError) as error:
                return self.inbox.put(End(REFUSED, self._refusal(error)))
            except (OSError, CommError) as error:
                link.cut("not in time")
                if loop.time() - seen_s > self._address.patience_s:
                    why = f"no server at {self._address} for {self._address.patience_s:g} s: {error}{self._hint(error)}"
                    return self.inbox.put(End(GONE, why))
                await asyncio.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
                continue
            pause_s = FIRST_PAUSE_S
            if (end := await self._correspond(link, welcome)) is not None:
                return self.inbox.put(end)
            seen_s = loop.time()
            log.warning("lost the server: %s; waiting for it for %g s", link.why_lost, self._address.patience_s)

    async def _connect(self, link: Link) -> Frame:
        """Connected, proved and welcomed."""
        loop, address = asyncio.get_running_loop(), self._address
        async with asyncio.timeout(wire.HANDSHAKE_S):
            await loop.create_connection(lambda: link, address.host, address.port, ssl=self._tls)
        who = {"name": address.name, "host": socket.gethostname(), "pid": os.getpid()}
        return await greeting.greet(link, address.token, who, LARGEST_BYTES)

    async def _correspond(self, link: Link, welcome: Frame) -> End | None:
        """Until the connection is lost, or the server says that this is the end."""
        loop = asyncio.get_running_loop()
        self.connection += 1
        self.cancelled = set()
        self._link = link
        self.inbox.put(Letter(self.connection, welcome))
        ended: list[End] = []
        lost = asyncio.Event()

        def take(frame: Frame) -> None:
            match frame.kind:
                case Kind.BEAT:
                    return
                case Kind.OVER:
                    ended.append(End(0, "the job is over"))
                case Kind.REFUSED:
                    ended.append(End(REFUSED, f"the server at {self._address}: {frame.body.get('why')}"))
                case _:
                    self._put(frame)
            if ended:
                link.close()
                lost.set()

        link.hand_to(take, lambda why: lost.set())
        silence_s = float(welcome.body.get("silence_s", 20.0))
        while not lost.is_set():
            try:
                async with asyncio.timeout(min(1.0, silence_s / 4)):
                    await lost.wait()
            except TimeoutError:
                link.send(Kind.BEAT)
                if loop.time() - link.heard_s > silence_s:
                    link.cut(f"silent for {silence_s:g} s")
        self._link = None
        self.connection += 1  # what was asked for over this one is void
        return ended[0] if ended else None

    def _put(self, frame: Frame) -> None:
        """Into the inbox; what is taken back need not be begun, unless it is given anew."""
        if frame.kind is Kind.CANCEL:
            self.cancelled.add((self.connection, int(frame.body.get("id", -1))))
            return
        if frame.kind is Kind.UNIT:
            # It may have been begun before it was taken back, so the mark is still there.
            self.cancelled.discard((self.connection, int(frame.body.get("id", -1))))
        self.inbox.put(Letter(self.connection, frame))

    def _end_now(self) -> None:
        number = os.read(self._signals, 1)[0]
        gone = threading.Event()
        self._leave("it was told to end", gone)
        assert self._loop is not None, "this runs in it"
        self._loop.call_later(0 if gone.is_set() else 0.1, os._exit, 128 + number)

    def _refusal(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"the server at {self._address} is not who --ca vouches for: {error.verify_message}"
        return f"refused by the server at {self._address}: {error}"

    def _hint(self, error: Exception) -> str:
        if isinstance(error, CommError) and self._tls is None:
            return " (if it wants TLS, give --ca)"
        return " (if it speaks no TLS, leave --ca out)" if isinstance(error, ssl.SSLError) else ""


def _client_tls(ca: str) -> ssl.SSLContext | None:
    if not ca:
        return None
    try:
        return ssl.create_default_context(cadata=ca)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"--ca holds no certificate: {error}; give a PEM file") from None
