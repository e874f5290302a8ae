"""How busy the processors of this machine are, by the kernel's count of all that runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def times() -> list[int]:
    """What their time was spent on so far, by kind, as /proc/stat has it."""
    return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


def busy_share(before: Sequence[int], after: Sequence[int]) -> float:
    """The share of the time between that was used, by whomever."""
    spent = [now - then for then, now in zip(before, after, strict=True)]
    idle = spent[3] + spent[4]
    return 1 - idle / sum(spent[:8]) if sum(spent[:8]) else 0.0
