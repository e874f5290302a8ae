"""EasyScale, figure 14: completion time and makespan of a list of jobs on 64 GPUs of three types.

The published baseline runs one job at a time. A FIFO of gangs, which is what the name of the baseline means elsewhere, is
beside it, and so is what live resizes change.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant.sched import compare as simulation
from pliant_repro.figures.easyscale import cluster_runs
from pliant_repro.figures.easyscale.cluster_runs import PUBLISHED
from pliant_repro.figures.figures import Options, TableRows, form

NAME = "easyscale-fig14"
ORDER = ("yarn-cs", "easyscale-homo", "easyscale-heter")


def run(options: Options) -> Json:
    ran = cluster_runs.run(options)
    found = simulation.result(ran.setting, ran.outcomes, {})
    policies = cast("dict[str, Json]", found["policies"])
    cells = [cell(name, numbers) for name, numbers in policies.items()]
    ours = policies["easyscale-heter"]
    return form(
        NAME,
        options,
        ours={"median_s": ours["jct_median_s"], "mean_s": ours["jct_mean_s"], "makespan_s": ours["makespan_s"]},
        paper={name: {"jct_mean_s": jct, "makespan_s": makespan} for name, (jct, makespan) in PUBLISHED.items()},
        cells=cells,
        complaints=judge(cells),
        remarks=ran.remarks,
        factors=found["factors"],
    )


def cell(name: str, numbers: Json) -> Json:
    """One policy, with the paper's numbers where it has some."""
    jct, makespan = PUBLISHED.get(name, (None, None))
    live = cast("Json", numbers.get("live_resize", {}))
    return {
        "policy": name,
        "ours": {
            "median_s": numbers["jct_median_s"], "iqr_s": None, "jct_mean_s": numbers["jct_mean_s"],
            "makespan_s": numbers["makespan_s"], "mean_allocated": numbers["mean_allocated"], "changes": numbers["changes"],
            "live_jct_mean_s": live.get("jct_mean_s"), "live_makespan_s": live.get("makespan_s"),
        },
        "peers": {"paper": {"median_s": None, "iqr_s": None, "speedup": None, "jct_mean_s": jct, "makespan_s": makespan}},
    }  # fmt: skip


def _ours(cells: list[Json], name: str, key: str) -> float:
    return cast("float", next(cast("Json", one["ours"])[key] for one in cells if one["policy"] == name))


def judge(cells: list[Json]) -> list[str]:
    """The published order, in both."""
    wrong = []
    for key, what in (("jct_mean_s", "JCT"), ("makespan_s", "makespan")):
        values = [_ours(cells, name, key) for name in ORDER]
        if not values[0] > values[1] > values[2]:
            wrong.append(
                f"{what} is not ordered {' > '.join(ORDER)}: {', '.join(f'{value:.0f} s' for value in values)}"
            )
    return wrong


def table(result: Json) -> TableRows:
    cells = cast("list[Json]", result["cells"])
    base = _ours(cells, "yarn-cs", "jct_mean_s"), _ours(cells, "yarn-cs", "makespan_s")
    paper_base = PUBLISHED["yarn-cs"]
    rows = []
    for one in cells:
        numbers, paper = cast("Json", one["ours"]), PUBLISHED.get(str(one["policy"]))
        live = numbers["live_jct_mean_s"]
        rows.append(
            (
                str(one["policy"]).removeprefix("easyscale-"),
                _gain(base[0], cast("float", numbers["jct_mean_s"])),
                _gain(base[1], cast("float", numbers["makespan_s"])),
                f"{live:.0f}" if isinstance(live, float) else "-",
                _gain(paper_base[0], paper[0]) if paper else "-",
                _gain(paper_base[1], paper[1]) if paper else "-",
            )
        )
    columns = ("policy", "JCT, s", "makespan, s", "JCT, live", "paper JCT", "makespan")
    return TableRows("jobs on 64 GPUs; in brackets: over one job at a time", columns, tuple(rows))


def _gain(base_s: float, seconds: float) -> str:
    return f"{seconds:.0f} ({base_s / seconds:.1f}x)"


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    caption = "Grey: the paper, whose step times were not published. Ours charges every change of devices; the paper only starts."
    labels = [str(one["policy"]) for one in cells]
    with plotting.picture(path, "Completion time and makespan", caption, panels=2) as panels:
        for axes, key, place, label in (
            (panels[0], "jct_mean_s", 0, "mean JCT, s"),
            (panels[1], "makespan_s", 1, "makespan, s"),
        ):
            series: dict[str, list[float | None]] = {
                "ours": [_ours(cells, name, key) for name in labels],
                "paper": [PUBLISHED[name][place] if name in PUBLISHED else None for name in labels],
            }
            plotting.bars(
                axes, labels, series, {"ours": plotting.POLICY_COLOURS["easyscale-heter"], "paper": plotting.PAPER}
            )
            plotting.log_heights(axes)
            axes.set(ylabel=label)
