"""The `pliant list` command: the cluster's jobs and devices."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from pliant.cli.cluster_output import (
    JsonFlag,
    ServerFlag,
    StateFlag,
    connected,
    devices_text,
    is_read_by_people,
    print_json,
    print_table,
    span_text,
)
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.sched.live_client import ClusterStatus, JobStatus

COLUMNS = ("name", "state", "devices", "replicas", "step", "steps/s", "age", "why")
NUMBERS = ("replicas", "step", "steps/s", "age")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("list")(list_jobs)


def list_jobs(
    only: Annotated[str, typer.Option("--only", metavar="STATE,...", help="Jobs in these states only.")] = "",
    names: Annotated[bool, typer.Option("-q", "--quiet", help="Names only, one per line.")] = False,
    as_json: JsonFlag = False,
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """The cluster's jobs, the first submitted first. Piped: columns with tabs between them, and no heading."""
    wanted = _states(only)
    with connected(server, state) as client:
        jobs = [job for job in client.jobs() if not wanted or job.state in wanted]
        cluster = None if names else client.cluster()
    if as_json:
        print_json(
            {"jobs": [job.model_dump(mode="json") for job in jobs]}
            | ({"cluster": cluster.model_dump(mode="json")} if cluster else {})
        )
        return
    if names:
        for job in jobs:
            print(job.name)
        return
    now_s = time.time()
    if jobs or not is_read_by_people():
        print_table(COLUMNS, [_row(job, now_s) for job in jobs], NUMBERS, cut=True)
    else:
        print(f"no jobs{' in these states' if wanted else ''}; `pliant submit job.yml` starts one")
    if cluster is not None and is_read_by_people():
        print(_cluster_line(cluster))


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
    from pliant.sched.live_client import State

    wanted = {word.strip() for word in only.split(",") if word.strip()}
    if strange := wanted - set(get_args(State)):
        raise ConfigError(f"--only {', '.join(sorted(strange))}: states are {', '.join(get_args(State))}")
    return wanted
