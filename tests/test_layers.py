"""Imports go down, importing does nothing, and the torch-free parts stay torch-free."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pliant"
LAYERS = [
    {"child", "errors", "machine"},
    {"cluster"},
    {"identity", "mistakes", "page", "record", "torchvision_import"},
    {"adapt"},
    {"comm"},
    {"elastic"},
    {"train", "launch"},
    {"fed", "integrations", "sched"},
    {"ui"},
    {"cli"},
]
INSIDE = {
    "comm": [
        {"graph", "handle", "kernels", "shm", "store", "telemetry"},
        {"order"},
        {"slices"},
        {"plan"},
        {"choice", "transport"},
        {"collective", "mesh", "strategies"},
        {"cuda", "lobby"},
        {"connections"},
        {"parting"},
        {"reactor"},
        {"workshop"},
        {"binding"},
        {"submission"},
        {"engine"},
        {"device", "latency", "probe", "station"},
        {"loopback"},
    ],
    "comm.collective": [
        {"peers", "span"},
        {"notices", "pings", "program", "reach", "requests"},
        {"operation", "vocabulary"},
        {"intake"},
        {"ledger"},
        {"delivery"},
        {"steps"},
        {"matching"},
        {"core"},
    ],
    "comm.device": [{"alarm", "launch_order", "torch_group"}, {"config"}, {"agreement", "pipeline"}, {"group"}],
    "comm.transport": [{"handshake", "tcp", "wire"}, {"outbox"}, {"link"}, {"poller"}],
    "fed": [
        {"config", "history", "named", "pickles", "updates"},
        {"tables", "work"},
        {"choice"},
        {"clients", "data", "fold"},
        {"training"},
        {"executors", "rounds"},
        {"flower", "jobs"},
    ],
    "elastic": [
        {"asking", "door", "membership", "serving", "session", "waiting"},
        {"roll"},
        {"client", "store"},
        {"inputs", "member"},
        {"caterer"},
        {"web"},
        {"server"},
    ],
    "launch": [
        {"addresses", "company", "debug", "devices", "duration", "events", "guardian", "options"},
        {"output", "ports", "registry", "replacement", "secret", "signals", "warm"},
        {"assembly", "channel", "courier", "inbox", "plan", "processes", "ssh", "state_file", "supervisor"},
        {"control", "forker", "on_ray", "watch"},
        {"crew"},
        {"runner"},
    ],
    "sched": [
        {"planner"},
        {"job"},
        {"machines", "pollux"},
        {"schedulers", "workloads"},
        {"live", "simulate", "traces"},
        {"compare", "outcome"},
        {"result"},
    ],
    "train": [
        {"buffers", "calls", "fold_check", "notice", "placement", "rng", "state", "trace", "view_changes"},
        {"data", "determinism", "obstacles", "priority"},
        {"context", "gradients", "measuring"},
        {"adapting", "model_copies", "replicas", "rows", "way"},
        {"exchange", "optim"},
        {"trainer"},
        {"guards", "job_state", "showing", "wrapping"},
        {"beginning", "saving", "settling"},
        {"job"},
    ],
}
"""The same within a part, or a folder of it: its folders, and the files beside them."""
TORCH_FREE = [
    "pliant.cli.main",
    "pliant.cluster",
    "pliant.comm.graph",
    "pliant.comm.order",
    "pliant.comm.slices",
    "pliant.ui.page",
    "pliant.ui.sources",
    "pliant.elastic.membership",
    "pliant.elastic.server",
    "pliant_repro.experiments.demo",
    "pliant.fed",
    "pliant.fed.choice.selectors",
    "pliant.fed.choice.testing",
    "pliant.fed.clients.availability",
    "pliant.fed.data.partition",
    "pliant.fed.executors.launch",
    "pliant.fed.flower.client",
    "pliant.fed.jobs.keeper",
    "pliant.fed.rounds.journal",
    "pliant.fed.rounds.plan",
    "pliant.launch.on_ray.run",
    "pliant.launch.runner",
    "pliant_repro.lab.hosts",
    "pliant.sched.compare",
    "pliant.sched.live.jobfile",
    "pliant.sched.live.client",
    "pliant.sched.live.ground",
    "pliant.sched.live.server",
    "pliant.sched.live.local",
    "pliant.sched.pollux",
    "pliant.sched.live.ray_ground",
    "pliant.sched.schedulers.registry",
    "pliant.sched.simulate",
    "pliant.sched.traces",
]


def imported(path: Path) -> set[tuple[str, ...]]:
    """The modules and names of the package that this file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {tuple(name.split(".")[1:]) for name in names if name.startswith("pliant.")}
    return found


def check(path: Path, house: tuple[str, ...], layers: list[set[str]]) -> None:
    """That this file of a house, which is a part or the whole package, imports only what is below it there."""
    level = {part: number for number, parts in enumerate(layers) for part in parts}
    depth = len(house)
    here = path.relative_to(PACKAGE).parts[depth].removesuffix(".py")
    assert here in level, f"{path}: say in {Path(__file__).name} where {here} belongs"
    for words in imported(path):
        if words[:depth] == house and len(words) > depth and words[depth] in level and words[depth] != here:
            assert level[words[depth]] < level[here], f"{path}: {here} may not import {words[depth]}"


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    check(path, (), LAYERS)
    words = path.relative_to(PACKAGE).parts
    for name, layers in INSIDE.items():
        house = tuple(name.split("."))
        # A house's own __init__ names what programs import, wherever that is.
        if words[: len(house)] == house and words[len(house)] != "__init__.py":
            check(path, house, layers)


@pytest.mark.parametrize("door", ["pliant", "pliant.fed", "pliant.fed.flower"])
def test_a_front_door_has_what_it_lists(door: str) -> None:
    module = import_module(door)
    assert all(getattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("module", TORCH_FREE)
def test_starts_without_torch(module: str) -> None:
    check = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=30).returncode == 0
