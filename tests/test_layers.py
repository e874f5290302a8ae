"""Imports go down, importing does nothing, and the torch-free parts stay torch-free."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pliant"
LAYERS = [
    {"errors"},
    {"cluster", "clock"},
    {"mistakes", "page", "perf", "record", "torchvision_import"},
    {"comm", "monitor"},
    {"elastic", "policy"},
    {"train", "launch", "lab"},
    {"fed", "integrations", "sched"},
    {"bench"},
    {"experiments", "dashboard"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
TORCH_FREE = [
    "pliant.cli.main",
    "pliant.cluster",
    "pliant.comm.graph",
    "pliant.comm.order",
    "pliant.comm.slices",
    "pliant.dashboard.page",
    "pliant.dashboard.sources",
    "pliant.elastic.membership",
    "pliant.elastic.server",
    "pliant.experiments.demo",
    "pliant.fed.availability",
    "pliant.fed.executors_launch",
    "pliant.fed.flower_client",
    "pliant.fed.journal",
    "pliant.fed.keeper",
    "pliant.fed.partition",
    "pliant.fed.rounds",
    "pliant.fed.selectors",
    "pliant.fed.testing",
    "pliant.launch.on_ray",
    "pliant.launch.runner",
    "pliant.lab",
    "pliant.sched.compare",
    "pliant.sched.jobfile",
    "pliant.sched.live_client",
    "pliant.sched.ground",
    "pliant.sched.live_server",
    "pliant.sched.local",
    "pliant.sched.pollux",
    "pliant.sched.ray_ground",
    "pliant.sched.schedulers",
    "pliant.sched.simulate",
    "pliant.sched.traces",
]


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The parts of the package that this file imports, wherever in the file it does."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            words = name.split(".")
            if words[0] == "pliant" and len(words) > 1 and words[1] in LEVEL:
                parts.add(words[1])
    return parts


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    here = part_of(path)
    assert here in LEVEL, f"{path}: say in LAYERS where {here} belongs"
    for there in imported_parts(path) - {here}:
        assert LEVEL[there] < LEVEL[here], f"{path}: {here} may not import {there}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_starts_without_torch(module: str) -> None:
    check = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=30).returncode == 0
