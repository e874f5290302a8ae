"""KungFu, figure 9: throughput per worker from 1 to 32 hosts, beside DDP on gloo and Open MPI, and a model up to 1,024.

Hosts are namespaces of this machine, layers wait for as long as a K80 would compute, and sizes and rates are divided by
the same factor; `bench.scaling.published` derives the ratio of traffic to compute from the published numbers. Ours has
to be twice as fast as DDP on the most hosts, or the bound has to forbid it: what even a perfect network order could gain
over DDP's measured step. Needs root.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.scaling import contest as scaling
from pliant_repro.bench.scaling import published
from pliant_repro.bench.scaling.contest import Run, ScalingOptions, Sweep
from pliant_repro.bench.stats import Summary, quantile
from pliant_repro.figures.figures import Options, TableRows, form, num_cores
from pliant_repro.figures.kungfu import fig9_model as model_of

NAME = "kungfu-fig9"
MODELS = tuple(published.K80_PER_S)
NODES = (1, 2, 4, 8, 16, 32)
USUAL = (1, 2, 4, 8, 32)
"""16 hosts lie between two that are measured, and take minutes to start."""
TWICE = 2.0
CLOSE = 1.03
"""Ours may be so much slower than DDP before that is a complaint: what two runs of one side differ by here."""
BUSY = 0.85
COLOURS = {
    "tree": "tab:cyan", "auto": "tab:blue", "priority": "tab:purple", "ddp": "tab:red", "ddp-best": "tab:orange",
    "openmpi": "tab:green", "plain": "0.4",
}  # fmt: skip
LABELS = {
    "tree": "pliant, MULTI_BINARY_TREE_STAR", "auto": "pliant, AUTO", "priority": "pliant, AUTO, priority",
    "ddp": "DDP/gloo, default buckets", "ddp-best": "DDP/gloo, best buckets", "openmpi": "Open MPI", "plain": "alone",
}  # fmt: skip


def run(options: Options) -> Json:
    models = options.choose_models(("resnet50",), MODELS if options.full else ("resnet50",), MODELS)
    iters = options.choose_steps(quick=2, usual=2, full=10)
    sweeps = []
    for number, model in enumerate(models):
        # The second model answers one question, whether it is the same with less to send: few sizes will do.
        nodes = (2, 4) if options.quick else NODES if options.full else USUAL if number == 0 else (16,)
        all_sides = not options.quick and (number == 0 or options.full)
        asked = ScalingOptions(
            model=model,
            nodes=nodes,
            sides=scaling.SIDES if all_sides else ("priority", "ddp"),
            iters=iters,
            repeat=1 if options.quick else 5 if options.full else 2,
            warmup=10 if options.full else 3,
            everywhere=options.full,
        )
        sweeps.append(scaling.run(asked, options.say, lambda sweep, nodes: _tell(sweep, nodes, options)))
    return result_of(sweeps, options)


def _tell(sweep: Sweep, nodes: int, options: Options) -> None:
    """The artifact's lines of one number of hosts."""
    for each in sweep.runs:
        if each.nodes == nodes:
            options.say(result_line(cell(sweep, each)) or each.failure)


def result_of(sweeps: Sequence[Sweep], options: Options) -> Json:
    """The figure out of the models' sweeps."""
    cores = num_cores()
    cells = [cell(sweep, run) for sweep in sweeps for run in sweep.runs]
    lines = [line for one in cells if (line := result_line(one))]
    claims = {}
    for sweep in sweeps:
        most = max(sweep.options.nodes)
        there = [one for one in cells if one["model"] == sweep.options.model and one["np"] == most]
        limits = {key: cast(float, there[0][key]) for key in ("p_star_s", "p_fifo_s")}
        claims[sweep.options.model] = model_of.claim_at(there, limits, cores)
    main = next(iter(claims.values()))
    return form(
        NAME,
        options,
        ours={"median_s": main.get("step_s"), "iqr_s": None, "over_ddp": main.get("over_ddp")},
        paper={"kungfu": published.KUNGFU, "horovod": published.HOROVOD, "over_horovod": 3.42},
        cells=cells,
        complaints=judge(cells, claims),
        remarks=[*said(sweeps, cells, claims, cores), *(text for sweep in sweeps for text in sweep.remarks)],
        claims=claims,
        lines=lines,
        predictions={sweep.options.model: model_of.predictions(sweep, cores) for sweep in sweeps},
        ddp_by_bucket={sweep.options.model: _probed(sweep) for sweep in sweeps},
    )


def _probed(sweep: Sweep) -> Json:
    return {str(nodes): {f"{cap:g}": step for cap, step in found.items()} for nodes, found in sweep.probed.items()}


def cell(sweep: Sweep, run: Run) -> Json:
    """One side on one number of hosts."""
    model = sweep.options.model
    limits = model_of.bound_at(sweep, run.nodes)
    per_s = [published.BATCH / (each * run.speed) for each in run.seconds]
    mean = sum(per_s) / len(per_s) if per_s else math.nan
    spread = 1.96 * math.sqrt(sum((each - mean) ** 2 for each in per_s) / len(per_s)) if per_s else math.nan
    median_s = run.median_s * run.speed if run.median_s is not None else None
    done = median_s is not None
    return {
        "model": model,
        "np": run.nodes,
        "side": run.side,
        "bs": published.BATCH,
        "speed": run.speed,
        "img_per_s": mean if done else None,
        "spread": spread if done else None,
        "of_ideal": mean / published.K80_PER_S[model] if done else None,
        "step_s": median_s,
        "r": limits.r,
        "p_star_s": limits.p_star_s,
        "p_fifo_s": limits.p_fifo_s,
        "fraction_of_bound": limits.p_star_s / median_s if median_s else None,
        "cpu_s": quantile(run.cpu_s, 0.5) if done and run.cpu_s else None,
        "cpu_busy": quantile(run.busy, 0.5) if done and run.busy else None,
        "sent_bytes": quantile(run.sent, 0.5) if done and run.sent else None,
        "bucket_cap_mb": run.cap_mb,
        "same_on_all_ranks": run.same_bits,
        "failure": run.failure,
        "ours": {"median_s": median_s, "iqr_s": Summary.of(run.seconds).iqr * run.speed if done else None},
    }


def result_line(one: Json) -> str:
    """As the artifact's benchmark prints it; empty where the side failed."""
    if one["img_per_s"] is None:
        return ""
    side = str(one["side"])
    facts: Json = {
        "framework": {"ddp": "ddp-gloo", "ddp-best": "ddp-gloo", "openmpi": "openmpi"}.get(side, "pliant"),
        "np": one["np"],
        "strategy": scaling.STRATEGIES.get(side, "-"),
        "bs": one["bs"],
        "model": published.NAMES[str(one["model"])],
        "kf-opt": "sync-sgd",
        "sync": "priority" if side == "priority" else "fifo",
        "side": side,
    }
    text = json.dumps(facts, separators=(",", ":"))
    return f"RESULT: {one['img_per_s']:.6f} +-{one['spread']:.6f} {text}"


def judge(cells: Sequence[Json], claims: dict[str, Json]) -> list[str]:
    """Twice DDP's throughput on the most hosts, or no more to gain; on no number of hosts slower than DDP where cores are
    left."""
    wrong = [f"{one['model']}, {one['np']} hosts: {one['failure']}" for one in cells if one["failure"]]
    for one in cells:
        if one["side"] != "ddp-best" and not one["failure"] and not one["same_on_all_ranks"]:
            wrong.append(f"{one['model']}, {one['np']} hosts, {one['side']}: the ranks ended with different parameters")
    for model, claim in claims.items():
        if not claim:
            wrong.append(f"{model}: ours or DDP was not measured")
            continue
        over, limit = (cast(float, claim[key]) for key in ("over_ddp", "limit_over_ddp"))
        if over < TWICE and limit >= TWICE:
            wrong.append(
                f"{model}: {over:.2f}x DDP's throughput on {claim['np']} hosts, where {limit:.2f}x are possible"
            )
        if over * CLOSE < 1:
            wrong.append(f"{model}: slower than DDP on {claim['np']} hosts, {over:.2f}x")
        elsewhere = {cast(int, one["np"]) for one in cells if one["model"] == model} - {claim["np"]}
        wrong += [text for nodes in sorted(elsewhere) if (text := _slower(cells, model, nodes))]
    return wrong


def _slower(cells: Sequence[Json], model: str, nodes: int) -> str:
    """That the best of ours is slower than DDP on so many hosts, though cores are left; empty if not."""
    there = {
        str(one["side"]): one
        for one in cells
        if (one["model"], one["np"]) == (model, nodes) and one["step_s"] is not None
    }
    ours = [there[side] for side in scaling.STRATEGIES if side in there]
    if not ours or "ddp" not in there:
        return ""
    best = min(ours, key=lambda one: cast(float, one["step_s"]))
    over = cast(float, there["ddp"]["step_s"]) / cast(float, best["step_s"])
    if over * CLOSE >= 1 or cast(float, best["cpu_busy"] or 0) > BUSY:
        return ""
    return f"{model}: slower than DDP on {nodes} hosts, {over:.2f}x ({best['side']}), with cores left"


def said(sweeps: Sequence[Sweep], cells: Sequence[Json], claims: dict[str, Json], cores: int) -> list[str]:
    """What a reader must know before believing the cells."""
    found = [_verdict(model, claim, cores) for model, claim in claims.items() if claim]
    gbit = published.published_bytes_per_s() * 8 / 1e9
    found.append(
        f"the ratio: a K80 at {published.K80_PER_S['resnet50']:g} images/s computes for 0.64 s; KungFu's 43.4 images/s leave room "
        f"for T/C = {published.published_ratio():.2f} at most, {gbit:.1f} Gbit/s per VM; its figure 5 needs at least "
        f"{published.star_bytes_per_s() * 8 / 1e9:.1f} Gbit/s, where everything would hide behind backward"
    )
    rates = ", ".join(
        f"{sweep.options.model} 1/{published.KAPPA[sweep.options.model]:g} at "
        f"{published.lab_bits_per_s(sweep.options.model) / 1e6:.0f} Mbit/s"
        for sweep in sweeps
    )
    found.append(f"compute is paced, sizes and rates are scaled: {rates}; gradients, sums and updates are real")
    found.append(
        "Horovod 0.16.1 is not rebuilt: its 12.7 images/s are less than no overlap at all would give at this ratio "
        f"({32 / (0.64 * (1 + published.published_ratio())):.1f}); the rest was its coordinator, which DDP does not have"
    )
    if any(one["model"] == "mobilenet-v2" for one in cells):
        found.append("MobileNetV2: a K80's rate of 100 images/s is assumed, as the artifact gives none")
    crowded = [f"{one['side']} on {one['np']}" for one in cells if cast(float, one["cpu_busy"] or 0) > BUSY]
    if crowded:
        found.append(f"the processors were more than {BUSY:.0%} busy, and set the pace: {', '.join(crowded)}")
    found.append(
        "the model: hops, bytes and messages are counted, their prices fitted to these runs; predictions are for machines of "
        "their own at full size, with a hop as slow as here, where 32 nodes share the cores: DDP's ring, which has the "
        "most hops, may do better on real machines"
    )
    if any(sweep.options.sides_at(nodes) != sweep.options.sides for sweep in sweeps for nodes in sweep.options.nodes):
        found.append(
            "where the cores carry the hosts only in slow motion, only AUTO with priorities and DDP were measured (--full: all); "
            "MULTI_BINARY_TREE_STAR would send 4.2 times the model on 32 hosts, AUTO 1.9 times: in DDP's exact order of "
            "summation trees carry what they may not fold"
        )
    for sweep in sweeps:
        for side, one in model_of.predictions(sweep, cores).items():
            apart = max(map(abs, cast("list[float]", one["cpu_residuals"])), default=0.0)
            found.append(
                f"{sweep.options.model}, {side}: the model fits steps within {one['worst_residual']:.0%} and CPU times within "
                f"{apart:.0%}; the price of a folded byte is multiplied by {published.KAPPA[sweep.options.model]:g} for the full "
                "size, so where CPU times fit badly the prediction is no more than a hint"
            )
    found.append(
        "full size: 32 hosts with a GPU each; `pliant run -np 32 -strategy AUTO -H ...` on each, and this table's model"
    )
    return found


def _verdict(model: str, claim: Json, cores: int) -> str:
    over, limit = cast(float, claim["over_ddp"]), cast(float, claim["limit_over_ddp"])
    text = (
        f"{model} on {claim['np']} hosts: {over:.2f}x DDP's throughput ({claim['best']}; {claim['over_ddp_best']:.2f}x with DDP's "
        f"best buckets); DDP's step is {claim['ddp_step_s']:.3f} s, ideal priorities need P* = {claim['p_star_s']:.3f} s and "
        f"an ideal FIFO {claim['p_fifo_s']:.3f} s, so {limit:.2f}x is the most that anything could have over DDP here"
    )
    if over < TWICE and limit < TWICE:
        text += f": the bound forbids {TWICE:g}x, and ours is at {claim['fraction_of_bound']:.0%} of it"
    floor_s = claim.get("cpu_floor_s")
    if isinstance(floor_s, float):
        text += f"; the ranks' own CPU time alone fills {floor_s:.3f} s of a step on {cores} cores"
    return text


def table(result: Json) -> TableRows:
    rows = []
    for one in cast("list[Json]", result["cells"]):
        paper = published.KUNGFU["mean"] if (one["model"], one["np"], one["side"]) == ("resnet50", 32, "tree") else None
        paper = (
            published.HOROVOD["mean"]
            if (one["model"], one["np"], one["side"]) == ("resnet50", 32, "openmpi")
            else paper
        )
        rows.append(
            (
                published.NAMES[str(one["model"])], str(one["np"]), LABELS[str(one["side"])],
                _shown(one["img_per_s"], ".1f", one["spread"]), _shown(one["of_ideal"], ".0%"), _shown(one["step_s"], ".3f"),
                _shown(one["p_star_s"], ".3f"), _shown(one["cpu_busy"], ".0%"), _shown(paper, ".1f"),
            )
        )  # fmt: skip
    for model, sides in cast("dict[str, dict[str, Json]]", result["predictions"]).items():
        for side, found in sides.items():
            per_s = cast("dict[str, float]", found["samples_per_s"])
            for nodes in map(str, (64, 256, 1024)):
                fits = f"fits within {found['worst_residual']:.0%}"
                ideal = per_s[nodes] / published.K80_PER_S[model]
                rows.append(
                    (
                        published.NAMES[model], nodes, f"{LABELS[side]}: predicted", f"{per_s[nodes]:.1f}", f"{ideal:.0%}",
                        f"{published.BATCH / per_s[nodes]:.3f}", "-", fits, "-",
                    )
                )  # fmt: skip
    columns = ("model", "np", "side", "img/s per worker", "of ideal", "step [s]", "P* [s]", "CPU busy", "paper")
    return TableRows("throughput per worker over the number of hosts", columns, tuple(rows))


def _shown(value: object, text: str, spread: object = None) -> str:
    if not isinstance(value, float):
        return "-"
    return format(value, text) + (f" +-{format(spread, text)}" if isinstance(spread, float) else "")


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    predictions = cast("dict[str, dict[str, Json]]", result["predictions"])
    models = list(dict.fromkeys(str(one["model"]) for one in cells))
    caption = (
        "Hosts as network namespaces of one machine; compute paced like a K80, sizes and rates divided by the same factor. "
        "Dashed: the alpha-beta model, on machines of their own. Grey: the artifact's 32 VMs with a K80 each."
    )
    with plotting.picture(path, "Throughput per worker", caption, len(models)) as panels:
        for axes, model in zip(panels, models, strict=True):
            axes.axhline(published.K80_PER_S[model], color="0.7", linewidth=0.8, label="ideal")
            for side in COLOURS:
                there = [one for one in cells if one["model"] == model and one["side"] == side and one["img_per_s"]]
                if there and side != "plain":
                    counts = [cast(int, one["np"]) for one in there]
                    values = [cast(float, one["img_per_s"]) for one in there]
                    axes.plot(counts, values, "o-", color=COLOURS[side], label=LABELS[side], markersize=4)
                found = predictions.get(model, {}).get(side)
                if found is not None:
                    per_s = cast("dict[str, float]", found["samples_per_s"])
                    axes.plot([int(each) for each in per_s], list(per_s.values()), "--", color=COLOURS[side])
            if model == "resnet50":
                for label, paper in (("KungFu", published.KUNGFU), ("Horovod", published.HOROVOD)):
                    axes.errorbar([32], [paper["mean"]], yerr=[paper["spread"]], fmt="s", color=plotting.PAPER)
                    axes.annotate(label, (32, paper["mean"]), textcoords="offset points", xytext=(6, -3), fontsize=8)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set(title=published.NAMES[model], xlabel="hosts", ylabel="images/s per worker", ylim=(0, None))
            axes.legend(fontsize=7, loc="lower left")  # where nothing is drawn
