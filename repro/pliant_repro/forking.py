"""Workers of a bench that are forked from one warm process, which has imported torch and everything else that they need.

With a slow file system the imports of a worker take a minute, and a bench starts dozens of workers. Within `warm_process`, each
worker that `contest.process_starter` starts is a fork, and is ready in a second or two. What cannot be forked is started as
a Python process of its own, as without the block; that only takes longer, and `ColdStarts` says why. The warm process has no
threads and no CUDA context, which a fork would not survive.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.child import kill_group, reap
from pliant.errors import LaunchError
from pliant.launch.processes import WarmProcess
from pliant_repro.worker import INHERITED

FORKED_WORKER = "pliant_repro.forked_worker"
IMPORTS = (
    "numpy", "torch", "torch._dynamo", "torch.distributed", "httpcore", "pliant.elastic.client", "pliant.train.joining",
    "pliant.adapt.registry", "pliant_repro.worker", "pliant_repro.zoo", "pliant_repro.bench.training",
)  # fmt: skip
"""What a worker of a training contest has imported when it is ready."""
WARM_UP_S = 120.0
"""How long the imports may take. A worker that is started meanwhile waits for them."""
LATE_VARIABLES = ("PLIANT_", "MASTER_", "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_COMPILE_THREADS")
"""Beginnings of the variables that a fork may have with another value: they are read when they are needed, or
`forked_worker` reads them again. Others may be read when torch is imported."""


@dataclass(slots=True)
class ColdStarts:
    """Reasons why workers were not forked."""

    reasons: list[str] = field(default_factory=list)

    def note(self, why: str) -> None:
        said = f"workers were not forked from a process that has imported torch, and started more slowly: {why}"
        if said not in self.reasons:
            self.reasons.append(said)


class ForkedProcess:
    """A process that was forked from the warm process, with the methods of `subprocess.Popen` that a contest needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, kill what it has left of its session, and return its exit code, or minus a signal.

        Raises:
            TimeoutExpired: it still runs after so many seconds.
        """
        if self._code is None:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(FORKED_WORKER, timeout or 0.0)
            kill_group(self.pid, signal.SIGKILL)  # while it is a zombie, its number is nobody else's
            self._code = reap(self.pid)
            os.close(self._pidfd)
        return self._code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self._code is None:
            kill_group(self.pid, signum)


class WarmSource:
    """The warm process of a bench, for all its threads. A context manager, to be entered by a thread that outlives the block:
    the kernel ends the warm process with the thread that has started it."""

    def __init__(self, environ: Mapping[str, str], imports: Sequence[str] = IMPORTS) -> None:
        self.cold = ColdStarts()
        self._environ = dict(environ)
        self._is_known = threading.Event()
        self._lock = threading.Lock()
        self._process = WarmProcess(environ, self._is_known.set, imports=imports, shown=["-m", FORKED_WORKER])

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> WarmSource:
        self._process.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()
        os.close(self._process.stdout)
        os.close(self._process.stderr)

    def fork(
        self, arguments: Sequence[str], environ: Mapping[str, str], output: int, fds: Sequence[int]
    ) -> ForkedProcess | None:
        """Fork a worker that writes to `output` and inherits `fds`; return None, and note why, if that cannot be done."""
        changed = {name for name in {*environ, *self._environ} if environ.get(name) != self._environ.get(name)}
        early = sorted(name for name in changed if not name.startswith(LATE_VARIABLES) or name not in environ)
        if early:
            self.cold.note(f"{', '.join(early)} changed since it was started")
            return None
        if not self._is_known.wait(WARM_UP_S):
            self.cold.note(f"it has not imported torch within {WARM_UP_S:g} s")
            return None
        command = [sys.executable, "-m", FORKED_WORKER, *arguments]
        inherited = {f"{INHERITED}{descriptor}": descriptor for descriptor in fds}
        try:
            with self._lock:
                return ForkedProcess(self._process.fork_into(command, environ, (output, output), inherited))
        except (LaunchError, OSError) as error:
            self.cold.note(f"{error}{self._last_words()}")
            return None

    def _last_words(self) -> str:
        """Return what the warm process has written about its end, after a colon."""
        os.set_blocking(self._process.stderr, False)
        select.select([self._process.stderr], [], [], 1.0)  # it closes its socket before it writes
        with contextlib.suppress(OSError):
            said = os.read(self._process.stderr, 1 << 16).decode(errors="replace").split("\n")
            return next((f": {line.strip()}" for line in reversed(said) if line.strip()), "")
        return ""


_sources: list[WarmSource] = []
"""The warm process of this bench, if there is one."""


@contextlib.contextmanager
def warm_process(environ: Mapping[str, str]) -> Iterator[ColdStarts]:
    """Fork workers from a warm process while the block runs, and give the reasons why some were not. A block inside another one
    uses the same process. The outer one must be entered by the main thread."""
    if _sources:
        yield _sources[0].cold
        return
    with contextlib.ExitStack() as cleanup:
        source = WarmSource(environ)
        try:
            cleanup.enter_context(source)
        except OSError as error:
            source.cold.note(str(error))
        else:
            _sources.append(source)
            cleanup.callback(_sources.clear)
        yield source.cold


def fork_worker(
    arguments: Sequence[str], environ: Mapping[str, str], output: int, fds: Sequence[int]
) -> ForkedProcess | None:
    """Fork a worker (see `WarmSource.fork`); None if this is not within `warm_process`, or it cannot be done."""
    return _sources[0].fork(arguments, environ, output, fds) if _sources else None
