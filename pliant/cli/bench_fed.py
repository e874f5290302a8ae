"""The `pliant bench fed` command: federated learning's own speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from pliant.bench.report import Json
from pliant.cli.bench_output import check_writable, ended_by_sigterm, milliseconds, ratio, shown_progress
from pliant.errors import ConfigError


def register(bench: typer.Typer) -> None:
    """Add the command to `bench`."""
    bench.command("fed")(fed)


def fed(
    what: Annotated[str, typer.Option("--what", help="select: picking the participants of a round.")] = "select",
    clients: Annotated[int, typer.Option("--clients", help="To pick from.")] = 1_000_000,
    pick: Annotated[int, typer.Option("--pick", help="How many are picked.")] = 100,
    preset: Annotated[str, typer.Option("--preset", help="Of Oort: paper, artifact, fedscale.")] = "paper",
    repeat: Annotated[int, typer.Option("--repeat", help="Selections that count.")] = 10,
    peers: Annotated[str, typer.Option("--peers", help="loops (the same in plain Python) or none.")] = "loops",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Everything, as one object.")] = None,
) -> None:
    """How long it takes to pick participants, beside plain Python, and how much memory."""
    from pliant.bench import fed_select

    if what == "simulate":
        raise ConfigError("--what simulate: clients per second are not measured by this version yet; use --what select")
    if what != "select":
        raise ConfigError(f"--what {what!r}: use select")
    options = fed_select.SelectOptions(clients=clients, pick=pick, preset=preset, repeat=repeat, peers=peers)
    args = {"what": what, "clients": clients, "pick": pick, "preset": preset, "repeat": repeat, "peers": peers}
    check_writable(json_file)
    with ended_by_sigterm(), shown_progress() as progress:
        result = fed_select.run(options, args, progress)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    _print(result)
    if not result["ok"]:
        raise typer.Exit(1)


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
    console = Console(width=120) if not Console().is_terminal else Console()
    console.print(table)
    verdict = "holds" if result["ok"] else "DOES NOT HOLD"
    console.print(f"{verdict}: at most 100 ms for a selection, and less than 500 MB", highlight=False)
    for remark in cast("list[str]", result["remarks"]):
        console.print(f"note: {remark}", highlight=False, markup=False)
