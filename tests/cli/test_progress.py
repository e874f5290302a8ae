"""What takes long shows on a terminal that it goes on, and says nothing where stderr is piped."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

MAIN = "from pliant.cli.main import main; main()"
WORDS = ("bench", "traffic", "--listen", "0", "--seconds", "0.3")


@pytest.mark.processes
def test_a_line_moves_on_a_terminal_and_stdout_stays_clean() -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *WORDS], stdout=subprocess.PIPE, stderr=theirs, env=environ
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # EIO: the other side is closed
            while data := os.read(ours, 4096):
                shown += data
        os.close(ours)
        assert process.stdout is not None
        said = process.stdout.read().decode().splitlines()
        assert process.wait(20) == 0
    assert b"taking what comes for 0.3 s" in shown
    assert [line.split()[0] for line in said] == ["listening", "took"]


@pytest.mark.processes
def test_nothing_moves_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", MAIN, *WORDS], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
