"""What becomes of an error that a worker's program does not catch: what the user reads, and the exit code.

The runner tells three cases apart by the exit code. A mistake that every worker makes alike ends the job with one message.
A worker that ends only because it has lost another one is never blamed. Any other error is the worker's own failure.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pliant.errors import (
    LOST_PEER_EXIT,
    PROGRAM_EXIT,
    REFUSED_EXIT,
    SHADOW_EXIT,
    CheckpointError,
    ClusterCleared,
    ConfigError,
    LoaderFailed,
    MustBeReplaced,
    NotWanted,
    NoView,
    Refused,
    TrainError,
    ViewChanged,
    WorkerLost,
)

_OWN_FOLDER = str(Path(__file__).parent)
_exit_codes: list[object] = []
"""What the program has passed to `sys.exit`."""
_in_shadow = False
NO_SHADOW = "this new worker cannot warm up alone, so it is started again without a warm-up"


def enter_shadow(is_in: bool) -> None:
    """From now on errors are, or are not, those of a program that warms up (`train.shadow`), which end no job."""
    global _in_shadow
    _in_shadow = is_in


def exit_code_for(error: BaseException) -> int | None:
    """Return the exit code that tells the runner what `error` means; None for an ordinary error."""
    match error:
        case Refused():
            return REFUSED_EXIT
        case WorkerLost() | ViewChanged():
            return LOST_PEER_EXIT
        case LoaderFailed() | NotWanted() | ClusterCleared() | NoView():
            return None
        case MustBeReplaced():
            return LOST_PEER_EXIT
        case TrainError() | ConfigError() | CheckpointError():
            return PROGRAM_EXIT
    return None


def is_failing() -> bool:
    """Return whether the program that is ending ends by an error, or with an exit code other than 0."""
    return hasattr(sys, "last_value") or any(code not in (None, 0) for code in _exit_codes)


def describe(error: BaseException, trace: TracebackType | None) -> str:
    """Return the error in one line, with the last place in the program's own code."""
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_library = file.startswith((_OWN_FOLDER, sys.base_prefix, "<")) or "site-packages" in file
        if not is_library:
            place = f"{Path(file).name}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return f"{place}{type(error).__name__}: {error}"


def fingerprint(error: BaseException, trace: TracebackType | None) -> str:
    """Return what `describe` does, without what differs from process to process: no numbers in the message, which may be
    addresses, processes, times or sizes."""
    place = describe(error, trace).removesuffix(str(error))
    return place + re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?", "#", str(error))


Explain = Callable[[BaseException], BaseException | None]


class _ExplainingHook:
    """Shows a better error in place of an uncaught one, where there is one."""

    def __init__(self, explain: Explain) -> None:
        self.explain, self._before = explain, sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        better = self.explain(error)
        if better is not None:
            kind, error = type(better), better.with_traceback(trace)
        self._before(kind, error, trace)


def explain_uncaught(explain: Explain) -> None:
    """Ask `explain` for a better error whenever one is not caught. Of several calls the last one counts."""
    if isinstance(sys.excepthook, _ExplainingHook):
        sys.excepthook.explain = explain
    else:
        sys.excepthook = _ExplainingHook(explain)


def report_uncaught(rank: Callable[[], int], note: Callable[[str], None]) -> None:
    """Give uncaught errors of this process, a worker of a launched job, their messages and exit codes.

    Of a mistake that every worker makes, rank 0 shows the traceback, and the others show one line. `note` is called with the
    fingerprint of an ordinary error, or of the place where the program ends itself with an exit code.
    """
    before, leave = sys.excepthook, sys.exit

    def leave_with(status: str | int | None = None, /) -> NoReturn:
        _exit_codes.append(status)  # the interpreter does not tell it to functions that run at exit
        if status not in (None, 0):
            caller = sys._getframe(1)
            note(f"{caller.f_code.co_filename}:{caller.f_lineno}: exit code {status}")
        leave(status)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = SHADOW_EXIT if _in_shadow and isinstance(error, Exception) else exit_code_for(error)
        if code is None:
            note(fingerprint(error, trace))
            before(kind, error, trace)
            return
        if code == PROGRAM_EXIT and rank() == 0:
            before(kind, error, trace)
        elif code == LOST_PEER_EXIT:
            ends = "" if isinstance(error, MustBeReplaced) else "; this worker ends, too"
            print(f"pliant: {error}{ends}", file=sys.stderr, flush=True)
        elif code == SHADOW_EXIT:
            print(f"pliant: {NO_SHADOW}: {describe(error, trace)}", file=sys.stderr, flush=True)
        else:
            print(f"pliant: {describe(error, trace)}", file=sys.stderr, flush=True)
        sys.exit(code)  # the interpreter heeds it: it ends in the usual way, with this code

    if getattr(before, "__module__", "") != __name__:
        sys.excepthook, sys.exit = show, leave_with


def end_with(error: BaseException) -> NoReturn:
    """End this process as `error` would if nobody caught it. Python drops the errors of functions that run at exit."""
    code: object = 1
    try:
        if isinstance(error, SystemExit):
            code = error.code
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        code = leaving.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
