"""The `pliant reproduce` command: runs the experiments of the artifact documents, draws their figures, reports on all of them."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pliant.cli import completion
from pliant.cli.output import (
    JsonCommand,
    JsonFile,
    check_writable,
    exit_on_sigterm,
    is_read_by_people,
    is_stdout,
    moving_line,
    print_table,
    save_json,
    show_progress,
    show_waiting,
)
from pliant.errors import ConfigError
from pliant_repro.cli import completion as repro_completion

if TYPE_CHECKING:
    from pliant.machine import Json
    from pliant_repro.figures.figures import Figure, Options, TableRows
    from pliant_repro.figures.kept import Standing

REPORT = "report"
COLUMNS = ("experiment", "paper", "time", "last run", "what it shows")
MARKS = {"here": "", "kept": "~"}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("reproduce", cls=JsonCommand)(reproduce)


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME... | all | report DIR", show_default=False, autocompletion=repro_completion.experiments),
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
    again: Annotated[bool, typer.Option("--again", help="Also what is finished in DIR, or in part.")] = False,
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
    from pliant.cli import plotting
    from pliant_repro.figures import figures, gather, kept

    if show_list or not names:
        check_writable(json_file)
        _list(out, json_file)
        return
    if names[0] == REPORT:
        _check_report(names)
        check_writable(json_file)
        with show_progress() as progress:
            path = gather.write(Path(names[1]) if len(names) > 1 else out, watch=progress)
        save_json({"report": str(path)}, json_file)
        if not is_stdout(json_file):
            print(f"wrote {path}")
        return
    chosen = figures.find(names)
    together = "all" in names
    if (plot or replot) and not (together and not replot):
        plotting.check()
    if together and (models or data):
        raise ConfigError(
            "--models and --data mean something else to each experiment: give them with its name, not with all"
        )
    if limit < 0:
        raise ConfigError(f"--limit {limit:g}: use minutes, or 0")
    options = figures.Options(
        quick=quick,
        full=full,
        steps=steps,
        models=tuple(filter(None, (name.strip() for name in models.split(",")))),
        scale=scale,
        device=device,
        data=data,
        parts=str(out / kept.PARTS),
    )
    _check_out(out, json_file)
    if again:
        kept.forget_parts(out)
    apart = contextlib.redirect_stdout(sys.stderr) if is_stdout(json_file) else contextlib.nullcontext()
    with exit_on_sigterm(), apart:
        if len(chosen) == 1 or replot:
            results = [_one(figure, options, out, plot=plot, replot=replot, verbose=verbose) for figure in chosen]
            all_well = all(result["ok"] for result in results)
        else:
            results, all_well = _many(
                chosen, options, out, plot=plot, again=again or not together, limit_s=60 * limit, brief=together
            )
    if json_file is not None:
        save_json(results[0] if len(results) == 1 else _together(results), json_file)
    if not all_well:
        raise typer.Exit(1)


def _check_report(names: list[str]) -> None:
    if len(names) > 2:
        raise ConfigError(f"reproduce report {' '.join(names[1:])}: give one folder")


# --- the list ---


def _list(out: Path, json_file: Path | None) -> None:
    from pliant_repro.figures import facts, figures, kept

    found = [kept.standing(out, name) for name in figures.FIGURES]
    listed = [_listed(figures.FIGURES[each.name], each) for each in found]
    save_json({"experiments": listed, "usual_s": sum(each.usual[0] for each in found)}, json_file)
    if is_stdout(json_file):
        return
    rows = []
    for each in found:
        usual_s, source = each.usual
        about = figures.FIGURES[each.name].about
        where = [] if is_read_by_people() else [str(each.path) if each.path else "-"]
        time_ = f"{MARKS[source]}{facts.clock(usual_s)}"
        rows.append((each.name, facts.paper_of(each.name), time_, _status(each), *where, about))
    print_table(COLUMNS, rows, ("time",))
    if is_read_by_people():
        total_s = sum(each.usual[0] for each in found)
        print(f"all: about {facts.clock(total_s)}; times: ~ of another machine with 2 cores, else of the last run")
        print(f"last run: with --out {out}, where the results are, as NAME.json")


def _status(found: Standing) -> str:
    """The outcome, and the size where that was not the default one."""
    args = found.result.get("args") if found.result is not None else None
    size = next((key for key in ("quick", "full") if isinstance(args, dict) and args.get(key)), "")
    return f"{found.outcome}, {size}" if size else found.outcome


def _listed(figure: Figure, found: Standing) -> Json:
    from pliant_repro.figures import facts

    usual_s, source = found.usual
    return {
        "name": figure.name, "paper": facts.paper_of(figure.name), "about": figure.about,
        "needs_root": facts.FACTS[figure.name].lab, "usual_s": usual_s, "usual_from": source,
        "status": found.outcome, "why": found.why, "took_s": found.run.took_s if found.run else None,
        "ended_s": found.run.ended_s if found.run else None, "result": str(found.path) if found.path else None,
    }  # fmt: skip


# --- one figure ---


def _one(figure: Figure, options: Options, out: Path, *, plot: bool, replot: bool, verbose: bool = False) -> Json:
    from pliant_repro.figures import figures, kept

    path = kept.result_path(out, figure.name)
    result = figures.load(path, figure.name) if replot else _measured(figure, options, out, verbose=verbose)
    _print_result(result, figure.module.table(result))
    files = [str(path)]
    if plot or replot:
        with show_waiting(f"drawing {figure.name}"):
            figure.module.plot(result, path.with_suffix(".png"))
        files.append(str(path.with_suffix(".png")))
    print(f"wrote {' and '.join(files)}\n")
    return result


def _measured(figure: Figure, options: Options, out: Path, *, verbose: bool) -> Json:
    """The result, kept in `out`, with a word about how it went; an interrupted run leaves no such word."""
    import dataclasses

    from pliant_repro.figures import batch, figures, kept

    command = batch.shown_command(figure.name, options)
    usual_s, _ = kept.standing(out, figure.name).usual
    kept.begin(out, figure.name)
    begun_s, whole = time.monotonic(), not kept.has_parts(out, figure.name)

    def ended(outcome: str, why: str = "") -> None:
        took_s = time.monotonic() - begun_s
        run = kept.Run.of(options, outcome, why=why, took_s=took_s, command=command, whole=whole)
        kept.write(out, figure.name, run)

    try:
        with _telling(figure.name, usual_s if kept.is_usual(options.to_json()) else 0.0, verbose) as say:
            result = figure.module.run(dataclasses.replace(options, say=say))
    except Exception as error:
        ended(kept.FAILED, " ".join(str(error).split())[:600] or repr(error))
        raise
    figures.save(result, kept.result_path(out, figure.name))
    ended(kept.outcome_of(result))
    return result


@contextlib.contextmanager
def _telling(name: str, usual_s: float, verbose: bool) -> Iterator[Callable[[str], None]]:
    """What a figure may say while it runs: lines above a bar on a terminal; nothing where stderr is piped, unless asked for."""
    from pliant_repro.figures import facts

    with _bar(f"of about {facts.clock(usual_s)}" if usual_s else "") as shown:
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
    return moving_line(SpinnerColumn(), words, BarColumn(20), TimeElapsedColumn(), TextColumn(tail, markup=False))


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# --- many figures ---


def _many(
    chosen: list[Figure], options: Options, out: Path, *, plot: bool, again: bool, limit_s: float, brief: bool
) -> tuple[list[Json], bool]:
    """The results that there are, and whether nothing failed and every claim holds; what was skipped does not count."""
    from pliant.cli import plotting
    from pliant_repro.figures import batch, facts, gather, kept

    try:
        plotting.check()
    except ConfigError as error:
        print(f"pliant: {error}; goes on without pictures", file=sys.stderr)
        plot = False
    plan = batch.Plan(figures=chosen, options=options, out=out, again=again, plot=plot, limit_s=limit_s)
    usual = [kept.standing(out, figure.name).usual[0] for figure in chosen]
    with _bar(f"of about {facts.clock(sum(usual))}" if kept.is_usual(options.to_json()) else "") as shown:
        task = shown.add_task("starting", total=sum(usual))

        def watch(now: batch.Now) -> None:
            done_s = sum(usual[: now.number]) + min(now.elapsed_s, usual[now.number])
            text = f"{now.number + 1}/{len(chosen)} {now.name}: {now.said}"
            shown.update(task, completed=done_s, description=_cut(text))

        def ended(found: Standing, was_kept: bool) -> None:
            took = facts.clock(found.run.took_s) if found.run and found.run.took_s else "-"
            print(
                f"{found.name:22} {found.outcome:14} {took:>8}  {'kept' if was_kept else _cut(found.why, 160)}".rstrip()
            )
            if not brief and found.result is not None:
                _print_result(found.result, next(f for f in chosen if f.name == found.name).module.table(found.result))

        try:
            found = batch.run(plan, watch, ended)
        except (KeyboardInterrupt, SystemExit):
            print(
                f"pliant: interrupted; the same command goes on, `pliant reproduce report {shlex.quote(str(out))}` reports "
                "on what there is",
                file=sys.stderr,
            )
            raise
        shown.update(task, description="writing the report")
        path = gather.write(out, chosen, command=_typed(options, out, chosen, brief=brief))
    print(f"wrote {path}")
    bad = (kept.DOES_NOT_HOLD, kept.FAILED)
    return [each.result for each in found if each.result is not None], not any(each.outcome in bad for each in found)


def _typed(options: Options, out: Path, chosen: list[Figure], *, brief: bool) -> str:
    from pliant_repro.figures import batch

    what = "all" if brief else " ".join(figure.name for figure in chosen)
    return f"{batch.shown_command('NAME', options).replace('NAME', what)} --out {shlex.quote(out.name)}"


def _together(results: list[Json]) -> Json:
    """Several figures as one object of the one form."""
    from pliant.machine import machine

    return {
        "bench": "reproduce",
        "args": {"names": [result["bench"] for result in results]},
        "ours": {"median_s": None, "iqr_s": None},
        "peers": {},
        "bound": None,
        "cells": results,
        "machine": machine(),
        "ok": all(result["ok"] for result in results),
        "remarks": [],
    }


def _check_out(out: Path, json_file: Path | None) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # a file for a moment, without a name
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; give a directory that can be written") from None
    check_writable(json_file)


def _print_result(result: Json, found: TableRows) -> None:
    from pliant_repro.figures import kept, report

    table = Table(title=f"{result['bench']}: {found.title}", title_justify="left")
    for number, name in enumerate(found.columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in found.rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for remark in cast("list[str]", result["remarks"]):
        console.print(f"note: {remark}", highlight=False, markup=False)
    outcome = kept.outcome_of(result)
    console.print(report.VERDICTS[outcome], style={"good": "green", "bad": "red"}.get(report.CLASSES[outcome], ""))
