"""The `pliant sim` command: replays a trace of jobs on a simulated cluster under each policy."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from rich import box
from rich.table import Table

from pliant.cli import completion
from pliant.cli.output import (
    JsonFile,
    check_picture,
    check_writable,
    exit_on_sigterm,
    is_stdout,
    option,
    parse_numbers,
    save_json,
    show_progress,
    show_waiting,
    wide_console,
)
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.machine import Json
    from pliant.sched.compare import PolicyRun
    from pliant.sched.simulate import SimulationOutcome
    from pliant.sched.tenants import Tenant

MIXED = "v100=32,p100=16,t4=16"
"""Cluster of EasyScale's figures."""
POLLUX = "gpu=16x4"
"""Cluster of Pollux' figures."""

WHOLE = 1e5
"""Numbers from here on are shown without digits after the point."""


def sim(
    trace: Annotated[
        str, option("--trace", "FILE|synthetic[:JOBS[:WEEKS]]", "Trace of the jobs.", completion.one_of("synthetic"))
    ],
    cluster: Annotated[
        str,
        option(
            "--cluster",
            "TYPE=N,...",
            f"Devices, nodes (16x4), or a CSV of nodes; default: {MIXED}; for Pollux: {POLLUX}.",
        ),
    ] = "",
    policy: Annotated[
        str,
        option(
            "--policy",
            "all|NAME,...",
            "Scheduling policies to compare; one of your own as module:Class or FILE.py:Class.",
            completion.schedulers,
        ),
    ] = "all",
    interval: Annotated[float, option("--interval", "", "Seconds between rounds.")] = 60.0,
    profiles: Annotated[str, option("--profiles", "DIR", "Pollux' measured step times.")] = "",
    form: Annotated[
        str,
        option(
            "--format",
            "",
            "philly, helios, pai, openb, pollux, easyscale; default: by its columns.",
            completion.trace_formats,
        ),
    ] = "",
    skip_bad: Annotated[
        bool, option("--skip-bad", "", "Go on without the wrong rows of the trace, and count them; else it is refused.")
    ] = False,
    seed: Annotated[int, option("--seed", "", "Seed for what a trace leaves open, and for synthetic traces.")] = 0,
    speed: Annotated[
        str,
        option(
            "--speed", "TYPE=S,...", "Replica-steps per second of device types without a built-in speed.", hidden=True
        ),
    ] = "",
    limit: Annotated[int, option("--limit", "", "Only the first jobs; 0: all.", hidden=True)] = 0,
    restart: Annotated[
        float, option("--restart", "", "Seconds that a start or a change of devices costs.", hidden=True)
    ] = 30.0,
    pause: Annotated[
        float, option("--pause", "", "Seconds of a live resize, as measured; below 0: only restarts.", hidden=True)
    ] = 0.0212,
    reserve: Annotated[
        list[str] | None,
        option("--reserve", "TYPE=N@BEGIN-END", "Devices in other use for these seconds; may be repeated."),
    ] = None,
    tenants: Annotated[
        str,
        option("--tenants", "FILE", "Share the cluster among the tenants in this YAML file, by quotas and weights."),
    ] = "",
    processes: Annotated[
        int, option("--processes", "", "Simulations at a time; 0: one for each core.", hidden=True)
    ] = 0,
    table_file: Annotated[Path | None, option("--table", "FILE", "A CSV row for each job.")] = None,
    plot: Annotated[Path | None, option("--plot", "FILE", "A PNG of times and devices in use.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Simulate a trace of jobs on a cluster under each scheduling policy: completion times, makespan, devices in use."""
    from pliant.sched import compare as simulation
    from pliant.sched import policies as schedulers
    from pliant.sched import pollux, traces
    from pliant.sched.cluster import Cluster, Reservation
    from pliant.sched.compare import SimulationSetting, compare

    chosen = schedulers.parse_policies(policy)
    for path, flag in ((table_file, "--table"), (json_file, "--json")):
        check_writable(path, flag)
    check_picture(plot)
    if processes < 0:
        raise ConfigError(f"--processes {processes}: use 1 or more, or 0 for one on each core")
    with show_waiting(f"reading {trace}"):
        measured = pollux.load(Path(profiles)) if profiles else None
        found = traces.read(trace, form, seed=seed, limit=limit, skip_bad=skip_bad, profiles=measured)
    cluster = cluster or (POLLUX if found.form == "pollux" else MIXED)
    setting = SimulationSetting(
        trace=found,
        cluster=cluster,
        profiles=profiles,
        interval_s=interval,
        restart_s=restart,
        live_pause_s=pause if pause >= 0 else None,
        seed=seed,
        speeds=tuple(parse_numbers(speed, "--speed").items()),
        reservations=tuple(each for text in reserve or () for each in Reservation.parse(text)),
        tenants=_tenants(tenants, Cluster.parse(cluster).counts),
    )
    with exit_on_sigterm(), show_progress() as progress:
        outcomes = compare(chosen, setting, processes=processes, progress=progress)
    args = {
        "trace": trace, "format": found.form, "cluster": setting.cluster, "policy": chosen, "interval": interval, "seed": seed,
        "profiles": profiles, "limit": limit, "restart": restart, "pause": pause, "speed": speed,
        "reserve": reserve or [], "skip_bad": skip_bad,
        "tenants": tenants,
    }  # fmt: skip
    answer = simulation.result(setting, outcomes, args)
    save_json(answer, json_file)
    if not is_stdout(json_file):
        _print(answer)
    if table_file is not None:
        _write_table(outcomes, table_file)
    if plot is not None:
        from pliant.cli import plotting

        plotting.policies(answer, plot)


def _tenants(file: str, devices: Mapping[str, int]) -> tuple[Tenant, ...]:
    if not file:
        return ()
    from pliant.sched.tenants_file import read_tenants

    return read_tenants(Path(file), devices, with_tokens=False)


def _print(answer: Json) -> None:
    policies = cast("dict[str, Json]", answer["policies"])
    args = cast("Mapping[str, object]", answer["args"])
    jobs = next(iter(policies.values()))["jobs"]
    title = f"{jobs} jobs of {args['trace']} on {args['cluster']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = (
        "policy",
        "JCT\nmean, s",
        "\nmedian",
        "\np99",
        "makespan,\ns",
        "GPU-\nhours",
        "GPUs\nin use",
        "\nchanges",
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for name, numbers_ in policies.items():
        table.add_row(name, *_cells(numbers_))
        if "live_resize" in numbers_:
            table.add_row("  live resize", *_cells(cast("Json", numbers_["live_resize"])), style="dim")
    console = wide_console()
    console.print(table)
    if any("tenants" in numbers_ for numbers_ in policies.values()):
        console.print(_tenant_table(policies))
    for pair, both in cast("dict[str, Mapping[str, float | None]]", answer["factors"]).items():
        jct, makespan = both["jct_mean"], both["makespan"]
        if jct is not None and makespan is not None:
            console.print(f"{pair}: JCT {jct:.2f}x, makespan {makespan:.2f}x", highlight=False)
    for remark in cast("list[str]", answer["remarks"]):
        console.print(f"note: {remark}", highlight=False, markup=False)


def _tenant_table(policies: Mapping[str, Json]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, column in enumerate(("policy", "tenant", "jobs", "JCT mean, s", "waited, s", "GPU-hours", "share")):
        table.add_column(column, justify="left" if number < 2 else "right", overflow="fold")
    for name, numbers in policies.items():
        for tenant, has in cast("Mapping[str, Mapping[str, float]]", numbers["tenants"]).items():
            table.add_row(
                name, tenant, str(has["jobs"]), f"{has['jct_mean_s']:.1f}", f"{has['waited_mean_s']:.1f}",
                f"{has['gpu_hours']:.1f}", f"{has['share']:.1%}",
            )  # fmt: skip
            name = ""
    return table


def _cells(values: Mapping[str, object]) -> list[str]:
    keys = ("jct_mean_s", "jct_median_s", "jct_p99_s", "makespan_s", "gpu_hours", "mean_allocated", "changes")
    digits = (2, 1, 0, 0, 0, 2, 0)
    numbers = [cast("float", values[key]) for key in keys]
    return [f"{number:.{places if number < WHOLE else 0}f}" for number, places in zip(numbers, digits, strict=True)]


def _write_table(outcomes: Mapping[PolicyRun, SimulationOutcome], path: Path) -> None:
    from pliant.sched.simulate import job_rows

    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for run, outcome in outcomes.items():
            for row in job_rows(outcome):
                line = {"policy": run.policy, "charged": "live resize" if run.live else "restart", **row}
                if writer is None:
                    writer = csv.DictWriter(file, list(line))
                    writer.writeheader()
                writer.writerow(line)
