"""A program's file run by forked workers: what `pliant run` would start, without seconds of imports in each process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gang import run

from pliant.cluster import WorkerSpec


def run_script(script: Path, members: Sequence[WorkerSpec], *arguments: str, timeout_s: float = 60) -> list[str]:
    """What each of these workers of one job has written to stdout when `script` is its main program."""
    environs = [member.to_environ() for member in members]
    return run(_main, len(members), str(script), arguments, environs, timeout_s=timeout_s)


def _main(rank: int, script: str, arguments: Sequence[str], environs: Sequence[dict[str, str]]) -> str:
    os.environ.update(environs[rank])
    os.chdir(Path(script).parent)
    sys.argv = [script, *arguments]
    output = Path(script).with_suffix(f".{os.getpid()}.out")
    with output.open("w", buffering=1) as sys.stdout:
        runpy.run_path(script, run_name="__main__")
    return output.read_text()
