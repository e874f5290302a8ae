"""What Linux is asked about a TCP connection, and told: how fast the path is, and how much may lie in its queues.

Functions of a socket. On one that is no TCP connection they do nothing, and know nothing.
"""

from __future__ import annotations

import socket
import struct

from pliant.comm.telemetry import Delivered

_NUMBER, _LONG = struct.Struct("=I"), struct.Struct("=Q")
# Offsets in tcp_info.
_BYTES_ACKED, _MIN_RTT, _DELIVERY_RATE, _BUSY_TIME, _RWND_LIMITED = 120, 148, 160, 168, 176
_UNKNOWN = 0xFFFFFFFF


def is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def send_at_once(sock: socket.socket) -> None:
    """Small frames shall not wait for more to come."""
    if is_tcp(sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def limit_unsent(sock: socket.socket, num_bytes: int) -> None:
    """Call the connection writable only while less than this lies unsent in its queue."""
    lowat = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if lowat is not None and is_tcp(sock):
        sock.setsockopt(socket.IPPROTO_TCP, lowat, num_bytes)


def delivered(sock: socket.socket) -> Delivered | None:
    """What the other end has acknowledged so far; None where that is not known, or no more."""
    if not is_tcp(sock):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RWND_LIMITED + 8)
    except OSError:
        return None
    if len(info) < _RWND_LIMITED + 8:  # a kernel before 4.10
        return None
    acknowledged, busy_us, full_us = (
        _LONG.unpack_from(info, at)[0] for at in (_BYTES_ACKED, _BUSY_TIME, _RWND_LIMITED)
    )
    # Not the time for which the other end had no room: then its process is late, and not the network.
    return Delivered(acknowledged, (busy_us - full_us) / 1e6)


def path_bytes(sock: socket.socket) -> int | None:
    """What the path holds at the rate seen so far; 0 if nothing was seen, None where that is not known."""
    if not is_tcp(sock):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE + 8)
    if len(info) < _DELIVERY_RATE + 8:
        return None
    (min_rtt_us,), (bytes_per_s,) = _NUMBER.unpack_from(info, _MIN_RTT), _LONG.unpack_from(info, _DELIVERY_RATE)
    return 0 if min_rtt_us == _UNKNOWN else bytes_per_s * min_rtt_us // 1_000_000
