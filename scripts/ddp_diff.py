"""The difference between examples/digits_ddp.py and examples/digits.py, from the first import on: what docs/coming-from.md shows.

`python scripts/ddp_diff.py` prints it; a test compares it with the page.
"""

from __future__ import annotations

import difflib
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def difference() -> str:
    old, new = (_code(EXAMPLES / name) for name in ("digits_ddp.py", "digits.py"))
    lines = list(difflib.unified_diff(old, new, n=100, lineterm=""))[2:]
    return "\n".join(line for line in lines if not line.startswith("@@"))


def _code(path: Path) -> list[str]:
    """Without the docstring."""
    return path.read_text().split('"""\n', 2)[-1].strip().splitlines()


if __name__ == "__main__":
    print(difference())
