"""`pliant bench traffic`: a paced sender and a sink of background traffic, both bounded in time.

They disturb an experiment on purpose. Traffic never leaves the machine: targets are loopback addresses or hosts of a lab
(10.77.0.0/24), and the sink listens only there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import cast

from pliant.cluster import Worker
from pliant.errors import ConfigError, LabError

LAB_NETWORK = ipaddress.ip_network("10.77.0.0/24")
MAX_SECONDS = 3600.0
MAX_CONNECTIONS = 256
_CHUNK, _PACED_CHUNK = bytes(64 << 10), bytes(16 << 10)


@dataclass(frozen=True, slots=True)
class Transferred:
    """Bytes that went through, and the time that took."""

    num_bytes: int
    seconds: float

    @property
    def bits_per_s(self) -> float:
        return self.num_bytes * 8 / self.seconds if self.seconds else 0.0


def check_target(text: str) -> Worker:
    """Parse `HOST:PORT` as a place that traffic may go to.

    Raises:
        ConfigError: it is neither loopback nor in a lab, or no address at all.
    """
    target = Worker.parse(text.replace("localhost:", "127.0.0.1:"))
    try:
        address = ipaddress.ip_address(target.host)
    except ValueError:
        raise ConfigError(
            f"--to {text}: give an address, not a name, such as 127.0.0.1:5000 or 10.77.0.2:5000"
        ) from None
    if not (address.is_loopback or address in LAB_NETWORK):
        raise ConfigError(f"--to {text}: traffic goes only to loopback or to a lab's hosts ({LAB_NETWORK})")
    return target


def check_amounts(seconds: float, connections: int) -> None:
    """Raise ConfigError if the traffic would last too long, or use too many connections."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"--seconds {seconds:g}: use more than 0 and at most {MAX_SECONDS:g}")
    if not 1 <= connections <= MAX_CONNECTIONS:
        raise ConfigError(f"--connections {connections}: use 1 to {MAX_CONNECTIONS}")


def send(target: Worker, bits_per_s: int | None, seconds: float, connections: int = 1) -> Transferred:
    """Send zeros to `target` at that rate for `seconds`; without a rate, as fast as they are taken.

    Several connections send in turn as each has room: the more there are, the larger their share of a full link.

    Raises:
        LabError: nobody listens there, or the sink went away.
    """
    begun_s = time.monotonic()
    ends_s = begun_s + seconds
    num_bytes = turn = 0
    try:
        with contextlib.ExitStack() as opened, DefaultSelector() as waiting:
            for _ in range(connections):
                connection = socket.create_connection((target.host, target.port), timeout=seconds)
                opened.enter_context(connection).setblocking(False)
                waiting.register(connection, EVENT_WRITE)
            while (left_s := ends_s - time.monotonic()) > 0:
                due_s = begun_s + num_bytes * 8 / bits_per_s if bits_per_s else 0.0
                if due_s > time.monotonic():
                    time.sleep(max(0.0, min(due_s - time.monotonic(), left_s)))
                    continue
                # Send in turn, and little at a time: after a burst the link would be left to others for as long.
                ready = [key.fileobj for key, _ in waiting.select(left_s)]
                if ready:
                    turn = (turn + 1) % len(ready)
                    num_bytes += cast(socket.socket, ready[turn]).send(_CHUNK if bits_per_s is None else _PACED_CHUNK)
    except OSError as error:
        raise LabError(
            f"traffic to {target}: {error}; start the sink first: `pliant bench traffic --listen {target.port}`"
        ) from error
    return Transferred(num_bytes, time.monotonic() - begun_s)


def listen_address() -> str:
    """Return this host's address in its lab, or loopback outside of one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.77.0.254", 9))  # sends nothing; asks the routing table
            own = str(probe.getsockname()[0])
        except OSError:
            own = ""
    return own if own and ipaddress.ip_address(own) in LAB_NETWORK else "127.0.0.1"


def sink(port: int, seconds: float, announce: Callable[[str], None]) -> Transferred:
    """Take and drop whatever arrives on `port` for `seconds`; `announce` is called with the address once it listens.

    Raises:
        LabError: the port is taken.
    """
    begun_s = time.monotonic()
    num_bytes = 0
    room = bytearray(1 << 20)
    host = listen_address()
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise LabError(f"--listen {port} on {host}: {error.strerror}; choose another port") from error
    with server, DefaultSelector() as waiting:
        waiting.register(server, EVENT_READ)
        announce(f"{host}:{server.getsockname()[1]}")
        while (left_s := begun_s + seconds - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                if key.fileobj is server:
                    waiting.register(server.accept()[0], EVENT_READ)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket), "only sockets are registered"
                num_read = _read(connection, room)
                num_bytes += num_read
                if not num_read:
                    waiting.unregister(connection)
                    connection.close()
        for key in list(waiting.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    return Transferred(num_bytes, time.monotonic() - begun_s)


def _read(connection: socket.socket, room: bytearray) -> int:
    try:
        return connection.recv_into(room)
    except ConnectionError:  # the sender was killed, which is how background traffic often ends
        return 0
