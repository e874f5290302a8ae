"""The `pliant submit` command: hands jobs to the cluster's server."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli.cluster_output import (
    JsonFlag,
    Patient,
    ServerFlag,
    StateFlag,
    await_end,
    is_read_by_people,
    print_json,
)
from pliant.errors import ConfigError, NameTaken

if TYPE_CHECKING:
    from pliant.page import Page
    from pliant.sched.jobfile import JobFile
    from pliant.sched.live_client import JobStatus, LiveClient

FEDERATED = ("job_conf", "ps_ip")
"""Keys that the configurations of federated jobs have, and no others."""
TRIES = 100


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("submit")(submit)


def submit(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="JOB.YML", show_default=False, help="Job files, one job each.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The job's name, whatever the file says.")] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when all have ended, with the exit code of the first that failed.")
    ] = False,
    as_json: JsonFlag = False,
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """Submit jobs to the cluster; none of them if a file is wrong. Piped: their names, one per line."""
    if not files:
        raise ConfigError("no job file: give one or several, as in `pliant submit job.yml`")
    if name and len(files) > 1:
        raise ConfigError(f"--name {name} for {len(files)} files: names are unique, so submit them one by one")
    jobs = _all_read(files, name)
    given: list[JobStatus] = []
    with Patient(server, state) as patient:
        patient.ask(functools.partial(_check_names, jobs), wait=False)
        for job in jobs:
            given.append(patient.ask(functools.partial(_handed_over, job), wait=False))
            if not as_json:
                name, now = given[-1].name, given[-1].state
                print(f"submitted {name} ({now})" if is_read_by_people() else name, flush=True)
        if wait:
            given = _awaited(patient, given, is_told=not as_json and is_read_by_people())
    if as_json:
        print_json({"jobs": [job.model_dump(mode="json") for job in given]})
    if wait and (codes := [_code(job) for job in given if _code(job)]):
        raise typer.Exit(codes[0])


def _all_read(files: list[Path], name: str) -> list[JobFile]:
    """The jobs of all files; the mistakes of all files are told together."""
    jobs, refusals = [], []
    for file in files:
        try:
            jobs.append(_read(file, name))
        except ConfigError as error:
            refusals.append(str(error))
    if refusals:
        raise ConfigError("\n".join(refusals))
    return jobs


def _read(file: Path, name: str) -> JobFile:
    """The job in `file`, by the reader of the kind of job that its keys say it is."""
    from pliant.page import Page
    from pliant.sched.jobfile import read_job

    page = Page.read(file)
    readers: list[tuple[tuple[str, ...], Callable[[Page, str], JobFile]]] = [(FEDERATED, _federated), ((), read_job)]
    reader = next(reader for keys, reader in readers if not keys or set(keys) & set(page.keys))
    return reader(page, name)


def _federated(page: Page, name: str) -> JobFile:
    key = next(key for key in FEDERATED if key in page.keys)
    raise ConfigError(
        f"{page.path}:{page.line((key,))}: {key} makes it a federated job, which this version of pliant cannot run; "
        "a training job has program and replicas"
    )


def _check_names(jobs: list[JobFile], client: LiveClient) -> None:
    """Refuse names that are taken, before any job is submitted."""
    taken = {job.name for job in client.jobs()}
    for job in jobs:
        if job.is_named and job.spec.name in taken:
            raise ConfigError(
                f"the name {job.spec.name} is taken: choose another with --name, or give none for a numbered one"
            )
        taken |= {job.spec.name} if job.is_named else set()


def _handed_over(job: JobFile, client: LiveClient) -> JobStatus:
    """Submit under the name in the file, or under the first number that is free."""
    for _ in range(TRIES):
        if not job.is_named:
            job = job.renumbered({known.name for known in client.jobs()})
        try:
            return client.submit(job.spec)
        except NameTaken:
            if job.is_named:
                raise
    raise ConfigError(f"{TRIES} names up to {job.spec.name} were taken while we asked: give --name")


def _awaited(server: Patient, jobs: list[JobStatus], *, is_told: bool) -> list[JobStatus]:
    ends: dict[str, JobStatus] = {}

    def ended(job: JobStatus) -> None:
        ends[job.name] = job
        if is_told:
            print(f"{job.name} {job.state}" + (f" with exit code {job.exit_code}" if job.exit_code else ""), flush=True)

    await_end(server, [job.name for job in jobs], math.inf, ended)
    return [ends[job.name] for job in jobs]


def _code(job: JobStatus) -> int:
    """What a shell is told of the job's end; one that was stopped has not done what was asked."""
    if job.exit_code is not None and job.exit_code < 0:
        return 128 - job.exit_code  # by a signal, as a shell says it
    return job.exit_code or (0 if job.state == "finished" else 1)
