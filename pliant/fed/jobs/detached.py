"""Federated jobs that run on by themselves: started, watched and ended from any process of the user."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from pliant.errors import LaunchError
from pliant.fed.jobs.folders import JobFolder
from pliant.launch.guardian import MARK

KEEPER = "pliant.fed.jobs.keeper"
DETACH = "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nos.execv(sys.argv[1], sys.argv[1:])"
"""Whoever starts a job is not its parent: nobody has to wait for it, and no terminal ends it."""
POLL_S = 0.1
APPEARS_S = 30.0
NOT_INHERITED = (MARK, "PLIANT_WORKER")


def start(folder: JobFolder, environ: Mapping[str, str] = os.environ) -> None:
    """Have the job run, from its checkpoint where there is one.

    Raises:
        NameTaken: it runs.
        LaunchError: the system starts no process.
    """
    directory = folder.job().directory
    with folder.minded() as lock, folder.log.open("ab") as log:
        folder.forget_end()
        keeper = [sys.executable, "-P", "-m", KEEPER, str(folder.path), str(lock)]
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", DETACH, *keeper],
                env={name: value for name, value in environ.items() if name not in NOT_INHERITED},
                cwd=directory if os.path.isdir(directory) else None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise LaunchError(f"{folder.path}: the job's keeper cannot be started: {error}") from None


def stop(folder: JobFolder, *, kill: bool = False) -> None:
    """Tell whoever minds the job to end it: after its round, or at once. Does not wait."""
    deadline_s = time.monotonic() + APPEARS_S
    while folder.is_minded():
        keeper = folder.keeper()
        if keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGINT if kill else signal.SIGTERM)
            return
        if time.monotonic() > deadline_s:
            raise LaunchError(f"{folder.path}: somebody minds this job, and has not said who within {APPEARS_S:g} s")
        time.sleep(POLL_S)


def await_end(folder: JobFolder, deadline_s: float) -> bool:
    """Until nobody minds the job; False: the deadline (of the monotonic clock) has passed before."""
    while folder.is_minded():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def log_of(folder: JobFolder, *, last: int | None = None, follow: bool = False) -> Iterator[str]:
    """What the job has said so far, or its last lines; with `follow`, also what it will say."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(folder.log.open(errors="replace"))
        except OSError:
            return
        text = file.read()
        yield text if last is None else "".join(text.splitlines(keepends=True)[-last:] if last else ())
        while follow:
            # Asked before the last look at the file: what is said in between is not missed.
            minded = folder.is_minded()
            while more := file.read():
                yield more
            if not minded:
                return
            time.sleep(POLL_S)
