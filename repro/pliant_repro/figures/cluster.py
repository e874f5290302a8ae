"""Figures 14 and 15 of EasyScale: its list of jobs on its cluster of 64 GPUs, simulated under several policies."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pliant.sched import compare as simulation
from pliant.sched import traces
from pliant.sched.compare import PolicyResult, PolicyRun, SimulationSetting, compare
from pliant.sched.simulate import SimulationOutcome, in_use, summary
from pliant.sched.traces import like_easyscale
from pliant_repro.figures.figure import Figure, Headline, Options, Panel, TableRows
from pliant_repro.figures.formatting import Result, show

CLUSTER = "v100=32,p100=16,t4=16"
NOT_PUBLISHED = (
    "the artifact's step times were never published: ours are those of its figure 12, in proportion to the batch size",
    "the artifact charges 20 s for a job's first start only; ours charges every start and every change of devices",
    "gangs larger than their device type share its devices",
)
SIMULATED = "times are on a virtual clock, from published step times: a simulation of machines that are not here"


def data_folder(options: Options, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder with the artifact's files; None where there is none."""
    places = [Path(options.data)] if options.data else []
    if "PLIANT_DATA" in environ:
        places.append(Path(environ["PLIANT_DATA"]) / "cluster" / "easyscale")
    return next((place for place in places if (place / "test.csv").is_file()), None)


def simulate(
    options: Options, policies: Sequence[str]
) -> tuple[SimulationSetting, Mapping[PolicyRun, PolicyResult], list[str]]:
    """Simulate the artifact's own list of jobs, or one like it; return setting, results and remarks."""
    folder = data_folder(options)
    if folder is not None:
        trace = traces.read(str(folder / "test.csv"))
        source = f"the artifact's list of {len(trace.entries)} jobs"
    else:
        trace = traces.Trace("easyscale", tuple(like_easyscale()))
        source = (
            "no test.csv of the artifact (--data DIR): a list of as many jobs with its applications, sizes and span"
        )
    setting = SimulationSetting(trace=trace, cluster=CLUSTER)
    options.say(f"{source}, {', '.join(policies)}")
    return setting, compare(tuple(policies), setting, processes=1), [source, *trace.notes, *NOT_PUBLISHED]


def paper_cell(name: str, ours: Mapping[str, Any], published: Mapping[str, Any]) -> Result:
    nothing = {"median_s": None, "iqr_s": None}
    peers = {"paper": {**nothing, "speedup": None, **published}}
    return {"policy": name, "ours": {**nothing, **ours}, "peers": peers}


class CompletionTimes(Figure):
    """Completion time and makespan. The published baseline runs one job at a time; beside it are a FIFO of gangs, which is
    what the baseline's name means elsewhere, and live resizes."""

    name = "easyscale-fig14"
    about = "completion time and makespan of a list of jobs on 64 GPUs, simulated, by policy"
    usual_s = 1
    policies = ("yarn-cs", "yarn-cs-gang", "easyscale-homo", "easyscale-heter")
    order = ("yarn-cs", "easyscale-homo", "easyscale-heter")
    paper = {
        "yarn-cs": {"jct_mean_s": 8904.9685, "makespan_s": 16560.0},
        "easyscale-homo": {"jct_mean_s": 1070.5008, "makespan_s": 6720.0},
        "easyscale-heter": {"jct_mean_s": 676.7497, "makespan_s": 6000.0},
    }
    title = "Completion time and makespan"
    caveats = (
        SIMULATED,
        "the published seconds cannot be met: the artifact's step times were never published, and it charges 20 s for a job's "
        "first start only. What is judged is the published order",
    )

    def run(self, options: Options) -> Result:
        setting, results, remarks = simulate(options, self.policies)
        found: Result = simulation.result(setting, results, {})
        cells = [self.cell(name, numbers) for name, numbers in found["policies"].items()]
        best = found["policies"]["easyscale-heter"]
        ours = {"median_s": best["jct_median_s"], "mean_s": best["jct_mean_s"], "makespan_s": best["makespan_s"]}
        complaints = self.judge(cells)
        return self.result(
            options, ours=ours, cells=cells, complaints=complaints, remarks=remarks, factors=found["factors"]
        )

    def cell(self, name: str, numbers: Result) -> Result:
        live = numbers.get("live_resize", {})
        names = ("jct_mean_s", "makespan_s", "mean_allocated", "changes")
        ours = {"median_s": numbers["jct_median_s"], **{key: numbers[key] for key in names}}
        ours |= {f"live_{key}": live.get(key) for key in ("jct_mean_s", "makespan_s")}
        return paper_cell(name, ours, self.paper.get(name, {"jct_mean_s": None, "makespan_s": None}))

    def judge(self, cells: Sequence[Result]) -> list[str]:
        wrong = []
        by_name = {cell["policy"]: cell["ours"] for cell in cells}
        for key, what in (("jct_mean_s", "JCT"), ("makespan_s", "makespan")):
            values = [by_name[name][key] for name in self.order]
            if not values[0] > values[1] > values[2]:
                seconds = ", ".join(f"{value:.0f} s" for value in values)
                wrong.append(f"{what} is not ordered {' > '.join(self.order)}: {seconds}")
        return wrong

    def table(self, result: Result) -> TableRows:
        base = next(cell for cell in result["cells"] if cell["policy"] == "yarn-cs")
        rows = []
        for cell in result["cells"]:
            times = []
            for side, of_base in ((cell["ours"], base["ours"]), (cell["peers"]["paper"], base["peers"]["paper"])):
                for key in ("jct_mean_s", "makespan_s"):
                    times.append(f"{side[key]:.0f} ({of_base[key] / side[key]:.1f}x)" if side[key] else "-")
            live = show(cell["ours"]["live_jct_mean_s"], ".0f")
            rows.append((cell["policy"].removeprefix("easyscale-"), *times[:2], live, *times[2:]))
        columns = ("policy", "JCT, s", "makespan, s", "JCT, live", "paper JCT", "makespan")
        return TableRows("jobs on 64 GPUs; in brackets: over one job at a time", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        cells = result["cells"]
        found = []
        for key, label in (("jct_mean_s", "mean JCT, s"), ("makespan_s", "makespan, s")):
            ours, paper = ([side[key] for side in each] for each in (
                [cell["ours"] for cell in cells], [cell["peers"]["paper"] for cell in cells]))  # fmt: skip
            bars = {"ours": ours, "paper": paper}
            found.append(Panel(y=label, bars=bars, labels=[cell["policy"] for cell in cells], scale="log"))
        return found

    def headline(self, result: Result) -> Headline:
        best = next(cell for cell in result["cells"] if cell["policy"] == "easyscale-heter")
        published, measured = (f"{side['jct_mean_s']:.0f} s" for side in (best["peers"]["paper"], best["ours"]))
        return "easyscale-heter: mean completion time", published, measured


class DevicesInUse(Figure):
    """GPUs in use over time: elastic jobs on one type of GPU each, beside jobs that may mix them."""

    name = "easyscale-fig15"
    about = "GPUs in use over time, with and without mixing their types, simulated"
    usual_s = 1
    step_s = 60.0
    paper = {
        "easyscale-homo": {"mean_allocated": 32.2, "max_allocated": 52},
        "easyscale-heter": {"mean_allocated": 45.6, "max_allocated": 64},
    }
    """Means over the first 6000 s, which is when the last mixed job ends."""
    title = "GPUs in use over time"
    caveats = (SIMULATED,)

    def run(self, options: Options) -> Result:
        _, results, remarks = simulate(options, tuple(self.paper))
        found = {name: results[PolicyRun(name, False)].first for name in self.paper}
        window_s = min(max(job.ended_s for job in outcome.jobs) for outcome in found.values())
        cells = [self.cell(name, outcome, window_s) for name, outcome in found.items()]
        folder = data_folder(options)
        return self.result(
            options,
            ours={key: cells[1]["ours"][key] for key in ("mean_allocated", "max_allocated")},
            cells=cells,
            complaints=self.judge(cells),
            remarks=[f"means over the first {window_s:.0f} s, when the first of the two policies has ended", *remarks],
            published=self.published_series(folder / "trace_alloc.csv") if folder else {},
        )

    def cell(self, name: str, outcome: SimulationOutcome, window_s: float) -> Result:
        ends = [at_s for at_s, _ in outcome.allocated[1:]] + [window_s]
        spans = zip(outcome.allocated, ends, strict=True)
        area = sum(count * max(0.0, min(end, window_s) - start) for (start, count), end in spans)
        known = summary(outcome)
        ours = {
            "mean_allocated": area / window_s, "max_allocated": known["max_allocated"], "makespan_s": known["makespan_s"],
            "allocated": [[start, round(used, 3)] for start, used in in_use(outcome, self.step_s)],
        }  # fmt: skip
        return paper_cell(name, ours, self.paper[name])

    def published_series(self, path: Path) -> dict[str, list[list[float]]]:
        """Return the artifact's own curves; nothing where they are missing."""
        try:
            with path.open(newline="") as file:
                rows = list(csv.reader(file, delimiter="\t"))[1:]
        except OSError:
            return {}
        return {
            name: [[float(row[0]), float(row[column])] for row in rows if len(row) > column]
            for column, name in enumerate(self.paper, start=1)
        }

    def judge(self, cells: Sequence[Result]) -> list[str]:
        homo, heter = (cell["ours"]["mean_allocated"] for cell in cells)
        return [f"mixing types uses {heter:.1f} GPUs, not mixing them {homo:.1f}"] if heter < homo else []

    def table(self, result: Result) -> TableRows:
        rows = []
        for cell in result["cells"]:
            ours, paper = cell["ours"], cell["peers"]["paper"]
            numbers = [(f"{side['mean_allocated']:.1f}", str(side["max_allocated"])) for side in (ours, paper)]
            rows.append((cell["policy"], *numbers[0], *numbers[1]))
        return TableRows("GPUs in use, of 64", ("policy", "GPUs in use", "most", "paper", "paper most"), tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        found = []
        for cell in result["cells"]:
            curves = {"ours": cell["ours"]["allocated"], "paper": result.get("published", {}).get(cell["policy"], [])}
            lines = {
                name: ([at_s / 60 for at_s, _ in curve], [used for _, used in curve], "-", {"paper": "0.6"}.get(name))
                for name, curve in curves.items()
            }
            found.append(Panel(title=cell["policy"], x="minutes", y="GPUs in use", lines=lines, limits=(0, 66)))
        return found

    def headline(self, result: Result) -> Headline:
        heter = result["cells"][1]
        published, measured = (f"{side['mean_allocated']:.1f}" for side in (heter["peers"]["paper"], heter["ours"]))
        return "easyscale-heter: GPUs in use", published, measured
