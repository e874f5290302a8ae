"""The `pliant bench` commands: measure ours beside its peers and beside what the hardware allows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table

from pliant.cli import completion
from pliant.cli.output import (
    JsonCommand,
    JsonFile,
    check_time,
    check_writable,
    exit_on_sigterm,
    is_stdout,
    save_json,
    show_waiting,
    wide_console,
)
from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.cli import bench_fed, bench_preemption, bench_priority, bench_training
from pliant_repro.cli.bench_output import measured, milliseconds, ratio

if TYPE_CHECKING:
    from pliant.comm.topology import Topology


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(help="Measure ours beside its peers, interleaved, in one run.", no_args_is_help=True)
    bench.command("allreduce", cls=JsonCommand)(allreduce)
    bench.command("traffic", cls=JsonCommand)(traffic)
    bench_training.register(bench)
    bench_priority.register(bench)
    bench_preemption.register(bench)
    bench_fed.register(bench)
    app.add_typer(bench, name="bench")


def allreduce(
    np: Annotated[int | None, typer.Option("-np", "--np", help="Workers; 4, or one per host of --lab.")] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="resnet50, vgg16, bert, slp, or a file of shapes.",
            autocompletion=completion.one_of("resnet50", "vgg16", "bert", "slp"),
        ),
    ] = "resnet50",
    mode: Annotated[str, typer.Option("--mode", help="seq: one tensor after the other; par: all at once.")] = "par",
    fuse: Annotated[bool, typer.Option("--fuse", help="All tensors as one.")] = False,
    strategy: Annotated[
        str,
        typer.Option(
            "-strategy", "--strategy", help="A topology's name, or all.", autocompletion=completion.strategies
        ),
    ] = "AUTO",
    peers: Annotated[str, typer.Option("--peers", help="gloo,openmpi or none.")] = "gloo,openmpi",
    lab: Annotated[str | None, typer.Option("--lab", metavar="hosts=4,rate=1gbit", help="Between hosts.")] = None,
    repeat: Annotated[int, typer.Option("--repeat", help="Rounds; everyone has a turn in each.")] = 10,
    iterations: Annotated[int, typer.Option("--iterations", help="All-reduces of the whole model in a turn.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", help="Iterations before the first round.")] = 2,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, float64, float16, bfloat16, int32, int64.")
    ] = "float32",
    determinism: Annotated[str, typer.Option("--determinism", help="exact: the bits of DDP; fast.")] = "exact",
    check: Annotated[bool, typer.Option("--check", help="Also compare everyone's sums with the right ones.")] = False,
    dump_graph: Annotated[bool, typer.Option("--dump-graph", help="Print who sends to whom, and stop.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds a turn may take before it is a failure.")
    ] = 120.0,
    json_file: JsonFile = None,
) -> None:
    """All-reduce a model's gradients: ours, gloo, Open MPI, and the bound of the hardware, interleaved."""
    from pliant_repro.bench import allreduce as bench
    from pliant_repro.bench.contest import Rules

    check_time(timeout, "--timeout")
    place = bench.parse_lab(lab) if lab is not None else None
    num_workers = np if np is not None else place.num_hosts if place is not None else 4
    options = bench.AllreduceOptions(
        num_workers=num_workers,
        model=model,
        mode=mode,
        fuse=fuse,
        strategy=strategy if strategy == "all" else strategy.upper(),
        peers=bench.parse_peers(peers),
        lab=place,
        rules=Rules(rounds=repeat, iterations=iterations, warmup=warmup, check=check, timeout_s=timeout),
        dtype=dtype,
        determinism=determinism,
    )
    if dump_graph:
        _dump(bench.graphs(options), json_file)
        return
    args: dict[str, object] = {
        "np": num_workers,
        "model": model,
        "mode": mode,
        "fuse": fuse,
        "strategy": options.strategy,
        "peers": list(options.peers),
        "lab": lab,
        "repeat": repeat,
        "iterations": iterations,
        "warmup": warmup,
        "dtype": dtype,
        "determinism": determinism,
        "check": check,
    }
    measured(json_file, lambda progress: bench.run(options, args, progress), _print_result)


def _dump(graphs: Iterable[tuple[str, int, Topology]], json_file: Path | None) -> None:
    """Who sends to whom, in each of a strategy's topologies."""
    found = [(name, number, graph.reduce_edges, graph.bcast_edges) for name, number, graph in graphs]
    keys = ("strategy", "number", "reduce", "broadcast")
    save_json({"graphs": [dict(zip(keys, each, strict=True)) for each in found]}, json_file)
    if not is_stdout(json_file):
        for name, number, reduce, broadcast in found:
            print(f"{name}[{number}] reduce {_arrows(reduce)}  broadcast {_arrows(broadcast)}")


def _arrows(edges: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{source}->{target}" for source, target in edges) or "-"


Cell = Mapping[str, object]


def _print_result(result: Json) -> None:
    args = cast(Cell, result["args"])
    where = f"lab {args['lab']}" if args["lab"] else "one host"
    num_bytes = cast(int, result["num_bytes"])
    table = Table(
        title=f"all-reduce {args['model']}: {result['num_tensors']} tensors, {num_bytes / 1e6:.1f} MB, "
        f"{args['np']} workers, {where}, {args['mode']}, {args['determinism']}",
        title_justify="left",
    )
    for name in ("", "median ms", "p10-p90 ms", "CPU ms", "speedup"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for cell in cast("list[Cell]", result.get("cells", [result])):
        table.add_row(f"ours, {cell['strategy']}", *_times(cast(Cell, cell["ours"])), "")
    if "fused" in result:
        fused = cast(Cell, result["fused"])
        table.add_row("ours, one fused tensor", *_times(fused), ratio(fused["speedup"], "x"))
    for name, peer in cast("dict[str, Cell]", result["peers"]).items():
        table.add_row(name, *_times(peer), ratio(peer["speedup"], "x"))
    bound = cast(Cell, result["bound"])
    table.add_row("bound", *_times(bound), ratio(bound["fraction"], " of it"))
    console = wide_console()
    console.print(table)
    if "cells" in result:
        console.print(f"ratios are those of the fastest, {result['strategy']}", highlight=False)
    if not result["ok"]:
        console.print("not ok: ours failed or summed wrongly", style="red")


def _times(values: Cell) -> tuple[str, str, str]:
    median_s, p10_s, p90_s, cpu_s = (values.get(key) for key in ("median_s", "p10_s", "p90_s", "cpu_s"))
    if not isinstance(median_s, float):
        return "failed", "", ""
    spread = f"{milliseconds(p10_s)}-{milliseconds(p90_s)}" if p10_s is not None else ""
    return milliseconds(median_s), spread, milliseconds(cpu_s)


def traffic(
    to: Annotated[str | None, typer.Option("--to", metavar="HOST:PORT", help="Send there.")] = None,
    listen: Annotated[int | None, typer.Option("--listen", metavar="PORT", help="Take and drop what arrives.")] = None,
    rate: Annotated[
        str, typer.Option("--rate", help="How fast: 500mbit, 1gbit, none (as fast as it goes).")
    ] = "500mbit",
    seconds: Annotated[float, typer.Option("--seconds", help="Stop after this long.")] = 10.0,
    connections: Annotated[int, typer.Option("--connections", help="To send on; together they send at the rate.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Background traffic, on loopback or between the hosts of a lab; ends by itself."""
    from pliant_repro.bench import traffic as wire
    from pliant_repro.lab.rates import parse_rate

    wire.check_seconds(seconds)
    if (to is None) == (listen is None):
        raise ConfigError("bench traffic: give either --to HOST:PORT or --listen PORT")
    if listen is not None and not 0 <= listen < 65536:
        raise ConfigError(f"--listen {listen} is not a port: use a number from 1 to 65535, or 0 for any free one")
    check_writable(json_file)
    aside = sys.stderr if is_stdout(json_file) else None
    if to is not None:
        target, bits_per_s, count = wire.check_target(to), parse_rate(rate), wire.check_connections(connections)
        with exit_on_sigterm(), show_waiting(f"sending to {target} for {seconds:g} s"):
            done, verb = wire.send(target, bits_per_s, seconds, count), "sent"
    else:
        with exit_on_sigterm(), show_waiting(f"taking what comes for {seconds:g} s"):
            done = wire.sink(listen or 0, seconds, lambda where: print(f"listening on {where}", file=aside, flush=True))
        verb = "took"
    if not is_stdout(json_file):
        print(f"{verb} {done.num_bytes / 1e6:.1f} MB in {done.seconds:.2f} s, {done.bits_per_s / 1e6:.1f} Mbit/s")
    args = {"to": to, "listen": listen, "rate": rate, "seconds": seconds, "connections": connections}
    numbers = {"num_bytes": done.num_bytes, "seconds": done.seconds, "bits_per_s": done.bits_per_s}
    save_json({"bench": "traffic", "args": args, verb: numbers, "ok": True}, json_file)
