"""The page of `pliant dash` beside a command that runs for long: a process of its own, which ends with the command."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from pliant import child, record
from pliant.errors import ConfigError

END_S = 5.0


@contextlib.contextmanager
def page(port: str, shown: str, *, token_file: str = "") -> Iterator[None]:
    """Show `shown`, or all that runs here where it is empty, at this port of loopback until the block ends; no page, where
    `port` is empty.

    In a process of its own, so that drawing never keeps a runner or a scheduler waiting; the kernel ends it if we are
    killed. It says by itself where it is.
    """
    if not port:
        yield
        return
    if not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"--dash {port!r} is not a port: use a number from 1 to 65535, or 0 for any free one")
    if shown and not os.path.exists(shown):
        record.Recorder(shown).close()  # a run will write it; the page may look before
    main = [sys.executable, "-c", "from pliant.cli.main import main; main()"]
    flags = ["--port", port, *(["--token-file", token_file] if token_file else [])]
    words = [*main, "dash", *filter(None, [shown]), *flags]
    process = subprocess.Popen([sys.executable, child.__file__, str(os.getpid()), *words])
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
