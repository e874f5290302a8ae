"""The `pliant logs` command: what a job has printed, of the cluster or a federated one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli import fed_jobs
from pliant.cli.cluster_output import JobArgument, Patient, ServerFlag, StateFlag, check_named
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.sched.live.client import LiveClient, LogPart

HOLD_S = 30.0


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
    if (federated := fed_jobs.find(name, server, state)) is not None:
        from pliant.fed.jobs.detached import log_of

        for text in log_of(federated, last=last, follow=follow):
            _print(text)
        return
    fed_jobs.check_known([name], server, state)
    with Patient(server, state) as patient:
        for part in _so_far(patient, name, last):
            _print(part.text)
        if follow:
            for more in _to_come(patient, name, part):
                _print(more.text)


def _so_far(server: Patient, name: str, last: int | None) -> Iterator[LogPart]:
    """What there is, or its last lines."""
    part = server.ask(lambda client: client.logs(name), wait=False)
    kept = ""
    while part.text:
        if last is None:
            yield part
        else:
            kept = "".join((kept + part.text).splitlines(keepends=True)[-last:]) if last else ""
        part = server.ask(functools.partial(_part, name, part.end, 0.0))
    yield part.model_copy(update={"text": kept})


def _to_come(server: Patient, name: str, part: LogPart) -> Iterator[LogPart]:
    """What comes after `part`, until the job has ended."""
    while not part.over or part.text:
        part = server.ask(functools.partial(_part, name, part.end, HOLD_S))
        yield part


def _part(name: str, begin: int, wait_s: float, client: LiveClient) -> LogPart:
    return client.logs(name, begin, wait_s)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _count(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"-n {text!r} is not a number of lines: use 0 or more")
    return int(text)
