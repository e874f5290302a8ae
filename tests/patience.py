"""For tests that wait for what processes do: a poll with a deadline, and the gates that their programs wait at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(happened: Callable[[], Any], what: str = "it", timeout_s: float = 90.0) -> Any:
    """What `happened` gives, once that is something."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := happened()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)  # pacing a poll with a deadline
    return found


def open_gate(gate: Path, steps: int) -> None:
    """Let a program do so many steps, counted from its beginning; it never sees half of the number."""
    draft = gate.with_suffix(".draft")
    draft.write_text(str(steps))
    draft.replace(gate)
