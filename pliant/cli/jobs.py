"""The commands `pliant list`, `show`, `logs`, `stop` and `forget`: jobs of any kind, with or without a running server."""

from __future__ import annotations

import functools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pliant.cli import completion
from pliant.cli.connection import (
    ReconnectingClient,
    ServerFlag,
    StateFlag,
    await_end,
    check_named,
    clock_text,
    devices_text,
    print_for_people,
)
from pliant.cli.output import (
    JsonCommand,
    JsonFile,
    check_writable,
    is_read_by_people,
    is_stdout,
    option,
    print_table,
    save_json,
    show_waiting,
)
from pliant.duration import parse_duration, span_text
from pliant.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from pliant.jobs.client import JobsClient, StoredJobs
    from pliant.jobs.status import ClusterStatus, JobDetail, JobStatus, LogPart, TenantStatus

COLUMNS = ("name", "state", "devices", "replicas", "step", "steps/s", "age", "why")
TENANT_COLUMNS = ("tenant", "has", "quota", "share", "borrowed", "jobs")
NUMBERS = ("replicas", "step", "steps/s", "age")
HOLD_S = 30.0
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="The job.", autocompletion=completion.jobs)
]
NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", show_default=False, help="Jobs.", autocompletion=completion.jobs),
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("list", cls=JsonCommand)(list_jobs)
    app.command("show", cls=JsonCommand)(show)
    app.command("logs")(logs)
    app.command("stop")(stop)
    app.command("forget")(forget)


def _opened(server: str, state: str) -> JobsClient | StoredJobs:
    from pliant.jobs.client import StoredJobs, open_jobs

    found = open_jobs(server, state)
    if isinstance(found, StoredJobs) and found.ended is not None:
        url, pid = found.ended.url, found.ended.pid
        print(
            f"pliant: the server at {url} (pid {pid}) has ended; its jobs run on: start `pliant serve` again",
            file=sys.stderr,
        )
    return found


# --- list ---


def list_jobs(
    only: Annotated[str, option("--only", "STATE,...", "Jobs in these states only.", completion.states)] = "",
    names: Annotated[bool, option("-q --quiet", "", "Names only, one per line.")] = False,
    json_file: JsonFile = None,
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """List jobs, the first submitted first. When piped, prints columns with tabs and no heading."""
    wanted = _states(only)
    check_writable(json_file)
    with _opened(server, state) as opened:
        jobs = [job for job in opened.jobs() if not wanted or job.state in wanted]
        cluster = None if names else opened.cluster()
    shown = {} if cluster is None else {"cluster": cluster.model_dump(mode="json")}
    save_json({"jobs": [job.model_dump(mode="json") for job in jobs]} | shown, json_file)
    if is_stdout(json_file):
        return
    if names:
        for job in jobs:
            print(job.name)
        return
    now_s = time.time()
    if jobs or not is_read_by_people():
        are_shown = any(job.tenant for job in jobs)
        columns = (*COLUMNS[:-1], *(("tenant",) if are_shown else ()), COLUMNS[-1])
        print_table(columns, [_row(job, now_s, with_tenant=are_shown) for job in jobs], NUMBERS, cut=True)
    else:
        print(f"no jobs{' in these states' if wanted else ''}; `pliant submit job.yml` starts one")
    if cluster is not None:
        print_for_people(_cluster_line(cluster))
        if cluster.tenants and is_read_by_people():
            print()
            print_table(TENANT_COLUMNS, [_tenant_row(tenant) for tenant in cluster.tenants])
        if cluster.policy_error:
            print(f"pliant: {cluster.policy_error}; what was decided before stays", file=sys.stderr)


def _row(job: JobStatus, now_s: float, *, with_tenant: bool) -> list[str]:
    return [
        job.name,
        job.state,
        devices_text(job.devices),
        str(job.replicas or "-"),
        "-" if job.step is None else str(job.step),
        "-" if job.steps_per_s is None else f"{job.steps_per_s:.3g}",
        span_text((job.ended_s or now_s) - job.submitted_s),
        *([job.tenant or "-"] if with_tenant else []),
        "; ".join(filter(None, [_federated_text(job), job.why])) or "-",
    ]


def _tenant_row(tenant: TenantStatus) -> list[str]:
    counts = ((tenant.running, "run"), (tenant.waiting, "wait"))
    return [
        tenant.name,
        devices_text(tenant.has),
        devices_text(tenant.quota),
        ",".join(f"{kind}={share:.3g}" for kind, share in tenant.share.items() if share) or "-",
        devices_text(tenant.borrowed),
        ", ".join(f"{count} {what if count > 1 else what + 's'}" for count, what in counts if count) or "-",
    ]


def _federated_text(job: JobStatus) -> str:
    """Return the progress of a federated job; empty for other kinds."""
    if (done := job.federated) is None:
        return ""
    accuracy = "" if done.accuracy is None else f", accuracy {done.accuracy:.2%}"
    return f"round {done.round} of {done.rounds}{accuracy}, {done.clock_s / 3600:.2f} h"


def _cluster_line(cluster: ClusterStatus) -> str:
    """Return such as `cpu: 4 devices, 1 free, 2 reserved`."""
    parts = []
    for kind, count in cluster.devices.items():
        reserved = cluster.reserved.get(kind, 0)
        parts.append(
            f"{kind}: {count} devices, {cluster.free.get(kind, 0)} free"
            + (f", {reserved} reserved" if reserved else "")
        )
    return "; ".join(parts) or "no devices"


def _states(only: str) -> set[str]:
    from pliant.jobs.status import STATES

    wanted = {word.strip() for word in only.split(",") if word.strip()}
    if strange := wanted - set(STATES):
        raise ConfigError(f"--only {', '.join(sorted(strange))}: no such state; use {', '.join(STATES)}")
    return wanted


# --- show ---


def show(name: NameArgument = "", json_file: JsonFile = None, server: ServerFlag = "", state: StateFlag = "") -> None:
    """Show one job: its state, and every decision about it with time and reason."""
    check_named(name)
    check_writable(json_file)
    with _opened(server, state) as opened:
        job = opened.job(name)
    save_json(job.model_dump(mode="json"), json_file)
    if is_stdout(json_file):
        return
    now_s = time.time()
    print_table(("", ""), [*_facts(job, now_s), *_spec_rows(job.spec or {})])
    if job.events:
        print()
        print_table(
            ("at", "what", "why"), [(clock_text(event.at, now_s), event.what, event.why) for event in job.events]
        )


def _facts(job: JobDetail, now_s: float) -> list[tuple[str, str]]:
    begun_s = job.started_s if job.started_s is not None else job.submitted_s
    facts = [
        ("name", job.name),
        ("state", job.state + (f" (exit code {job.exit_code})" if job.exit_code is not None else "")),
        ("why", job.why or "-"),
        ("devices", devices_text(job.devices)),
        *([("tenant", job.tenant)] if job.tenant else []),
    ]
    if (done := job.federated) is not None:
        facts += [
            ("workers", ", ".join(done.workers) or "none: the coordinator trains"),
            ("round", f"{done.round} of {done.rounds}, {done.participants} participants in each"),
            ("virtual clock", f"{done.clock_s / 3600:.2f} h"),
            ("accuracy", "-" if done.accuracy is None else f"{done.accuracy:.2%}"),
        ]
    else:
        facts += [
            ("replicas", f"{job.replicas or '-'} on {job.workers} workers"),
            ("step", "-" if job.step is None else str(job.step)),
            ("steps/s", "-" if job.steps_per_s is None else f"{job.steps_per_s:.3g}"),
        ]
    return [
        *facts,
        ("submitted", clock_text(job.submitted_s, now_s)),
        ("started", clock_text(job.started_s, now_s)),
        ("ended", clock_text(job.ended_s, now_s)),
        ("took", span_text((job.ended_s or now_s) - begun_s)),
        *([("folder", job.folder)] if job.folder else []),
    ]


def _spec_rows(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a train job's file says, as far as it is not the default."""
    if not spec or spec.get("kind") == "federated":
        return []
    from pliant.jobs.schema import TrainJob

    job = TrainJob.model_validate(spec)
    said = job.model_dump(mode="json", exclude={"name", "kind", "replicas"}, exclude_defaults=True)
    shown = {**said, "program": shlex.join([job.program, *job.args]), "min": job.min, "max": job.max}
    shown.pop("args", None)
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in shown.items()]


# --- logs ---


def logs(
    name: NameArgument = "",
    follow: Annotated[bool, option("-f --follow", "", "Follow the output until the job has ended.")] = False,
    lines: Annotated[str, option("-n --lines", "N", "Begin with the last N lines only.")] = "",
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """Print the output of a job; with -f, follow it until the job has ended."""
    from pliant.jobs.client import StoredJobs, open_jobs

    last = _line_count(lines)
    check_named(name)
    with open_jobs(server, state) as opened:
        if isinstance(opened, StoredJobs):
            _print_logs(functools.partial(opened.logs, name), last, follow=follow)
            return
    with ReconnectingClient(server, state) as client:
        client.ask(lambda asked: asked.job(name), wait=False)
        _print_logs(functools.partial(_server_part, client, name), last, follow=follow)


def _server_part(client: ReconnectingClient, name: str, begin: int, wait_s: float) -> LogPart:
    return client.ask(lambda asked: asked.logs(name, begin, wait_s))


def _print_logs(read: functools.partial[LogPart], last: int | None, *, follow: bool) -> None:
    for part in _existing_parts(read, last):
        _write(part.text)
    while follow and (not part.over or part.text):
        part = read(part.end, HOLD_S)
        _write(part.text)


def _existing_parts(read: functools.partial[LogPart], last: int | None) -> Iterator[LogPart]:
    """Yield what there is by now, or its last lines."""
    part = read(0, 0.0)
    kept = ""
    while part.text:
        if last is None:
            yield part
        else:
            kept = "".join((kept + part.text).splitlines(keepends=True)[-last:]) if last else ""
        part = read(part.end, 0.0)
    yield part.model_copy(update={"text": kept})


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _line_count(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"-n {text!r} is not a number of lines: use 0 or more")
    return int(text)


# --- stop and forget ---


def stop(
    names: NamesArgument = None,
    kill: Annotated[bool, option("--kill", "", "End them at once.")] = False,
    wait: Annotated[bool, option("--wait/--no-wait", "", "Return only when they have ended.")] = True,
    timeout: Annotated[str, option("--timeout", "TIME", "How long to wait.")] = "60s",
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """End jobs after the step or round they are in. If one name is unknown, none is ended."""
    check_named(*(names or ("",)))
    deadline_s = time.monotonic() + parse_duration(timeout, "--timeout")
    with _opened(server, state) as opened:
        found = [opened.job(name) for name in dict.fromkeys(names or ())]
    for job in found:
        if job.is_over:
            print_for_people(f"{job.name} had already ended ({job.state})")
    foreground = [job.name for job in found if not job.is_over and not job.scheduled]
    scheduled = [job.name for job in found if not job.is_over and job.scheduled]
    if foreground and (server or state):
        raise ConfigError(
            f"{', '.join(foreground)}: runs in the foreground, which is stopped on its own machine: leave --server and --state out"
        )
    late = _stop_foreground(foreground, deadline_s, kill=kill, wait=wait)
    if scheduled:
        with ReconnectingClient(server, state, start=True) as client:
            for name in scheduled:
                client.ask(functools.partial(_tell_to_stop, name, kill))
            late += await_end(client, scheduled, deadline_s, _print_end) if wait else []
    if late:
        raise LaunchError(
            f"still running after {timeout}: {', '.join(late)}; they were told to end, --kill does not wait for their step"
        )


def _tell_to_stop(name: str, kill: bool, client: JobsClient) -> None:
    client.stop(name, kill=kill)


def _stop_foreground(names: list[str], deadline_s: float, *, kill: bool, wait: bool) -> list[str]:
    """Tell foreground runs to end; returns those that still run at the deadline."""
    from pliant.jobs.client import open_jobs, stop_foreground

    left = list(names)
    for name in names:
        if not stop_foreground(name, kill=kill):
            raise ConfigError(f"{name}: no process of it runs here; `pliant forget {name}` takes it off the list")
    if not left:
        return []
    with show_waiting("each finishes its step"):
        while wait and left and time.monotonic() < deadline_s:
            with open_jobs() as opened:
                running = {job.name for job in opened.jobs() if job.state == "running"}
            for name in [name for name in left if name not in running]:
                left.remove(name)
                print_for_people(f"{name} has ended")
            time.sleep(0.1 if left else 0)
    return left if wait else []


def _print_end(job: JobStatus) -> None:
    unit = "step" if job.federated is None else "round"
    print_for_people(f"{job.name} {job.state}" + (f" after {unit} {job.step}" if job.step is not None else ""))


def forget(names: NamesArgument = None, server: ServerFlag = "", state: StateFlag = "") -> None:
    """Remove ended jobs from the list; their files stay. If one name is unknown or one job runs, none is removed."""
    from pliant.jobs.status import check_forgettable

    check_named(*(names or ("",)))
    with _opened(server, state) as opened:
        found = [opened.job(name) for name in dict.fromkeys(names or ())]
        for job in found:
            check_forgettable(job)
        for job in found:
            opened.forget(job.name)
            print_for_people(f"{job.name} is off the list; its files stay in {job.folder}")
