"""The `pliant bench` commands: measure ours beside its peers and beside what the hardware allows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pliant.cli import completion
from pliant.cli.output import (
    JsonCommand,
    JsonFile,
    check_time,
    check_writable,
    exit_on_sigterm,
    is_stdout,
    save_json,
    show_progress,
    show_waiting,
)
from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.cli import bench_tables as tables

if TYPE_CHECKING:
    from pliant.comm.topology import Topology
    from pliant_repro.contest import Progress


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(help="Measure ours beside its peers, interleaved, in one run.", no_args_is_help=True)
    for command in (allreduce, traffic, train, replicas, resize, recover, priority, preemption, fed):
        bench.command(command.__name__, cls=JsonCommand)(command)
    app.add_typer(bench, name="bench")


def _measure(json_file: Path | None, measure: Callable[[Progress], Json], show: Callable[[Json], None]) -> None:
    """Measure, save the result where `--json` says, show it with its remarks, and exit with 1 if it is not ok."""
    check_writable(json_file)
    with exit_on_sigterm(), show_progress() as progress:
        result = measure(progress)
    save_json(result, json_file)
    if not is_stdout(json_file):
        show(result)
        for remark in cast("list[str]", result["remarks"]):
            tables.say(f"note: {remark}")
    if not result["ok"]:
        raise typer.Exit(1)


def _model(*names: str) -> Any:
    known = f"{', '.join(names[:-1])} or {names[-1]}."
    return typer.Option("--model", help=known, autocompletion=completion.one_of(*names))


AnyModel = Annotated[str, _model("resnet18", "transformer", "resnet50", "small")]
QuickModel = Annotated[str, _model("resnet18", "transformer", "small")]
Batch = Annotated[int, typer.Option("--batch", help="Samples of a replica's step; 0: by model.")]
Size = Annotated[int, typer.Option("--size", help="Pixels or words of a sample; 0: by model.")]
FixedBatch = Annotated[int, typer.Option("--batch", help="Samples of a replica's step.")]
FixedSize = Annotated[int, typer.Option("--size", help="Pixels or words of a sample.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.", autocompletion=completion.one_of("cpu", "cuda"))]


# --- communication ---


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
    from pliant_repro.contest import Rules

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
        _dump_graphs(bench.graphs(options), json_file)
        return
    args: dict[str, object] = {
        "np": num_workers, "model": model, "mode": mode, "fuse": fuse, "strategy": options.strategy,
        "peers": list(options.peers), "lab": lab, "repeat": repeat, "iterations": iterations, "warmup": warmup,
        "dtype": dtype, "determinism": determinism, "check": check,
    }  # fmt: skip
    _measure(json_file, lambda progress: bench.run(options, args, progress), tables.show_allreduce)


def _dump_graphs(graphs: Iterable[tuple[str, int, Topology]], json_file: Path | None) -> None:
    """Print who sends to whom in each of a strategy's topologies."""
    found = [(name, number, graph.reduce_edges, graph.bcast_edges) for name, number, graph in graphs]
    keys = ("strategy", "number", "reduce", "broadcast")
    save_json({"graphs": [dict(zip(keys, each, strict=True)) for each in found]}, json_file)
    if not is_stdout(json_file):
        for name, number, *both in found:
            reduce, broadcast = (" ".join(f"{a}->{b}" for a, b in edges) or "-" for edges in both)
            print(f"{name}[{number}] reduce {reduce}  broadcast {broadcast}")


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
    from pliant_repro.bench import traffic as bench
    from pliant_repro.lab.rates import parse_rate

    bench.check_seconds(seconds)
    if (to is None) == (listen is None):
        raise ConfigError("bench traffic: give either --to HOST:PORT or --listen PORT")
    if listen is not None and not 0 <= listen < 65536:
        raise ConfigError(f"--listen {listen} is not a port: use a number from 1 to 65535, or 0 for any free one")
    check_writable(json_file)
    aside = sys.stderr if is_stdout(json_file) else None
    if to is not None:
        target, bits_per_s, count = bench.check_target(to), parse_rate(rate), bench.check_connections(connections)
        with exit_on_sigterm(), show_waiting(f"sending to {target} for {seconds:g} s"):
            done, verb = bench.send(target, bits_per_s, seconds, count), "sent"
    else:
        announce = lambda where: print(f"listening on {where}", file=aside, flush=True)  # noqa: E731
        with exit_on_sigterm(), show_waiting(f"taking what comes for {seconds:g} s"):
            done, verb = bench.sink(listen or 0, seconds, announce), "took"
    if not is_stdout(json_file):
        print(f"{verb} {done.num_bytes / 1e6:.1f} MB in {done.seconds:.2f} s, {done.bits_per_s / 1e6:.1f} Mbit/s")
    args = {"to": to, "listen": listen, "rate": rate, "seconds": seconds, "connections": connections}
    numbers = {"num_bytes": done.num_bytes, "seconds": done.seconds, "bits_per_s": done.bits_per_s}
    save_json({"bench": "traffic", "args": args, verb: numbers, "ok": True}, json_file)


# --- training ---


def train(
    np: Annotated[str, typer.Option("-np", "--np", metavar="N,...", help="Numbers of workers.")] = "1,2,4",
    model: AnyModel = "resnet18",
    peers: Annotated[str, typer.Option("--peers", help="ddp_gloo, and ddp_gloo_views.")] = "ddp_gloo",
    batch: Batch = 0,
    size: Size = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="Rounds; everyone has a window in each.")] = 15,
    steps: Annotated[int, typer.Option("--steps", help="Steps in a window.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps before the first round.")] = 3,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Steps per second: ours beside plain PyTorch (one worker) and DDP on gloo (several), interleaved."""
    from pliant_repro.bench import train as bench
    from pliant_repro.contest import Rules, parse_counts, split_words

    rules = Rules(rounds=repeat, iterations=steps, warmup=warmup, timeout_s=600.0)
    counts, names = parse_counts(np, "-np"), split_words(peers)
    options = bench.TrainOptions(
        num_workers=counts, model=model, peers=names, batch=batch, size=size, rules=rules, device=device
    )
    args = {
        "np": list(counts), "model": model, "peers": list(names), "batch": batch, "size": size, "repeat": repeat,
        "steps": steps, "warmup": warmup, "device": device,
    }  # fmt: skip
    _measure(json_file, lambda progress: bench.run(options, args, progress), tables.show_train)


def replicas(
    counts: Annotated[str, typer.Option("--replicas", metavar="N,...", help="Replicas on one worker.")] = "1,2,4,8,16",
    model: AnyModel = "resnet18",
    batch: Batch = 0,
    size: Size = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="Windows with switching, and as many without.")] = 10,
    steps: Annotated[int, typer.Option("--steps", help="Steps in a window, with 4 replicas.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps before the first window.")] = 2,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Several replicas on one worker: the share of a step that switching takes, memory, samples per second."""
    from pliant_repro.bench import replicas as bench
    from pliant_repro.contest import parse_counts

    numbers = parse_counts(counts, "--replicas")
    same: dict[str, Any] = {
        "model": model, "batch": batch, "size": size, "steps": steps, "warmup": warmup, "device": device
    }  # fmt: skip
    options = bench.ReplicasOptions(replicas=numbers, windows=repeat, **same)
    args = {"replicas": list(numbers), "repeat": repeat, **same}
    _measure(json_file, lambda progress: bench.run(options, args, progress), tables.show_replicas)


def resize(
    np: Annotated[int, typer.Option("-np", "--np", help="Workers, when there are many.")] = 4,
    to: Annotated[int, typer.Option("--to", help="Workers, when there are few.")] = 2,
    repeat: Annotated[int, typer.Option("--repeat", help="Changes in each direction.")] = 20,
    model: QuickModel = "resnet18",
    batch: FixedBatch = 2,
    size: FixedSize = 32,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a change may take.")] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """How long a job stands still when it shrinks and when it grows."""
    from pliant_repro.bench import resize as bench
    from pliant_repro.bench.elastic import ElasticOptions

    check_time(timeout, "--timeout")
    same: dict[str, Any] = {"repeat": repeat, "model": model, "batch": batch, "size": size}
    options = ElasticOptions(num_workers=np, small=to, timeout_s=timeout, **same)
    args = {"np": np, "to": to, **same}
    _measure(json_file, lambda progress: bench.run_resize(options, args, progress), tables.show_resize)


def recover(
    np: Annotated[int, typer.Option("-np", "--np", help="Workers.")] = 4,
    repeat: Annotated[int, typer.Option("--repeat", help="Kills.")] = 20,
    model: QuickModel = "resnet18",
    batch: FixedBatch = 2,
    size: FixedSize = 32,
    seed: Annotated[int, typer.Option("--seed", help="Of whom to kill, and when.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a recovery may take.")] = 60.0,
    json_file: JsonFile = None,
) -> None:
    """kill -9 to the next step of the survivors, again and again."""
    from pliant_repro.bench import resize as bench
    from pliant_repro.bench.elastic import ElasticOptions

    check_time(timeout, "--timeout")
    same: dict[str, Any] = {"repeat": repeat, "model": model, "batch": batch, "size": size, "seed": seed}
    options = ElasticOptions(num_workers=np, small=1, timeout_s=timeout, **same)
    args = {"np": np, **same}
    _measure(json_file, lambda progress: bench.run_recover(options, args, progress), tables.show_recover)


# --- slow networks ---


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
    from pliant_repro.bench import priority as bench
    from pliant_repro.bench.ssh_hosts import hosts_of_ranks, read_hosts
    from pliant_repro.contest import split_words

    machines = read_hosts(hosts) if hosts is not None else ()
    real = compute == "real" or (compute is None and ":" in model)
    count = len(hosts_of_ranks(machines)) if machines else nodes if nodes is not None else 2 if real else 4
    if machines and nodes is not None and nodes != count:
        raise ConfigError(f"--nodes {nodes}, but --hosts {hosts} has {count} slots: leave one of them out")
    same: dict[str, Any] = {"size": size, "repeat": repeat, "iters": iters, "warmup": warmup}
    options = bench.PriorityOptions(
        model=model,
        nodes=count,
        rates=bench.parse_rates(rate),
        modes=split_words(modes),
        compute="real" if real else compute or "paced",
        slices=bench.parse_slices(slices),
        batch=bench.choose_batch(batch, os.environ),
        hosts=machines,
        utilisation=utilisation,
        trace=trace,
        **same,
    )
    args: dict[str, object] = {
        "model": model, "nodes": count, "rate": rate, "modes": list(options.modes), "compute": options.compute,
        "slice": slices, "batch": options.samples, **same, "hosts": [host.host for host in machines] or None,
        "utilisation": utilisation, "trace": str(trace) if trace else None,
    }  # fmt: skip
    check_writable(trace, "--trace")
    _measure(json_file, lambda progress: bench.run(options, args, progress), tables.show_priority)


def _validate(path: Path, json_file: Path | None) -> None:
    from pliant_repro.bench import priority_verdict

    check_writable(json_file)
    result = priority_verdict.load(path)
    try:
        checks = priority_verdict.judge(result)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--validate {path}: a cell of it is damaged ({error!r}); measure again with --json FILE"
        ) from None
    failed = [check for check in checks if check.ok is False]
    done = [check for check in checks if check.ok]
    ok = bool(done) and not failed
    save_json({"validated": str(path), "checks": [asdict(check) for check in checks], "ok": ok}, json_file)
    if not is_stdout(json_file):
        for check in checks:
            print(check)
        print(f"{len(done)} hold, {len(failed)} do not, {len(checks) - len(done) - len(failed)} not judged")
    if not ok:
        raise typer.Exit(1)


def preemption(
    nodes: Annotated[int, typer.Option("--nodes", help="Workers, each on a host.")] = 2,
    rate: Annotated[str, typer.Option("--rate", help="What each host may send.")] = "100mbit",
    iters: Annotated[int, typer.Option("--iters", help="Steps of each way that count.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """From the first layer's gradient to its new value, while 10 MB of the last layer are under way."""
    from pliant_repro.lab.rates import parse_rate

    bits_per_s = parse_rate(rate)
    if bits_per_s is None:
        raise ConfigError("--rate none: without a limit nothing has to wait; use a rate such as 100mbit")
    if not 2 <= nodes <= 64 or iters < 1:
        raise ConfigError(f"--nodes {nodes} --iters {iters}: use 2 to 64 nodes, and 1 step or more")
    args = {"nodes": nodes, "rate": rate, "iters": iters}

    def measure(progress: Progress) -> Json:
        from pliant_repro.bench import preemption as bench

        return bench.run(nodes, bits_per_s, iters, args, progress)

    _measure(json_file, measure, tables.show_preemption)


# --- federated learning ---


def fed(
    what: Annotated[
        str,
        typer.Option(
            "--what",
            help="select: picking a round's participants. simulate: clients per second, beside Flower.",
            autocompletion=completion.one_of("select", "simulate"),
        ),
    ] = "select",
    clients: Annotated[int | None, typer.Option("--clients", help="In all; 1,000,000, or 100 to simulate.")] = None,
    pick: Annotated[int | None, typer.Option("--pick", help="Of a round; 100, or 20 to simulate.")] = None,
    preset: Annotated[str, typer.Option("--preset", help="select: Oort's, paper, artifact or fedscale.")] = "paper",
    steps: Annotated[int, typer.Option("--steps", help="simulate: of a client in a round.")] = 10,
    batch_size: Annotated[int, typer.Option("--batch-size", help="simulate: samples of a step.")] = 20,
    rounds: Annotated[int, typer.Option("--rounds", help="simulate: of a turn, that count.")] = 15,
    cores: Annotated[int, typer.Option("--cores", help="simulate: of each side; 0 for all.")] = 0,
    batching: Annotated[
        int | None, typer.Option("--batching", help="simulate: our clients trained at once; by default as measured.")
    ] = None,
    repeat: Annotated[int | None, typer.Option("--repeat", help="Selections that count (10), or turns (4).")] = None,
    peers: Annotated[
        str | None, typer.Option("--peers", help="select: loops (plain Python); simulate: flower,bare; or none.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="simulate: one turn of two rounds, to see that it runs.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """How long it takes to pick participants, and how many clients are trained in a second, beside others."""
    from pliant_repro.bench import fed_select, fed_simulate

    given: dict[str, Any]
    if what == "select":
        given = {"clients": clients, "pick": pick, "preset": preset, "repeat": repeat, "peers": peers}
        select = fed_select.SelectOptions(**_without_none(given))
        chosen = {"what": what, **{name: getattr(select, name) for name in given}}
        _measure(json_file, lambda progress: fed_select.run(select, chosen, progress), tables.show_selection)
    elif what == "simulate":
        given = {
            "clients": clients, "participants": pick, "steps": steps, "batch_size": batch_size, "rounds": rounds,
            "cores": cores, "batching": batching, "turns": repeat, "peers": peers,
        }  # fmt: skip
        options = fed_simulate.SimulateOptions(**_without_none(given))
        simulate = options.quick if quick else options
        args = {"what": what, **{name: getattr(simulate, name) for name in given}}
        _measure(json_file, lambda progress: fed_simulate.run(simulate, args, progress), tables.show_simulation)
    else:
        raise ConfigError(f"--what {what!r}: use select or simulate")


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    """Return what was asked for; the rest has defaults of its own."""
    return {name: value for name, value in given.items() if value is not None}
