"""The figures of P3: contests of `pliant bench priority` at rates that stand for the paper's.

Models and rates are divided by the same factor, so that the ratio of traffic to compute is the paper's: what a figure calls
4 Gbit/s was 400 Mbit/s here, for ResNet-50. Compute is paced. Needs root, for network namespaces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pliant_repro.bench import priority
from pliant_repro.bench.priority import PriorityOptions
from pliant_repro.bench.priority_verdict import FIG7, FIG7_MODES, FIG9, FIG10, FIG12
from pliant_repro.figures.figure import Figure, Headline, Options, Panel, Points, TableRows
from pliant_repro.figures.formatting import Result, names_in, pick, show
from pliant_repro.profiles import SCALES, profile

COLOURS = {"baseline": "tab:red", "slicing": "tab:orange", "priority": "tab:blue", "ddp": "tab:green"}
PAIR = ("baseline", "priority")
PACED = (
    "compute is paced: layers wait for as long as the published GPU would take, and sizes and rates are divided by one factor, "
    "so that the ratio of traffic to compute is the published one; samples per second compare, training to an accuracy does not"
)


def gbps_of(cell: Result) -> float:
    """Return the paper's bandwidth that a cell stands for."""
    return float(cell["rate_mbit"]) * SCALES[cell["model"]] / 1000


def number(cell: Result | None, key: str) -> float | None:
    """Return a cell's value, or None where there is no cell or no value."""
    value = cell.get(key) if cell is not None else None
    return float(value) if isinstance(value, (int, float)) else None


def spread_of(cell: Result | None) -> float:
    """Return half of the spread of a cell's step times, as a share of their median."""
    step_s, iqr_s = number(cell, "iter_median_s"), number(cell, "iter_iqr_s")
    return iqr_s / step_s / 2 if step_s and iqr_s else 0.0


class Contest(Figure):
    """A figure that is made of contests between modes of synchronisation."""

    needs_lab = True
    caveats: ClassVar[tuple[str, ...]] = (PACED,)

    def contest(self, options: Options, model: str, gbps: Sequence[float], modes: Sequence[str], **more: Any) -> Result:
        """Run a contest at rates that stand for the paper's `gbps`; return the result of the bench."""
        nodes = more.setdefault("nodes", 4)
        asked = PriorityOptions(
            model=model, rates=tuple(round(each * 1e9 / SCALES[model]) for each in gbps), modes=tuple(modes),
            warmup=6 if options.quick else 10, **more,
        )  # fmt: skip
        said: list[str] = []

        def tell(what: str, fraction: float) -> None:
            stage = what.partition(":")[0] if ":" in what else "starting"
            if stage not in said:
                said.append(stage)
                options.say(f"{model}, {nodes} nodes: {stage}")

        return priority.run(asked, {"model": model, "nodes": nodes, "gbps": list(gbps), "modes": list(modes)}, tell)

    def result_of(self, results: Sequence[Result], options: Options) -> Result:
        """Return the figure out of its contests. A mode that failed, or other bits, is a complaint."""
        cells = [self.cell(cell) for each in results for cell in each["cells"]]
        failed = [str(remark) for each in results if not each["ok"] for remark in each["remarks"]]
        remarks = list(dict.fromkeys(remark for each in results for remark in each["remarks"]))
        complaints = failed + self.judge(cells)
        return self.result(options, ours=results[0]["ours"], cells=cells, complaints=complaints, remarks=remarks)

    def cell(self, cell: Result) -> Result:
        return {**cell, "gbps": gbps_of(cell)}

    @abstractmethod
    def judge(self, cells: Sequence[Result]) -> list[str]:
        """Return the complaints about the cells; none if the claim holds."""


class Bandwidth(Contest):
    """Throughput over bandwidth with the layer-wise baseline, with slicing, and with priorities."""

    name = "p3-fig7"
    about = "throughput over bandwidth: baseline, slicing, priority; needs root"
    usual_s = 283
    paper = {model: {str(gbps): list(found) for gbps, found in curves.items()} for model, curves in FIG7.items()}
    least_fraction = 0.91
    """Least share of the ideal P*: the paper's own worst point."""
    usual: Mapping[str, Sequence[float]] = {"resnet50": (2, 4, 8), "vgg": (8, 12, 20)}
    """Before, at and after the most that priorities can gain. --full has all of the figure."""
    title = "Throughput over bandwidth"

    def run(self, options: Options) -> Result:
        models = options.choose_models(("resnet50",), tuple(FIG7 if options.full else self.usual), tuple(FIG7))
        iters, repeat = options.choose_steps(quick=4, usual=8, full=30), 3 if options.full else 1
        modes = (*FIG7_MODES, "ddp") if options.full else FIG7_MODES
        results = []
        for model in models:
            every = tuple(FIG7[model])
            gbps = options.choose(quick=(4.0, 8.0), usual=self.usual.get(model, every[::2]), full=every)
            results.append(self.contest(options, model, gbps, modes, iters=iters, repeat=repeat))
        return self.result_of(results, options)

    def cell(self, cell: Result) -> Result:
        point, mode = FIG7[cell["model"]].get(round(gbps_of(cell), 3)), cell["mode"]
        published = point[FIG7_MODES.index(mode)] if point and mode in FIG7_MODES else None
        return {**super().cell(cell), "paper_samples_per_s": published, "spread": spread_of(cell)}

    def judge(self, cells: Sequence[Result]) -> list[str]:
        """Claims: priority is first at every bandwidth, near its bound, and gains most in the middle.

        The distance from the bound counts as too large only where it is so beyond the spread of the step times.
        """
        wrong = []
        for model in names_in(cells):
            gains: dict[float, float] = {}
            for gbps in dict.fromkeys(cell["gbps"] for cell in cells if cell["model"] == model):
                found = {mode: pick(cells, model=model, gbps=gbps, mode=mode) for mode in FIG7_MODES}
                ours, *others = (number(found[mode], "iter_median_s") for mode in ("priority", "baseline", "slicing"))
                known = [each for each in others if each is not None]
                where = f"{model} at {gbps:g} Gbit/s"
                if ours is None or len(known) < 2:
                    wrong.append(f"{where}: not all modes were measured")
                    continue
                gains[gbps] = min(known) / ours - 1
                if ours > 1.02 * min(known):
                    wrong.append(f"{where}: priority is {ours / min(known) - 1:.1%} slower than without")
                fraction, spread = number(found["priority"], "fraction_of_bound") or 0.0, spread_of(found["priority"])
                if fraction * (1 + spread) < self.least_fraction:
                    worst = f"the paper's worst is {self.least_fraction}"
                    wrong.append(f"{where}: {fraction:.2f} of P* (spread {spread:.1%}), {worst}")
            peak = max(gains, key=lambda gbps: gains[gbps]) if len(gains) > 2 else None
            if peak is not None and peak in (min(gains), max(gains)):
                wrong.append(f"{model}: the gain is largest at {peak:g} Gbit/s, an end of the curve")
        return wrong

    def table(self, result: Result) -> TableRows:
        cells, rows = result["cells"], []
        for model, gbps in dict.fromkeys((cell["model"], cell["gbps"]) for cell in cells):
            found = {mode: pick(cells, model=model, gbps=gbps, mode=mode) for mode in (*FIG7_MODES, "ddp")}
            speeds = [
                " / ".join(show(number(found[mode], key)) for mode in FIG7_MODES)
                for key in ("samples_per_s", "paper_samples_per_s")
            ]
            ratios = (
                show(number(found["priority"], "r"), ".2f"),
                show(number(found["priority"], "fraction_of_bound"), ".3f"),
            )
            rows.append(
                (model, f"{gbps:g}", ratios[0], *speeds, show(number(found["ddp"], "samples_per_s")), ratios[1])
            )
        columns = ("model", "Gbit/s", "r", "base/slicing/priority", "paper", "ddp", "of P*")
        return TableRows("samples per second of a worker, 4 nodes", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        found = []
        for model in names_in(result["cells"]):
            lines: dict[str, Points] = {}
            for mode in (*FIG7_MODES, "ddp"):
                ours = [c for c in result["cells"] if (c["model"], c["mode"]) == (model, mode) and c["iter_median_s"]]
                places = [cell["gbps"] for cell in ours]
                lines[mode] = (places, [cell["samples_per_s"] for cell in ours], "o-", COLOURS[mode])
                if mode == "priority":
                    lines["P*"] = (places, [32 / cell["p_star_s"] for cell in ours], ":", "black")
            for place, mode in enumerate(FIG7_MODES):
                paper = [values[place] for values in FIG7[model].values()]
                lines[f"paper, {mode}"] = (list(FIG7[model]), paper, "--", COLOURS[mode])
            found.append(Panel(title=model, x="Gbit/s", y="samples/s", lines=lines))
        return found

    def headline(self, result: Result) -> Headline:
        fractions = [number(cell, "fraction_of_bound") for cell in result["cells"] if cell["mode"] == "priority"]
        worst = min((each for each in fractions if each), default=None)
        return "of the ideal P*, worst point", f"{self.least_fraction}", show(worst, ".2f")


class NetworkUse(Contest):
    """Figures 8 and 9: how busy a worker's network is, every 10 ms, with the baseline and with priorities."""

    name = "p3-fig9"
    about = "how busy the network is, baseline beside priority; needs root"
    usual_s = 109
    paper = {model: {"gbps": gbps, "mean": mean, "idle": idle} for model, (gbps, mean, idle) in FIG9.items()}
    title = "What a worker sends, of the capacity"
    shown_s = 2.0

    def run(self, options: Options) -> Result:
        models = options.choose_models(("resnet50",), tuple(FIG9), tuple(FIG9))
        iters = options.choose_steps(quick=5, usual=12, full=60)
        found = [self.contest(options, each, [FIG9[each][0]], PAIR, iters=iters, utilisation=True) for each in models]
        return self.result_of(found, options)

    def judge(self, cells: Sequence[Result]) -> list[str]:
        """Claims: priorities keep the network busier, and leave it idle less often."""
        wrong = []
        for model in names_in(cells):
            before, ours = (pick(cells, model=model, mode=mode) for mode in PAIR)
            mean, idle = number(ours, "tx_mean_share"), number(ours, "tx_idle_share")
            mean_before, idle_before = number(before, "tx_mean_share"), number(before, "tx_idle_share")
            if mean is None or idle is None or mean_before is None or idle_before is None:
                wrong.append(f"{model}: not both modes were measured")
                continue
            if mean < 0.98 * mean_before:
                wrong.append(
                    f"{model}: priority sends at {mean:.0%} of the capacity, the baseline at {mean_before:.0%}"
                )
            # Where there is less to send than the network can, it must be idle for the rest of the time.
            if (number(ours, "r") or 1.0) >= 0.9 and idle > idle_before:
                wrong.append(f"{model}: idle for {idle:.0%} of the time, the baseline for {idle_before:.0%}")
        return wrong

    def table(self, result: Result) -> TableRows:
        rows = []
        for model in names_in(result["cells"]):
            gbps, means, idles = FIG9[model]
            for place, mode in enumerate(PAIR):
                cell = pick(result["cells"], model=model, mode=mode)
                mean, idle = (show(number(cell, key), ".0%") for key in ("tx_mean_share", "tx_idle_share"))
                rows.append((f"{model} at {gbps:g}G", mode, mean, f"{means[place]:.0%}", idle, f"{idles[place]:.0%}"))
        columns = ("model", "mode", "mean TX", "paper", "time with TX < 5 %", "paper")
        return TableRows("what one worker sends, of the capacity, in samples of 10 ms", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        found = []
        for model in names_in(result["cells"]):
            lines: dict[str, Points] = {}
            for mode in PAIR:
                cell = pick(result["cells"], model=model, mode=mode) or {}
                series = cell.get("tx_series") or {"step_s": 1.0, "share": []}
                shares = series["share"][: int(self.shown_s / series["step_s"])]
                lines[mode] = ([place * series["step_s"] for place in range(len(shares))], shares, "-", COLOURS[mode])
            found.append(Panel(title=f"{model} at {FIG9[model][0]:g} Gbit/s", x="s", y="sent / capacity", lines=lines))
        return found

    def headline(self, result: Result) -> Headline:
        model = result["cells"][0]["model"]
        ours = number(pick(result["cells"], model=model, mode="priority"), "tx_mean_share")
        return f"{model}, priority: network in use", f"{FIG9[model][1][1]:.0%}", show(ours, ".0%")


class Machines(Contest):
    """Throughput over the number of machines, with the baseline and with priorities.

    The paper's machines of this figure have slower GPUs than those of figure 7. So that the ratio of traffic to compute is
    theirs, the rate here is higher by as much as our compute is faster. Throughput is shown relative to one machine.
    """

    name = "p3-fig10"
    about = "throughput over machines, baseline beside priority; needs root"
    usual_s = 143
    paper = {model: {str(nodes): list(pair) for nodes, pair in points.items()} for model, points in FIG10.items()}
    usual: Mapping[str, Sequence[int]] = {"vgg": (2, 4, 8), "resnet50": (4,), "sockeye": (2, 4)}
    """More nodes than this need more than two cores: their traffic is that of all of them."""
    title = "Throughput over machines, relative to one"
    caveats = (PACED, "16 machines need more than 2 cores for their traffic: --full has them, the default ends at 8")

    def rate_gbps(self, model: str) -> float:
        """Return the bandwidth at which our compute relates to traffic as the paper's did at 10 Gbit/s."""
        one = profile(model)
        return 10.0 * (one.batch / FIG10[model][1][0]) / one.compute_s

    def run(self, options: Options) -> Result:
        models = options.choose_models(("vgg",), ("vgg", "resnet50"), tuple(FIG10))
        iters = options.choose_steps(quick=4, usual=8, full=30)
        counts = {each: options.choose(quick=(2,), usual=self.usual[each], full=(2, 4, 8, 16)) for each in models}
        found = [
            self.contest(options, model, [self.rate_gbps(model)], PAIR, nodes=nodes, iters=iters)
            for model in models
            for nodes in counts[model]
        ]
        return self.result_of(found, options)

    def cell(self, cell: Result) -> Result:
        """Add the throughput of all nodes over that of one, which has nothing to send."""
        step_s, compute_s = number(cell, "iter_median_s"), number(cell, "compute_s")
        return {**cell, "scaling": cell["nodes"] * compute_s / step_s if step_s and compute_s else None}

    def paper_scaling(self, model: str, nodes: int, mode: str) -> float | None:
        points = FIG10[model]
        return points[nodes][PAIR.index(mode)] / points[1][0] if nodes in points else None

    def judge(self, cells: Sequence[Result]) -> list[str]:
        """Claim: priorities scale better, where traffic takes about as long as computing.

        Where it takes much less there is nothing to gain over a baseline that overlaps both, as ours does and the paper's
        did not.
        """
        wrong = []
        for model, nodes in dict.fromkeys((cell["model"], cell["nodes"]) for cell in cells):
            found = [pick(cells, model=model, nodes=nodes, mode=mode) for mode in PAIR]
            before, ours = (number(cell, "scaling") for cell in found)
            if before is None or ours is None:
                wrong.append(f"{model} on {nodes} nodes: not both modes were measured")
                continue
            least = 1.10 if 0.85 <= (number(found[1], "r") or 0.0) <= 1.5 else 0.98
            if ours < least * before:
                gain = f"{ours / before - 1:+.1%} over the baseline, to be {least - 1:+.0%}"
                wrong.append(f"{model} on {nodes} nodes: {gain}")
        return wrong

    def table(self, result: Result) -> TableRows:
        cells, rows = result["cells"], []
        for model, nodes in dict.fromkeys((cell["model"], cell["nodes"]) for cell in cells):
            found = [pick(cells, model=model, nodes=nodes, mode=mode) for mode in PAIR]
            ours = [show(number(cell, "scaling"), ".2f") for cell in found]
            paper = [show(self.paper_scaling(model, nodes, mode), ".2f") for mode in PAIR]
            rows.append((model, str(nodes), *ours, *paper, show(number(found[1], "fraction_of_bound"), ".3f")))
        columns = ("model", "nodes", "baseline", "priority", "paper: base", "P3", "of P*")
        return TableRows("throughput of all nodes over that of one", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        found = []
        for model in names_in(result["cells"]):
            lines: dict[str, Points] = {}
            for mode in PAIR:
                ours = [c for c in result["cells"] if (c["model"], c["mode"]) == (model, mode) and c["scaling"]]
                places = [1, *(cell["nodes"] for cell in ours)]
                lines[mode] = (places, [1.0, *(cell["scaling"] for cell in ours)], "o-", COLOURS[mode])
                counts = [nodes for nodes in FIG10[model] if nodes <= max(places)]
                paper = [self.paper_scaling(model, nodes, mode) for nodes in counts]
                lines[f"paper, {mode}"] = (counts, paper, "--", COLOURS[mode])
            found.append(Panel(title=model, x="machines", y="throughput / that of one", lines=lines))
        return found

    def headline(self, result: Result) -> Headline:
        model = result["cells"][0]["model"]
        most = max(cell["nodes"] for cell in result["cells"] if cell["model"] == model)
        ours = number(pick(result["cells"], model=model, nodes=most, mode="priority"), "scaling")
        published = show(self.paper_scaling(model, most, "priority"), ".2f", "x")
        return f"{model}, priority: {most} machines over one", published, show(ours, ".2f", "x")


class SliceSize(Contest):
    """Throughput over the size of a slice, and what our tuner chooses.

    Sizes are multiplied by what the model was divided by, so a size means the same number of slices as in the paper. The cost
    of a message does not shrink with the model, so the left end of the curve is steeper here.
    """

    name = "p3-fig12"
    about = "throughput over the size of a slice; needs root"
    usual_s = 132
    paper = {model: {str(size): value for size, value in curve.items()} for model, curve in FIG12.items()}
    gbps = {"resnet50": 4.0, "vgg": 15.0, "sockeye": 10.0}
    sizes: Mapping[str, Sequence[int]] = {
        "resnet50": (10_000, 20_000, 50_000, 100_000, 500_000, 1_000_000),
        "vgg": (50_000, 100_000, 500_000, 1_000_000, 4_000_000),
        "sockeye": (10_000, 50_000, 100_000, 500_000, 1_000_000),
    }
    """Sizes of the full model."""
    title = "Throughput over the size of a slice"

    def run(self, options: Options) -> Result:
        models = options.choose_models(("resnet50",), tuple(FIG12) if options.full else ("resnet50",), tuple(FIG12))
        iters, repeat = options.choose_steps(quick=4, usual=10, full=30), options.choose(quick=1, usual=2, full=3)
        results = []
        for model in models:
            sizes = self.sizes[model][1::3] if options.quick else self.sizes[model]
            slices = (None, *(max(1, round(size / SCALES[model])) for size in sizes))
            asked = {"slices": slices, "iters": iters, "repeat": repeat}
            results.append(self.contest(options, model, [self.gbps[model]], ["priority"], **asked))
        return self.result_of(results, options)

    def cell(self, cell: Result) -> Result:
        """Add the size in the paper's parameters; None means tuned."""
        size = None if cell["slice"] == "auto" else round(cell["slice"] * SCALES[cell["model"]])
        return {**cell, "paper_slice": size}

    def judge(self, cells: Sequence[Result]) -> list[str]:
        """The paper's claim: a size in the middle is best. Ours: the tuner comes within 5 % of it."""
        wrong = []
        for model in names_in(cells):
            speeds = {cell["paper_slice"]: number(cell, "samples_per_s") for cell in cells if cell["model"] == model}
            tuned = speeds.pop(None, None)
            fixed = {size: speed for size, speed in speeds.items() if speed is not None}
            if tuned is None or not fixed:
                wrong.append(f"{model}: not all sizes were measured")
                continue
            best = max(fixed, key=lambda size: fixed[size])
            if len(fixed) > 3 and best == max(fixed):
                wrong.append(f"{model}: the largest slices are best")
            if tuned < 0.95 * fixed[best]:
                wrong.append(f"{model}: tuned {tuned:.1f} samples/s, {fixed[best]:.1f} with slices of {best:,}")
        return wrong

    def table(self, result: Result) -> TableRows:
        rows = []
        for cell in result["cells"]:
            size = cell["paper_slice"]
            names = (
                (f"tuned, now {number(cell, 'slice_bytes') or 0:,.0f} B", "")
                if size is None
                else (f"{size:,}", f"{cell['slice']:,}")
            )
            paper = FIG12[cell["model"]].get(size) if size is not None else None
            numbers = show(number(cell, "samples_per_s")), show(paper), show(number(cell, "fraction_of_bound"), ".3f")
            rows.append((cell["model"], *names, *numbers))
        columns = ("model", "parameters per slice", "scaled", "samples/s", "paper", "of P*")
        return TableRows("throughput over the size of a slice, priority", columns, tuple(rows))

    def panels(self, result: Result) -> list[Panel]:
        found = []
        for model in names_in(result["cells"]):
            mine = [cell for cell in result["cells"] if cell["model"] == model and cell["iter_median_s"]]
            fixed = sorted((cell["paper_slice"], cell["samples_per_s"]) for cell in mine if cell["paper_slice"])
            lines: dict[str, Points] = {
                "priority": ([size for size, _ in fixed], [speed for _, speed in fixed], "o-", "tab:blue"),
                "paper": (list(FIG12[model]), list(FIG12[model].values()), "--", "0.6"),
            }
            tuned = [cell["samples_per_s"] for cell in mine if cell["paper_slice"] is None]
            title = f"{model} at {self.gbps[model]:g} Gbit/s; dotted: tuned"
            found.append(
                Panel(title=title, x="parameters per slice", y="samples/s", lines=lines, levels=tuned, scale="log-x")
            )
        return found

    def headline(self, result: Result) -> Headline:
        model = result["cells"][0]["model"]
        best = max(FIG12[model].values())
        tuned = number(pick(result["cells"], model=model, paper_slice=None), "samples_per_s")
        return f"{model}: samples/s at the best size; ours tuned", show(best), show(tuned)
