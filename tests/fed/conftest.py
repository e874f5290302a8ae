"""Where the real tables lie (tests that read them are skipped where they do not), and what forks workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from worker_processes import Nursery

sys.path.append(str(Path(__file__).parent / "flower_app"))  # the app that test_flower's SuperNodes run


@pytest.fixture(scope="session")
def fed_data() -> Path:
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PLIANT_DATA", beside)) / "fl"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: set PLIANT_DATA to the folder of data sets")
    return folder


@pytest.fixture(scope="session")
def ward() -> Iterator[Nursery]:
    """Forks workers and coordinators. First, so that `no_leaks` does not count its descriptors."""
    import torch
    from gang import warm_up
    from worker_processes import nursery

    warm_up()
    torch.set_num_threads(1)
    with nursery() as running:
        yield running


@pytest.fixture
def nothing_left(ward: Nursery) -> Iterator[None]:
    """What the test has started ends with it, and by itself where all went well."""
    before = len(ward.children)
    yield
    for child in ward.children[before:]:
        child.kill(signal.SIGCONT)
        child.kill()
        child.wait(10)
