"""The `pliant submit` command: hands jobs to the cluster's server; federated ones run by themselves."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli import completion, fed_jobs
from pliant.cli.cluster_output import Patient, ServerFlag, StateFlag, await_end, connected
from pliant.cli.output import JsonFlag, is_read_by_people, print_json, show_waiting
from pliant.errors import ConfigError, NameTaken, ServerUnavailable

if TYPE_CHECKING:
    from pliant.fed.jobs.folders import JobFolder
    from pliant.fed.jobs.job import FedJob
    from pliant.sched.live.client import JobStatus, LiveClient
    from pliant.sched.live.jobfile import JobFile

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
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="NAME",
            help="A federated job that was interrupted goes on from its checkpoint.",
            autocompletion=completion.federated,
        ),
    ] = "",
    as_json: JsonFlag = False,
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """Submit jobs to the cluster, federated ones to this machine; none of them if a file is wrong. Piped: their names."""
    if resume and (files or name):
        raise ConfigError("--resume goes on with what was submitted: leave the file and --name out")
    if not files and not resume:
        raise ConfigError("no job file: give one or several, as in `pliant submit job.yml`")
    if name and len(files or ()) > 1:
        raise ConfigError(f"--name {name} for {len(files or ())} files: names are unique, so submit them one by one")
    with show_waiting("reading the jobs, and what they name"):
        jobs, federated = _all_read(files or [], name)
    given: list[JobStatus] = []
    folders = [fed_jobs.resume(resume, is_told=not as_json)] if resume else []
    if jobs:
        given = _to_cluster(jobs, server, state, wait=wait and not federated, as_json=as_json)
    folders += _by_themselves(federated, server, state, is_told=not as_json)
    codes = []
    if wait:
        is_told = not as_json and is_read_by_people()
        if given and federated:
            with Patient(server, state) as patient:
                given = _awaited(patient, given, is_told=is_told)
        codes = [code for job in given if (code := _code(job))]
        codes += [code] if (code := fed_jobs.awaited(folders, is_told=is_told)) else []
    if as_json:
        found: dict[str, object] = {"jobs": [job.model_dump(mode="json") for job in given]}
        if folders:
            found["federated"] = [folder.status().model_dump(mode="json") for folder in folders]
        print_json(found)
    if codes:
        raise typer.Exit(codes[0])


def _all_read(files: list[Path], name: str) -> tuple[list[JobFile], list[FedJob]]:
    """The jobs of all files, and the federated ones; the mistakes of all files are told together."""
    from pliant.fed.jobs.jobfile import is_federated, read_fed_job
    from pliant.sched.live.jobfile import read_job
    from pliant.yaml_source import YamlSource

    jobs, federated, refusals = [], [], []
    for file in files:
        try:
            page = YamlSource.read(file)
            if is_federated(page):
                federated.append(read_fed_job(page, name))
            else:
                jobs.append(read_job(page, name))
        except ConfigError as error:
            refusals.append(str(error))
    if refusals:
        raise ConfigError("\n".join(refusals))
    return jobs, federated


def _to_cluster(jobs: list[JobFile], server: str, state: str, *, wait: bool, as_json: bool) -> list[JobStatus]:
    given: list[JobStatus] = []
    with Patient(server, state) as patient:
        patient.ask(functools.partial(_check_names, jobs), wait=False)
        for job in jobs:
            given.append(patient.ask(functools.partial(_handed_over, job), wait=False))
            if not as_json:
                name, now = given[-1].name, given[-1].state
                print(f"submitted {name} ({now})" if is_read_by_people() else name, flush=True)
        return _awaited(patient, given, is_told=not as_json and is_read_by_people()) if wait else given


def _by_themselves(federated: list[FedJob], server: str, state: str, *, is_told: bool) -> list[JobFolder]:
    """Start federated jobs; no name may be a cluster's job's, too: `pliant stop` could mean either."""
    if not federated:
        return []
    taken: set[str] = set()
    try:
        with connected(server, state) as client:
            taken = {job.name for job in client.jobs()}
    except ServerUnavailable:
        pass  # they need none
    for job in federated:
        if job.is_named and job.config.name in taken:
            raise ConfigError(
                f"the name {job.config.name} is taken by a job of the cluster: choose another with --name"
            )
    return [fed_jobs.submit(job, taken, is_told=is_told) for job in federated]


def _check_names(jobs: list[JobFile], client: LiveClient) -> None:
    """Refuse names that are taken, before any job is submitted."""
    taken = {job.name for job in client.jobs()} | fed_jobs.names()
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
            job = job.renumbered({known.name for known in client.jobs()} | fed_jobs.names())
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
