"""README's commands, typed in their order by somebody who has just cloned it: none fails, and hashes that are said to be equal are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gang import FULL

ROOT = Path(__file__).parent.parent
INSTALLING = ("make ", "source ")  # what has made the environment that this runs in

RETRY = """
for turn in $(seq 100); do {command} && break; [ $turn -lt 100 ]; sleep 0.3; done
"""


def commands(text: str) -> list[str]:
    """What follows a $ in README, without remarks."""
    lines = re.findall(r"^    \$ (.+)$", text, re.MULTILINE)
    return [re.sub(r"\s+#.*$", "", line) for line in lines]


def script(typed: list[str]) -> str:
    """One shell types them all; what comes after a program in the background is tried until that one listens."""
    lines = ["set -e"]
    behind = False
    for number, line in enumerate(typed):
        lines.append(f"echo '--- {number}'")
        lines.append(RETRY.format(command=line) if behind else line)
        behind = line.endswith("&")
    return "\n".join(lines)


def test_readme_has_commands() -> None:
    found = commands((ROOT / "README.md").read_text())
    assert found[:3] == ["make demo", "make demo", "source .venv/bin/activate"]
    assert len(found) > 20


@pytest.mark.processes
@pytest.mark.skipif(not FULL, reason="takes some minutes: PLIANT_FULL=1")
@pytest.mark.timeout(1200)
def test_each_command_works_in_order(tmp_path: Path) -> None:
    clone = tmp_path / "pliant"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    typed = [line for line in commands((clone / "README.md").read_text()) if not line.startswith(INSTALLING)]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(clone),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    typing = tmp_path / "readme.sh"  # a file, so that pgrep does not find these words in the shell's own arguments
    typing.write_text(script(typed))
    done = subprocess.run(["bash", typing], cwd=clone, env=environment, capture_output=True, text=True, timeout=1100)
    parts = dict(re.findall(r"^--- (\d+)\n(.*?)(?=^--- |\Z)", done.stdout, re.MULTILINE | re.DOTALL))
    said = [(typed[int(number)], text) for number, text in parts.items()]
    assert done.returncode == 0, f"{typed[len(parts) - 1]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert [line for line, _ in said] == typed
    hashes = [re.findall(r"model ([0-9a-f]{16})", text) for line, text in said if "examples/digits" in line]
    assert len({found for [found] in hashes}) == 1
    assert len(hashes) == 3
