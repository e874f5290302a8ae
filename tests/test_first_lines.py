"""Every file's first lines say what it owns: in the package, and around it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("pliant", "repro", "tests", "benchmarks", "examples", "experimental", "scripts")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
SMALL = {"a", "an", "and", "by", "for", "in", "of", "on", "test", "tests", "the", "this", "to", "with"}
"""Words that say nothing about a file, together with those of its name."""


def complaint(path: Path, text: str) -> str:
    """What is wrong with a file's first line; empty where it is a sentence that says more than the file's name."""
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    if not lines:
        return "has no docstring: say in its first line what it owns"
    first = lines[0]
    if not re.search(r"[.:?!][\"'`)]?$", first):
        return f"the first line of its docstring is no whole sentence: {first!r}"
    words = set(re.findall(r"\w+", first.lower())) - SMALL
    own = set(re.findall(r"[^\W_]+", "_".join(path.with_suffix("").parts[-3:]).lower()))
    if len(words - own - {f"{word}s" for word in own}) < 3:
        return f"its docstring repeats its name: {first!r}"
    return ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_files_first_line_says_what_it_owns(folder: str) -> None:
    found = {path.relative_to(ROOT): path.read_text() for path in SOURCES if path.relative_to(ROOT).parts[0] == folder}
    assert found
    wrong = [f"{path}: {said}" for path, text in found.items() if (said := complaint(path, text))]
    assert not wrong, "\n".join(wrong)
