"""From a folder of results to report.html: reads them, makes tables, draws pictures, and writes the page that `report` makes."""

from __future__ import annotations

import base64
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pliant.cli import plotting
from pliant.errors import ConfigError
from pliant.machine import Json, machine
from pliant_repro.figures import batch, headlines, kept, report
from pliant_repro.figures.facts import FACTS, paper_of
from pliant_repro.figures.figures import FIGURES, Figure, Options, TableRows
from pliant_repro.figures.kept import Standing
from pliant_repro.figures.report import About, Entry

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""What a figure's module raises where a result has not its form: one of another version, or one that was edited."""


def write(
    out: Path,
    figures: Sequence[Figure] = tuple(FIGURES.values()),
    command: str = "pliant reproduce all",
    watch: Callable[[str, float], None] = lambda name, done: None,
) -> Path:
    """report.html in `out`, whole or as it was; `watch` is told what is drawn now, and how much is done, up to 1.

    Raises:
        ConfigError: there is no such folder, no result in it, or it cannot be written.
    """
    if not out.is_dir():
        raise ConfigError(f"{out} is no folder: give the one that `pliant reproduce all --out DIR` has written")
    found = [kept.standing(out, figure.name) for figure in figures]
    if all(each.outcome == kept.NEVER for each in found):
        raise ConfigError(f"{out} has no result: `pliant reproduce all --out {out}` makes some")
    entries = []
    for number, (figure, each) in enumerate(zip(figures, found, strict=True)):
        watch(figure.name, number / len(figures))
        entries.append(entry_of(figure, each))
    path = out / "report.html"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(report.page(entries, _about(found, command)))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a folder that can be written") from None
    return path


def entry_of(figure: Figure, found: Standing) -> Entry:
    """All that the page says of a figure."""
    numbers: Sequence[headlines.Headline] = ()
    table: TableRows | None = None
    picture, no_picture, why, outcome = "", "", found.why, found.outcome
    if found.result is not None:
        try:
            numbers, table = headlines.of(found.result), figure.module.table(found.result)
            picture, no_picture = _drawn(figure, found.result)
        except UNREADABLE as error:
            outcome, why = kept.FAILED, f"{found.path} has not the form of this figure ({error!r}): run it again"
    run = found.run
    args = found.result.get("args") if found.result is not None else None
    size = _size(args) if isinstance(args, dict) else ""
    return Entry(
        name=figure.name,
        about=figure.about,
        paper=paper_of(figure.name),
        outcome=outcome,
        why=why,
        took_s=run.took_s if run is not None else 0.0,
        ended=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.ended_s)) if run is not None else "",
        size=size,
        command=(run.command if run is not None else "") or batch.shown_command(figure.name, Options()),
        picture=picture,
        no_picture=no_picture,
        headlines=numbers,
        table=table,
        remarks=_remarks(found),
        standing=FACTS[figure.name].remarks,
    )


def _drawn(figure: Figure, result: Json) -> tuple[str, str]:
    """The picture as a data: address, and why there is none."""
    try:
        plotting.check()
    except ConfigError as error:
        return "", str(error)
    with tempfile.TemporaryDirectory(prefix="pliant-report-") as folder:
        path = Path(folder) / "figure.svg"
        figure.module.plot(result, path)
        return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode(), ""


def _size(args: Json) -> str:
    said = [key for key in ("quick", "full") if args.get(key)] or ["default size"]
    said += [f"{key} {args[key]}" for key in ("steps", "models", "data") if args.get(key)]
    return f"{', '.join(said)}, {args.get('scale', '')} on {args.get('device', '')}"


def _remarks(found: Standing) -> list[str]:
    said = found.result["remarks"] if found.result is not None else []
    return [str(remark) for remark in said] if isinstance(said, list) else []


def _about(found: Sequence[Standing], command: str) -> About:
    """The machine is that of the last result; where results come from several, the page says so."""
    ran = sorted(
        (each for each in found if each.result is not None), key=lambda each: each.run.ended_s if each.run else 0.0
    )
    machines = [each.result["machine"] for each in ran if each.result and isinstance(each.result.get("machine"), dict)]
    last = machines[-1] if machines else machine()
    assert isinstance(last, dict), "only mappings were taken"
    notes = []
    places = ("cpu", "cores", "kernel", "torch", "pliant")
    if len({tuple(str(each.get(key)) for key in places) for each in machines if isinstance(each, dict)}) > 1:
        notes.append(
            "not all results are from one machine, or from one version of it; the table below is of the last one"
        )
    quick = [each.name for each in ran if each.result and _is_quick(each.result)]
    if quick:
        notes.append(f"{len(quick)} of them were run with --quick: they show that it works, and little about numbers")
    here = kept.sources()
    others = [each.name for each in ran if each.run is not None and each.run.sources != here]
    if others:
        named = "all of them" if len(others) == len(ran) > 1 else ", ".join(others)
        notes.append(f"measured with other sources than those that are here now: {named}")
    return About(made=time.strftime("%Y-%m-%d %H:%M"), command=command, machine=last, notes=notes)


def _is_quick(result: Json) -> bool:
    args = result.get("args")
    return isinstance(args, dict) and bool(args.get("quick"))
