"""What the commands for jobs (`submit`, `list`, `logs`, `stop`) do about federated ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pliant.cli.cluster_output import clock_text, span_text
from pliant.cli.output import is_read_by_people, show_waiting
from pliant.errors import ConfigError, LaunchError, ServerUnavailable, UnknownJob

if TYPE_CHECKING:
    from pliant.fed.jobs.folders import FedStatus, JobFolder
    from pliant.fed.jobs.job import FedJob


def find(name: str, server: str = "", state: str = "") -> JobFolder | None:
    """The federated job of that name; None: there is none, or a server's jobs are meant."""
    from pliant.fed.jobs.folders import Jobs

    if server or state or "/" in name:
        return None
    jobs = Jobs.of_user()
    return jobs.find(name) if jobs.has(name) else None


def check_known(asked: Sequence[str], server: str = "", state: str = "") -> None:
    """Refuse names that nobody can know: no federated job has them, and there is no server of a cluster to ask.

    Raises:
        UnknownJob: so it is; a server that is known and does not answer may know them.
    """
    from pliant.fed.jobs.folders import Jobs
    from pliant.sched.live.client import find_server

    try:
        find_server(server, state)
    except ServerUnavailable:
        if state:
            raise
        known = ", ".join(sorted(Jobs.of_user().names())) or "none"
        raise UnknownJob(
            f"no job is called {' or '.join(asked)}: there are {known}, and no server of a cluster is known on this machine"
        ) from None


def all_jobs(server: str = "", state: str = "") -> list[FedStatus]:
    from pliant.fed.jobs.folders import Jobs

    found: list[FedStatus] = []
    for folder in [] if server or state else Jobs.of_user().all():
        try:
            found.append(folder.status())
        except ConfigError as error:
            print(f"pliant: {error}", file=sys.stderr)  # one damaged job must not hide the others
    return found


def names() -> set[str]:
    from pliant.fed.jobs.folders import Jobs

    return Jobs.of_user().names()


def tell_remarks(job: FedJob) -> None:
    """To stderr: stdout is for names."""
    for remark in job.remarks:
        print(f"pliant: {remark}", file=sys.stderr, flush=True)


def submit(job: FedJob, taken: set[str], *, is_told: bool) -> JobFolder:
    """Start the job by itself; `taken` are the names of other jobs."""
    from pliant.fed.jobs import detached
    from pliant.fed.jobs.folders import Jobs

    tell_remarks(job)
    jobs = Jobs.of_user()
    folder = jobs.create(job if job.is_named else job.renumbered(taken | jobs.names()))
    detached.start(folder)
    if is_told:
        _tell(folder)
    return folder


def resume(name: str, *, is_told: bool) -> JobFolder:
    """Have an interrupted, stopped or failed job go on from its checkpoint."""
    from pliant.fed.jobs import detached
    from pliant.fed.jobs.folders import Jobs

    folder = Jobs.of_user().find(name)
    if folder.status().state == "finished":
        raise ConfigError(f"{name} has finished: there is nothing to go on with; submit it again for a new run")
    detached.start(folder)
    if is_told:
        _tell(folder)
    return folder


def _tell(folder: JobFolder) -> None:
    name = folder.job().config.name
    if is_read_by_people():
        print(f"submitted {name}, in {folder.path}", flush=True)
    else:
        print(name, flush=True)
        print(f"pliant: {name} is in {folder.path}", file=sys.stderr, flush=True)


def awaited(folders: Sequence[JobFolder], *, is_told: bool) -> int:
    """Until all have ended: the exit code of the first that did not finish."""
    from pliant.fed.jobs import detached

    code = 0
    for folder in folders:
        with show_waiting(f"waiting for {folder.job().config.name}"):
            detached.await_end(folder, float("inf"))
        status = folder.status()
        if is_told:
            print(ended_text(status), flush=True)
        code = code or code_of(status)
    return code


def code_of(status: FedStatus) -> int:
    """What a shell is told; a job that was stopped has not done what was asked."""
    if status.state == "finished":
        return 0
    return status.exit_code if status.exit_code is not None and 0 < status.exit_code < 256 else 1


def ended_text(status: FedStatus) -> str:
    right = "" if status.accuracy is None else f", accuracy {status.accuracy:.2%}"
    why = f": {status.why}" if status.why and status.state != "stopped" else ""
    return f"{status.name} {status.state} after round {status.round}{right}{why}"


def stop(folders: Sequence[JobFolder], *, kill: bool, wait: bool, deadline_s: float, timeout: str) -> list[str]:
    """Tell them to end; what to say about each that did."""
    from pliant.fed.jobs import detached

    said, running = [], []
    for folder in folders:
        status = folder.status()
        if status.is_over:
            said.append(f"{status.name} has ended before ({status.state})")
        else:
            detached.stop(folder, kill=kill)
            running.append(folder)
    if not wait:
        said += [f"{folder.job().config.name} was told to end" for folder in running]
    with show_waiting("each finishes its round"):
        late = [folder for folder in running if wait and not detached.await_end(folder, deadline_s)]
    said += [ended_text(folder.status()) for folder in running if wait and folder not in late]
    if late:
        names = ", ".join(folder.job().config.name for folder in late)
        raise LaunchError(
            f"still running after {timeout}: {names}; they were told to end, --kill does not wait for a round"
        )
    return said


def row(status: FedStatus, now_s: float) -> list[str]:
    """As `pliant list` has them: name, state, devices, replicas, step, steps/s, age, why."""
    right = "" if status.accuracy is None else f", accuracy {status.accuracy:.2%}"
    progress = f"round {status.round} of {status.rounds}{right}, {status.clock_s / 3600:.2f} h"
    return [
        status.name,
        status.state,
        f"executors={'+'.join(status.workers) or 0}",
        str(status.participants),
        str(status.round),
        "-",
        span_text((status.ended_s or now_s) - status.submitted_s),
        f"{progress}; {status.why}" if status.why else progress,
    ]


def facts(status: FedStatus) -> list[tuple[str, str]]:
    """As `pliant show` has them."""
    now_s = time.time()
    return [
        ("name", status.name),
        ("state", status.state + (f" (exit code {status.exit_code})" if status.exit_code else "")),
        ("why", status.why or "-"),
        ("executors", ", ".join(status.workers) or "none: the server trains"),
        ("round", f"{status.round} of {status.rounds}, {status.participants} participants in each"),
        ("virtual clock", f"{status.clock_s / 3600:.2f} h"),
        ("accuracy", "-" if status.accuracy is None else f"{status.accuracy:.2%}"),
        ("submitted", clock_text(status.submitted_s, now_s)),
        ("ended", clock_text(status.ended_s, now_s)),
        ("folder", status.folder),
    ]
