"""EasyScale, figure 15: GPUs in use over time, elastic jobs on one type of GPU each beside jobs that may mix them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant.sched.compare import PolicyRun
from pliant.sched.simulate import SimulationOutcome, in_use, summary
from pliant_repro.figures.easyscale import cluster_runs
from pliant_repro.figures.figures import Options, TableRows, form

NAME = "easyscale-fig15"
STEP_S = 60.0
PUBLISHED = {"easyscale-homo": (32.2, 52), "easyscale-heter": (45.6, 64)}
"""Mean over the first 6000 s, which is when the last mixed job ends, and the most at once."""


def run(options: Options) -> Json:
    ran = cluster_runs.run(options, tuple(PUBLISHED))
    outcomes = {name: ran.outcomes[PolicyRun(name, False)] for name in PUBLISHED}
    window_s = min(max(job.ended_s for job in outcome.jobs) for outcome in outcomes.values())
    cells = [cell(name, outcome, window_s) for name, outcome in outcomes.items()]
    heter = cast("Json", cells[1]["ours"])
    folder = cluster_runs.data_folder(options)
    return form(
        NAME,
        options,
        ours={"mean_allocated": heter["mean_allocated"], "max_allocated": heter["max_allocated"]},
        paper={name: {"mean_allocated": mean, "max_allocated": most} for name, (mean, most) in PUBLISHED.items()},
        cells=cells,
        complaints=judge(cells),
        remarks=[f"means over the first {window_s:.0f} s, when the first of the two policies has ended", *ran.remarks],
        published=published_series(folder / "trace_alloc.csv") if folder else {},
    )


def cell(name: str, outcome: SimulationOutcome, window_s: float) -> Json:
    mean, most = PUBLISHED[name]
    ends = [time for time, _ in outcome.allocated[1:]] + [window_s]
    area = sum(
        count * max(0.0, min(end, window_s) - start)
        for (start, count), end in zip(outcome.allocated, ends, strict=True)
    )
    return {
        "policy": name,
        "ours": {
            "median_s": None, "iqr_s": None, "mean_allocated": area / window_s,
            "max_allocated": summary(outcome)["max_allocated"], "makespan_s": summary(outcome)["makespan_s"],
            "allocated": [[start, round(used, 3)] for start, used in in_use(outcome, STEP_S)],
        },
        "peers": {"paper": {"median_s": None, "iqr_s": None, "speedup": None, "mean_allocated": mean, "max_allocated": most}},
    }  # fmt: skip


def published_series(path: Path) -> dict[str, list[list[float]]]:
    """The artifact's own curves; nothing where they are missing."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file, delimiter="\t"))[1:]
    except OSError:
        return {}
    return {
        name: [[float(row[0]), float(row[column])] for row in rows if len(row) > column]
        for column, name in enumerate(PUBLISHED, start=1)
    }


def judge(cells: Sequence[Json]) -> list[str]:
    homo, heter = (cast("float", cast("Json", one["ours"])["mean_allocated"]) for one in cells)
    return [f"mixing types uses {heter:.1f} GPUs, not mixing them {homo:.1f}"] if heter < homo else []


def table(result: Json) -> TableRows:
    rows = []
    for one in cast("list[Json]", result["cells"]):
        numbers, (mean, most) = cast("Json", one["ours"]), PUBLISHED[str(one["policy"])]
        used = cast("float", numbers["mean_allocated"])
        rows.append((str(one["policy"]), f"{used:.1f}", str(numbers["max_allocated"]), f"{mean:.1f}", str(most)))
    columns = ("policy", "GPUs in use", "most", "paper", "paper most")
    return TableRows("GPUs in use, of 64", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    series = cast("dict[str, plotting.Series]", result.get("published", {}))
    caption = "Dashed: the paper. Every start and change of devices is charged 30 s in ours; step times of the paper were not published."
    cells = cast("list[Json]", result["cells"])
    with plotting.picture(path, "GPUs in use over time", caption, panels=len(cells)) as panels:
        for axes, one in zip(panels, cells, strict=True):
            name = str(one["policy"])
            plotting.devices_in_use(
                axes, name, cast("plotting.Series", cast("Json", one["ours"])["allocated"]), unit_s=60
            )
            if name in series:
                plotting.devices_in_use(axes, "paper", series[name], unit_s=60, dashed=True)
            axes.set(xlabel="minutes", ylabel="GPUs in use", ylim=(0, 66))
            axes.legend(fontsize=8)
