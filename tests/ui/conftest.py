"""What the page's tests share: a home for commands, and one browser for all of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from pages import CHROMIUM, Browser, Home


@pytest.fixture(scope="module")
def _forks() -> Iterator[None]:
    with forked.forking("pliant.cli.main", "pliant.ui.server", "pliant.ui.page"):
        yield


@pytest.fixture
def home(_forks: None, tmp_path: Path) -> Iterator[Home]:
    """Its commands are forked from a process that has imported what the page needs."""
    tmp_path.chmod(0o700)
    made = Home(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: scripts/system-packages installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP evil.example 127.0.0.1"],
        )
        yield started
        started.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    made = Browser(chromium)
    yield made
    for context in list(chromium.contexts):
        context.close()
    assert not made.foreign, "the page must work offline"
    assert not made.errors
