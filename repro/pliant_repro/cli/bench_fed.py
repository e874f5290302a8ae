"""The `pliant bench fed` command: federated learning's own speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from pliant.cli import completion
from pliant.cli.output import JsonCommand, JsonFile, wide_console
from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.cli.bench_output import measured, milliseconds, ratio


def register(bench: typer.Typer) -> None:
    """Add the command to `bench`."""
    bench.command("fed", cls=JsonCommand)(fed)


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
    if what == "select":
        given = {"clients": clients, "pick": pick, "preset": preset, "repeat": repeat, "peers": peers}
        _select(given, json_file)
    elif what == "simulate":
        given = {
            "clients": clients, "participants": pick, "steps": steps, "batch_size": batch_size, "rounds": rounds,
            "cores": cores, "batching": batching, "turns": repeat, "peers": peers,
        }  # fmt: skip
        _simulate(given, quick, json_file)
    else:
        raise ConfigError(f"--what {what!r}: use select or simulate")


def _select(given: Mapping[str, object], json_file: Path | None) -> None:
    from pliant_repro.bench.fed import selection

    options = selection.SelectOptions(**_told(given))
    args = {"what": "select", **{name: getattr(options, name) for name in given}}
    measured(json_file, lambda progress: selection.run(options, args, progress), _print)


def _simulate(given: Mapping[str, object], quick: bool, json_file: Path | None) -> None:
    from pliant_repro.bench.fed import simulate

    options = simulate.SimulateOptions(**_told(given))
    options = options.quick if quick else options
    args = {"what": "simulate", **{name: getattr(options, name) for name in given}}
    measured(json_file, lambda progress: simulate.run(options, args, progress), _print_simulated)


def _told(given: Mapping[str, object]) -> dict[str, Any]:
    """What was asked for; the rest has defaults of its own."""
    return {name: value for name, value in given.items() if value is not None}


def _print(result: Json) -> None:
    args = cast("Mapping[str, object]", result["args"])
    table = Table(title=f"{args['pick']} of {args['clients']:,} clients, Oort ({args['preset']})", title_justify="left")
    for name in ("have taken part", "ours ms", "IQR", "cpu ms", "peak MB", "loops ms", "speedup"):
        table.add_column(name, justify="right")
    for cell in cast("list[Mapping[str, Mapping[str, object]]]", result["cells"]):
        ours, loops = cell["ours"], cast("Mapping[str, object]", cell["peers"].get("loops", {}))
        table.add_row(
            f"{cast(float, cell['explored']):.0%}", milliseconds(ours["median_s"]), milliseconds(ours["iqr_s"]),
            milliseconds(ours["cpu_s"]), f"{cast(int, ours['peak_bytes']) / 1e6:.0f}",
            milliseconds(loops.get("median_s")), ratio(loops.get("speedup"), "x"),
        )  # fmt: skip
    wide_console().print(table)
    verdict = "holds" if result["ok"] else "DOES NOT HOLD"
    wide_console().print(f"{verdict}: at most 100 ms for a selection, and less than 500 MB", highlight=False)


def _print_simulated(result: Json) -> None:
    args = cast("Mapping[str, object]", result["args"])
    title = f"{args['participants']} of {args['clients']} clients a round, {args['steps']} steps of {args['batch_size']} samples"
    table = Table(title=title, title_justify="left")
    for name in ("", "clients/s", "least turn", "most", "round ms", "IQR", "ours is"):
        table.add_column(name, justify="right")
    sides = {"ours": result["ours"], **cast("Mapping[str, object]", result["peers"])}
    for name, side in sides.items():
        numbers = cast("Mapping[str, object]", side)
        turns = cast("list[float]", numbers.get("turns_clients_per_s")) or [0.0]
        table.add_row(
            name, ratio(numbers["clients_per_s"], ""), f"{min(turns):.3g}", f"{max(turns):.3g}",
            milliseconds(numbers.get("median_s")), milliseconds(numbers.get("iqr_s")),
            ratio(numbers.get("speedup"), "x") if name != "ours" else "",
        )  # fmt: skip
    wide_console().print(table)
    if "flower" in sides:
        verdict = "holds" if result["ok"] else "DOES NOT HOLD"
        wide_console().print(
            f"{verdict}: at least twice as many clients per second as Flower's simulation", highlight=False
        )
