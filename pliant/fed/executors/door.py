"""Who may come to the desk: connections are taken in, and those that prove that they know the job's token are handed on.

All others are refused with a line in the log, and cost no more than the seconds that each is given.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from pliant.errors import CommError
from pliant.fed.executors import greeting, wire
from pliant.fed.executors.wire import Kind, Link

log = logging.getLogger(__name__)

MAX_GUESTS = 500
"""Connections at a time that have not proved yet who they are."""


class Door:
    def __init__(self, token: str, tls: ssl.SSLContext | None, take_in: Callable[[Link, dict[str, Any]], None]) -> None:
        """`take_in` is given the connection of each who may come, and what it said of itself."""
        self._token = token
        self._tls = tls
        self._take_in = take_in
        self._guests: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket) -> None:
        """Take in who comes, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files: those who wait are taken in later
                log.warning("cannot take in an executor now: %s", error)
                await asyncio.sleep(0.5)
                continue
            if len(self._guests) >= MAX_GUESTS:
                sock.close()  # a flood: each is given seconds to prove itself, and executors try again
                continue
            guest = asyncio.create_task(self._greet(sock))
            self._guests.add(guest)
            guest.add_done_callback(self._guests.discard)

    def close(self) -> None:
        """Those who have not proved yet who they are must go."""
        for guest in self._guests:
            guest.cancel()

    async def _greet(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        link = Link()
        peer = "somebody"
        try:
            peer = "{}:{}".format(*sock.getpeername()[:2])
            timeout_s = wire.HANDSHAKE_S if self._tls else None
            await loop.connect_accepted_socket(lambda: link, sock, ssl=self._tls, ssl_handshake_timeout=timeout_s)
            hello = await greeting.answer(link, self._token)
        except OSError as error:
            why = str(error) or "it hung up: is its --ca this server's?"
            log.warning("refused %s: %s", peer, f"no TLS connection: {why}" if self._tls else why)
            sock.close()
        except CommError as error:
            log.warning("refused %s: %s", peer, error)
            link.send(Kind.REFUSED, {"why": str(error)})
            link.close()
        except asyncio.CancelledError:
            link.cut("the server ends")
            sock.close()
            raise
        else:
            self._take_in(link, hello)
