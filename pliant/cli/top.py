"""The `pliant top` command: jobs as they run, in the terminal."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from typing import TYPE_CHECKING, Annotated

from pliant.cli import keys
from pliant.cli.dash import Given
from pliant.cli.output import JsonFile, check_writable, is_stdout, option, save_json, show_waiting
from pliant.duration import parse_duration
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.ui.jobs import DashboardState, ShownJob


def top(
    given: Given = None,
    job: Annotated[str, option("--job", "NAME", "Job to show in detail.")] = "",
    interval: Annotated[str, option("--interval", "TIME", "Time between updates.")] = "1s",
    once: Annotated[bool, option("--once", "", "Print once and exit; the default when piped.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show jobs in the terminal, as `pliant dash` does in the browser; the arrow keys choose one, q quits.

    With --json it exits at once.
    """
    from rich.console import Console
    from rich.live import Live

    from pliant.ui.jobs import Watcher
    from pliant.ui.sources import open_sources
    from pliant.ui.terminal import neighbour, screen

    interval_s = parse_duration(interval, "--interval")
    if interval_s < 0.1:
        raise ConfigError(f"--interval {interval}: use 100ms or more")
    check_writable(json_file)
    console = Console()
    is_shown_once = once or json_file is not None or not console.is_terminal
    with show_waiting("reading the records"):
        watcher = Watcher(open_sources(given or []))
        watcher.poll()
    if is_shown_once:
        _check_known(job, watcher.known)  # elsewhere it may still come
        save_json(_as_json(watcher.known, time.time(), job), json_file)
        if is_stdout(json_file):
            return
        console.print(screen(watcher.known, time.time(), console.width, job))
        return
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with Live(console=console, screen=True, auto_refresh=False) as live, keys.pressed() as key:
        while not over.is_set():
            live.update(screen(watcher.known, time.time(), console.width, job, console.height), refresh=True)
            match key(interval_s, over.is_set):
                case "q":
                    return
                case keys.UP | "k":
                    job = neighbour(watcher.known, time.time(), job, -1)
                case keys.DOWN | "j":
                    job = neighbour(watcher.known, time.time(), job, 1)
                case _:
                    watcher.poll()


def _check_known(wanted: str, known: DashboardState) -> None:
    if wanted and not any(wanted in (job.name, job.key) for job in known.jobs.values()):
        names = ", ".join(sorted(job.name for job in known.jobs.values())) or "none"
        raise ConfigError(f"--job {wanted}: nobody knows such a job; there are: {names}")


def _as_json(known: DashboardState, now_s: float, wanted: str) -> dict[str, object]:
    chosen = [job for job in known.jobs.values() if not wanted or wanted in (job.name, job.key)]
    clusters = {each.where: each.status for each in known.clusters.values() if each.status is not None}
    return {
        "jobs": [_job(job, now_s) for job in chosen],
        "clusters": [{"where": where} | status.model_dump(mode="json") for where, status in clusters.items()],
        "problems": list(known.problems.values()),
    }


def _job(job: ShownJob, now_s: float) -> dict[str, object]:
    timeline = job.timeline
    return {
        "name": job.name, "key": job.key, "where": job.where, "state": job.state(now_s), "why": job.why,
        "unit": timeline.unit, "step": job.step,
        "workers": job.num_workers, "devices": job.devices, "started_s": job.started_s,
        "values": {name: series.last for name, series in timeline.values.items()},
        "figures": {name: series.last for name, series in timeline.figures.items()},
        "accuracy_percent": timeline.federated.best if timeline.federated is not None else None,
        "clients": timeline.federated.clients.figures().as_json() if timeline.federated is not None else None,
        "events": [dataclasses.asdict(event) for event in job.events],
    }  # fmt: skip
