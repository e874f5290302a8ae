"""The few numbers of each figure that its paper is known for, published and measured side by side.

Pure functions of a result. The whole of it is in the figure's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pliant.machine import Json

Data = Any
"""A result as it was read from JSON: whatever is in it was put there by the figure's module."""


@dataclass(frozen=True, slots=True)
class Headline:
    """One number of the paper and ours."""

    what: str
    published: str
    measured: str


def of(result: Json) -> list[Headline]:
    """The headlines of a result.

    Raises:
        KeyError, TypeError, ValueError, IndexError, AttributeError: the result has not the form of its figure.
    """
    return [Headline(*row) for row in BY_NAME[str(result["bench"])](result)]


Rows = Iterable[tuple[str, str, str]]


def _paper(result: Data) -> Data:
    return result["peers"]["paper"]


def _span(values: Iterable[float | None], form: str = ".2f") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    least, most = format(min(known), form), format(max(known), form)
    return least if least == most else f"{least} to {most}"


def _percent(value: float | None, form: str = ".1%") -> str:
    return "-" if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


# --- EasyScale ---


def _easyscale_fig9(result: Data) -> Rows:
    published = {
        "D0": "0 in the first stage, then up to 0.16 off",
        "D1": "0 while the GPUs are of one type",
        "D1, unlike": "differs as soon as another type of GPU joins",
        "D1+D2, unlike": "0, also with another type of GPU",
    }
    for name, text in published.items():
        series = [cell["series"][name] for cell in result["cells"] if name in cell["series"]]
        if not series:
            continue
        same = [step for each in series for step in each["same_bits"]]
        off = max(
            (abs(delta) for each in series for delta in each["delta_loss"] if delta is not None), default=float("nan")
        )
        refused = "; the newcomer is refused" if any(each["refused"] for each in series) else ""
        measured = f"{'0' if off == 0 else f'up to {off:.2g}'}; DDP's bits in {sum(same)} of {len(same)} steps{refused}"
        yield f"loss minus DDP's, {name}", text, measured


def _easyscale_fig10(result: Data) -> Rows:
    for model, paper in _paper(result).items():
        cells = [cell for cell in result["cells"] if cell["model"] == model] if isinstance(paper, dict) else []
        if not cells:
            continue
        first, last = cells[0], cells[-1]
        steps = f"{first['replicas']} to {last['replicas']}"
        ours = [_mib(cell["ours"]) for cell in (first, last)]
        packed = [_mib(cell["peers"]["packed"]) for cell in (first, last)]
        yield (
            f"{model}: memory of {steps} replicas",
            f"{paper['replicas_mib']:.0f} MiB for any number",
            " to ".join(ours),
        )
        limit = f"{paper['packed_mib']['1']:.0f} MiB each, too much from {paper['out_of_memory_from']} on"
        yield f"{model}: of {steps} packed workers", limit, " to ".join(packed)


def _mib(numbers: Data) -> str:
    return f"{numbers['memory_bytes'] / (1 << 20):.0f} MiB" if "memory_bytes" in numbers else "failed"


def _easyscale_fig11(result: Data) -> Rows:
    shares = [each["switch_share"] for each in _paper(result).values() if isinstance(each, dict)]
    yield (
        "most of a micro-step that a switch takes",
        _percent(max(shares), ".2%"),
        _percent(result["ours"]["max_switch_share"], ".2%"),
    )


def _easyscale_fig12(result: Data) -> Rows:
    paper = [each for each in _paper(result).values() if isinstance(each, dict)]
    for name, key, ours in (("D1", "d1_s", "ours"), ("D1+D2", "d2_s", "d2")):
        published = sum(each[key] / each["baseline_s"] - 1 for each in paper) / len(paper)
        costs = [cell[ours]["cost"] for cell in result["cells"] if cell[ours]["cost"] is not None]
        mean = sum(costs) / len(costs) if costs else None
        yield f"cost of {name}, mean over the models", _percent(published, "+.1%"), _percent(mean, "+.1%")


def _easyscale_fig13(result: Data) -> Rows:
    paper = [each for each in _paper(result).values() if isinstance(each, dict)]
    names = {"copy": "a replica that copies its gradients", "sync": "the replica that also sums"}
    for key, what in names.items():
        measured = _span(cell["ours"][key] for cell in result["cells"])
        yield f"{what}, of a DDP worker's step", _span(each[key] for each in paper), measured


def _easyscale_fig14(result: Data) -> Rows:
    for cell in result["cells"]:
        ours, paper = cell["ours"], cell["peers"]["paper"]
        if paper["jct_mean_s"] is not None:
            yield (
                f"{cell['policy']}: mean completion time",
                f"{paper['jct_mean_s']:.0f} s",
                f"{ours['jct_mean_s']:.0f} s",
            )
            yield f"{cell['policy']}: makespan", f"{paper['makespan_s']:.0f} s", f"{ours['makespan_s']:.0f} s"


def _easyscale_fig15(result: Data) -> Rows:
    for cell in result["cells"]:
        ours, paper = cell["ours"], cell["peers"]["paper"]
        yield f"{cell['policy']}: GPUs in use", f"{paper['mean_allocated']:.1f}", f"{ours['mean_allocated']:.1f}"


# --- KungFu ---


def _kungfu_fig4(result: Data) -> Rows:
    ours, paper = result["ours"], _paper(result)
    for mode in ("small", "large", "adaptive"):
        sooner = ours[mode]["time_to_accuracy_s"]
        reached = f"small's after {sooner:.1f} s" if sooner else "never as good as small"
        yield f"{mode} batches", paper[mode], f"{ours[mode]['final_accuracy']:.2%}, {reached}"


def _kungfu_fig5(result: Data) -> Rows:
    ours, paper = result["ours"], _paper(result)
    names = {
        "before": "images/s per worker in quiet",
        "under_interference": "under other traffic",
        "after": "after the change",
    }
    for key, what in names.items():
        yield what, f"{paper[key]:.1f}", _span([ours[key]], ".1f")
    yield "steps from the vote to 90 %", str(paper["steps_to_recovery"]), str(ours["steps_to_recovery"])


def _kungfu_fig6(result: Data) -> Rows:
    ours, paper = result["ours"], _paper(result)
    stopped = f"{_span(ours['stopped_at'], 'd')} (best of the sweep: {ours['best']})"
    yield "workers where it stops", f"{paper['workers_of_that']} of 4 GPUs", stopped
    each = next((cell["per_worker"] for cell in result["cells"] if cell["workers"] == ours["best"]), None)
    yield "samples/s per worker there", f"{paper['examples_per_s_per_worker']:.2f} (BERT-base)", _span([each], ".1f")


def _kungfu_fig7(result: Data) -> Rows:
    for cell in result["cells"]:
        joined = cell["ours"].get("until_joined", {}).get("median_s")
        more = f" (newcomer takes part after {_seconds(joined)})" if joined is not None else ""
        yield cell["resize"], _seconds(cell["peers"]["paper"]["median_s"]), _seconds(cell["ours"]["median_s"]) + more


def _kungfu_fig8(result: Data) -> Rows:
    names = {"noise_scale": "noise scale", "variance": "variance", "variance_every_8": "variance, every 8 steps"}
    for key, what in names.items():
        measured = _percent(result["overhead"][key], ".2%")
        yield f"cost of monitoring: {what}", _percent(_paper(result)["overhead"][key]), measured


def _kungfu_fig9(result: Data) -> Rows:
    paper = _paper(result)
    for model, claim in result["claims"].items():
        if claim:
            published = f"{paper['over_horovod']:.2f}x Horovod" if model == "resnet50" else "not published as a number"
            limit = f"{claim['over_ddp']:.2f}x DDP (at most {claim['limit_over_ddp']:.2f}x is possible)"
            yield f"{model}, throughput on {claim['np']} hosts", published, limit
    most = max(cell["np"] for cell in result["cells"])
    ours = [cell["img_per_s"] for cell in result["cells"] if cell["np"] == most and cell["side"] == "priority"]
    yield f"images/s per worker on {most} hosts", f"{paper['kungfu']['mean']:.1f} (32 hosts)", _span(ours, ".1f")


def _kungfu_fig10(result: Data) -> Rows:
    order = result["order"]
    yield "launches in one order on all ranks", "yes", "yes" if order["same_on_all_ranks"] else "no"
    yield "wrong sums, with and without it", "not published", f"{order['wrong']} and {order['control_wrong']}"
    speeds = [cell["img_per_s"] for cell in result["cells"] if cell["side"] == "scheduled"]
    paper = f"{_paper(result)['mean']:.1f} (4 GPUs)"
    yield "images/s per GPU", paper, _span(speeds, ".1f") if speeds else "not measured: needs 2 GPUs"


# --- Oort ---


def _oort_time_to_accuracy(result: Data) -> Rows:
    paper, worlds = _paper(result), result["ours"]["worlds"]
    main = worlds["unequal"]
    yield (
        "shorter time to accuracy",
        f"1.2x to 14.1x (others, with its program: {paper['replication'].partition(',')[0]})",
        _times(main),
    )
    gain = main["final_difference"]["median"]
    yield "final accuracy, over random", "+1.3 to +9.8 points", f"{gain * 100:+.1f} points"
    if "alike" in worlds:
        yield "the same, where all clients are alike", "no difference is to be expected", _times(worlds["alike"])


def _times(world: Data) -> str:
    found = world["ratio"]
    return f"{found['median']:.2f}x ({found['least']:.2f} to {found['most']:.2f})" if found else "not reached by all"


def _oort_ablation(result: Data) -> Rows:
    paper, ways = _paper(result), result["ours"]["ways"]
    full = ways["oort"]
    for way in ("no penalty", "no pacer", "no exploration"):
        one = ways[way]
        measured = (
            f"rounds of {one['mean_round_s']:.1f} s ({full['mean_round_s']:.1f}), {one['coverage']:g} clients heard "
        )
        measured += f"({full['coverage']:g}), ends with {one['final_accuracy']:.2%} ({full['final_accuracy']:.2%})"
        yield f"{way} (in brackets: all of Oort)", paper.get(way, "not published as a number"), measured


def _oort_1300(result: Data) -> Rows:
    ours, cells = result["ours"], result["cells"]
    yield "participants in a round", _paper(result)["participants"], _span((cell["aggregated"] for cell in cells), ",d")
    measured = f"{ours['clients_per_s']:.1f} clients/s, {ours['peak_mb']:.0f} MB, on one machine"
    yield "what it takes", _paper(result)["hardware"], measured


def _oort_testing(result: Data) -> Rows:
    measured = f"{result['ours']['end_to_end_ratio']:.1f}x"
    yield "shorter than with the whole problem, end to end", "4.7x on average", measured


# --- P3 ---


def _p3_fig7(result: Data) -> Rows:
    cells = result["cells"]
    for model in dict.fromkeys(cell["model"] for cell in cells):
        mine = [cell for cell in cells if cell["model"] == model]
        speeds = {(cell["gbps"], cell["mode"]): cell for cell in mine}
        gains: dict[float, float] = {}
        theirs: dict[float, float] = {}
        for gbps in dict.fromkeys(cell["gbps"] for cell in mine):
            before, ours = speeds.get((gbps, "baseline")), speeds.get((gbps, "priority"))
            if before is None or ours is None:
                continue
            for found, key in ((gains, "samples_per_s"), (theirs, "paper_samples_per_s")):
                if before.get(key) and ours.get(key):
                    found[gbps] = ours[key] / before[key] - 1
        yield f"{model}: most that priority gains over the baseline", _best_gain(theirs), _best_gain(gains)
        bound = [cell["fraction_of_bound"] for cell in mine if cell["mode"] == "priority" and cell["fraction_of_bound"]]
        yield f"{model}: of the ideal P*, worst point", "0.91", f"{min(bound):.2f}" if bound else "-"


def _best_gain(gains: dict[float, float]) -> str:
    if not gains:
        return "-"
    best = max(gains, key=lambda gbps: gains[gbps])
    return f"{gains[best]:+.0%} at {best:g} Gbit/s"


def _p3_fig9(result: Data) -> Rows:
    for cell in result["cells"]:
        paper = _paper(result)[cell["model"]]
        place = ("baseline", "priority").index(cell["mode"])
        what = f"{cell['model']}, {cell['mode']}: network in use / idle"
        measured = f"{_percent(cell.get('tx_mean_share'), '.0%')} / {_percent(cell.get('tx_idle_share'), '.0%')}"
        yield what, f"{paper['mean'][place]:.0%} / {paper['idle'][place]:.0%}", measured


def _p3_fig10(result: Data) -> Rows:
    for model in dict.fromkeys(cell["model"] for cell in result["cells"]):
        most = max(cell["nodes"] for cell in result["cells"] if cell["model"] == model)
        paper = _paper(result)[model]
        for place, mode in enumerate(("baseline", "priority")):
            found = [
                cell["scaling"] for cell in result["cells"]
                if (cell["model"], cell["nodes"], cell["mode"]) == (model, most, mode)
            ]  # fmt: skip
            published = f"{paper[str(most)][place] / paper['1'][0]:.2f}x" if str(most) in paper else "-"
            yield f"{model}, {mode}: {most} machines over one", published, f"{_span(found)}x"


def _p3_fig12(result: Data) -> Rows:
    for model in dict.fromkeys(cell["model"] for cell in result["cells"]):
        curve = _paper(result)[model]
        best = max(curve, key=lambda size: curve[size])
        cells = [cell for cell in result["cells"] if cell["model"] == model and cell.get("samples_per_s")]
        fixed = [cell for cell in cells if cell["paper_slice"] is not None]
        tuned = next((cell for cell in cells if cell["paper_slice"] is None), None)
        ours = max(fixed, key=lambda cell: cell["samples_per_s"], default=None)
        measured = f"{ours['paper_slice']:,} ({ours['samples_per_s']:.1f} samples/s)" if ours else "-"
        yield f"{model}: best parameters per slice", f"{int(best):,} ({curve[best]:.1f} samples/s)", measured
        if tuned is not None:
            yield f"{model}: with a size that is tuned", "not published", f"{tuned['samples_per_s']:.1f} samples/s"


BY_NAME: dict[str, Callable[[Data], Rows]] = {
    "easyscale-fig9": _easyscale_fig9,
    "easyscale-fig10": _easyscale_fig10,
    "easyscale-fig11": _easyscale_fig11,
    "easyscale-fig12": _easyscale_fig12,
    "easyscale-fig13": _easyscale_fig13,
    "easyscale-fig14": _easyscale_fig14,
    "easyscale-fig15": _easyscale_fig15,
    "kungfu-fig4": _kungfu_fig4,
    "kungfu-fig5": _kungfu_fig5,
    "kungfu-fig6": _kungfu_fig6,
    "kungfu-fig7": _kungfu_fig7,
    "kungfu-fig8": _kungfu_fig8,
    "kungfu-fig9": _kungfu_fig9,
    "kungfu-fig10": _kungfu_fig10,
    "oort-time-to-accuracy": _oort_time_to_accuracy,
    "oort-ablation": _oort_ablation,
    "oort-1300": _oort_1300,
    "oort-testing": _oort_testing,
    "p3-fig7": _p3_fig7,
    "p3-fig9": _p3_fig9,
    "p3-fig10": _p3_fig10,
    "p3-fig12": _p3_fig12,
}
