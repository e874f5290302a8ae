"""SIGTERM as a notice that this machine will be taken away: time to leave in good order, at the next step's boundary."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable


def mind(leave: Callable[[], bool]) -> None:
    """Have `leave` called when the notice comes; if it says that there is nothing to leave, the program ends at once.

    Only in the main thread, and not where the program has a handler of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def heed(signum: int, frame: object) -> None:
        if not leave():
            sys.exit(0)

    signal.signal(signal.SIGTERM, heed)
