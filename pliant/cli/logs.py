"""The `pliant logs` command: what a job of the cluster has printed."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli.cluster_output import JobArgument, ServerFlag, StateFlag, check_named, connected
from pliant.errors import ConfigError, ServerUnavailable

if TYPE_CHECKING:
    from pliant.sched.live_client import LogPart

HOLD_S = 30.0
AWAY_S = 60.0
"""How long a server that has gone may take to come back while its jobs run on."""
RETRY_S = 0.5


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("logs")(logs)


def logs(
    name: JobArgument = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    lines: Annotated[str, typer.Option("-n", "--lines", metavar="N", help="Begin with the last N lines only.")] = "",
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """What the job has printed. With -f also what it will; a server that restarts meanwhile is waited for."""
    last = _count(lines)
    check_named(name)
    try:
        with _Reading(server, state, name) as reading:
            _print(_last_lines(reading.so_far(), last))
            if follow:
                for text in reading.to_come():
                    _print(text)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Reading:
    """A job's log, and how far it was read."""

    def __init__(self, server: str, state: str, name: str) -> None:
        self._place = (server, state)
        self._name = name
        self._client = connected(server, state)
        self._begin = 0

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def so_far(self) -> Iterator[str]:
        """What there is."""
        while (part := self._client.logs(self._name, self._begin)).text:
            self._begin = part.end
            yield part.text

    def to_come(self) -> Iterator[str]:
        """What comes, until the job has ended."""
        while True:
            part = self._next()
            self._begin = part.end
            yield part.text
            if part.over and not part.text:
                return

    def _next(self) -> LogPart:
        deadline_s = math.inf
        while True:
            try:
                if deadline_s < math.inf:
                    self._client.close()
                    self._client = connected(*self._place)  # it may come back at another port, with another token
                return self._client.logs(self._name, self._begin, HOLD_S)
            except ServerUnavailable as error:
                if deadline_s == math.inf:
                    print(f"pliant: {error} (waiting for it)", file=sys.stderr, flush=True)
                    deadline_s = time.monotonic() + AWAY_S
                elif time.monotonic() > deadline_s:
                    raise
            time.sleep(RETRY_S)


def _last_lines(texts: Iterator[str], last: int | None) -> str:
    """All of `texts`, or its last lines."""
    whole = "".join(texts)
    if last is None:
        return whole
    return "".join(whole.splitlines(keepends=True)[-last:]) if last else ""


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _count(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"-n {text!r} is not a number of lines: use 0 or more")
    return int(text)
