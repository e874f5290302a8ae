"""Imported by processes that become Flower's: they ask each other every 0.1 s, instead of every second or every three."""

from __future__ import annotations

import time
from typing import Any

from flwr.cli import app as _app  # noqa: F401
from flwr.supercore import cli as _supercore  # noqa: F401
from flwr.supercore.superexec import run_superexec
from flwr.superlink import cli as _superlink  # noqa: F401
from flwr.superlink.grid import http_grid
from flwr.supernode import cli as _supernode  # noqa: F401
from flwr.supernode import start_client_internal

import pliant.fed.flower.strategy  # noqa: F401


class _Time:
    """The module `time`, with short pauses."""

    def sleep(self, pause_s: float) -> None:
        time.sleep(min(pause_s, 0.1))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


for module in (run_superexec, http_grid, start_client_internal):
    module.time = _Time()
