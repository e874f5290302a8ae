"""The page of the first five minutes, typed as it stands: each command does what the page shows below it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from forked import PLIANT, Program, run
from patience import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "first-five-minutes.md").read_text()
LOOP = "for epoch in job.epochs(args.epochs):\n"
MAY_END = '        if job.on_first(__import__("pathlib").Path("enough").exists):\n            break\n'
"""The page's job is over when the test has seen enough, however fast this machine is."""


def shown(beginning: str) -> str:
    """Return the only command of the page that begins so."""
    [line] = re.findall(rf"^    \$ ({re.escape(beginning)}.*)$", PAGE, re.MULTILINE)
    return str(line)


class Terminal:
    """Types the page's commands in a folder that has examples of its own name, for `pgrep -f` to find no other job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.examples = f"examples-{os.getpid()}"
        (folder / self.examples).mkdir()
        program = (ROOT / "examples" / "digits.py").read_text()
        assert program.count(LOOP) == 1
        (folder / self.examples / "digits.py").write_text(program.replace(LOOP, f"{LOOP}{MAY_END}"))
        self.environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}

    def words(self, line: str) -> list[str]:
        words = shlex.split(line.replace("examples/", f"{self.examples}/").replace("--dash 9300", "--dash 0"))
        programs = {"pliant": PLIANT, "python": sys.executable}
        return [programs.get(words[0], words[0]), *words[1:]]

    def type(self, line: str) -> str:
        """Return what a command of pliant prints, on stdout and on stderr."""
        done = run(self.words(line), cwd=self.folder, env=self.environ, timeout=90)
        return done.stdout + done.stderr

    def shell(self, line: str) -> None:
        """Let a shell read the line, from a file, so that its own arguments are not found by pgrep."""
        script = self.folder / "typed.sh"
        script.write_text(line.replace("examples/", f"{self.examples}/"))
        subprocess.run(["bash", script], check=True, timeout=30)


class Output:
    """Reads the lines of a program as they come."""

    def __init__(self, program: Program) -> None:
        self.text = ""
        self._program = program
        self._readers = [threading.Thread(target=self._read, args=(pipe,)) for pipe in (program.stdout, program.stderr)]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: object) -> None:
        for line in pipe:  # type: ignore[attr-defined]
            self.text += line

    def wait_for(self, pattern: str) -> str:
        until(lambda: re.search(pattern, self.text) or not any(map(threading.Thread.is_alive, self._readers)), pattern)
        found = re.search(pattern, self.text)
        assert found, f"it ended without {pattern!r}: {self.text}"
        return str(found[1] if found.groups() else found[0])

    def end(self) -> int:
        for reader in self._readers:
            reader.join(90)
        return self._program.wait(30)


def test_a_job_is_resized_and_robbed_of_a_worker_and_ends_with_the_hash_of_the_one_alone(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    started = Program(terminal.words(shown("pliant run")), cwd=tmp_path, env=terminal.environ)
    with contextlib.closing(started):
        job = Output(started)
        address = job.wait_for(r"the page is at (http://127\.0\.0\.1:\S+)")
        job.wait_for("epoch 0 done, on 2 workers")
        assert re.search(
            r"resize 2 -> 1 \(version 2\)\nthe job runs on 1 worker after", terminal.type("pliant resize 1")
        )
        assert re.search(
            r"resize 1 -> 2 \(version 3\)\nthe job runs on 2 workers after", terminal.type("pliant resize 2")
        )
        [refusal] = re.findall(r"^    (pliant: size 3: .*)$", PAGE, re.MULTILINE)
        assert terminal.type(shown("pliant resize 3")) == f"{refusal}\n"
        with httpx.Client(follow_redirects=True, trust_env=False, timeout=30) as browser:
            assert "pliant" in browser.get(address).raise_for_status().text
        terminal.shell(shown("kill -9"))
        job.wait_for(r"lost \S+: killed by SIGKILL; replacing it now")
        job.wait_for(r"recovered at step \d+: 2 -> 1 took")
        until(lambda: len(re.findall("resize 1 -> 2 took", job.text)) == 2, "the replacement")
        assert re.search(r"digits-\d+ +running +[\d,]+ +2 ", terminal.type(shown("pliant top")))
        (tmp_path / "enough").touch()
        hashed = job.wait_for(r"model ([0-9a-f]{16})")
        assert job.end() == 0, job.text
    assert re.search(r"all \d/\d local workers finished \(1 lost\), took ", job.text)
    epochs = 1 + max(int(number) for number in re.findall(r"epoch (\d+) done", job.text))
    (tmp_path / "enough").unlink()
    alone = terminal.words(shown("python").replace("--epochs 600", f"--epochs {epochs}"))
    assert f"model {hashed}," in run(alone, cwd=tmp_path, env=terminal.environ, timeout=90).stdout
