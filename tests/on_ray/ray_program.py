"""A training program for jobs of several nodes: `ray_program.py FOLDER PROGRAM REPLICAS EPOCHS`.

Each worker keeps a journal in FOLDER, and does no more steps than the file `gate` there allows.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def main() -> int:
    sys.path[:0] = [str(TESTS), str(TESTS / "train")]
    from subject import Task, train

    folder, program, replicas, epochs = sys.argv[1:]
    environ = {name: value for name, value in os.environ.items() if name.startswith("PLIANT_")}
    journal = f"{folder}/{os.environ['PLIANT_WORKER']}.journal"
    task = Task(
        program=program,
        replicas=int(replicas),
        epochs=int(epochs),
        journal=journal,
        environ=environ,
        gate=f"{folder}/gate",
    )
    return train(0, task)


if __name__ == "__main__":
    sys.exit(main())
