"""The `pliant reproduce` command: runs the experiments of the artifact documents and draws their figures."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.bench.report import Json
    from pliant.experiments.figures import Figure, Options, TableRows


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("reproduce")(reproduce)


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME... | all", show_default=False)] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Say which figures there are.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where NAME.json and NAME.png go.")] = Path(
        "reproduced"
    ),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Everything, as one object.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As little as shows that it works; some 20 s each.")] = False,
    full: Annotated[bool, typer.Option("--full", help="As long as the artifacts run it.")] = False,
    steps: Annotated[int, typer.Option("--steps", help="Steps of each stage or series; 0: the figure's own.")] = 0,
    models: Annotated[str, typer.Option("--models", metavar="NAME,...", help="Models of the zoo, or of P3.")] = "",
    scale: Annotated[str, typer.Option("--scale", help="tiny, small or paper; default: by the device.")] = "",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; default: what there is.")] = "",
    data: Annotated[str, typer.Option("--data", metavar="PATH", help="The published experiment's data set.")] = "",
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw NAME.png, too.")] = True,
    replot: Annotated[bool, typer.Option("--replot", help="Measure nothing, draw what NAME.json says.")] = False,
) -> None:
    """Run experiments of the EasyScale, KungFu, P3 and Oort artifacts, with the papers' numbers beside ours."""
    from pliant.experiments import figures, plotting

    if show_list or not names:
        for figure in figures.FIGURES.values():
            print(f"{figure.name:21} {figure.about}")
        return
    chosen = figures.find(names)
    if plot or replot:
        plotting.check()
    options = figures.Options(
        quick=quick,
        full=full,
        steps=steps,
        models=tuple(filter(None, (name.strip() for name in models.split(",")))),
        scale=scale,
        device=device,
        data=data,
        parts=str(out / "parts"),
        say=_say,
    )
    _check_out(out, json_file)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends what was started
    try:
        results = [_one(figure, options, out, plot=plot, replot=replot) for figure in chosen]
    finally:
        signal.signal(signal.SIGTERM, before)
    if json_file is not None:
        figures.save(results[0] if len(results) == 1 else _together(results), json_file)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


def _one(figure: Figure, options: Options, out: Path, *, plot: bool, replot: bool) -> Json:
    from pliant.experiments import figures

    path = out / f"{figure.name}.json"
    if replot:
        result = figures.load(path, figure.name)
    else:
        result = figure.module.run(options)
        figures.save(result, path)
    _print_result(result, figure.module.table(result))
    files = [str(path)]
    if plot or replot:
        figure.module.plot(result, path.with_suffix(".png"))
        files.append(str(path.with_suffix(".png")))
    print(f"wrote {' and '.join(files)}\n")
    return result


def _together(results: list[Json]) -> Json:
    """Several figures as one object of the one form."""
    return {
        "bench": "reproduce",
        "args": {"names": [result["bench"] for result in results]},
        "ours": {"median_s": None, "iqr_s": None},
        "peers": {},
        "bound": None,
        "cells": results,
        "machine": results[0]["machine"],
        "ok": all(result["ok"] for result in results),
        "remarks": [],
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_out(out: Path, json_file: Path | None) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if json_file is not None:
            json_file.touch()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; give a place that can be written") from None


def _print_result(result: Json, found: TableRows) -> None:
    table = Table(title=f"{result['bench']}: {found.title}", title_justify="left")
    for number, name in enumerate(found.columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in found.rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for remark in cast("list[str]", result["remarks"]):
        console.print(f"note: {remark}", highlight=False, markup=False)
    verdict = "the figure's claim holds" if result["ok"] else "the figure's claim does not hold here"
    console.print(verdict, style="green" if result["ok"] else "red")
