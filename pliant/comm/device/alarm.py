"""One rank's trouble is soon every rank's: a ring in which each rank listens to the one before it.

A library below us (NCCL, gloo) may wait for ever for a rank that has given up or died. Each rank
therefore holds one engine broadcast open to the rank after it, and sends on it once: what went wrong,
or that it has ended well. Whoever hears of trouble passes it on. That a rank died is heard from the
engine itself, which fails the broadcast. One small message and one sleeping thread per rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable

import torch

from pliant.comm.engine import Engine
from pliant.errors import CommError, Mismatch, WorkerLost

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4096
TEXT_CHARS = 600
"""Longer explanations are cut, so that they fit into a message even if every character needs an escape."""


class Alarm:
    """Tells the other ranks of trouble here, and us of trouble there. All ranks open it under the same name."""

    def __init__(self, engine: Engine, name: str, heard: Callable[[Exception], None]) -> None:
        self._engine = engine
        self._name = name
        self._heard = heard
        """Called at most once, in the listening thread."""
        self._lock = threading.Lock()
        self._sent = False
        self._thread = threading.Thread(target=self._listen, name=f"pliant-alarm-{engine.rank}", daemon=True)

    def open(self) -> None:
        if self._engine.size > 1:
            self._thread.start()

    def tell(self, error: Exception | None) -> None:
        """Send `error` round, or None if all is well here and this rank ends. Only the first call counts."""
        self._send(encode(self._engine.rank, error))

    def close(self, timeout_s: float) -> None:
        """End the listening. It may outlast this call until the rank before us ends too, or the engine does."""
        self.tell(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _send(self, message: torch.Tensor) -> None:
        with self._lock:
            if self._sent or self._engine.size == 1:
                return
            self._sent = True
        me, after = self._engine.rank, (self._engine.rank + 1) % self._engine.size
        # A rank that cannot be reached any more learns the same from the engine.
        with contextlib.suppress(CommError):
            self._engine.broadcast(f"{self._name}:alarm:{me}", message, root=me, ranks=[me, after])

    def _listen(self) -> None:
        me, before = self._engine.rank, (self._engine.rank - 1) % self._engine.size
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        try:
            open_end = self._engine.broadcast(f"{self._name}:alarm:{before}", message, root=before, ranks=[before, me])
            # As long as the group lives. It ends with a message, with the neighbour, or with the engine.
            open_end.wait(threading.TIMEOUT_MAX)
        except CommError as lost:
            self.tell(lost)
            self._heard(lost)
            return
        error = decode(message)
        if error is not None:
            self._send(message)
            self._heard(error)


def encode(rank: int, error: Exception | None) -> torch.Tensor:
    """What is said of `error`, which came up on `rank`, as a message of fixed length."""
    words: dict[str, str | int] = {"by": rank}
    if isinstance(error, WorkerLost):
        words |= {"lost": error.worker, "rank": error.rank, "why": error.why[:TEXT_CHARS]}
    elif error is not None:
        words |= {"kind": "mismatch" if isinstance(error, Mismatch) else "error", "text": str(error)[:TEXT_CHARS]}
    data = json.dumps(words).encode()
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return message


def decode(message: torch.Tensor) -> CommError | None:
    """The error that `encode` was given, as others see it; None if the rank ended well."""
    words = json.loads(bytes(message.numpy()).rstrip(b"\0"))
    if "lost" in words:
        return WorkerLost(words["lost"], words["rank"], words["why"])
    if "text" not in words:
        return None
    kind = Mismatch if words["kind"] == "mismatch" else CommError
    return kind(f"on rank {words['by']}: {words['text']}")
