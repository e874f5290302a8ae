"""Reads single keys from the terminal, for commands that draw a whole screen."""

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
CHECK_S = 0.1
"""Interval at which signals are checked while waiting for a key."""


@contextlib.contextmanager
def pressed() -> Iterator[Callable[[float, Callable[[], bool]], str]]:
    """Yield a function that waits for a key: at most some seconds, or until a condition holds. It returns "" for none.

    Within the block keys need no Enter and are not echoed. If stdin is no terminal, there are no keys.
    """
    if not sys.stdin.isatty():
        yield lambda wait_s, is_over: _next(None, wait_s, is_over)
        return
    place = sys.stdin.fileno()
    before = termios.tcgetattr(place)
    tty.setcbreak(place)  # Ctrl-C still sends its signal
    try:
        yield lambda wait_s, is_over: _next(place, wait_s, is_over)
    finally:
        termios.tcsetattr(place, termios.TCSADRAIN, before)


def _next(place: int | None, wait_s: float, is_over: Callable[[], bool]) -> str:
    until_s = time.monotonic() + wait_s
    while not is_over() and (left_s := until_s - time.monotonic()) > 0:
        if select.select([] if place is None else [place], [], [], min(left_s, CHECK_S))[0] and place is not None:
            return os.read(place, 16).decode(errors="replace")
    return ""
