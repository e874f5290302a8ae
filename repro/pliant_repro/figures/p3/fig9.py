"""P3, figures 8 and 9: how busy a worker's network is, every 10 ms, with the baseline and with priorities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.priority.paper import FIG9
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.p3 import contest
from pliant_repro.figures.p3.contest import cells_of, gbps_of, number, pick, shown

NAME = "p3-fig9"
MODES = ("baseline", "priority")
SHOWN_S = 2.0


def run(options: Options) -> Json:
    models = options.choose_models(("resnet50",), tuple(FIG9), tuple(FIG9))
    iters = options.choose_steps(quick=5, usual=12, full=60)
    each = (contest.sweep(options, model, [FIG9[model][0]], MODES, iters=iters, utilisation=True) for model in models)
    return result_of(list(each), options)


def result_of(results: Sequence[Json], options: Options) -> Json:
    """The figure out of the models' contests."""
    cells = [{**one, "gbps": gbps_of(one)} for each in results for one in cells_of(each)]
    return form(
        NAME,
        options,
        ours=cast(Json, results[0]["ours"]),
        paper={model: {"gbps": gbps, "mean": mean, "idle": idle} for model, (gbps, mean, idle) in FIG9.items()},
        cells=cells,
        complaints=[text for each in results for text in contest.complaints_of(each)] + judge(cells),
        remarks=contest.remarks_of(results),
    )


def judge(cells: Sequence[Json]) -> list[str]:
    """The figure's claims: priorities keep the network busier, and leave it less often idle."""
    wrong = []
    for model in dict.fromkeys(str(one["model"]) for one in cells):
        before, ours = (pick(cells, model=model, mode=mode) for mode in MODES)
        mean, idle = number(ours, "tx_mean_share"), number(ours, "tx_idle_share")
        mean_before, idle_before = number(before, "tx_mean_share"), number(before, "tx_idle_share")
        if mean is None or idle is None or mean_before is None or idle_before is None:
            wrong.append(f"{model}: not both modes were measured")
            continue
        if mean < 0.98 * mean_before:
            wrong.append(f"{model}: priority sends at {mean:.0%} of the capacity, the baseline at {mean_before:.0%}")
        # Where there is less to send than the network can, it must be idle for the rest of the time.
        if (number(ours, "r") or 1.0) >= 0.9 and idle > idle_before:
            wrong.append(f"{model}: idle for {idle:.0%} of the time, the baseline for {idle_before:.0%}")
    return wrong


def table(result: Json) -> TableRows:
    rows = []
    cells = cells_of(result)
    for model in dict.fromkeys(str(one["model"]) for one in cells):
        gbps, means, idles = FIG9[model]
        for place, mode in enumerate(MODES):
            one = pick(cells, model=model, mode=mode)
            mean, idle = (shown(number(one, key), ".0%") for key in ("tx_mean_share", "tx_idle_share"))
            rows.append((f"{model} at {gbps:g}G", mode, mean, f"{means[place]:.0%}", idle, f"{idles[place]:.0%}"))
    columns = ("model", "mode", "mean TX", "paper", "time with TX < 5 %", "paper")
    return TableRows("what one worker sends, of the capacity, in samples of 10 ms", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cells_of(result)
    models = list(dict.fromkeys(str(one["model"]) for one in cells))
    with plotting.picture(path, "What a worker sends, of the capacity", contest.CAPTION, len(models)) as panels:
        for axes, model in zip(panels, models, strict=True):
            for mode in MODES:
                one = pick(cells, model=model, mode=mode)
                series = cast("Json | None", one.get("tx_series")) if one is not None else None
                if series is None:
                    continue
                step_s, shares = cast(float, series["step_s"]), cast("list[float]", series["share"])
                count = min(len(shares), int(SHOWN_S / step_s))
                times = [place * step_s for place in range(count)]
                axes.plot(times, shares[:count], color=contest.COLOURS[mode], label=mode, linewidth=0.8)
            axes.set(
                title=f"{model} at {FIG9[model][0]:g} Gbit/s", xlabel="s", ylabel="sent / capacity", ylim=(0, None)
            )
            axes.legend(fontsize=8)
