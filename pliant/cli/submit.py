"""The `pliant submit` command: gives jobs of any kind to the server, which it starts if none runs."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli import completion
from pliant.cli.connection import ReconnectingClient, ServerFlag, StateFlag, await_end
from pliant.cli.output import JsonFile, check_writable, is_read_by_people, is_stdout, option, save_json, show_waiting
from pliant.errors import ConfigError, NameTaken

if TYPE_CHECKING:
    from pliant.jobs.client import JobsClient
    from pliant.jobs.schema import JobFile
    from pliant.jobs.status import JobStatus

TRIES = 100


def submit(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="JOB.YML", show_default=False, help="Job files, one job each.")
    ] = None,
    name: Annotated[str, option("--name", "NAME", "Name of the job; overrides the file's.")] = "",
    wait: Annotated[
        bool, option("--wait", "", "Return when all have ended, with the exit code of the first that failed.")
    ] = False,
    resume: Annotated[
        str,
        option(
            "--resume",
            "NAME",
            "Let a job that was stopped, has failed or was interrupted go on from its checkpoint.",
            completion.jobs,
        ),
    ] = "",
    json_file: JsonFile = None,
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """Submit jobs to the server, which is started if none runs. If one file is wrong, nothing is submitted.

    When piped, prints the names of the jobs.
    """
    if resume and (files or name):
        raise ConfigError("--resume goes on with what was submitted: leave the file and --name out")
    if not files and not resume:
        raise ConfigError("no job file: give one or several, as in `pliant submit job.yml`")
    if name and len(files or ()) > 1:
        raise ConfigError(f"--name {name} for {len(files or ())} files: names are unique, so submit them one by one")
    check_writable(json_file)
    was_interrupted = _is_interrupted(resume, server, state) if resume else False
    with show_waiting("reading the jobs, and what they name"):
        jobs = _read_all(files or [], name)
    is_shown = not is_stdout(json_file)
    with ReconnectingClient(server, state, start=True) as client:
        if resume:
            # A server that has just been started takes up interrupted jobs by itself.
            given = [client.ask(lambda asked: (asked.job if was_interrupted else asked.resume)(resume), wait=False)]
            _print_submitted(given[0], is_shown=is_shown)
        else:
            client.ask(functools.partial(_check_devices, files or [], jobs), wait=False)
            given = _submit_all(client, jobs, is_shown=is_shown)
        if wait:
            given = _wait_for_end(client, given, is_shown=is_shown and is_read_by_people())
    save_json({"jobs": [job.model_dump(mode="json") for job in given]}, json_file)
    if wait and (codes := [code for job in given if (code := _exit_code(job))]):
        raise typer.Exit(codes[0])


def _is_interrupted(name: str, server: str, state: str) -> bool:
    """Return whether the processes of a scheduled job are gone; raises UnknownJob before a server is started for it."""
    from pliant.jobs.client import open_jobs

    with open_jobs(server, state) as opened:
        job = opened.job(name)
    return job.state == "interrupted" and job.scheduled


def _read_all(files: list[Path], name: str) -> list[JobFile]:
    """Return the jobs of all files; the mistakes of all files are reported together."""
    from pliant.jobs.schema import read_job

    jobs, refusals = [], []
    for file in files:
        try:
            jobs.append(read_job(file, name))
        except ConfigError as error:
            refusals.append(str(error))
    if refusals:
        raise ConfigError("\n".join(refusals))
    return jobs


def _check_devices(files: list[Path], jobs: list[JobFile], client: JobsClient) -> None:
    """Refuse jobs that could never run on the cluster's devices before any job is submitted, with file and line."""
    from pliant.jobs.scheduler import demand_of
    from pliant.yaml_source import YamlSource

    devices = client.cluster().devices
    refusals = []
    for file, job in zip(files, jobs, strict=True):
        if wrong := demand_of(job.job).misfits(devices):
            refusals.append(str(YamlSource.read(file).error({(key,): text for key, text in wrong.items()})))
    if refusals:
        raise ConfigError("\n".join(refusals))


def _submit_all(client: ReconnectingClient, jobs: list[JobFile], *, is_shown: bool) -> list[JobStatus]:
    client.ask(functools.partial(_check_names, jobs), wait=False)
    given = []
    for job in jobs:
        for remark in getattr(job.job, "remarks", ()):
            print(f"pliant: {remark}", file=sys.stderr, flush=True)
        given.append(client.ask(functools.partial(_submit_one, job), wait=False))
        _print_submitted(given[-1], is_shown=is_shown)
    return given


def _print_submitted(job: JobStatus, *, is_shown: bool) -> None:
    if not is_shown:
        return
    where = f", in {job.folder}" if job.kind == "federated" else ""
    if is_read_by_people():
        print(f"submitted {job.name} ({job.state}){where}", flush=True)
    else:
        print(job.name, flush=True)
        if where:
            print(f"pliant: {job.name} is in {job.folder}", file=sys.stderr, flush=True)


def _check_names(jobs: list[JobFile], client: JobsClient) -> None:
    """Refuse names that are taken before any job is submitted; an ended federated job gives its name to the next one."""
    known = {job.name: job for job in client.jobs()}
    taken: set[str] = set()
    for job in jobs:
        before = known.get(job.name)
        is_free = before is None or (
            job.job.kind == before.kind == "federated" and (before.is_over or before.state == "interrupted")
        )
        if job.is_named and (not is_free or job.name in taken):
            raise ConfigError(
                f"the name {job.name} is taken: choose another with --name, or give none for a numbered one"
            )
        taken |= {job.name} if job.is_named else set()


def _submit_one(job: JobFile, client: JobsClient) -> JobStatus:
    """Submit under the name in the file, or under the first number that is free."""
    refused: set[str] = set()  # of jobs that this token may not see
    for _ in range(TRIES):
        if not job.is_named:
            job = job.with_free_name({known.name for known in client.jobs()} | refused)
        try:
            return client.submit(job.job)
        except NameTaken:
            if job.is_named:
                raise
            refused.add(job.name)
    raise ConfigError(f"{TRIES} names up to {job.name} were taken while we asked: give --name")


def _wait_for_end(client: ReconnectingClient, jobs: list[JobStatus], *, is_shown: bool) -> list[JobStatus]:
    ends: dict[str, JobStatus] = {}

    def ended(job: JobStatus) -> None:
        ends[job.name] = job
        if is_shown:
            print(f"{job.name} {job.state}" + (f" with exit code {job.exit_code}" if job.exit_code else ""), flush=True)

    await_end(client, [job.name for job in jobs], math.inf, ended)
    return [ends[job.name] for job in jobs]


def _exit_code(job: JobStatus) -> int:
    """Return what a shell is told; a job that was stopped has not done what was asked."""
    if job.state == "stopped":
        return 1
    if job.exit_code is not None and job.exit_code < 0:
        return 128 - job.exit_code  # killed by a signal, as a shell says it
    return job.exit_code or (0 if job.state == "finished" else 1)
