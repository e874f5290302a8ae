"""The `pliant bench` commands about training: throughput, replicas, resizing, recovery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from pliant.cli import completion
from pliant.cli.output import JsonCommand, JsonFile, check_time, wide_console
from pliant.machine import Json
from pliant_repro.cli.bench_output import measured, milliseconds, ratio

Cell = Mapping[str, object]


def _models(*names: str) -> Any:
    told = f"{', '.join(names[:-1])} or {names[-1]}."
    return typer.Option("--model", help=told, autocompletion=completion.one_of(*names))


AnyModel = Annotated[str, _models("resnet18", "transformer", "resnet50", "small")]
QuickModel = Annotated[str, _models("resnet18", "transformer", "small")]


def register(bench: typer.Typer) -> None:
    """Add the commands to `bench`."""
    bench.command("train", cls=JsonCommand)(train)
    bench.command("replicas", cls=JsonCommand)(replicas)
    bench.command("resize", cls=JsonCommand)(resize)
    bench.command("recover", cls=JsonCommand)(recover)


def train(
    np: Annotated[str, typer.Option("-np", "--np", metavar="N,...", help="Numbers of workers.")] = "1,2,4",
    model: AnyModel = "resnet18",
    peers: Annotated[str, typer.Option("--peers", help="ddp_gloo, and ddp_gloo_views.")] = "ddp_gloo",
    batch: Annotated[int, typer.Option("--batch", help="Samples of a replica's step; 0: by model.")] = 0,
    size: Annotated[int, typer.Option("--size", help="Pixels or words of a sample; 0: by model.")] = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="Rounds; everyone has a window in each.")] = 15,
    steps: Annotated[int, typer.Option("--steps", help="Steps in a window.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps before the first round.")] = 3,
    device: Annotated[
        str, typer.Option("--device", help="cpu or cuda.", autocompletion=completion.one_of("cpu", "cuda"))
    ] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Steps per second: ours beside plain PyTorch (one worker) and DDP on gloo (several), interleaved."""
    from pliant_repro.bench import throughput
    from pliant_repro.bench.contest import Rules

    options = throughput.TrainOptions(
        num_workers=throughput.parse_counts(np, "-np"),
        model=model,
        peers=tuple(name.strip() for name in peers.split(",") if name.strip()),
        batch=batch,
        size=size,
        rules=Rules(rounds=repeat, iterations=steps, warmup=warmup, timeout_s=600.0),
        device=device,
    )
    args = {
        "np": list(options.num_workers), "model": model, "peers": list(options.peers), "batch": batch, "size": size,
        "repeat": repeat, "steps": steps, "warmup": warmup, "device": device,
    }  # fmt: skip
    measured(json_file, lambda progress: throughput.run(options, args, progress), _print_train)


def replicas(
    counts: Annotated[str, typer.Option("--replicas", metavar="N,...", help="Replicas on one worker.")] = "1,2,4,8,16",
    model: AnyModel = "resnet18",
    batch: Annotated[int, typer.Option("--batch", help="Samples of a replica's step; 0: by model.")] = 0,
    size: Annotated[int, typer.Option("--size", help="Pixels or words of a sample; 0: by model.")] = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="Windows with switching, and as many without.")] = 10,
    steps: Annotated[int, typer.Option("--steps", help="Steps in a window, with 4 replicas.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps before the first window.")] = 2,
    device: Annotated[
        str, typer.Option("--device", help="cpu or cuda.", autocompletion=completion.one_of("cpu", "cuda"))
    ] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Several replicas on one worker: the share of a step that switching takes, memory, samples per second."""
    from pliant_repro.bench import replicas as bench
    from pliant_repro.bench.throughput import parse_counts

    options = bench.ReplicasOptions(
        replicas=parse_counts(counts, "--replicas"),
        model=model,
        batch=batch,
        size=size,
        device=device,
        windows=repeat,
        steps=steps,
        warmup=warmup,
    )
    args = {
        "replicas": list(options.replicas), "model": model, "batch": batch, "size": size, "repeat": repeat,
        "steps": steps, "warmup": warmup, "device": device,
    }  # fmt: skip
    measured(json_file, lambda progress: bench.run(options, args, progress), _print_replicas)


def resize(
    np: Annotated[int, typer.Option("-np", "--np", help="Workers, when there are many.")] = 4,
    to: Annotated[int, typer.Option("--to", help="Workers, when there are few.")] = 2,
    repeat: Annotated[int, typer.Option("--repeat", help="Changes in each direction.")] = 20,
    model: QuickModel = "resnet18",
    batch: Annotated[int, typer.Option("--batch", help="Samples of a replica's step.")] = 2,
    size: Annotated[int, typer.Option("--size", help="Pixels or words of a sample.")] = 32,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a change may take.")] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """How long a job stands still when it shrinks and when it grows."""
    from pliant_repro.bench import resize as bench
    from pliant_repro.bench.elastic import ElasticOptions

    check_time(timeout, "--timeout")
    options = ElasticOptions(
        num_workers=np, small=to, repeat=repeat, model=model, batch=batch, size=size, timeout_s=timeout
    )
    args = {"np": np, "to": to, "repeat": repeat, "model": model, "batch": batch, "size": size}
    measured(json_file, lambda progress: bench.run(options, args, progress), _print_resize)


def recover(
    np: Annotated[int, typer.Option("-np", "--np", help="Workers.")] = 4,
    repeat: Annotated[int, typer.Option("--repeat", help="Kills.")] = 20,
    model: QuickModel = "resnet18",
    batch: Annotated[int, typer.Option("--batch", help="Samples of a replica's step.")] = 2,
    size: Annotated[int, typer.Option("--size", help="Pixels or words of a sample.")] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Of whom to kill, and when.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a recovery may take.")] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """kill -9 to the next step of the survivors, again and again."""
    from pliant_repro.bench import recover as bench
    from pliant_repro.bench.elastic import ElasticOptions

    check_time(timeout, "--timeout")
    options = ElasticOptions(
        num_workers=np, small=1, repeat=repeat, model=model, batch=batch, size=size, seed=seed, timeout_s=timeout
    )
    args = {"np": np, "repeat": repeat, "model": model, "batch": batch, "size": size, "seed": seed}
    measured(json_file, lambda progress: bench.run(options, args, progress), _print_recover)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _print_train(result: Json) -> None:
    args = cast(Cell, result["args"])
    table = _table(f"train {args['model']}, one host", "workers", "side", "median ms", "IQR ms", "speedup")
    for cell in cast("list[Cell]", result["cells"]):
        ours = cast(Cell, cell["ours"])
        table.add_row(str(cell["np"]), "ours", milliseconds(ours["median_s"]), milliseconds(ours["iqr_s"]), "")
        for name, peer in cast("dict[str, Cell]", cell["peers"]).items():
            spread = milliseconds(peer["iqr_s"])
            table.add_row("", name, milliseconds(peer["median_s"]), spread, ratio(peer["speedup"], "x"))
    wide_console().print(table)


def _print_replicas(result: Json) -> None:
    args = cast(Cell, result["args"])
    columns = ("replicas", "step ms", "samples/s", "switch share", "by clocks", "peak MB")
    table = _table(f"{args['model']}, replicas on one worker, {args['device']}", *columns)
    memory = cast(Cell, result["memory_by_replicas"])
    for cell in cast("list[Cell]", result["cells"]):
        peak = memory[str(cell["replicas"])]
        table.add_row(
            str(cell["replicas"]),
            milliseconds(cast(Cell, cell["ours"])["median_s"]),
            ratio(cell.get("samples_per_s"), ""),
            _percent(cell.get("switch_share")),
            _percent(cell.get("switch_timer_share")),
            f"{peak / 1e6:.0f}" if isinstance(peak, int) else "-",
        )
    wide_console().print(table)


def _percent(value: object) -> str:
    return f"{value:.2%}" if isinstance(value, float) else "-"


def _print_resize(result: Json) -> None:
    args = cast(Cell, result["args"])
    title = f"resize {args['model']}: {args['np']} -> {args['to']} -> {args['np']} workers, {args['repeat']} times"
    targets = cast(Cell, result["targets_s"])
    table = _table(title, "", "median ms", "IQR ms", "max ms", "to reach")
    for name in ("shrink", "grow", "request_to_first_step"):
        values = cast(Cell, result[name])
        _add(table, name.replace("_", " "), values, targets[name])
        for key in ("to_next_batch", "first_step", "until_it_began"):
            if key in values:
                _add(table, f"  {key.replace('_', ' ')}", cast(Cell, values[key]), None)
    wide_console().print(table)


def _print_recover(result: Json) -> None:
    args = cast(Cell, result["args"])
    title = (
        f"recover {args['model']}: {args['repeat']} kills of {args['np']} workers, {result['steps_lost']} steps lost"
    )
    table = _table(title, "", "median ms", "IQR ms", "max ms", "to reach")
    _add(table, "kill to next step", cast(Cell, result["recover"]), cast(Cell, result["targets_s"])["recover"])
    _add(table, "  noticed to ready", cast(Cell, result["noticed_to_ready"]), None)
    _add(table, "  replacement's first step", cast(Cell, result["replacement"]), None)
    _add(table, "  an undisturbed step", cast(Cell, result["step"]), None)
    wide_console().print(table)


def _add(table: Table, name: str, values: Cell, target_s: object) -> None:
    times = [milliseconds(values.get(key)) for key in ("median_s", "iqr_s", "max_s")]
    table.add_row(name, *times, milliseconds(target_s))
