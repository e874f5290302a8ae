"""Results of many figures: how their runs are started and kept in a folder, and the HTML page about them.

A run leaves NAME.json (the result), NAME.run.json (how the run went) and logs/NAME.log in the folder. A run that was interrupted
has no NAME.run.json and counts as not run. The page, report.html, needs nothing but itself.
"""

from __future__ import annotations

import base64
import contextlib
import html
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from pliant import child
from pliant.errors import ConfigError
from pliant.machine import machine
from pliant_repro.figures.figure import Figure, Headline, Options, TableRows, load
from pliant_repro.figures.formatting import Result, clock
from pliant_repro.figures.launch import PLIANT, end_process_group
from pliant_repro.lab.hosts import missing_for_lab as check_lab

HOLDS, DOES_NOT_HOLD, UNJUDGED, FAILED, SKIPPED, NEVER = (
    "holds",
    "does not hold",
    "not judged",
    "failed",
    "skipped",
    "never",
)
FINISHED = (HOLDS, DOES_NOT_HOLD, UNJUDGED)
VERDICTS = {
    HOLDS: "the figure's claim holds",
    DOES_NOT_HOLD: "the figure's claim does not hold here",
    UNJUDGED: "it works; the run is too short to judge the figure's claim",
    FAILED: "the run failed",
    SKIPPED: "not run here",
    NEVER: "not run yet",
}
CLASSES = {HOLDS: "good", DOES_NOT_HOLD: "bad", FAILED: "bad"}
"""Style of a verdict on the page; others are grey."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""Errors that a figure raises for a result in another form, of another version or edited by hand."""
GRACE_S, POLL_S = 30.0, 0.5
"""Seconds after SIGTERM for a figure to end its processes and namespaces; seconds between looks at a run."""
QUICK_LIMIT_S, FULL_LIMIT_S = 600.0, 12 * 3600.0


# --- what is kept ---


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureRun:
    """The outcome of the last run of a figure."""

    outcome: str
    why: str = ""
    """Why it failed, or was not run."""
    took_s: float = 0.0
    ended_s: float = field(default_factory=time.time)
    command: str = ""
    options: Result = field(default_factory=dict)
    version: str = ""

    @classmethod
    def ended(cls, name: str, options: Options, outcome: str, *, why: str = "", took_s: float = 0.0) -> FigureRun:
        """Return a run that ends now."""
        return cls(
            outcome=outcome, why=why, took_s=took_s, command=shown_command(name, options), options=options.to_json(),
            version=version(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a figure in a folder of results."""

    figure: Figure
    outcome: str
    why: str = ""
    run: FigureRun | None = None
    result: Result | None = None
    path: Path | None = None
    """File of the result; None if there is none."""

    @property
    def usual_s(self) -> float:
        """Seconds of a run in default size: as measured here, else as published on 2 cores."""
        return self.run.took_s if self.is_measured and self.run is not None else self.figure.usual_s

    @property
    def is_measured(self) -> bool:
        run = self.run
        return run is not None and self.outcome in FINISHED and run.took_s > 0 and is_default(run.options)


def is_default(args: Result) -> bool:
    """Return whether these are the options of the default size."""
    return args.get("device") in ("cpu", "cuda") and args == Options(device=str(args["device"])).to_json()


def version() -> str:
    try:
        return importlib.metadata.version("pliant")
    except importlib.metadata.PackageNotFoundError:
        return ""


def result_path(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def run_path(out: Path, name: str) -> Path:
    return out / f"{name}.run.json"


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)


def write_run(out: Path, name: str, run: FigureRun) -> None:
    replace_file(run_path(out, name), json.dumps(asdict(run), indent=1) + "\n")


def read_run(out: Path, name: str) -> FigureRun | None:
    """Return how the last run went; None if there was none, or its file is damaged."""
    try:
        found = json.loads(run_path(out, name).read_text())
        run = FigureRun(**{each.name: found[each.name] for each in fields(FigureRun)})
        is_sound = run.outcome in VERDICTS and isinstance(run.options, dict)
        return run if is_sound and all(isinstance(each, (int, float)) for each in (run.took_s, run.ended_s)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def outcome_of(result: Result) -> str:
    if not result["ok"]:
        return DOES_NOT_HOLD
    return UNJUDGED if result.get("judged") is False else HOLDS


def status_of(out: Path, figure: Figure) -> Status:
    """Return the last run of a figure and its result; a result that cannot be read is a failure."""
    run, path = read_run(out, figure.name), result_path(out, figure.name)
    if run is not None and run.outcome not in FINISHED:
        return Status(figure, run.outcome, run.why, run)
    if not path.exists():
        return Status(figure, NEVER)
    try:
        result = load(path, figure.name)
        if not isinstance(result.get("ok"), bool) or not isinstance(result.get("remarks"), list):
            raise ConfigError(f"{path} is no whole result: run `pliant reproduce {figure.name}` again")
    except ConfigError as error:
        return Status(figure, FAILED, str(error), run, None, path)
    return Status(figure, outcome_of(result), "", run, result, path)


def is_done(status: Status, options: Options) -> bool:
    """Return whether there is a finished result of these options and this version."""
    run = status.run
    is_same = run is not None and run.options == options.to_json() and run.version == version()
    return status.outcome in FINISHED and is_same


# --- running many figures ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Figures that are run in a row, each in a process of its own with a time limit."""

    figures: Sequence[Figure]
    options: Options
    out: Path
    again: bool = False
    """Run also what is finished."""
    plot: bool = True
    limit_s: float = 0.0
    """Limit of each figure; 0 means three times its usual time."""

    def run(
        self,
        watch: Callable[[int, float, str], None] = lambda number, elapsed_s, line: None,
        ended: Callable[[Status, bool], None] = lambda status, was_done: None,
    ) -> list[Status]:
        """Run what is not finished. A figure that fails does not stop the others.

        `watch` is called with the number of the figure that runs, its seconds and its last line; `ended` with each figure's
        status, and whether it was finished before.
        """
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        problems = check_lab() if any(figure.needs_lab for figure in self.figures) else []
        found = []
        for number, figure in enumerate(self.figures):
            done = not self.again and is_done(status_of(self.out, figure), self.options)
            if not done and figure.needs_lab and problems:
                why = f"needs network namespaces: {'; '.join(problems)}"
                write_run(self.out, figure.name, FigureRun.ended(figure.name, self.options, SKIPPED, why=why))
            elif not done:
                self._run_one(figure, lambda elapsed_s, line, number=number: watch(number, elapsed_s, line))  # type: ignore[misc]
            found.append(status_of(self.out, figure))
            ended(found[-1], done)
        return found

    def _run_one(self, figure: Figure, watch: Callable[[float, str], None]) -> None:
        """Run a figure to its end. It writes itself how it went; if it cannot, this does."""
        log, limit_s = self.out / "logs" / f"{figure.name}.log", self._limit_of(figure)
        words = ["--out", str(self.out), "--verbose", *["--no-plot"] * (not self.plot)]
        run_path(self.out, figure.name).unlink(missing_ok=True)
        begun_s = time.monotonic()
        with (
            log.open("wb") as file,
            _started([*PLIANT, *command_words(figure.name, self.options), *words], file) as process,
        ):
            while process.poll() is None and time.monotonic() - begun_s < limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                watch(time.monotonic() - begun_s, last_line(log))
            code = process.poll()
        if read_run(self.out, figure.name) is None:
            why = f"ended after its limit of {clock(limit_s)}; give it more with --limit MINUTES"
            if code is not None:
                why = f"exit code {code}: {last_line(log) or 'it printed nothing'} ({log})"
            took_s = time.monotonic() - begun_s
            write_run(self.out, figure.name, FigureRun.ended(figure.name, self.options, FAILED, why=why, took_s=took_s))

    def _limit_of(self, figure: Figure) -> float:
        """Return three times the usual, for a slower machine, and some time to start."""
        return self.limit_s or self.options.choose(QUICK_LIMIT_S, 3 * figure.usual_s + 120, FULL_LIMIT_S)


@contextlib.contextmanager
def _started(command: Sequence[str], output: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that dies with this one; it has ended when the block is left."""
    words = [sys.executable, child.__file__, str(os.getpid()), *command]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        yield process
    finally:
        end_process_group(process, GRACE_S)


def command_words(name: str, options: Options) -> list[str]:
    """Return `reproduce NAME` with these options, as words."""
    words = ["reproduce", name]
    words += ["--quick"] * options.quick + ["--full"] * options.full
    words += ["--steps", str(options.steps)] if options.steps else []
    words += ["--models", ",".join(options.models)] if options.models else []
    for flag, value in (("--scale", options.scale), ("--device", options.device), ("--data", options.data)):
        words += [flag, value] if value else []
    return words


def shown_command(name: str, options: Options) -> str:
    """Return what a person would type."""
    return shlex.join(["pliant", *command_words(name, options)])


def last_line(log: Path, most: int = 4096) -> str:
    """Return the last line of a file that is not empty; only the file's end is read."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# --- the page ---


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure on the page: its state, and what its result shows. Every text is escaped when it is written."""

    status: Status
    headline: Headline | None = None
    table: TableRows | None = None
    picture: str = ""
    """A data: address."""

    @property
    def took_s(self) -> float:
        return self.status.run.took_s if self.status.run else 0.0


def write_report(
    out: Path,
    figures: Sequence[Figure],
    command: str = "pliant reproduce all",
    watch: Callable[[str, float], None] = lambda name, done: None,
) -> Path:
    """Write report.html in `out`; `watch` is called with the figure that is drawn now and the share that is done.

    Raises:
        ConfigError: there is no such folder, no result in it, or it cannot be written.
    """
    if not out.is_dir():
        raise ConfigError(f"{out} is no folder: give the one that `pliant reproduce all --out DIR` has written")
    found = [status_of(out, figure) for figure in figures]
    if all(status.outcome == NEVER for status in found):
        raise ConfigError(f"{out} has no result: `pliant reproduce all --out {out}` makes some")
    entries = []
    for number, status in enumerate(found):
        watch(status.figure.name, number / len(found))
        entries.append(make_entry(status))
    path = out / "report.html"
    try:
        replace_file(path, render_page(entries, command, *_machine_and_notes(found)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a folder that can be written") from None
    return path


def make_entry(status: Status) -> Entry:
    figure, result = status.figure, status.result
    if result is None:
        return Entry(status)
    try:
        return Entry(status, figure.headline(result), figure.table(result), _draw(figure, result))
    except MALFORMED as error:
        why = f"{status.path} has not the form of this figure ({error!r}): run it again"
        return Entry(replace(status, outcome=FAILED, why=why))


def _draw(figure: Figure, result: Result) -> str:
    """Return the picture as a data: address."""
    with tempfile.TemporaryDirectory(prefix="pliant-report-") as folder:
        path = Path(folder) / "figure.svg"
        figure.plot(result, path)
        return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def _machine_and_notes(found: Sequence[Status]) -> tuple[Result, list[str]]:
    """Return the machine of the last result, and notes where results differ in machine or size."""
    ran = [status for status in found if status.result is not None]
    ran.sort(key=lambda status: status.run.ended_s if status.run else 0.0)
    results = [status.result for status in ran if status.result is not None]
    machines = [result["machine"] for result in results if isinstance(result.get("machine"), dict)]
    notes = []
    places = ("cpu", "cores", "kernel", "torch", "pliant")
    if len({tuple(str(each.get(key)) for key in places) for each in machines}) > 1:
        notes.append(
            "not all results are from one machine, or from one version of it; the table below is of the last one"
        )
    quick = sum(bool(result["args"].get("quick")) for result in results if isinstance(result.get("args"), dict))
    if quick:
        notes.append(f"{quick} of them were run with --quick: they show that it works, and little about numbers")
    return machines[-1] if machines else machine(), notes


def render_page(entries: Sequence[Entry], command: str, about_machine: Result, notes: Sequence[str] = ()) -> str:
    """Return the whole document."""
    counts = {outcome: sum(entry.status.outcome == outcome for entry in entries) for outcome in VERDICTS}
    named = {HOLDS: "hold", DOES_NOT_HOLD: "do not hold", NEVER: "not run yet"}
    summary = ", ".join(f"{count} {named.get(each, each)}" for each, count in counts.items() if count) or "nothing"
    total_s = sum(entry.took_s for entry in entries)
    in_all = f" {clock(total_s)} in all." if total_s else ""
    parts = [
        "<header><h1>pliant reproduce</h1>",
        f"<p class=lead>{len(entries)} experiments: {_text(summary)}.{in_all}</p>",
        f"<p>Made {time.strftime('%Y-%m-%d %H:%M')} with <code>{_text(command)}</code></p>",
        *(f"<p class=note>{_text(note)}</p>" for note in notes),
        "</header><main>",
        _overview(entries),
    ]
    for source in dict.fromkeys(entry.status.figure.source for entry in entries):
        parts.append(f"<h2>{_text(source)}</h2>")
        parts += [_section(entry) for entry in entries if entry.status.figure.source == source]
    shown = {key: value for key, value in about_machine.items() if value is not None}
    if isinstance(shown.get("memory_bytes"), int):
        shown["memory"] = f"{shown.pop('memory_bytes') / (1 << 30):.1f} GiB"
    grid = _grid(("what", "here"), [(_text(key), _text(value)) for key, value in shown.items()])
    parts.append(f'<section id="machine"><h2>Machine and versions</h2>{grid}</section></main>')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        # The browser, too, is told that the page needs nothing but itself.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>pliant reproduce: {_text(summary)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """Return a table of cells that are HTML already; it scrolls by itself where the page is narrow."""
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class=wide><table class="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _badge(outcome: str) -> str:
    return f'<span class="badge {CLASSES.get(outcome, "none")}">{_text(outcome)}</span>'


def _overview(entries: Sequence[Entry]) -> str:
    rows = []
    for entry in entries:
        figure = entry.status.figure
        link = f'<a href="#{_text(figure.name)}">{_text(figure.name)}</a>'
        numbers = [_text(each) for each in entry.headline or ("", "-", "-")]
        took = _text(clock(entry.took_s)) if entry.took_s else "-"
        rows.append((link, _text(figure.about), *numbers, _badge(entry.status.outcome), took))
    columns = ("experiment", "what it shows", "its number", "published", "measured here", "claim", "time")
    return "<h2>All</h2>" + _grid(columns, rows, "overview")


def _section(entry: Entry) -> str:
    status = entry.status
    figure, run, remarks = status.figure, status.run, status.result["remarks"] if status.result else []
    verdict = VERDICTS[status.outcome] + (f": {status.why}" if status.why else "")
    parts = [
        f'<section id="{_text(figure.name)}"><h3>{_text(figure.name)} {_badge(status.outcome)}</h3>',
        f"<p>{_text(figure.about[:1].upper() + figure.about[1:])}.</p>",
        f'<p class="verdict {CLASSES.get(status.outcome, "none")}">{_text(verdict)}</p>',
    ]
    if entry.picture:
        alt = f"Figure of {figure.name}: {figure.about}"  # its numbers are in the table below
        parts.append(f'<figure><img alt="{_text(alt)}" src="{_text(entry.picture)}"></figure>')
    if entry.headline is not None:
        parts.append(_grid(("number", "published", "measured here"), [[*map(_text, entry.headline)]], "beside"))
    if entry.table is not None:
        grid = _grid(entry.table.columns, [[*map(_text, row)] for row in entry.table.rows])
        parts.append(f"<details open><summary>{_text(entry.table.title)}</summary>{grid}</details>")
    for title, texts in (("This run", remarks), ("What cannot be shown here, and why", figure.caveats)):
        if texts:
            items = "".join(f"<li>{_text(text)}</li>" for text in texts)
            parts.append(f"<h4>{title}</h4><ul>{items}</ul>")
    command = run.command if run and run.command else shown_command(figure.name, Options())
    parts.append(f"<p><code>{_text(command)}</code></p><p class=note>{_text(', '.join(_details(status)))}</p>")
    return "".join(parts) + "</section>"


def _details(status: Status) -> list[str]:
    """Return options and time of the run, in words."""
    found = []
    args = status.result.get("args") if status.result else None
    if isinstance(args, dict):
        found += [key for key in ("quick", "full") if args.get(key)] or ["default size"]
        found += [f"{key} {args[key]}" for key in ("steps", "models", "data") if args.get(key)]
        found.append(f"{args.get('scale', '')} on {args.get('device', '')}")
    if status.run is not None:
        found.append(f"took {clock(status.run.took_s)}")
        found.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(status.run.ended_s)))
    return found


STYLE = """
:root { --paper: #fff; --ink: #1d232b; --soft: #5b6572; --line: #d9dee5; --back: #f4f6f8; --good: #11733a; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e4e8ed; --soft: #9aa5b1; --line: #333b45; --back: #1d232a; --good: #5fd08a; --bad: #ff8a80 }
  figure img { filter: invert(.92) hue-rotate(180deg) }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { margin: .5rem 0 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) } h4 { margin: 1rem 0 .2rem }
a { color: inherit } .lead { font-size: 1.15rem } .note, summary { color: var(--soft); font-size: .9rem }
section { margin: 2rem 0; overflow-wrap: anywhere } ul { margin: .2rem 0; padding-left: 1.2rem; font-size: .92rem }
figure { margin: 1rem 0 } figure img { max-width: 100%; height: auto; border-radius: .3rem; background: #fff }
.wide { overflow-x: auto; overflow-wrap: normal } table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0 }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 600 } td { font-variant-numeric: tabular-nums }
.overview td:first-child { white-space: nowrap } .beside { width: 100% } .beside td:nth-child(3), .overview td:nth-child(5) { font-weight: 600 }
code { background: var(--back); padding: .15rem .35rem; border-radius: .25rem; font-size: .88rem; overflow-wrap: anywhere }
.badge { display: inline-block; font-size: .8rem; font-weight: 600; padding: 0 .5rem; border: 1px solid; border-radius: 1rem;
  white-space: nowrap }
.verdict { font-weight: 600 } .good { color: var(--good) } .bad { color: var(--bad) } .none { color: var(--soft) }
@media (max-width: 40rem) {
  .overview :is(th, td):is(:nth-child(2), :nth-child(3)) { display: none }
  figure { overflow-x: auto } figure img { width: auto; min-width: 34rem; max-width: none }
}
@media print {
  :root { --paper: #fff; --ink: #000; --soft: #444; --line: #bbb; --back: #fff; --good: #11733a; --bad: #b3261e }
  body { max-width: none; font-size: 11px } figure img { filter: none } .wide { overflow: visible }
  h3, h4 { break-after: avoid } figure, tr { break-inside: avoid }
}
""".strip()
