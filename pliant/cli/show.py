"""The `pliant show` command: one job, of the cluster or a federated one, and what happened to it."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING

import typer

from pliant.cli import fed_jobs
from pliant.cli.cluster_output import (
    JobArgument,
    ServerFlag,
    StateFlag,
    check_named,
    clock_text,
    connected,
    devices_text,
    span_text,
)
from pliant.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from pliant.sched.live.jobfile import JobSpec


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("show")(show)


def show(
    name: JobArgument = "",
    as_json: JsonFlag = False,
    server: ServerFlag = "",
    state: StateFlag = "",
) -> None:
    """One job: how it is, and what was decided about it, and when."""
    check_named(name)
    if (federated := fed_jobs.find(name, server, state)) is not None:
        status = federated.status()
        if as_json:
            print_json(status.model_dump(mode="json") | {"spec": federated.job().model_dump(mode="json")})
        else:
            print_table(("", ""), fed_jobs.facts(status))
        return
    fed_jobs.check_known([name], server, state)
    with connected(server, state) as client:
        job = client.job(name)
    if as_json:
        print_json(job.model_dump(mode="json"))
        return
    now_s = time.time()
    begun_s = job.started_s if job.started_s is not None else job.submitted_s
    facts = [
        ("name", job.name),
        ("state", job.state + (f" (exit code {job.exit_code})" if job.exit_code is not None else "")),
        ("why", job.why or "-"),
        ("devices", devices_text(job.devices)),
        ("replicas", f"{job.replicas} on {job.workers} workers"),
        ("step", "-" if job.step is None else str(job.step)),
        ("steps/s", "-" if job.steps_per_s is None else f"{job.steps_per_s:.3g}"),
        ("submitted", clock_text(job.submitted_s, now_s)),
        ("started", clock_text(job.started_s, now_s)),
        ("ended", clock_text(job.ended_s, now_s)),
        ("took", span_text((job.ended_s or now_s) - begun_s)),
        *_asked(job.spec),
    ]
    print_table(("", ""), facts)
    if job.events:
        print()
        print_table(
            ("at", "what", "why"), [(clock_text(event.at, now_s), event.what, event.why) for event in job.events]
        )


def _asked(spec: JobSpec | None) -> list[tuple[str, str]]:
    """What was submitted, in the words of a job file."""
    if spec is None:
        return []
    said = spec.model_dump(mode="json", exclude={"name", "replicas"}, exclude_defaults=True)
    shown = {**said, "program": shlex.join([spec.program, *spec.args]), "min": spec.min, "max": spec.max}
    shown.pop("args", None)
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in shown.items()]
