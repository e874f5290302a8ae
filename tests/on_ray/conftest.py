"""Fixtures for jobs on Ray: one cluster for all tests of a file, since it takes long to start; it is gone when others begin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("on_ray", "launch", "jobs", "train")]

from launching import Launcher, Nursery, launcher_in  # noqa: E402
from two_nodes import Nodes, two_nodes  # noqa: E402


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as running:
        yield running


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with Nursery() as nursery, launcher_in(tmp_path, nursery, "RAY_") as made:
        yield made
