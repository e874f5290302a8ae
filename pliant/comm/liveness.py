"""Whether a peer that says nothing still lives, as the kernels know it: no code of the peer has to run for that.

A process that holds Python's interpreter lock for a minute sends no heartbeat, and is not lost. Its kernel tells it apart
from one that is stopped (`kill -STOP`), from a host that is down, and from a link that is cut.
"""

from __future__ import annotations

import socket
import struct

from pliant.child import STOPPED, process_state

_CREDENTIALS = struct.Struct("=iII")
# Offsets in tcp_info.
_PROBES, _SENT_MS, _ACK_MS = 3, 44, 56
_U32 = struct.Struct("=I")
_INFO_BYTES = _ACK_MS + _U32.size


def peer_process(sock: socket.socket) -> int:
    """Return the process at the other end of a Unix socket; 0 if it cannot be known from here."""
    if sock.family != socket.AF_UNIX:
        return 0
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def process_runs(pid: int) -> bool | None:
    """Return whether a process of this host lives and is not stopped; None if it cannot be known from here."""
    return process_state(pid) not in (*STOPPED, "") if pid else None


def host_answers(sock: socket.socket, within_s: float) -> bool | None:
    """Return whether the other host acknowledges what is sent on a TCP connection; None if it is not one.

    The last acknowledgement may be old, because little was sent: a peer that reads nothing takes no more at some time, and
    then the kernel asks ever more rarely whether there is room. So what counts is that nothing was sent after it that
    has waited for an answer for an eighth of `within_s`, and not two questions for room.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return None
    (sent_ms,), (acked_ms,) = _U32.unpack_from(info, _SENT_MS), _U32.unpack_from(info, _ACK_MS)  # so long ago
    is_answered = acked_ms <= sent_ms or sent_ms < within_s * 125
    return acked_ms < within_s * 1000 or (is_answered and info[_PROBES] < 2)
