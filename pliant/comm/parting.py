"""How a worker leaves the job in good order: what is queued goes out, then its goodbye, and the others close first."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from pliant.comm.connections import Connections
from pliant.comm.transport.link import Link
from pliant.comm.transport.poller import Poller
from pliant.comm.transport.wire import Kind, header

PARTING_S = 1.0
"""Who leaves waits this long for the others to take note."""


def part(connections: Connections, poller: Poller, linger_s: float) -> None:
    """Send what is queued, then BYE, then wait briefly for the peers to read it. The last use of both."""
    deadline_s = time.monotonic() + linger_s
    farewell = b"" if connections.core is None else connections.core.farewell()
    leaving = [link for link in connections.links.values() if not connections.is_lost(link)]
    for link in leaving:
        link.say(header(Kind.BYE, max(0, link.view), length=len(farewell)), farewell)
    while connections.unsent and time.monotonic() < deadline_s:
        connections.flush()
        if connections.unsent:
            connections.on_events(poller.poll(0.05))
    _await_closing(leaving, poller, min(deadline_s, time.monotonic() + PARTING_S))


def _await_closing(leaving: Sequence[Link], poller: Poller, deadline_s: float) -> None:
    """Let the peers close first. Closing with something unread would reset the connection, and a reset may
    overtake our goodbye."""
    poller.listen(to_bell=False)
    for link in leaving:
        if not link.closed:
            link.paused = False  # what it says is of no interest now, but must be read
            poller.watch(link, writing=False)
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)
    while poller.watched and time.monotonic() < deadline_s:
        for fd, _ in poller.poll(max(0.0, deadline_s - time.monotonic())):
            link = poller.watched[fd][0]
            try:
                more = link.sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                more = b""
            if not more:
                poller.unwatch(link)
