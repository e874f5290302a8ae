"""The `pliant bench` commands: measure ours beside its peers and beside what the hardware allows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from pliant.cli import completion
from pliant.cli.output import (
    JsonCommand,
    JsonFile,
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
    from pliant_repro.contest import Progress

T = TypeVar("T")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    bench = typer.Typer(help="Measure ours beside its peers, interleaved, in one run.", no_args_is_help=True)
    for command in (allreduce, orders, traffic, train, gpu, resize, recover, soak, priority, preemption, fed):
        bench.command(command.__name__, cls=JsonCommand)(command)
    app.add_typer(bench, name="bench")


def _measure(
    run: Callable[[T, Mapping[str, object], Progress], Json],
    options: T,
    args: Mapping[str, object],
    show: Callable[[Json], None],
    json_file: Path | None,
) -> None:
    """Measure, save the result where `--json` says, show it with its remarks, and exit with 1 if it is not ok."""
    check_writable(json_file)
    with exit_on_sigterm(), show_progress() as progress:
        result = run(options, args, progress)
    save_json(result, json_file)
    if not is_stdout(json_file):
        show(result)
        for remark in cast("list[str]", result["remarks"]):
            tables.say(f"note: {remark}")
    if not result["ok"]:
        raise typer.Exit(1)


def _choice(flag: str, text: str, *words: str) -> Any:
    return typer.Option(flag, help=text, autocompletion=completion.one_of(*words))


Workers = Annotated[int, typer.Option("-np", "--np", help="Workers, when there are many.")]
TrainedModel = Annotated[
    str, _choice("--model", "resnet18, transformer, resnet50 or small.", "resnet18", "transformer", "resnet50", "small")
]
Batch = Annotated[int, typer.Option("--batch", help="Samples of a replica's step; 0: by model.")]
Size = Annotated[int, typer.Option("--size", help="Pixels or words of a sample; 0: by model.")]
Repeat = Annotated[int, typer.Option("--repeat", help="Rounds; everyone has a turn in each.")]


# --- communication ---


def allreduce(
    np: Annotated[int | None, typer.Option("-np", "--np", help="Workers; 4, or one per host of --lab.")] = None,
    model: Annotated[
        str, _choice("--model", "resnet50, vgg16, bert or slp.", "resnet50", "vgg16", "bert", "slp")
    ] = "resnet50",
    fuse: Annotated[bool, typer.Option("--fuse", help="All tensors as one.")] = False,
    strategy: Annotated[
        str, typer.Option("-strategy", "--strategy", help="A topology's name.", autocompletion=completion.strategies)
    ] = "AUTO",
    device: Annotated[str, _choice("--device", "cpu, or cuda with a GPU for each worker.", "cpu", "cuda")] = "cpu",
    peers: Annotated[
        str | None,
        typer.Option("--peers", help="gloo,openmpi,group; with cuda nccl,host; or none.", show_default="gloo,openmpi"),
    ] = None,
    lab: Annotated[str | None, typer.Option("--lab", metavar="hosts=4,rate=1gbit", help="Between hosts.")] = None,
    repeat: Repeat = 10,
    iterations: Annotated[int, typer.Option("--iterations", help="All-reduces of the whole model in a turn.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """All-reduce a model's gradients: ours, gloo, Open MPI, and the bound of the hardware, interleaved."""
    from pliant_repro.bench import allreduce as bench
    from pliant_repro.contest import Rules

    place = bench.parse_lab(lab) if lab is not None else None
    options = bench.AllreduceOptions(
        num_workers=np if np is not None else place.num_hosts if place is not None else 4,
        model=model,
        fuse=fuse,
        strategy=strategy.upper(),
        device=device,
        peers=bench.parse_peers(peers, device),
        lab=place,
        rules=Rules(rounds=repeat, iterations=iterations),
    )
    args = {
        "np": options.num_workers, "model": model, "fuse": fuse, "strategy": options.strategy, "device": device,
        "peers": list(options.peers), "lab": lab, "repeat": repeat, "iterations": iterations,
    }  # fmt: skip
    _measure(bench.run, options, args, tables.show_allreduce, json_file)


def orders(
    np: Annotated[int, typer.Option("-np", "--np", help="Workers, each with a host of its own.")] = 4,
    replicas: Annotated[int, typer.Option("--replicas", help="N, the replicas of the job.")] = 16,
    model: TrainedModel = "resnet18",
    batch: Annotated[int, typer.Option("--batch", help="Samples of a replica's step.")] = 2,
    size: Annotated[int, typer.Option("--size", help="Pixels or words of a sample.")] = 32,
    steps: Annotated[int, typer.Option("--steps", help="Steps that are counted.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Bytes between hosts and gradients in memory: the order of DDP beside the tree, with several replicas per worker."""
    from pliant_repro.bench import orders as bench

    args = {"np": np, "replicas": replicas, "model": model, "batch": batch, "size": size, "steps": steps}
    options = bench.OrdersOptions(num_workers=np, replicas=replicas, model=model, batch=batch, size=size, steps=steps)
    _measure(bench.run, options, args, tables.show_orders, json_file)


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
    from pliant_repro.contest import form
    from pliant_repro.lab.rates import parse_rate

    if (to is None) == (listen is None):
        raise ConfigError("bench traffic: give either --to HOST:PORT or --listen PORT")
    if listen is not None and not 0 <= listen < 65536:
        raise ConfigError(f"--listen {listen} is not a port: use a number from 1 to 65535, or 0 for any free one")
    bench.check_amounts(seconds, connections)
    check_writable(json_file)
    aside = sys.stderr if is_stdout(json_file) else None
    if to is not None:
        target, bits_per_s = bench.check_target(to), parse_rate(rate)
        with exit_on_sigterm(), show_waiting(f"sending to {target} for {seconds:g} s"):
            done, verb = bench.send(target, bits_per_s, seconds, connections), "sent"
    else:
        announce = lambda where: print(f"listening on {where}", file=aside, flush=True)  # noqa: E731
        with exit_on_sigterm(), show_waiting(f"taking what comes for {seconds:g} s"):
            done, verb = bench.sink(listen or 0, seconds, announce), "took"
    if not is_stdout(json_file):
        print(f"{verb} {done.num_bytes / 1e6:.1f} MB in {done.seconds:.2f} s, {done.bits_per_s / 1e6:.1f} Mbit/s")
    args = {"to": to, "listen": listen, "rate": rate, "seconds": seconds, "connections": connections}
    numbers = {**asdict(done), "bits_per_s": done.bits_per_s}
    save_json(form("traffic", args, True, [], ours=numbers, **{verb: numbers}), json_file)


# --- training ---


def train(
    np: Annotated[str, typer.Option("-np", "--np", metavar="N,...", help="Numbers of workers.")] = "1,2,4",
    model: TrainedModel = "resnet18",
    batch: Batch = 0,
    size: Size = 0,
    repeat: Repeat = 15,
    steps: Annotated[int, typer.Option("--steps", help="Steps of a turn.")] = 5,
    device: Annotated[str, _choice("--device", "cpu or cuda.", "cpu", "cuda")] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Steps per second: ours beside plain PyTorch (one worker) and DDP on gloo (several), interleaved."""
    from pliant_repro.bench import train as bench
    from pliant_repro.contest import Rules, parse_counts

    counts = parse_counts(np, "-np")
    same: dict[str, Any] = {"model": model, "batch": batch, "size": size, "device": device}
    rules = Rules(rounds=repeat, iterations=steps, warmup=3, timeout_s=600.0)
    options = bench.TrainOptions(num_workers=counts, rules=rules, **same)
    args = {"np": list(counts), **same, "repeat": repeat, "steps": steps}
    _measure(bench.run, options, args, tables.show_train, json_file)


def gpu(
    part: Annotated[
        str,
        typer.Argument(
            metavar="PART",
            help="step, memory, bits, changes, live, packed or profile; all: all but the last, one after another.",
            autocompletion=completion.one_of("step", "memory", "bits", "changes", "live", "packed", "profile", "all"),
        ),
    ],
    models: Annotated[
        str, typer.Option("--models", help="Some of gpt2,resnet50,lstm,vit,lstm-dropout; default: by part.")
    ] = "",
    modes: Annotated[str, typer.Option("--modes", help="eager,compiled; default: by part.")] = "",
    device: Annotated[str, _choice("--device", "cuda or cpu.", "cuda", "cpu")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Small networks, to try this on a CPU.")] = False,
    replicas: Annotated[int, typer.Option("--replicas", help="N, where there are several.")] = 4,
    batch: Batch = 0,
    size: Size = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="Rounds, or changes of each kind, at most; 0: by part.")] = 0,
    steps: Annotated[int, typer.Option("--steps", help="Steps of a turn, or steps to compare; 0: by part.")] = 0,
    limit: Annotated[float, typer.Option("--limit", help="Seconds in which the part, or all, are to end.")] = 420.0,
    order: Annotated[str, typer.Option("--order", help="Order of sums, as pliant.join takes it.")] = "",
    gradients: Annotated[str, typer.Option("--gradients", help="Where they are kept, as pliant.join takes it.")] = "",
    sync: Annotated[str, typer.Option("--sync", help="How sums travel, as pliant.join takes it.")] = "",
    autocast: Annotated[bool, typer.Option("--autocast/--float32", help="Forward passes in bfloat16.")] = True,
    old: Annotated[
        Path | None, typer.Option("--old", metavar="DIR", help="packed: a checkout of version 0.1 to measure, too.")
    ] = None,
    traces: Annotated[Path | None, typer.Option("--traces", metavar="DIR", help="profile: keep the traces.")] = None,
    parts: Annotated[str, typer.Option("--parts", help="all: only these, such as step,packed,live.")] = "",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="all: where each part's result goes.")] = Path("."),
    json_file: JsonFile = None,
) -> None:
    """Training on one GPU beside plain PyTorch and DDP: time, memory, bits and changes of the workers."""
    from pliant_repro.bench import gpu as bench
    from pliant_repro.bench.gpu_parts import GpuOptions
    from pliant_repro.contest import split_words

    same: dict[str, Any] = {
        "device": device, "tiny": tiny, "replicas": replicas, "batch": batch, "size": size, "repeat": repeat,
        "steps": steps, "order": order, "gradients": gradients, "sync": sync, "autocast": autocast,
    }  # fmt: skip
    some: dict[str, Any] = {"models": split_words(models), "modes": split_words(modes), "old": old, "traces": traces}
    options = GpuOptions(part=bench.PARTS[0] if part == "all" else part, limit_s=limit, **some, **same)
    args = {"part": part, "cells": options.cells, **same, "limit": limit, "old": str(old) if old else None}
    if part != "all":
        _measure(bench.run, options, args, tables.show_gpu, json_file)
        return
    chosen = split_words(parts)
    bench.phases_of(chosen)  # complains before anything is started
    out.mkdir(parents=True, exist_ok=True)

    def run(options: GpuOptions, args: Mapping[str, object], progress: Progress) -> Json:
        return bench.run_all(options, chosen, out, args, progress, save_json)

    _measure(run, options, {**args, "cells": None, "parts": chosen}, tables.show_gpu, json_file)


def resize(
    np: Workers = 4,
    to: Annotated[int, typer.Option("--to", help="Workers, when there are few.")] = 2,
    repeat: Annotated[int, typer.Option("--repeat", help="Changes in each direction.")] = 20,
    model: TrainedModel = "resnet18",
    batch: Batch = 2,
    size: Size = 32,
    json_file: JsonFile = None,
) -> None:
    """How long a job stands still when it shrinks and when it grows."""
    from pliant_repro.bench import resize as bench
    from pliant_repro.bench.elastic import ElasticOptions

    same: dict[str, Any] = {"repeat": repeat, "model": model, "batch": batch, "size": size}
    options = ElasticOptions(num_workers=np, small=to, **same)
    _measure(bench.run_resize, options, {"np": np, "to": to, **same}, tables.show_resize, json_file)


def recover(
    np: Workers = 4,
    repeat: Annotated[int, typer.Option("--repeat", help="Kills.")] = 20,
    model: TrainedModel = "resnet18",
    batch: Batch = 2,
    size: Size = 32,
    json_file: JsonFile = None,
) -> None:
    """kill -9 to the next step of the survivors, again and again."""
    from pliant_repro.bench import resize as bench
    from pliant_repro.bench.elastic import ElasticOptions

    same: dict[str, Any] = {"repeat": repeat, "model": model, "batch": batch, "size": size}
    options = ElasticOptions(num_workers=np, small=1, **same)
    _measure(bench.run_recover, options, {"np": np, **same}, tables.show_recover, json_file)


# --- slow networks ---


def soak(
    minutes: Annotated[float, typer.Option("--minutes", help="How long.")] = 5.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the stream of faults.")] = 1,
    faults: Annotated[
        str, typer.Option("--faults", metavar="KIND,...", help="Which kinds; default: all that can be here.")
    ] = "",
    hosts: Annotated[int, typer.Option("--hosts", help="Hosts, with two slots each.")] = 3,
    lab: Annotated[
        bool | None,
        typer.Option("--lab/--no-lab", help="Network namespaces or loopback addresses; default: as this machine can."),
    ] = None,
    logs: Annotated[
        str, typer.Option("--logs", metavar="DIR", help="Keep the logs here; default: only if something is wrong.")
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """A real job under random faults, beside the digests of stock DDP: lost steps, wrong bits, hangs, leaks."""
    from pliant_repro.bench import soak as bench
    from pliant_repro.bench.soak_plan import parse_fault_kinds
    from pliant_repro.lab.hosts import missing_for_lab

    missing = missing_for_lab() if lab is not False else []
    if lab and missing:
        raise ConfigError(f"--lab: {'; '.join(missing)}")
    in_lab = lab is not False and not missing
    kinds = parse_fault_kinds(faults, in_lab=in_lab)
    check_writable(json_file)
    options = bench.SoakOptions(minutes=minutes, seed=seed, kinds=kinds, num_hosts=hosts, in_lab=in_lab, keep_logs=logs)
    args = {"minutes": minutes, "seed": seed, "faults": ",".join(kinds), "hosts": hosts, "lab": in_lab}
    aside = sys.stderr if is_stdout(json_file) else None
    with exit_on_sigterm():
        result = bench.run(options, args, lambda line: print(line, file=aside, flush=True))
    save_json(result, json_file)
    if not result["ok"]:
        raise typer.Exit(1)


def priority(
    model: Annotated[
        str,
        _choice(
            "--model",
            "resnet50, inception-v3, vgg, sockeye, or module:function (real).",
            *("resnet50", "inception-v3", "vgg", "sockeye"),
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
        _choice("--compute", "paced: layers sleep as long as a GPU would compute; real.", "paced", "real"),
    ] = None,
    slices: Annotated[
        str, typer.Option("--slice", metavar="auto|1k,2k,...", help="Parameters per slice; several: a sweep.")
    ] = "auto",
    batch: Annotated[
        int, typer.Option("--batch", envvar="BATCH_SIZE", help="Samples of a step; 0: 32, or by model with real.")
    ] = 0,
    size: Annotated[int, typer.Option("--size", help="Pixels or words of a sample, with real; 0: by model.")] = 0,
    repeat: Repeat = 5,
    iters: Annotated[int, typer.Option("--iters", help="Timed steps of a turn.")] = 30,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps of every mode at a new rate, not timed.")] = 10,
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="JSON list of hosts to use over ssh.")
    ] = None,
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
    same: dict[str, Any] = {"model": model, "nodes": count, "size": size, "repeat": repeat, "iters": iters}
    options = bench.PriorityOptions(
        rates=bench.parse_rates(rate),
        modes=split_words(modes),
        compute="real" if real else compute or "paced",
        slices=bench.parse_slices(slices),
        batch=batch,
        warmup=warmup,
        hosts=machines,
        **same,
    )
    args = {
        **same, "rate": rate, "modes": list(options.modes), "compute": options.compute, "slice": slices,
        "batch": options.samples, "warmup": warmup, "hosts": [host.host for host in machines] or None,
    }  # fmt: skip
    _measure(bench.run, options, args, tables.show_priority, json_file)


def _validate(path: Path, json_file: Path | None) -> None:
    from pliant_repro.bench import priority_verdict
    from pliant_repro.contest import form

    check_writable(json_file)
    checks = priority_verdict.judge_file(path)
    failed = [check for check in checks if check.ok is False]
    done = [check for check in checks if check.ok]
    ok = bool(done) and not failed
    told = [asdict(check) for check in checks]
    save_json(form("priority", {"validate": str(path)}, ok, [], checks=told), json_file)
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
    from pliant_repro.bench import preemption as bench  # imported late: it loads torch

    args = {"nodes": nodes, "rate": rate, "iters": iters}
    _measure(bench.run, bench.PreemptionOptions(nodes, bits_per_s, iters), args, tables.show_preemption, json_file)


# --- federated learning ---


def fed(
    what: Annotated[
        str,
        _choice(
            "--what",
            "select: picking a round's participants. simulate: clients per second, beside Flower.",
            *("select", "simulate"),
        ),
    ] = "select",
    clients: Annotated[int | None, typer.Option("--clients", help="In all; 1,000,000, or 100 to simulate.")] = None,
    pick: Annotated[int | None, typer.Option("--pick", help="Of a round; 100, or 20 to simulate.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="simulate: of a turn, that count; 15.")] = None,
    repeat: Annotated[int | None, typer.Option("--repeat", help="Selections that count (10), or turns (4).")] = None,
    json_file: JsonFile = None,
) -> None:
    """How long it takes to pick participants, and how many clients are trained in a second, beside others."""
    from pliant_repro.bench import fed as bench

    given = {"clients": clients, "pick": pick, "rounds": rounds, "repeat": repeat}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if what == "select":
        asked.pop("rounds", None)
        select = bench.SelectOptions(**asked)
        _measure(bench.run_select, select, {"what": what, **asdict(select)}, tables.show_selection, json_file)
    elif what == "simulate":
        simulate = bench.SimulateOptions(**asked)
        _measure(bench.run_simulate, simulate, {"what": what, **asdict(simulate)}, tables.show_simulation, json_file)
    else:
        raise ConfigError(f"--what {what!r}: use select or simulate")
