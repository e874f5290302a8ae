"""Fixtures for jobs on Ray: one cluster for all tests of a file, since it takes long to start; it is gone when others begin."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("on_ray", "launch", "jobs", "train")]

from launching import DEADLINE_S, Launcher, Nursery  # noqa: E402
from two_nodes import Nodes, two_nodes  # noqa: E402


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as running:
        yield running


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PLIANT_", "RAY_"))}
    with Nursery() as nursery:
        made = Launcher(tmp_path, {**environ, "HOME": str(tmp_path)}, nursery)
        yield made
        for runner in made.started:
            runner.kill()
            runner.wait(DEADLINE_S)
            runner.close()
