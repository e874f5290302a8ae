"""The `pliant sim` command: replays a trace of jobs on a simulated cluster under each policy."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
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
    from pliant.sched.compare import PolicyResult, PolicyRun
    from pliant.sched.tenants import Tenant

MIXED = "v100=32,p100=16,t4=16"
"""Cluster of EasyScale's figures."""
POLLUX = "gpu=16x4"
"""Cluster of Pollux' figures."""

FIGURES = (
    ("jct_mean_s", 2), ("jct_median_s", 1), ("jct_p99_s", 0), ("makespan_s", 0), ("gpu_hours", 0), ("mean_allocated", 2), ("changes", 0),
)  # fmt: skip
"""Columns of the table, and digits after the point."""
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
    seeds: Annotated[
        int,
        option("--seeds", "K", "Simulate K times: the trace as it is, then perturbed; shows medians, least and most."),
    ] = 1,
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
    mtbf: Annotated[
        list[str] | None,
        option(
            "--mtbf",
            "TIME[/TYPE],...",
            "Devices fail, each once in this mean time (30d); /TYPE: those of a type; /node: whole nodes; may be repeated.",
        ),
    ] = None,
    repair: Annotated[str, option("--repair", "TIME", "How long what has failed is away.")] = "2h",
    checkpoint_every: Annotated[
        str,
        option(
            "--checkpoint-every",
            "TIME",
            "Computing time between checkpoints, to which jobs go back after a failure; 0: only when their devices change.",
        ),
    ] = "30m",
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
    from pliant.sched.failures import FailureRates

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
    rates = FailureRates.parse(mtbf, repair, checkpoint_every, Cluster.parse(cluster)) if mtbf else None
    setting = SimulationSetting(
        trace=found,
        cluster=cluster,
        profiles=profiles,
        interval_s=interval,
        restart_s=restart,
        live_pause_s=pause if pause >= 0 else None,
        seed=seed,
        seeds=seeds,
        speeds=tuple(parse_numbers(speed, "--speed").items()),
        reservations=tuple(each for text in reserve or () for each in Reservation.parse(text)),
        tenants=_tenants(tenants, Cluster.parse(cluster).counts),
        failures=rates,
    )
    with exit_on_sigterm(), show_progress() as progress:
        results = compare(chosen, setting, processes=processes, progress=progress)
    args = {
        "trace": trace, "format": found.form, "cluster": setting.cluster, "policy": chosen, "interval": interval, "seed": seed, "seeds": seeds,
        "profiles": profiles, "limit": limit, "restart": restart, "pause": pause, "speed": speed,
        "reserve": reserve or [], "skip_bad": skip_bad, "tenants": tenants,
        "mtbf": mtbf or [], "repair": repair, "checkpoint_every": checkpoint_every,
    }  # fmt: skip
    answer = simulation.result(setting, results, args)
    save_json(answer, json_file)
    if not is_stdout(json_file):
        _print(answer)
    if table_file is not None:
        _write_table(results, table_file)
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
    title = f"{jobs:g} jobs of {args['trace']} on {args['cluster']}"
    if answer["seeds"] != 1:
        title += f", medians of {answer['seeds']} seeds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns: tuple[str, ...] = (
        "policy",
        "JCT\nmean, s",
        "\nmedian",
        "\np99",
        "makespan,\ns",
        "GPU-\nhours",
        "GPUs\nin use",
        "\nchanges",
    )
    keys: tuple[tuple[str, int], ...] = FIGURES
    if args["mtbf"]:
        columns += ("failed,\nin use", "GPU-hours\nlost")
        keys = (*FIGURES, ("interruptions", 0), ("lost_gpu_hours", 1))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for name, numbers_ in policies.items():
        _add_rows(table, name, numbers_, keys)
        if "live_resize" in numbers_:
            _add_rows(table, "  live resize", cast("Json", numbers_["live_resize"]), keys, style="dim")
    console = wide_console()
    console.print(table)
    if any("tenants" in numbers_ for numbers_ in policies.values()):
        console.print(_tenant_table(policies))
    for pair, factor in cast("dict[str, Json]", answer["factors"]).items():
        if factor["jct_mean"] is not None and factor["makespan"] is not None:
            console.print(_factor_in_words(pair.split(" over ")[0].rstrip(","), factor), highlight=False)
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


def _add_rows(
    table: Table, name: str, numbers: Json, keys: Sequence[tuple[str, int]], style: str | None = None
) -> None:
    table.add_row(name, *_cells(numbers, keys), style=style)
    if "spread" in numbers:
        spread = cast("Mapping[str, tuple[float, float]]", numbers["spread"])
        indent = " " * (len(name) - len(name.lstrip()) + 2)
        for place, word in enumerate(("least", "most")):
            cells = _cells({key: pair[place] for key, pair in spread.items()}, keys)
            table.add_row(indent + word, *cells, style="dim")


def _factor_in_words(name: str, factor: Json) -> str:
    """Return `easyscale-heter: 29.80x as fast as one job at a time by mean JCT, 2.41x by makespan`."""
    spread = cast("Mapping[str, tuple[float, float]]", factor.get("spread", {}))

    def words(key: str) -> str:
        found = f"{cast('float', factor[key]):.2f}x"
        return f"{found} ({spread[key][0]:.2f} to {spread[key][1]:.2f})" if key in spread else found

    return f"{name}: {words('jct_mean')} as fast as {factor['of']} by mean JCT, {words('makespan')} by makespan"


def _cells(values: Mapping[str, object], keys: Sequence[tuple[str, int]]) -> list[str]:
    numbers = [(cast("float", values[key]), digits) for key, digits in keys]
    return [f"{number:.{digits if number < WHOLE else 0}f}" for number, digits in numbers]


def _write_table(results: Mapping[PolicyRun, PolicyResult], path: Path) -> None:
    from pliant.sched.simulate import job_rows

    with path.open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for run, found in results.items():
            for row in job_rows(found.first):
                line = {"policy": run.policy, "charged": "live resize" if run.live else "restart", **row}
                if writer is None:
                    writer = csv.DictWriter(file, list(line))
                    writer.writeheader()
                writer.writerow(line)
