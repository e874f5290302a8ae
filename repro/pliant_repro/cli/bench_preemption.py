"""The `pliant bench preemption` command: how long an urgent gradient waits for one that is already on its way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, cast

import typer
from rich.table import Table

from pliant.cli.output import JsonCommand, JsonFile, wide_console
from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.cli.bench_output import measured, milliseconds


def register(bench: typer.Typer) -> None:
    """Add the command to `bench`."""
    bench.command("preemption", cls=JsonCommand)(preemption)


def preemption(
    nodes: Annotated[int, typer.Option("--nodes", help="Workers, each on a host.")] = 2,
    rate: Annotated[str, typer.Option("--rate", help="What each host may send.")] = "100mbit",
    iters: Annotated[int, typer.Option("--iters", help="Steps of each way that count.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """From the first layer's gradient to its new value, while 10 MB of the last layer are under way."""
    from pliant_repro.bench import preemption as bench
    from pliant_repro.lab.rates import parse_rate

    bits_per_s = parse_rate(rate)
    if bits_per_s is None:
        raise ConfigError("--rate none: without a limit nothing has to wait; use a rate such as 100mbit")
    if not 2 <= nodes <= 64 or iters < 1:
        raise ConfigError(f"--nodes {nodes} --iters {iters}: use 2 to 64 nodes, and 1 step or more")
    args = {"nodes": nodes, "rate": rate, "iters": iters}
    measured(json_file, lambda progress: bench.run(nodes, bits_per_s, iters, args, progress), _print)


def _print(result: Json) -> None:
    cells = cast("list[Mapping[str, object]]", result["cells"])
    first = cells[0]
    mbit = cast(float, first["capacity_mbit"])
    table = Table(
        title=f"{first['nodes']} nodes, B = {mbit:.1f} Mbit/s, T = {milliseconds(first['all_s'])} ms: first layer's gradient "
        "ready -> its parameter ready",
        title_justify="left",
    )
    for name in ("way", "q KiB", "queued KiB", "t_0 ms", "2q/B ms", "median ms", "p90 ms"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for one in cells:
        queues = milliseconds(one["queues_s"]) if one["mode"] == "priority" else ""
        table.add_row(
            str(one["way"]), f"{cast(int, one['q_bytes']) >> 10}", f"{cast(float, one['queued_bytes']) / 1024:.0f}",
            milliseconds(one["t0_s"]), queues,
            milliseconds(one["latency_s"]), milliseconds(one["latency_p90_s"]),
        )  # fmt: skip
    console = wide_console()
    console.print(table)
    for verdict in cast("list[Mapping[str, object]]", result["verdicts"]):
        console.print(f"{'holds' if verdict['ok'] else 'DOES NOT HOLD'}: {verdict['text']}", highlight=False)
