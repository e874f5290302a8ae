"""Runners as real processes, for the tests beside this file."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Without the other commands, whose imports would be most of a test's time.
MAIN = "import pliant.cli.main as cli; cli.COMMANDS = ('run',); cli.main()"
DEADLINE_S = 20.0


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return self.stdout.splitlines()[-1]


@dataclass
class Launcher:
    """Starts `pliant run` in a directory of its own, with nobody's variables but the test's."""

    directory: Path
    environ: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def script(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *arguments: object, **environ: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "run", *map(str, arguments)],
            cwd=self.directory,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> Ended:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
        return Ended(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    def run(self, *arguments: object, **environ: str) -> Ended:
        return self.end(self.start(*arguments, **environ))

    def run_all(self, *commands: tuple[object, ...], **environ: str) -> list[Ended]:
        """Several at the same time."""
        started = [self.start(*command, **environ) for command in commands]
        return [self.end(process) for process in started]

    def until(self, happened: Callable[[], object], what: str = "it") -> None:
        """Wait for something in another process, which has no other way to tell us."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not happened():
            assert time.monotonic() < deadline_s, f"{what} did not happen in {DEADLINE_S} s"
            time.sleep(0.005)

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.directory.glob(pattern))


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
