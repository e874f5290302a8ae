"""One HTML page about many figures: pictures, published and measured numbers side by side, verdicts, the machine, remarks.

Pure: values in, text out. The page needs nothing but itself: pictures are data in it, there is no script, and no address is
loaded. What `gather` has collected goes in; every text is escaped here.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pliant.machine import Json
from pliant_repro.figures import kept
from pliant_repro.figures.facts import clock
from pliant_repro.figures.figures import TableRows
from pliant_repro.figures.headlines import Headline

VERDICTS = {
    kept.HOLDS: "the figure's claim holds",
    kept.DOES_NOT_HOLD: "the figure's claim does not hold here",
    kept.UNJUDGED: "it works; the run is too short to judge the figure's claim",
    kept.FAILED: "the run failed",
    kept.SKIPPED: "not run here",
    kept.NEVER: "not run yet",
}
COUNTED = {kept.HOLDS: "hold", kept.DOES_NOT_HOLD: "do not hold", kept.NEVER: "not run yet"}
CLASSES = {
    kept.HOLDS: "good", kept.DOES_NOT_HOLD: "bad", kept.UNJUDGED: "none", kept.FAILED: "bad", kept.SKIPPED: "none",
    kept.NEVER: "none",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One figure on the page."""

    name: str
    about: str
    paper: str
    outcome: str
    why: str = ""
    took_s: float = 0.0
    ended: str = ""
    """When, as text."""
    size: str = ""
    """The options that it was run with, in words."""
    command: str = ""
    picture: str = ""
    """A data: address."""
    no_picture: str = ""
    """Why there is none."""
    headlines: Sequence[Headline] = ()
    table: TableRows | None = None
    remarks: Sequence[str] = ()
    """Of this run."""
    standing: Sequence[str] = ()
    """What is true of every run here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What the page says of the whole."""

    made: str
    command: str
    machine: Json
    notes: Sequence[str] = field(default_factory=tuple)


def page(entries: Sequence[Entry], about: About) -> str:
    """The whole document."""
    counts = {outcome: sum(entry.outcome == outcome for entry in entries) for outcome in kept.OUTCOMES}
    total_s = sum(entry.took_s for entry in entries)
    summary = ", ".join(f"{count} {COUNTED.get(each, each)}" for each, count in counts.items() if count) or "nothing"
    in_all = f" {clock(total_s)} in all." if total_s else ""
    parts = [
        "<header>",
        "<h1>pliant reproduce</h1>",
        f"<p class=lead>{len(entries)} experiments: {_text(summary)}.{in_all}</p>",
        f"<p>Made {_text(about.made)} with <code>{_text(about.command)}</code></p>",
        *(f"<p class=note>{_text(note)}</p>" for note in about.notes),
        "</header>",
        "<main>",
        _overview(entries),
    ]
    for paper in dict.fromkeys(entry.paper for entry in entries):
        parts.append(f"<h2>{_text(paper)}</h2>")
        parts += [_section(entry) for entry in entries if entry.paper == paper]
    parts += [_machine(about.machine), "</main>"]
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
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


def _rows(cells: Iterable[Iterable[str]], *, heading: bool = False) -> str:
    """Rows of cells that are HTML already."""
    kind = "th" if heading else "td"
    return "".join(f"<tr>{''.join(f'<{kind}>{cell}</{kind}>' for cell in row)}</tr>" for row in cells)


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """A table that scrolls by itself where the page is narrow."""
    head = _rows([[_text(column) for column in columns]], heading=True)
    return f'<div class=wide><table class="{name}"><thead>{head}</thead><tbody>{_rows(rows)}</tbody></table></div>'


def _overview(entries: Sequence[Entry]) -> str:
    rows = [
        (
            f'<a href="#{_text(entry.name)}">{_text(entry.name)}</a>', _text(entry.about), *_first(entry),
            _badge(entry.outcome), _text(clock(entry.took_s)) if entry.took_s else "-",
        )
        for entry in entries
    ]  # fmt: skip
    columns = ("experiment", "what it shows", "its first number", "published", "measured here", "claim", "time")
    return "<h2>All</h2>" + _grid(columns, rows, "overview")


def _first(entry: Entry) -> tuple[str, str, str]:
    if not entry.headlines:
        return "", "-", "-"
    first = entry.headlines[0]
    return _text(first.what), _text(first.published), _text(first.measured)


def _badge(outcome: str) -> str:
    return f'<span class="badge {CLASSES[outcome]}">{_text(outcome)}</span>'


def _section(entry: Entry) -> str:
    verdict = VERDICTS[entry.outcome] + (f": {entry.why}" if entry.why else "")
    parts = [
        f'<section id="{_text(entry.name)}"><h3>{_text(entry.name)} {_badge(entry.outcome)}</h3>',
        f"<p>{_text(entry.about[:1].upper() + entry.about[1:])}.</p>",
        f'<p class="verdict {CLASSES[entry.outcome]}">{_text(verdict)}</p>',
    ]
    if entry.picture:
        # Who cannot see it has its numbers in the tables below.
        alt = f"Figure of {entry.name}: {entry.about}"
        parts.append(f'<figure><img alt="{_text(alt)}" src="{_text(entry.picture)}"></figure>')
    elif entry.no_picture:
        parts.append(f"<p class=note>No picture: {_text(entry.no_picture)}</p>")
    if entry.headlines:
        rows = [(_text(each.what), _text(each.published), _text(each.measured)) for each in entry.headlines]
        parts.append(_grid(("number", "published", "measured here"), rows, "beside"))
    if entry.table is not None:
        grid = _grid(entry.table.columns, [[_text(cell) for cell in row] for row in entry.table.rows])
        parts.append(f"<details open><summary>{_text(entry.table.title)}</summary>{grid}</details>")
    for title, remarks in (("Of this run", entry.remarks), ("What cannot be shown here, and why", entry.standing)):
        if remarks:
            items = "".join(f"<li>{_text(remark)}</li>" for remark in remarks)
            parts.append(f"<h4>{title}</h4><ul>{items}</ul>")
    if entry.command:
        parts.append(f"<p><code>{_text(entry.command)}</code></p>")
    facts = [entry.size, f"took {clock(entry.took_s)}" if entry.took_s else "", entry.ended]
    if any(facts):
        parts.append(f"<p class=note>{_text(', '.join(filter(None, facts)))}</p>")
    return "".join(parts) + "</section>"


def _machine(machine: Json) -> str:
    memory = machine.get("memory_bytes")
    shown = {
        **{key: value for key, value in machine.items() if value is not None},
        **({"memory_bytes": f"{memory / (1 << 30):.1f} GiB"} if isinstance(memory, int) else {}),
    }
    rows = [(_text("memory" if key == "memory_bytes" else key), _text(value)) for key, value in shown.items()]
    return (
        '<section id="machine"><h2>Machine and versions</h2>' + _grid(("what", "here"), rows, "machine") + "</section>"
    )


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
