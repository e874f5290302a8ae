"""The pages about the design are true to the tree: the house, the walk of a gradient, paths, and dependencies."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
from test_layers import LAYERS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pliant"
DESIGN = (ROOT / "docs" / "design.md").read_text()
PAGES = [
    ROOT / "docs" / "design.md",
    ROOT / "docs" / "decisions.md",
    ROOT / "docs" / "log.md",
    ROOT / "CONTRIBUTING.md",
]


def house(text: str) -> dict[str, int]:
    """The layer of each package and module in the house, by its path."""
    [block] = re.findall(r"```text\nlayer\n(.*?)```", text, re.DOTALL)
    found: dict[str, int] = {}
    layer, above = -1, ""
    for line in block.splitlines():
        number, rest = re.findall(r"^ *(\d*) *(.*)", line)[0]
        names = list(takewhile(lambda word: word.endswith(("/", ".py")), rest.split()))
        layer = int(number or layer)
        if line.index(rest) == 6:
            above = names[-1]
            found |= dict.fromkeys(names, layer)
        else:
            found |= {above + name: layer for name in names}
    return found


def test_the_house_is_the_tree() -> None:
    shown = house(DESIGN)
    packages = {f"{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.rglob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    assert set(shown) == packages | modules


def test_the_layers_are_those_of_the_imports() -> None:
    shown = house(DESIGN)
    for number, parts in enumerate(LAYERS):
        here = {name for part in parts for name in (f"{part}/", f"{part}.py") if (PACKAGE / name).exists()}
        assert here == {name for name, layer in shown.items() if layer == number and "/" not in name[:-1]}


def defined(path: Path) -> set[str]:
    """The names of a file's functions, methods and classes."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_the_walk_names_functions_that_are_there() -> None:
    walk = DESIGN.partition("## The walk of one gradient")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", walk)
    assert len(named) > 15
    missing = [
        f"{file}: {name}"
        for file, names in named
        for name in re.findall(r"\w+", names)
        if not (PACKAGE / file).exists() or name not in defined(PACKAGE / file)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_paths_on_the_page_are_there(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]*/[\w.-]+\.(?:py|md|yml|toml|txt))(?:::\w+)?`", page.read_text()))
    assert not [name for name in sorted(named) if not (PACKAGE / name).exists() and not (ROOT / name).exists()]


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = DESIGN.partition("## Dependencies")[2]
    shown = re.findall(r"^\| ([^|]+) \| ([^|]+) \|(?: ([^|]+) \|)?$", text, re.MULTILINE)
    needed = {name for names, _, third in shown if not third for name in names.split(", ")}
    extras = {
        extra: set(names.split(", "))
        for extras, names, third in shown
        if third
        for extra in re.findall(r"`(\w+)`", extras)
    }
    assert {_name(each) for each in project["dependencies"]} <= needed
    assert set(project["optional-dependencies"]) == set(extras)
    for extra, listed in project["optional-dependencies"].items():
        assert {_name(each) for each in listed} - {"pliant"} == extras[extra], extra


def _name(requirement: str) -> str:
    [name] = re.findall(r"^[\w-]+", requirement)
    return str(name)
