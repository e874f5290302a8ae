"""The `pliant stop` command: ends jobs, of the cluster and federated ones."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli import completion, fed_jobs
from pliant.cli.cluster_output import Patient, ServerFlag, StateFlag, await_end, check_named
from pliant.cli.output import is_read_by_people
from pliant.errors import LaunchError
from pliant.launch.duration import parse_duration

if TYPE_CHECKING:
    from pliant.sched.live.client import JobStatus, LiveClient


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("stop")(stop)


def stop(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", show_default=False, help="Jobs to end.", autocompletion=completion.jobs),
    ] = None,
    kill: Annotated[bool, typer.Option("--kill", help="At once, not after the step they are in.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return only when they have ended.")] = True,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long to wait.")] = "60s",
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """End jobs, in good order: each finishes its step, or its round. None of them if a name is unknown."""
    check_named(*(names or ("",)))
    deadline_s = time.monotonic() + parse_duration(timeout, "--timeout")
    asked = list(dict.fromkeys(names or ()))
    federated = {name: folder for name in asked if (folder := fed_jobs.find(name, server, state)) is not None}
    if others := [name for name in asked if name not in federated]:
        fed_jobs.check_known(others, server, state)
        _stop_clusters(others, server, state, kill=kill, wait=wait, deadline_s=deadline_s, timeout=timeout)
    for line in fed_jobs.stop(list(federated.values()), kill=kill, wait=wait, deadline_s=deadline_s, timeout=timeout):
        _say(line)


def _stop_clusters(
    names: list[str], server: str, state: str, *, kill: bool, wait: bool, deadline_s: float, timeout: str
) -> None:
    with Patient(server, state) as patient:
        before = patient.ask(lambda client: [client.job(name) for name in names], wait=False)
        running = [job.name for job in before if not job.is_over]
        for job in before:
            if job.is_over:
                _say(f"{job.name} has ended before ({job.state})")
        for name in running:
            patient.ask(functools.partial(_stop, name, kill))
        late = await_end(patient, running, deadline_s, _ended) if wait else []
    if late:
        raise LaunchError(
            f"still running after {timeout}: {', '.join(late)}; they were told to end, --kill does not wait for their step"
        )


def _stop(name: str, kill: bool, client: LiveClient) -> None:
    client.stop(name, kill=kill)


def _ended(job: JobStatus) -> None:
    _say(f"{job.name} {job.state}" + (f" after step {job.step}" if job.step is not None else ""))


def _say(line: str) -> None:
    if is_read_by_people():
        print(line, flush=True)
