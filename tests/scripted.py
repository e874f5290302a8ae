"""A program's file run by forked workers: what `pliant run` would start, without seconds of imports in each process."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gang import run

from pliant.identity import WorkerSpec


def run_script(script: Path, members: Sequence[WorkerSpec] = (), *, timeout_s: float = 60) -> list[str]:
    """What each of these workers of one job has written to stdout when `script` is its main program; one without a job
    where there are none."""
    environs = [member.to_environ() for member in members] or [{}]
    return run(_main, len(environs), str(script), environs, timeout_s=timeout_s)


def _main(rank: int, script: str, environs: Sequence[dict[str, str]]) -> str:
    os.environ.update(environs[rank])
    sys.argv, sys.path[0] = [script], str(Path(script).parent)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()
