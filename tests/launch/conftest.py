"""Fixtures for the launcher: runners as real processes, ended whatever a test does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import gang
import pytest
from launching import DEADLINE_S, Launcher, Nursery, is_alive


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as running:
        yield running


@pytest.fixture
def launcher(tmp_path: Path, nursery: Nursery) -> Iterator[Launcher]:
    foreign = ("PLIANT_", "CUDA_", "PYTHONUNBUFFERED", "XDG_CONFIG_HOME", "NO_COLOR")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    made = Launcher(tmp_path, {**environ, "HOME": str(tmp_path)}, nursery)
    yield made
    for runner in made.started:
        runner.kill()
        runner.wait(DEADLINE_S)
        runner.close()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on now, on any of the addresses that the tests use."""
    return gang.free_port("0.0.0.0")


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return is_alive
