"""The ports of this host's workers, bound by the runner and handed on as open sockets.

A port that is only looked up can be taken before the worker binds it; a listening socket
that the worker inherits cannot. Peers that connect early wait in its backlog.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Collection

from pliant.cluster import PortRange
from pliant.errors import CapacityError, ConfigError

BACKLOG = 1024


def listen_on(address: str, port: int) -> socket.socket:
    """A socket that listens on (`address`, `port`); port 0 takes any. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        # Only one socket of those bound with SO_REUSEADDR can listen, so that this call decides.
        sock.listen(BACKLOG)
        undo.pop_all()
    return sock


def bind_ports(address: str, num_ports: int, ports: PortRange, avoid: Collection[int] = ()) -> dict[int, socket.socket]:
    """The first `num_ports` free ports of the range on `address`, each listening; taken ones are skipped.

    Raises:
        CapacityError: fewer are free; those already bound are closed again.
        ConfigError: `address` is not of this machine, or the ports need privileges.
    """
    bound: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo:
        for port in range(ports.begin, ports.end + 1):
            if len(bound) == num_ports:
                break
            if port in avoid:
                continue
            try:
                bound[port] = undo.enter_context(listen_on(address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"cannot listen on {address}:{port} ({error.strerror}): give an address of this "
                        "machine with -self or -nic, and ports from 1024 on with -port-range"
                    ) from None
        if len(bound) < num_ports:
            raise CapacityError(
                f"no free port: -port-range {ports} has {len(ports)} ports, {len(bound)} of them free on {address}, "
                f"and {num_ports} workers need one each; give another -port-range"
            )
        undo.pop_all()
    return bound
