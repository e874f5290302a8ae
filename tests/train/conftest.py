"""What all tests of training share: one run of the oracle for every process of pytest, and one arithmetic thread."""

from __future__ import annotations

import os
from collections.abc import Iterator

import golden
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _shared_goldens(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The oracle runs once, also where pytest-xdist runs tests in several processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        golden.shared = tmp_path_factory.getbasetemp().parent


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors, and others may need the processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
