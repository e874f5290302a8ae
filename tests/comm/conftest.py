"""Fixtures for tests of the engine with real processes."""

from __future__ import annotations

import pytest
from gang import FULL, warm_up


@pytest.fixture(scope="session")
def fork_server() -> None:
    """The server that workers are forked from. First, so that `no_leaks` does not count its descriptors."""
    warm_up()


@pytest.fixture
def full() -> None:
    """Skip what takes minutes, unless PLIANT_FULL=1."""
    if not FULL:
        pytest.skip("takes minutes: set PLIANT_FULL=1 to run it")
