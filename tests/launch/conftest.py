"""Fixtures for the launcher: runners as real processes, ended whatever a test does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gang
import pytest
from launching import Launcher, Nursery, is_alive, launcher_in


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as running:
        yield running


@pytest.fixture
def launcher(tmp_path: Path, nursery: Nursery) -> Iterator[Launcher]:
    with launcher_in(tmp_path, nursery, "CUDA_", "PYTHONUNBUFFERED", "XDG_CONFIG_HOME", "NO_COLOR") as made:
        yield made


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on now, on any of the addresses that the tests use."""
    return gang.free_port("0.0.0.0")


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return is_alive
