"""The `pliant reproduce` command: runs the papers' figures, draws them, and reports on all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pliant.cli import completion, output
from pliant.cli.output import JsonFile, check_writable, is_stdout, save_json
from pliant.duration import span_text
from pliant.errors import ConfigError
from pliant_repro.cli import completion as repro_completion

if TYPE_CHECKING:
    from pliant_repro.figures.figure import Figure, Options, TableRows
    from pliant_repro.figures.formatting import Result
    from pliant_repro.figures.report import Status

COLUMNS = ("experiment", "paper", "time", "last run", "what it shows")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("reproduce", cls=output.JsonCommand)(reproduce)


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME... | all | report DIR", show_default=False, autocompletion=repro_completion.experiments
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Which there are, how long they take, how the last run in DIR went.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where NAME.json, NAME.png, report.html go.")
    ] = Path("reproduced"),
    json_file: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="As little as shows that it works; some 20 s each.")] = False,
    full: Annotated[bool, typer.Option("--full", help="As long as the artifacts run it.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also what is finished in DIR.")] = False,
    limit: Annotated[
        float, typer.Option("--limit", metavar="MINUTES", help="With all: for each; 0: three times the usual.")
    ] = 0.0,
    steps: Annotated[int, typer.Option("--steps", help="Steps of each stage or series; 0: the figure's own.")] = 0,
    models: Annotated[
        str,
        typer.Option(
            "--models", metavar="NAME,...", help="Models of the zoo, or of P3.", autocompletion=repro_completion.zoo
        ),
    ] = "",
    scale: Annotated[
        str,
        typer.Option(
            "--scale",
            help="tiny, small or paper; default: by the device.",
            autocompletion=completion.one_of("tiny", "small", "paper"),
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device", help="cpu or cuda; default: what there is.", autocompletion=completion.one_of("cpu", "cuda")
        ),
    ] = "",
    data: Annotated[str, typer.Option("--data", metavar="PATH", help="The published experiment's data set.")] = "",
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw NAME.png, too.")] = True,
    replot: Annotated[bool, typer.Option("--replot", help="Measure nothing, draw what NAME.json says.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Say on stderr what happens now, also where that is no terminal.")
    ] = False,
) -> None:
    """Run experiments of the EasyScale, KungFu, P3 and Oort artifacts, with the papers' numbers beside ours.

    `all` runs every one, each in a process of its own, and writes DIR/report.html; after an interruption the same command goes on.
    `report DIR` writes the report again.
    """
    from pliant_repro.figures.catalog import find
    from pliant_repro.figures.figure import Options

    if show_list or not names:
        check_writable(json_file)
        _list(out, json_file)
        return
    if names[0] == "report":
        if len(names) > 2:
            raise ConfigError(f"reproduce report {' '.join(names[1:])}: give one folder")
        _report(Path(names[1]) if len(names) > 1 else out, json_file)
        return
    chosen, is_all = find(names), "all" in names
    if is_all and (models or data):
        raise ConfigError(
            "--models and --data mean something else to each experiment: give them with its name, not with all"
        )
    if limit < 0:
        raise ConfigError(f"--limit {limit:g}: use minutes, or 0")
    asked = tuple(filter(None, (name.strip() for name in models.split(","))))
    options = Options(quick=quick, full=full, steps=steps, models=asked, scale=scale, device=device, data=data)
    _check_out(out, json_file)
    to_stderr = contextlib.redirect_stdout(sys.stderr) if is_stdout(json_file) else contextlib.nullcontext()
    with output.exit_on_sigterm(), to_stderr:
        if len(chosen) == 1 or replot:
            results = [_run_one(figure, options, out, plot=plot, replot=replot, verbose=verbose) for figure in chosen]
            all_well = all(result["ok"] for result in results)
        else:
            results, all_well = _run_many(
                chosen, options, out, plot=plot, again=again or not is_all, limit_s=60 * limit, is_all=is_all
            )
    if json_file is not None:
        save_json(results[0] if len(results) == 1 else _combine(results), json_file)
    if not all_well:
        raise typer.Exit(1)


def _report(folder: Path, json_file: Path | None) -> None:
    from pliant_repro.figures.catalog import FIGURES
    from pliant_repro.figures.report import write_report

    check_writable(json_file)
    with output.show_progress() as progress:
        path = write_report(folder, list(FIGURES.values()), watch=progress)
    save_json({"report": str(path)}, json_file)
    if not is_stdout(json_file):
        print(f"wrote {path}")


def _list(out: Path, json_file: Path | None) -> None:
    from pliant_repro.figures.catalog import FIGURES
    from pliant_repro.figures.report import status_of

    found = [status_of(out, figure) for figure in FIGURES.values()]
    total_s = sum(status.usual_s for status in found)
    save_json({"experiments": [_describe(status) for status in found], "usual_s": total_s}, json_file)
    if is_stdout(json_file):
        return
    rows = []
    for status in found:
        usual = ("" if status.is_measured else "~") + span_text(status.usual_s)
        args = status.result.get("args") if status.result is not None else None
        size = next((f", {key}" for key in ("quick", "full") if isinstance(args, dict) and args.get(key)), "")
        where = [] if output.is_read_by_people() else [str(status.path) if status.path else "-"]
        figure = status.figure
        rows.append((figure.name, figure.source, usual, status.outcome + size, *where, figure.about))
    output.print_table(COLUMNS, rows, ("time",))
    if output.is_read_by_people():
        print(f"all: about {span_text(total_s)}; times: ~ of another machine with 2 cores, else of the last run")
        print(f"last run: with --out {out}, where the results are, as NAME.json")


def _describe(status: Status) -> Result:
    figure, run = status.figure, status.run
    return {
        "name": figure.name, "paper": figure.source, "about": figure.about, "needs_root": figure.needs_lab,
        "usual_s": status.usual_s, "usual_from": "here" if status.is_measured else "kept", "status": status.outcome,
        "why": status.why, "took_s": run.took_s if run else None, "ended_s": run.ended_s if run else None,
        "result": str(status.path) if status.path else None,
    }  # fmt: skip


# --- one figure ---


def _run_one(figure: Figure, options: Options, out: Path, *, plot: bool, replot: bool, verbose: bool) -> Result:
    from pliant_repro.figures.figure import load
    from pliant_repro.figures.report import result_path

    path = result_path(out, figure.name)
    result = load(path, figure.name) if replot else _measure(figure, options, out, verbose=verbose)
    _print_result(result, figure.table(result))
    files = [str(path)]
    if plot or replot:
        with output.show_waiting(f"drawing {figure.name}"):
            figure.plot(result, path.with_suffix(".png"))
        files.append(str(path.with_suffix(".png")))
    print(f"wrote {' and '.join(files)}\n")
    return result


def _measure(figure: Figure, options: Options, out: Path, *, verbose: bool) -> Result:
    """Run the figure and keep its result, and how it went, in `out`."""
    from pliant_repro.figures import report
    from pliant_repro.figures.figure import save

    usual_s = report.status_of(out, figure).usual_s
    report.run_path(out, figure.name).unlink(missing_ok=True)  # an interrupted run must not be taken for finished
    begun_s = time.monotonic()

    def ended(outcome: str, why: str = "") -> None:
        took_s = time.monotonic() - begun_s
        run = report.FigureRun.ended(figure.name, options, outcome, why=why, took_s=took_s)
        report.write_run(out, figure.name, run)

    try:
        with _show_lines(figure.name, usual_s if report.is_default(options.to_json()) else 0.0, verbose) as say:
            result = figure.run(dataclasses.replace(options, say=say))
    except Exception as error:
        ended(report.FAILED, " ".join(str(error).split())[:600] or repr(error))
        raise
    save(result, report.result_path(out, figure.name))
    ended(report.outcome_of(result))
    return result


@contextlib.contextmanager
def _show_lines(name: str, usual_s: float, verbose: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a line: above a bar on a terminal; elsewhere only if asked for."""
    from pliant_repro.figures.formatting import clock

    with _bar(f"of about {clock(usual_s)}" if usual_s else "") as shown:
        task = shown.add_task(name, total=None)

        def say(text: str) -> None:
            if not shown.disable:
                shown.console.print(text, markup=False, highlight=False)
                shown.update(task, description=_cut(f"{name}: {text}"))
            elif verbose:
                print(text, file=sys.stderr, flush=True)

        yield say


def _bar(tail: str) -> Progress:
    words = TextColumn("{task.description}", markup=False)
    return output.moving_line(
        SpinnerColumn(), words, BarColumn(20), TimeElapsedColumn(), TextColumn(tail, markup=False)
    )


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# --- many figures ---


def _run_many(
    chosen: list[Figure], options: Options, out: Path, *, plot: bool, again: bool, limit_s: float, is_all: bool
) -> tuple[list[Result], bool]:
    """Return the results, and whether nothing failed and every claim holds; what was skipped does not count."""
    from pliant_repro.figures import report
    from pliant_repro.figures.formatting import clock

    batch = report.Batch(figures=chosen, options=options, out=out, again=again, plot=plot, limit_s=limit_s)
    usual = [report.status_of(out, figure).usual_s for figure in chosen]
    with _bar(f"of about {clock(sum(usual))}" if report.is_default(options.to_json()) else "") as shown:
        task = shown.add_task("starting", total=sum(usual))

        def watch(number: int, elapsed_s: float, line: str) -> None:
            done_s = sum(usual[:number]) + min(elapsed_s, usual[number])
            text = f"{number + 1}/{len(chosen)} {chosen[number].name}: {line}"
            shown.update(task, completed=done_s, description=_cut(text))

        def ended(status: Status, was_done: bool) -> None:
            took = clock(status.run.took_s) if status.run and status.run.took_s else "-"
            why = "kept" if was_done else _cut(status.why, 160)
            print(f"{status.figure.name:22} {status.outcome:14} {took:>8}  {why}".rstrip())
            if not is_all and status.result is not None:
                _print_result(status.result, status.figure.table(status.result))

        try:
            found = batch.run(watch, ended)
        except (KeyboardInterrupt, SystemExit):
            report_command = f"`pliant reproduce report {shlex.quote(str(out))}`"
            print(
                f"pliant: interrupted; the same command goes on, {report_command} reports on what there is",
                file=sys.stderr,
            )
            raise
        shown.update(task, description="writing the report")
        what = "all" if is_all else " ".join(figure.name for figure in chosen)
        command = report.shown_command("NAME", options).replace("NAME", what)
        path = report.write_report(out, chosen, f"{command} --out {shlex.quote(out.name)}")
    print(f"wrote {path}")
    bad = (report.DOES_NOT_HOLD, report.FAILED)
    return [each.result for each in found if each.result is not None], not any(each.outcome in bad for each in found)


def _combine(results: list[Result]) -> Result:
    """Return several results as one object of the one form."""
    from pliant.machine import machine

    return {
        "bench": "reproduce", "args": {"names": [result["bench"] for result in results]},
        "ours": {"median_s": None, "iqr_s": None}, "peers": {}, "bound": None, "cells": results, "machine": machine(),
        "ok": all(result["ok"] for result in results), "remarks": [],
    }  # fmt: skip


def _check_out(out: Path, json_file: Path | None) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # a file for a moment, without a name
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; give a directory that can be written") from None
    check_writable(json_file)


def _print_result(result: Result, found: TableRows) -> None:
    from pliant_repro.figures import report

    table = Table(title=f"{result['bench']}: {found.title}", title_justify="left")
    for number, name in enumerate(found.columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in found.rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for remark in result["remarks"]:
        console.print(f"note: {remark}", highlight=False, markup=False)
    outcome = report.outcome_of(result)
    style = {"good": "green", "bad": "red"}.get(report.CLASSES.get(outcome, ""), "")
    console.print(report.VERDICTS[outcome], style=style)
