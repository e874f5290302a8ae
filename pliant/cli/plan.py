"""The `pliant plan` command: assigns the replicas of a job to devices, and proposes which devices to add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from pliant.cli.output import JsonFile, check_writable, is_stdout, option, parse_counts, parse_numbers, save_json
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.sched.planner import DevicePlan, Proposal, Types


def plan(
    replicas: Annotated[int, option("--replicas", "", "Number of replicas of the job (EasyScale's ESTs).")],
    speed: Annotated[str, option("--speed", "TYPE=S,...", "Replica-steps per second of one device of each type.")],
    have: Annotated[str, option("--have", "TYPE=N,...", "Devices that the job has.")] = "",
    free: Annotated[str, option("--free", "TYPE=N,...", "Devices it may ask for; default: any number.")] = "",
    executors: Annotated[
        str,
        option(
            "--executors",
            "TYPE=M,...",
            "Most worker processes on one device at a time (EasyScale's executors); default: 1.",
        ),
    ] = "",
    interference: Annotated[
        str,
        option(
            "--interference",
            "TYPE=F,...",
            "Share of its speed that each of several workers on a device keeps; default: 1.",
        ),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Plan which devices host which replicas of a job: how fast is it, and which further devices would help most?"""
    from pliant.sched.planner import DeviceType, best_plan, proposals

    speeds, fit, factors = (
        parse_numbers(speed, "--speed"),
        parse_counts(executors, "--executors"),
        parse_numbers(interference, "--interference"),
    )
    held, offered = parse_counts(have, "--have"), parse_counts(free, "--free")
    for flag, named in (("--have", held), ("--free", offered), ("--executors", fit), ("--interference", factors)):
        for name in named:
            if name not in speeds:
                raise ConfigError(f"{flag} {name}: its speed is not known; add it to --speed")
    if not speeds:
        raise ConfigError("--speed is empty: give at least one type, as in v100=3.1")
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: use 1 or more")
    check_writable(json_file)
    types = tuple(DeviceType(name, value, fit.get(name, 1), factors.get(name, 1.0)) for name, value in speeds.items())
    given = tuple(held.get(kind.name, 0) for kind in types)
    limits = tuple(offered.get(kind.name, 0) if free else replicas for kind in types)
    found = best_plan(replicas, types, given)
    wishes = proposals(replicas, types, given, limits)
    if json_file is not None:
        asked: dict[str, object] = {
            "replicas": replicas, "speed": speeds, "have": held, "free": offered if free else None, "executors": fit,
            "interference": factors,
        }  # fmt: skip
        save_json(_answer(asked, found, types, given, wishes), json_file)
    if not is_stdout(json_file):
        _print(replicas, found, types, given, wishes)


def _print(
    replicas: int, found: DevicePlan | None, types: Types, given: tuple[int, ...], wishes: Sequence[Proposal]
) -> None:
    console = Console(soft_wrap=True, markup=False, emoji=False)
    if found is None:
        console.print("no devices yet")
    else:
        table = Table(title=f"{replicas} replicas on {sum(given)} devices", title_justify="left")
        for number, column in enumerate(("type", "devices", "workers each", "replicas each", "speed", "idle")):
            table.add_column(column, justify="left" if number == 0 else "right")
        for kind, there, used, each, hosted in zip(
            types, given, found.used, found.executors, found.per_device, strict=True
        ):
            if there:
                table.add_row(kind.name, str(there), str(each), str(hosted), f"{kind.speed:g}", str(there - used))
        console.print(table)
        mapping = ",".join(str(hosted) for hosted, there in zip(found.per_device, given, strict=True) if there)
        console.print(
            f"A=({mapping})  step {found.overload:.4f} s  waste {found.waste:.1%}  perf {found.perf:.2f} replica-steps/s",
            highlight=False,
        )
        if found.idle:
            console.print(f"would give back: {_listed(found.idle)}", highlight=False)
    for number, wish in enumerate(wishes):
        console.print(
            f"{'next:' if number == 0 else '  or:'} +{wish.more} {wish.kind} -> {_listed(wish.plan.devices)}  perf {wish.plan.perf:.2f} "
            f"({wish.speedup:.2f}x, {wish.per_device:.3f} per device)  waste {wish.plan.waste:.1%}",
            highlight=False,
        )
    if not wishes:
        console.print("next: nothing; no device would make it faster at a waste of at most 30 %", highlight=False)


def _answer(
    asked: dict[str, object], found: DevicePlan | None, types: Types, given: tuple[int, ...], wishes: Sequence[Proposal]
) -> dict[str, object]:
    from pliant.machine import machine

    return {
        "bench": "plan",
        "args": asked,
        "ours": {"median_s": found.overload if found else None, "iqr_s": None},
        "peers": {},
        "bound": None,
        "replicas_per_device": {kind.name: hosted for kind, hosted, there in zip(types, found.per_device, given, strict=True) if there}
        if found else {},
        "assignment": [list(pair) for pair in found.assignment()] if found else [],
        "executors_per_device": {kind.name: each for kind, each, there in zip(types, found.executors, given, strict=True) if there}
        if found else {},
        "idle": found.idle if found else {},
        "overload": found.overload if found else None,
        "waste": found.waste if found else None,
        "perf": found.perf if found else None,
        "proposals": [
            {
                "type": wish.kind, "more": wish.more, "devices": wish.plan.devices, "speedup": wish.speedup,
                "inc_perf": wish.per_device, "waste": wish.plan.waste, "perf": wish.plan.perf,
                "replicas_per_device": {
                    kind.name: hosted for kind, hosted, used in zip(types, wish.plan.per_device, wish.plan.used, strict=True) if used
                },
            }
            for wish in wishes
        ],
        "machine": machine(),
        "ok": True,
        "remarks": ["sums of gradients are not counted"],
    }  # fmt: skip


def _listed(devices: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in devices.items())
