"""Fixtures for tests of the engine with real processes."""

from __future__ import annotations

import pytest
from gang import FULL, warm_up


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the server that workers are forked from, before `no_leaks` counts descriptors."""
    warm_up()


@pytest.fixture
def full() -> None:
    """Skip what takes minutes, unless PLIANT_FULL=1."""
    if not FULL:
        pytest.skip("takes minutes: set PLIANT_FULL=1 to run it")
