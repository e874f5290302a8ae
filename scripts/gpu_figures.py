"""Writes the figures of `pliant bench gpu` into docs/gpu.md, and the GPU's row of README's table.

python scripts/gpu_figures.py           # from repro/results/gpu_PART_*.json, the newest of each part
python scripts/gpu_figures.py --check   # writes nothing; exit status 1 if a page is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "repro" / "results"
BEGIN, END = "<!-- figures of scripts/gpu_figures.py -->", "<!-- end of figures -->"
PARTS = ("step", "memory", "live", "packed", "bits", "changes")
ROW = "| on a GPU |"
ROW_AFTER = "| no cost while nothing happens |"
NOT_MEASURED = "not measured"
Result = Mapping[str, Any]


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the newest result of each part that there is one of."""
    found = {}
    for part in PARTS:
        files = sorted(folder.glob(f"gpu_{part}_*.json"))
        if files:
            found[part] = {**json.loads(files[-1].read_text()), "file": files[-1].name}
    return found


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(["---", *["--:"] * (len(columns) - 1)]) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def ratio(values: Mapping[str, float | None]) -> str:
    if values["median"] is None:
        return "-"
    return f"{values['median']:.3f} ({values['p10']:.3f} to {values['p90']:.3f})"


# --- the tables of docs/gpu.md ---


def step_table(result: Result) -> list[str]:
    rows = []
    for cell in result["cells"]:
        ms = {side: milliseconds(values["median_s"]) for side, values in cell["sides"].items()}
        many = cell["replicas"]
        rows.append([
            f"{cell['model']}, {cell['mode']}", ms["plain_free"], ms["plain"], ms["pliant"], ratio(cell["one"]),
            ms[f"plain_x{many}"], ms[f"pliant_x{many}"], ratio(cell["several"]), ratio(cell["noise"]),
        ])  # fmt: skip
    many = result["cells"][0]["replicas"]
    columns = (
        "ms per step", "PyTorch, free", "deterministic", "pliant, N = 1", "ratio", f"{many} batches accumulated",
        f"pliant, N = {many}", "ratio", "PyTorch over itself",
    )  # fmt: skip
    return table(columns, rows)


def memory_table(result: Result) -> list[str]:
    def mega(value: float | None) -> str:
        return "-" if value is None else f"{value / 1e6:.0f}"

    rows = [
        [str(cell["replicas"]), *(mega(cell[key]) for key in ("bare_bytes", "ours_bytes", "limit_bytes", "host_bytes"))]
        for cell in result["cells"]
    ]
    return table(("N", "accumulation, MB", "pliant", "limit", 'pliant, gradients="host"'), rows)


def live_table(result: Result) -> list[str]:
    rows = []
    for cell in result["cells"]:
        for kind, felt in cell["changes"].items():
            steps = [felt[f"median_step_{when}_s"][0] for when in ("before", "after")]
            slow = f"{sum(felt['slow_steps'])} of {sum(felt['steps_after'])}"
            times = [felt["gap"]["median_s"], felt["gap"].get("max_s"), felt["next"].get("median_s")]
            rows.append([
                f"{cell['model']}, {cell['mode']}: {kind}", *(milliseconds(each) for each in steps),
                *(milliseconds(each) for each in times[:2]), slow, milliseconds(times[2]),
            ])  # fmt: skip
    columns = (
        "change",
        "step before, ms",
        "after",
        "longest gap, median",
        "worst",
        "slow steps after",
        "kill -9 to next step",
    )
    return table(columns, rows)


def packed_table(result: Result) -> list[str]:
    rows = []
    for cell in result["cells"]:
        ms = {side: milliseconds(values["median_s"]) for side, values in cell["sides"].items()}
        name = f"{cell['model']} on {cell['processes']} processes"
        rows.append([name, *(ms.get(side, "-") for side in ("pliant", "ddp", "version01"))])
    return table(("ms per step", "pliant", "DDP on gloo", "pliant 0.1"), rows)


def verdict_line(result: Result) -> str:
    """Return how many verdicts hold, those that do not, and those for which there was no time."""
    failed, missing = (
        [verdict["text"] for verdict in result["verdicts"] if verdict["ok"] is value] for value in (False, None)
    )
    holds = len(result["verdicts"]) - len(failed) - len(missing)
    told = [f"; not: {text}" for text in failed] + [f"; {NOT_MEASURED}: {text}" for text in missing]
    return f"{holds} of {len(result['verdicts'])} checks hold" + "".join(told) + "."


def shown_command(command: str) -> str:
    """Return the command without the options that say where its results go."""
    return re.sub(r" --(json|out) \S+", "", command)


TITLES = {
    "step": "**A step on one worker**, same deterministic kernels on all sides but the free one; ratios with 10th and 90th percentile:",
    "memory": "**Peak memory** of one worker with N replicas:",
    "live": "**Changes while it trains**, two workers and one; the longest gap between two commits around each change:",
    "packed": "**Several processes on the one GPU**:",
    "bits": "**Bits** (placements, two runs, DDP on gloo, controls):",
    "changes": "**Bits through 2 -> 1 -> 3 workers, `kill -9` and a replacement**:",
}
TABLES = {"step": step_table, "memory": memory_table, "live": live_table, "packed": packed_table}


def figures(results: Mapping[str, Result]) -> str:
    """Return the text between the marks of docs/gpu.md."""
    lines: list[str] = []
    for part in PARTS:
        result = results.get(part)
        lines += ["", f"{TITLES[part]}{'' if result else f' {NOT_MEASURED}.'}"]
        if result is None:
            continue
        if part in TABLES:
            lines += ["", *TABLES[part](result)]
        where, device = f"`{shown_command(result['command'])}`", result["device"]
        if device:  # the parts that only start jobs do not know it
            where += f" on {device['name']}, torch {device['torch']}"
        lines += ["", f"{verdict_line(result)} [{result['file']}](../repro/results/{result['file']}), {where}."]
    return "\n".join([BEGIN, *lines, "", END])


# --- README's row ---


def span(values: Sequence[float], form: str = ".2f") -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def readme_row(results: Mapping[str, Result]) -> str:
    """Return the GPU's row of README's table; empty if the time of a step was not measured."""
    if "step" not in results:
        return ""
    cells = results["step"]["cells"]
    one, many = ([cell[key]["median"] for cell in cells if cell[key]["median"]] for key in ("one", "several"))
    if not one or not many:
        return ""
    name = results["step"]["device"].get("name", "a GPU").removeprefix("NVIDIA ")
    said = [
        f"one {name}, GPT-2 and ResNet-50: a step takes {span(one)} times plain PyTorch's with the same deterministic kernels"
    ]
    said.append(f"{cells[0]['replicas']} replicas take {span(many)} times bare accumulation")
    if noise := [cell["noise"]["median"] for cell in cells if cell["noise"]["median"]]:
        said.append(f"plain PyTorch took {span(noise)} times as long as itself there")
    if "live" in results:
        changes = [(kind, felt) for cell in results["live"]["cells"] for kind, felt in cell["changes"].items()]
        gaps = [felt["gap"]["median_s"] * 1e3 for kind, felt in changes if kind in ("shrink", "grow")]
        kills = [felt["next"]["median_s"] * 1e3 for kind, felt in changes if felt["next"].get("median_s")]
        if gaps:
            said.append(f"the longest gap between steps of a shrink or grow is {span(gaps, '.0f')} ms")
        if kills:
            said.append(f"{span(kills, '.0f')} ms from `kill -9` to the end of the next step")
    return f"{ROW} {'; '.join(said)} ([costs](docs/gpu.md#what-it-costs)) | `pliant bench gpu all` |"


# --- writing ---


def with_figures(page: str, text: str) -> str:
    """Return the page with the text between its marks."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{text}{after}"


def with_row(page: str, row: str) -> str:
    """Return README with the GPU's row: in place of the one that it has, or after the row on cost; without a row if empty."""
    lines = [line for line in page.split("\n") if not line.startswith(ROW)]
    if row:
        at = next(number for number, line in enumerate(lines) if line.startswith(ROW_AFTER))
        lines.insert(at + 1, row)
    return "\n".join(lines)


def pages(results: Mapping[str, Result]) -> dict[Path, str]:
    """Return both pages as the results want them."""
    guide, readme = ROOT / "docs" / "gpu.md", ROOT / "README.md"
    return {
        guide: with_figures(guide.read_text(), figures(results)),
        readme: with_row(readme.read_text(), readme_row(results)),
    }


def main() -> int:
    wrong = [path for path, text in pages(read_results()).items() if path.read_text() != text]
    if "--check" not in sys.argv[1:]:
        for path, text in pages(read_results()).items():
            path.write_text(text)
        return 0
    for path in wrong:
        print(f"{path.relative_to(ROOT)} is not what repro/results says: run scripts/gpu_figures.py")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
