"""The program of a worker that is forked from the warm process of a bench (see `forking`): `worker`, and what a fork needs first.

It is a module of its own because the warm process has imported `worker` already, and `python -m` warns about such a module.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

from pliant_repro import worker

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become what a worker with a Python of its own would be, and run it."""
    # Like that one, it ends when its control connection does. It can go on without the warm process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    gc.unfreeze()  # so that garbage collections take as long as with a Python of its own
    read_environ_again()
    worker.main()


def read_environ_again() -> None:
    """Set what torch has taken from the environment of the warm process, where this one may have another value."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.compile_threads = config.decide_compile_threads()


if __name__ == "__main__":
    main()
