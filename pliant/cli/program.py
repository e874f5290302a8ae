"""The `pliant` program from its first moment on: Ctrl-C while its commands are still imported is no traceback."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the program. To import it takes a third of a second, in which somebody may change their mind."""
    try:
        from pliant.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run()
