"""Imports go down and stay shallow, a class name is used once, and the torch-free parts stay torch-free."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import house

PACKAGE = Path(__file__).parent.parent / "pliant"
LAYERS = [
    {"values"},
    {"comm"},
    {"adapt"},
    {"elastic"},
    {"train", "launch"},
    {"sched", "fed", "integrations"},
    {"jobs"},
    {"ui"},
    {"cli"},
]
"""A package imports from the layers above it in this list. The files directly in pliant/ are the values."""
DEEPEST_CHAIN = 14
"""The longest chain of imports that is allowed."""
TORCH_FREE = [
    "pliant.adapt.goodput_policy",
    "pliant_repro.scaling_model",
    "pliant.cli.main",
    "pliant.cluster",
    "pliant.comm.plan",
    "pliant.comm.order",
    "pliant.comm.topology",
    "pliant.ui.timeline",
    "pliant.ui.sources",
    "pliant.elastic.membership",
    "pliant.elastic.server",
    "pliant_repro.figures.demo",
    "pliant.fed",
    "pliant.fed.selection.selectors",
    "pliant.fed.selection.testing",
    "pliant.fed.clients",
    "pliant.fed.data.names",
    "pliant.fed.data.partition",
    "pliant.fed.workers",
    "pliant.fed.flower.client",
    "pliant.jobs.keeper",
    "pliant.fed.rounds.storage",
    "pliant.fed.rounds.plan",
    "pliant.launch.on_ray.driver",
    "pliant.launch.runner",
    "pliant_repro.lab.hosts",
    "pliant.sched.compare",
    "pliant.jobs.schema",
    "pliant.jobs.client",
    "pliant.jobs.rules",
    "pliant.jobs.api",
    "pliant.jobs.backends",
    "pliant.sched.pollux",
    "pliant.jobs.scheduler",
    "pliant.sched.policies",
    "pliant.sched.simulate",
    "pliant.sched.traces",
]


def layer_of(module: str) -> tuple[int, str]:
    """Return the layer of a module and the name of its part: its package, or `values` for a file in pliant/."""
    words = module.split(".")
    is_package = (PACKAGE / words[1]).is_dir()
    part = words[1] if is_package else "values"
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number, part
    raise AssertionError(f"{module}: add {part} to LAYERS in {Path(__file__).name}")


def test_packages_only_import_from_lower_layers() -> None:
    known = house.modules(PACKAGE)
    for module in known.keys() - {"pliant"}:
        layer, part = layer_of(module)
        for imported in house.imports_of(known[module], known) - {"pliant"}:
            lower, other = layer_of(imported)
            assert lower < layer or other == part, f"{module} may not import {imported}"


def test_imports_have_no_cycles_and_short_chains() -> None:
    chain = house.deepest_chain(PACKAGE)
    assert len(chain) <= DEEPEST_CHAIN, " > ".join(chain)


def test_a_class_name_is_used_by_one_module() -> None:
    repeated = house.repeated_classes(PACKAGE)
    assert not repeated, repeated


@pytest.mark.parametrize("door", ["pliant", "pliant.fed", "pliant.fed.flower"])
def test_a_front_door_has_what_it_lists(door: str) -> None:
    module = import_module(door)
    assert all(getattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_some_modules_start_without_torch() -> None:
    """All in one process: whichever brings torch in is named."""
    check = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
"""
    done = subprocess.run([sys.executable, "-c", check, *TORCH_FREE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_programs_may_seed_before_they_use_pliant() -> None:
    """Some libraries draw from Python's generator when they are imported, and `pliant.join` imports some."""
    check = "import random, pliant; random.seed(1); before = random.getstate(); pliant.join; assert random.getstate() == before"
    assert subprocess.run([sys.executable, "-c", check], timeout=30).returncode == 0
