"""Where the real tables lie; tests that read them are skipped where they do not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "flower_app"))  # the app that test_flower's SuperNodes run


@pytest.fixture(scope="session")
def fed_data() -> Path:
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PLIANT_DATA", beside)) / "fl"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: set PLIANT_DATA to the folder of data sets")
    return folder
