"""The `pliant list` command: the cluster's jobs and devices, and federated jobs beside them."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from pliant.cli import completion, fed_jobs
from pliant.cli.cluster_output import ServerFlag, StateFlag, connected, devices_text, span_text
from pliant.cli.output import JsonFlag, is_read_by_people, print_json, print_table
from pliant.errors import ConfigError, ServerUnavailable

if TYPE_CHECKING:
    from pliant.sched.live.client import ClusterStatus, JobStatus

COLUMNS = ("name", "state", "devices", "replicas", "step", "steps/s", "age", "why")
NUMBERS = ("replicas", "step", "steps/s", "age")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("list")(list_jobs)


def list_jobs(
    only: Annotated[
        str,
        typer.Option(
            "--only", metavar="STATE,...", help="Jobs in these states only.", autocompletion=completion.states
        ),
    ] = "",
    names: Annotated[bool, typer.Option("-q", "--quiet", help="Names only, one per line.")] = False,
    as_json: JsonFlag = False,
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """The cluster's jobs, and federated ones; the first submitted first. Piped: columns with tabs, and no heading."""
    wanted = _states(only)
    federated = [job for job in fed_jobs.all_jobs(server, state) if not wanted or job.state in wanted]
    jobs, cluster = _of_cluster(server, state, with_devices=not names, is_needed=not federated)
    jobs = [job for job in jobs if not wanted or job.state in wanted]
    if as_json:
        print_json(
            {"jobs": [job.model_dump(mode="json") for job in jobs]}
            | ({"federated": [job.model_dump(mode="json") for job in federated]} if federated else {})
            | ({"cluster": cluster.model_dump(mode="json")} if cluster else {})
        )
        return
    if names:
        for name in [*(job.name for job in jobs), *(job.name for job in federated)]:
            print(name)
        return
    now_s = time.time()
    rows = [_row(job, now_s) for job in jobs] + [fed_jobs.row(job, now_s) for job in federated]
    if rows or not is_read_by_people():
        print_table(COLUMNS, rows, NUMBERS, cut=True)
    else:
        print(f"no jobs{' in these states' if wanted else ''}; `pliant submit job.yml` starts one")
    if cluster is not None and is_read_by_people():
        print(_cluster_line(cluster))


def _of_cluster(
    server: str, state: str, *, with_devices: bool, is_needed: bool
) -> tuple[list[JobStatus], ClusterStatus | None]:
    """What the cluster's server says; nothing, where there is none and other jobs can be shown."""
    try:
        with connected(server, state) as client:
            return client.jobs(), client.cluster() if with_devices else None
    except ServerUnavailable as error:
        if is_needed:
            raise
        with contextlib.suppress(ServerUnavailable):
            connected(server, state).close()
            print(f"pliant: {error}", file=sys.stderr)  # one is known, and does not answer
        return [], None


def _row(job: JobStatus, now_s: float) -> list[str]:
    return [
        job.name,
        job.state,
        devices_text(job.devices),
        str(job.replicas),
        "-" if job.step is None else str(job.step),
        "-" if job.steps_per_s is None else f"{job.steps_per_s:.3g}",
        span_text((job.ended_s or now_s) - job.submitted_s),
        job.why or "-",
    ]


def _cluster_line(cluster: ClusterStatus) -> str:
    """Such as `cpu: 4 devices, 1 free, 2 reserved`."""
    parts = []
    for kind, count in cluster.devices.items():
        reserved = cluster.reserved.get(kind, 0)
        parts.append(
            f"{kind}: {count} devices, {cluster.free.get(kind, 0)} free"
            + (f", {reserved} reserved" if reserved else "")
        )
    return "; ".join(parts) or "no devices"


def _states(only: str) -> set[str]:
    from pliant.fed.jobs.folders import State as FedState
    from pliant.sched.live.client import State

    known = list(dict.fromkeys([*get_args(State), *get_args(FedState)]))
    wanted = {word.strip() for word in only.split(",") if word.strip()}
    if strange := wanted - set(known):
        raise ConfigError(f"--only {', '.join(sorted(strange))}: no such state; use {', '.join(known)}")
    return wanted
