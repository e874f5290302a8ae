"""Servers and runners whose output goes to a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from full_disk import small_disk
from gang import free_port
from patience import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")


def _answers(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/")
    except httpx.TransportError:
        return False
    return True


@pytest.mark.parametrize("words", ["config-server", "serve --devices cpu=1", "dash"], ids=lambda words: words.split()[0])
def test_a_server_whose_output_finds_no_room_goes_on(words: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PLIANT_HOME": str(tmp_path / "home")}
    port = free_port("127.0.0.1")
    with small_disk(tmp_path / "disk") as disk, (tmp_path / "disk" / "out").open("wb") as out:
        disk.fill()
        flags = (*words.split(), "--port", str(port))
        with subprocess.Popen([*PLIANT, *flags], stdout=out, stderr=out, env=environ) as server:
            try:
                until(lambda: _answers(port) or server.poll() is not None)
                assert server.poll() is None
                disk.free()  # there is room again before it ends, so nothing is left to be said of the disk
                server.send_signal(signal.SIGTERM)
                assert server.wait(30) == 0
            finally:
                server.kill()


def test_a_job_whose_output_finds_no_room_goes_on(tmp_path: Path) -> None:
    program, done = tmp_path / "program.py", tmp_path / "done"
    program.write_text(f"for i in range(1000):\n    print('a line', i, flush=True)\nopen({str(done)!r}, 'w').close()\n")
    environ = {**os.environ, "PLIANT_HOME": str(tmp_path / "home")}
    with small_disk(tmp_path / "disk") as disk, (tmp_path / "disk" / "out").open("wb") as out:
        disk.fill()
        subprocess.run([*PLIANT, "run", "-np", "1", str(program)], stdout=out, stderr=out, env=environ, timeout=60)
    assert done.exists()
