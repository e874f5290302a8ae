"""What `pliant bench preemption` trains: a tiny layer, then a large one, and nearly nothing to compute.

Backward has the large gradient first, so it is on the wire when the tiny one, which the next forward needs first, is
ready. How long that takes to come back is noted in the trace, and how much lay in the kernel's queues at that moment.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import termios
import time

import torch
from torch import Tensor, nn

from pliant.train import trace
from pliant_repro.bench.preemption import FIRST_BACKWARD_S, FIRST_PARAMETERS, LAST_PARAMETERS, LATENCY, QUEUED


class TwoLayers(nn.Module):
    """Notes how long each step's gradient of the first layer took to become its next value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((FIRST_PARAMETERS,), 0.5))
        self.last = nn.Parameter(torch.full((LAST_PARAMETERS,), 0.5))
        self._ready_s: float | None = None
        self.first.register_post_accumulate_grad_hook(lambda _: self._note_gradient())  # type: ignore[no-untyped-call]

    def _note_gradient(self) -> None:
        self._ready_s = time.monotonic()
        if trace.enabled():
            trace.event(QUEUED, str(queued_bytes()), self._ready_s)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = (self.first * inputs).mean()  # waits, where the parameter is not here yet
        if self._ready_s is not None:
            trace.event(LATENCY, "first", self._ready_s)
        if hidden.requires_grad:
            # The first layer's backward.
            hidden.register_hook(lambda _: time.sleep(FIRST_BACKWARD_S))  # type: ignore[no-untyped-call]
        found: Tensor = self.last * hidden
        return found


def queued_bytes() -> int:
    """What the kernel has of this process's TCP connections to other hosts and nobody has acknowledged: unsent, or on the way."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    (found,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4))
                    total += found
        except OSError:
            continue  # closed meanwhile, or it listens
    return total


def build() -> tuple[nn.Module, Tensor]:
    """For `--model module:function`."""
    return TwoLayers(), torch.ones(1)
