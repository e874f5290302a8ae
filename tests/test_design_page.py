"""The design page is true to the tree: the house, the four walks, the paths and the dependencies that it names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pliant"
DESIGN = (ROOT / "docs" / "design.md").read_text()
PAGES = [ROOT / "docs" / name for name in ("design.md", "decisions.md")] + [ROOT / "CONTRIBUTING.md"]
WALKS = {"One gradient": 20, "One resize": 20, "One submit": 15, "One federated round": 12}
"""The sections that follow one thing through the code, and the number of files that each may name."""


def house_packages(text: str) -> set[str]:
    """Return the packages that the drawing of the house shows, as paths below `pliant/`."""
    [block] = re.findall(r"```text\npliant/\n(.*?)```", text, re.DOTALL)
    found, above = set(), ""
    for indent, name in re.findall(r"^( +)([\w/]+/) ", block, re.MULTILINE):
        above = name if len(indent) == 2 else above
        found.add(name if len(indent) == 2 else above + name)
    return found


def test_the_house_is_the_tree() -> None:
    assert house_packages(DESIGN) == {f"{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.rglob("*/__init__.py")}


def section(title: str) -> str:
    return DESIGN.partition(f"\n## {title}\n")[2].partition("\n#")[0]


def defined(path: Path) -> set[str]:
    """Return the names of a file's functions, methods and classes."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


@pytest.mark.parametrize(("title", "limit"), WALKS.items())
def test_a_walk_names_few_files_and_functions_that_exist(title: str, limit: int) -> None:
    text = section(title)
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert 5 <= len(files) <= limit
    assert not [file for file in files if not (PACKAGE / file).exists()]
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text)
    assert named
    missing = [
        f"{file}: {name}"
        for file, names in named
        for name in re.findall(r"\w+", names)
        if name not in defined(PACKAGE / file)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_paths_on_the_page_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]*/[\w.-]+\.(?:py|md|yml|toml|txt))(?:::\w+)?`", page.read_text()))
    assert not [name for name in sorted(named) if not (PACKAGE / name).exists() and not (ROOT / name).exists()]


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = section("Dependencies")
    shown = re.findall(r"^\| ([^|]+) \| ([^|]+) \|(?: ([^|]+) \|)?$", text, re.MULTILINE)
    needed = {name for names, _, third in shown if not third for name in names.split(", ")}
    extras = {extra: set(names.split(", ")) for extra, names, third in shown if third}
    assert {_name(each) for each in project["dependencies"]} <= needed
    for extra, listed in project["optional-dependencies"].items():
        assert {_name(each) for each in listed} - {"pliant"} == extras[f"`{extra}`"], extra


def _name(requirement: str) -> str:
    [name] = re.findall(r"^[\w-]+", requirement)
    return str(name)
