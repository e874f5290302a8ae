"""Keys of the terminal as they are pressed, for commands that draw a whole screen."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

UP, DOWN = "\x1b[A", "\x1b[B"
HEED_S = 0.1
"""How soon a signal is heeded while a key is waited for."""


@contextlib.contextmanager
def pressed() -> Iterator[Callable[[float, Callable[[], bool]], str]]:
    """A function that waits for a key at most so many seconds, or until something is over; empty: there was none.

    Keys need no Enter and are not shown until the block ends. Where stdin is no terminal, there are none.
    """
    if not sys.stdin.isatty():
        yield lambda wait_s, is_over: _next(None, wait_s, is_over)
        return
    place = sys.stdin.fileno()
    before = termios.tcgetattr(place)
    tty.setcbreak(place)  # signals of the keyboard stay what they are
    try:
        yield lambda wait_s, is_over: _next(place, wait_s, is_over)
    finally:
        termios.tcsetattr(place, termios.TCSADRAIN, before)


def _next(place: int | None, wait_s: float, is_over: Callable[[], bool]) -> str:
    until_s = time.monotonic() + wait_s
    while not is_over() and (left_s := until_s - time.monotonic()) > 0:
        if select.select([] if place is None else [place], [], [], min(left_s, HEED_S))[0] and place is not None:
            return os.read(place, 16).decode(errors="replace")
    return ""
