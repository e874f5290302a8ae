"""Signals that end programs, for those who wait for events."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handed_to(put: Callable[[int], object]) -> Iterator[None]:
    """Signals that would end this program are handed to `put`, within the block."""
    before = {
        number: signal.signal(number, lambda signum, frame: put(signum))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
