"""Shell completion: what bash, zsh and fish ask the program at the tab key, and what it answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.jobs.store import JobStore

Said = tuple[int, str, str]
PROGRAM = """#!{python}
import sys
from pliant.cli.main import main
try:
    main()
finally:
    if "torch" in sys.modules:
        print("torch was imported", file=sys.stderr)
"""


@pytest.fixture
def asked(pliant: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What is proposed for the last word of a line."""

    def asked(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_PLIANT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        code, out, err = pliant()
        assert (code, err) == (0, "")
        return out.split()

    return asked


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("pliant rep", {"report", "reproduce"}),
        ("pliant bench pr", {"priority", "preemption"}),
        ("pliant run -n", {"-np"}),
        ("pliant run -np 4 --np", set()),  # given once already
        ("pliant run --strategy MULTI_", {"MULTI_STAR", "MULTI_BINARY_TREE_STAR"}),
        ("pliant run --policy schedu", {"scheduled-batch-size", "scheduled-size"}),
        ("pliant run --determinism ", {"D0", "D1", "D2"}),
        ("pliant run --order ", {"ddp", "tree"}),
        ("pliant serve --policy yarn", {"yarn-cs", "yarn-cs-gang"}),
        ("pliant sim --policy optimus,poll", {"optimus,pollux"}),
        ("pliant reproduce kungfu-fig1", {"kungfu-fig10"}),
        ("pliant reproduce al", {"all"}),
        ("pliant reproduce --scale ", {"tiny", "small", "paper"}),
        ("pliant list --only running,fa", {"running,failed"}),
        ("pliant fed select --selector oo", {"oort"}),
        ("pliant stop dig", {"digits-1"}),
        ("pliant logs ", {"digits-1"}),
        ("pliant submit --resume ", {"digits-1"}),
        ("pliant run train.p", set()),  # the shell's own: files
        ("pliant nonsense ", None),
    ],
)
def test_words_are_completed(
    asked: Callable[[str], list[str]], tmp_path: Path, line: str, proposed: set[str] | None
) -> None:
    job = {"spec": {"replicas": 2}, "folder": str(tmp_path), "state": "stopped", "submitted_s": 0.0}
    with JobStore(tmp_path / "state" / "pliant") as store:
        store.save([("digits-1", 1, job)], at_s=0.0)
    found = asked(line)
    assert proposed is None or set(found) == proposed


def test_nothing_is_proposed_where_looking_fails(asked: Callable[[str], list[str]], tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    assert asked("pliant logs ") == []


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """An environment with `pliant` on its PATH, and a home."""
    file = tmp_path / "bin" / "pliant"
    file.parent.mkdir()
    file.write_text(PROGRAM.format(python=sys.executable))
    file.chmod(0o755)
    return {**os.environ, "PATH": f"{file.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_itself_completes(program: dict[str, str]) -> None:
    line = """
    source <(pliant --show-completion)
    complete -p pliant
    COMP_WORDS=(pliant bench allreduce -strategy BIN) COMP_CWORD=4
    _pliant_completion pliant
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", line], env=program, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "-F _pliant_completion pliant" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[1:] == ["BINARY_TREE", "BINARY_TREE_STAR"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_answered_in_its_own_protocol(
    pliant: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("_PLIANT_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "pliant run --strategy RI")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_WORDS", "pliant run --strategy RI")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert "RING" in pliant()[1]
