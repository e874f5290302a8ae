"""The `pliant bench priority` command: how near to the bound each way of synchronising comes, over the links' rates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from pliant.cli import completion
from pliant.cli.output import JsonCommand, JsonFile, check_writable, is_stdout, save_json, wide_console
from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.cli.bench_output import measured, milliseconds

Cell = Mapping[str, object]
_COLUMNS = (
    "rate", "r", "mode", "median ms", "p10-p90", "P* ms", "of P*", "worst", "vs P_fifo", "vs ddp", "tx", "CPU ms",
)  # fmt: skip


def register(bench: typer.Typer) -> None:
    """Add the command to `bench`."""
    bench.command("priority", cls=JsonCommand)(priority)


def priority(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="resnet50, inception-v3, vgg, sockeye, or module:function (real).",
            autocompletion=completion.one_of("resnet50", "inception-v3", "vgg", "sockeye"),
        ),
    ] = "resnet50",
    nodes: Annotated[int | None, typer.Option("--nodes", help="Workers, each on a host; 4, or 2 with real.")] = None,
    rate: Annotated[
        str, typer.Option("--rate", metavar="R,...", help="What each host may send: 100,200,400mbit, none.")
    ] = "100,200,400mbit",
    modes: Annotated[
        str, typer.Option("--modes", help="Some of baseline,slicing,priority,fifo,auto,ddp.")
    ] = "baseline,slicing,priority,ddp",
    compute: Annotated[
        str | None,
        typer.Option(
            "--compute",
            help="paced: layers sleep as long as a GPU would compute; real.",
            autocompletion=completion.one_of("paced", "real"),
        ),
    ] = None,
    slices: Annotated[
        str, typer.Option("--slice", metavar="auto|1k,2k,...", help="Parameters per slice; several: a sweep.")
    ] = "auto",
    batch: Annotated[int | None, typer.Option("--batch", help="Samples of a step; else BATCH_SIZE, else 32.")] = None,
    size: Annotated[int, typer.Option("--size", help="Pixels or words of a sample, with real; 0: by model.")] = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="Rounds; every mode has a turn in each.")] = 5,
    iters: Annotated[int, typer.Option("--iters", help="Timed steps of a turn.")] = 30,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps of every mode at a new rate, not timed.")] = 10,
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="JSON list of hosts to use over ssh.")
    ] = None,
    utilisation: Annotated[bool, typer.Option("--utilisation", help="Sample what a host sends, every 10 ms.")] = False,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace.")] = None,
    validate: Annotated[
        Path | None, typer.Option("--validate", metavar="FILE", help="Measure nothing: judge this result.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Steps per second of each way to synchronise, beside stock DDP and the bound, at several rates of the links."""
    if validate is not None:
        _validate(validate, json_file)
        return
    from pliant_repro.bench.priority import hosts as machines
    from pliant_repro.bench.priority import options as parsing
    from pliant_repro.bench.priority import sweep as bench

    machine_list = machines.read_hosts(hosts) if hosts is not None else ()
    real = compute == "real" or (compute is None and ":" in model)
    count = len(machines.placed(machine_list)) if machine_list else nodes if nodes is not None else 2 if real else 4
    if machine_list and nodes is not None and nodes != count:
        raise ConfigError(f"--nodes {nodes}, but --hosts {hosts} has {count} slots: leave one of them out")
    options = parsing.PriorityOptions(
        model=model,
        nodes=count,
        rates=parsing.parse_rates(rate),
        modes=parsing.parse_modes(modes),
        compute="real" if real else compute or "paced",
        slices=parsing.parse_slices(slices),
        batch=parsing.batch_from(batch, os.environ),
        size=size,
        repeat=repeat,
        iters=iters,
        warmup=warmup,
        hosts=machine_list,
        utilisation=utilisation,
        trace=trace,
    )
    args: dict[str, object] = {
        "model": model, "nodes": count, "rate": rate, "modes": list(options.modes), "compute": options.compute,
        "slice": slices, "batch": options.samples, "size": size, "repeat": repeat, "iters": iters, "warmup": warmup,
        "hosts": [host.host for host in machine_list] or None, "utilisation": utilisation,
        "trace": str(trace) if trace else None,
    }  # fmt: skip
    check_writable(trace, "--trace")
    measured(json_file, lambda progress: bench.run(options, args, progress), _print)


def _print(result: Json) -> None:
    args = cast(Cell, result["args"])
    table = Table(
        title=f"{args['model']}, {args['nodes']} nodes, {args['compute']} compute: the step, and how near to the bound",
        title_justify="left",
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("rate", "mode") else "right", no_wrap=True)
    before: object = ()
    for one in cast("list[Cell]", result["cells"]):
        new = one["rate_mbit"] != before
        before = one["rate_mbit"]
        table.add_row(*_row(one, first=new), style=None if one["mode"] != "priority" else "bold")
    console = wide_console()
    console.print(table)
    if not result["ok"]:
        console.print("not ok: a mode failed, or parameters differ", style="red")


def _row(one: Cell, *, first: bool) -> list[str]:
    rate = one["rate_mbit"]
    mode = str(one["mode"]) if one["slice"] == "auto" else f"{one['mode']} {one['slice']}"
    spread = f"{milliseconds(one.get('iter_p10_s'))}-{milliseconds(one.get('iter_p90_s'))}"
    return [
        (f"{rate:g} Mbit/s" if isinstance(rate, float) else "no limit") if first else "",
        _number(one["r"], ".2f") if first else "",
        mode,
        milliseconds(one["iter_median_s"]) or "failed",
        spread if one["iter_median_s"] is not None else "",
        milliseconds(one["p_star_s"]) if first else "",
        _number(one["fraction_of_bound"], ".3f"),
        _number(one.get("fraction_of_worst_repeat"), ".3f"),
        _number(one.get("over_p_fifo"), "+.1%"),
        _number(one.get("gain_over_ddp"), "+.1%"),
        _number(one.get("tx_over_least"), "+.1%"),
        milliseconds(one["cpu_s_per_iter"]),
    ]


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, float) else ""


def _validate(path: Path, json_file: Path | None) -> None:
    from pliant_repro.bench.priority import verdict

    check_writable(json_file)
    result = verdict.load(path)
    try:
        checks = verdict.judge(result)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--validate {path}: a cell of it is damaged ({error!r}); measure again with --json FILE"
        ) from None
    failed = [check for check in checks if check.ok is False]
    done = [check for check in checks if check.ok]
    is_well = bool(done) and not failed
    save_json({"validated": str(path), "checks": [asdict(check) for check in checks], "ok": is_well}, json_file)
    if not is_stdout(json_file):
        for check in checks:
            print(check)
        print(f"{len(done)} hold, {len(failed)} do not, {len(checks) - len(done) - len(failed)} not judged")
    if not is_well:
        raise typer.Exit(1)
