"""KungFu, figure 10: gradients summed by NCCL, launched in the order that all ranks have agreed on.

NCCL matches collectives by their order, so ranks whose gradients are ready in different orders would wait for each other
for ever. Where this machine has several GPUs, ResNet-50 is trained with the scheduler, without it, and by DDP, as in the
artifact (there 4 GPUs, batches of 64). Everywhere the order itself is checked, on gloo, with real processes: 160 tensors in
a random order on each rank, and a control without the scheduler, whose sums are wrong.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.scaling import order
from pliant_repro.bench.scaling.order import OrderCheck, Trained
from pliant_repro.figures.figures import Options, TableRows, form, timed

NAME = "kungfu-fig10"
PAPER = {"mean": 181.336683, "spread": 2.371972, "np": 4, "bs": 64, "model": "ResNet50"}
NUM_TENSORS = 160
MOST_GPUS = 4
SIDES = ("scheduled", "unscheduled", "ddp")
LABELS = {"scheduled": "pliant, NCCL scheduler", "unscheduled": "NCCL, as gradients come", "ddp": "DDP/NCCL"}


def run(options: Options) -> Json:
    iterations = options.choose_steps(quick=10, usual=60, full=1000)
    num_ranks = 3
    options.say(f"{num_ranks} processes on gloo: {NUM_TENSORS} tensors in random orders, {iterations} iterations")
    with order.ranks(num_ranks) as (job, _):
        check = order.check(job, tensors=NUM_TENSORS, iterations=iterations, control=3)
    num_gpus = min(count_gpus(), MOST_GPUS) if options.where == "cuda" else 0
    trained = train(num_gpus, options) if num_gpus > 1 else []
    return result_of(check, trained, num_gpus, options)


def count_gpus() -> int:
    """The GPUs of this machine, without loading torch."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def train(num_gpus: int, options: Options, *, backend: str = "nccl", model: str = "resnet50") -> list[Trained]:
    """All sides in turns, in the same processes."""
    turns, iterations = (1, 5) if options.quick else (3, 20)
    batch = cast(int, PAPER["bs"])
    found: dict[str, list[Trained]] = {side: [] for side in SIDES}
    with order.ranks(num_gpus) as (job, folder):
        for turn in range(turns):
            for side in SIDES:
                options.say(f"{model} on {num_gpus} GPUs: {side}, turn {turn + 1} of {turns}")
                done = order.train(
                    job, folder, side, model=model, batch=batch, iterations=iterations, warmup=5, backend=backend, turn=turn
                )  # fmt: skip
                found[side].append(done)
    return [
        Trained(side, tuple(s for each in runs for s in each.seconds), all(each.same_on_all_ranks for each in runs))
        for side, runs in found.items()
    ]


def result_of(check: OrderCheck, trained: Sequence[Trained], num_gpus: int, options: Options) -> Json:
    """The figure out of the check and what was trained."""
    cells = [cell(each, num_gpus) for each in trained]
    lines = [result_line(one) for one in cells]
    for line in lines:
        options.say(line)
    outcome = (
        "all launched alike, by name at first and from the second on as rank 0's had arrived"
        if check.holds
        else "see above"
    )
    remarks = [
        f"{check.ranks} processes submitted {check.tensors} tensors in random orders, {check.iterations} times: {outcome}; "
        f"{check.wrong} wrong sums, no deadlock; {timed(check.seconds)['median_s'] or 0:.3f} s per iteration",
        f"without the scheduler the ranks' orders differ, and {check.control_wrong} sums of the same tensors are wrong",
    ]
    if not trained:
        remarks.append(
            "fewer than two GPUs here: NCCL takes one worker per GPU, so throughput was not measured, only the launch order on "
            "gloo; on a machine with several GPUs the same command trains ResNet-50 with batches of 64 on up to 4 of them"
        )
    return form(
        NAME,
        options,
        ours=timed([s for each in trained if each.side == "scheduled" for s in each.seconds]),
        paper=dict(PAPER),
        cells=cells,
        complaints=judge(check, trained),
        remarks=remarks,
        order=cast(Json, {**asdict(check), "seconds": list(check.seconds), "holds": check.holds}),
        lines=lines,
    )


def cell(trained: Trained, num_gpus: int) -> Json:
    """One side's throughput."""
    batch = cast(int, PAPER["bs"])
    per_s = [batch / each for each in trained.seconds]
    mean = sum(per_s) / len(per_s)
    spread = 1.96 * math.sqrt(sum((each - mean) ** 2 for each in per_s) / len(per_s))
    return {
        "side": trained.side, "np": num_gpus, "bs": batch, "img_per_s": mean, "spread": spread,
        "same_on_all_ranks": trained.same_on_all_ranks, "ours": timed(trained.seconds),
    }  # fmt: skip


def result_line(one: Json) -> str:
    """As the artifact's benchmark prints it."""
    ours = one["side"] == "scheduled"
    facts: Json = {
        "framework": "pliant" if ours else str(one["side"]), "np": one["np"], "strategy": "AUTO", "bs": one["bs"],
        "model": "ResNet50", "kf-opt": "sync-sgd-nccl" if ours else "sync-sgd", "fuse": False,
    }  # fmt: skip
    return f"RESULT: {one['img_per_s']:.6f} +-{one['spread']:.6f} {json.dumps(facts, separators=(',', ':'))}"


def judge(check: OrderCheck, trained: Sequence[Trained]) -> list[str]:
    wrong = []
    if not check.same_on_all_ranks or check.changed:
        wrong.append(f"the ranks launched in different orders, or changed theirs in {check.changed} iterations")
    if not check.first_sorted or not check.taken_over:
        wrong.append("the order is not the sorted names at first and rank 0's arrival from the second iteration on")
    if check.wrong:
        wrong.append(f"{check.wrong} sums are wrong")
    if not check.arrivals_differed or not check.control_orders_differed:
        wrong.append("the control shows nothing: all ranks had the same order by themselves")
    medians = {each.side: timed(each.seconds)["median_s"] or math.inf for each in trained}
    if medians and medians["scheduled"] > 1.1 * medians["ddp"]:
        wrong.append(f"a step takes {medians['scheduled']:.4f} s with the scheduler, {medians['ddp']:.4f} s with DDP")
    wrong += [
        f"{each.side}: the ranks ended with different parameters" for each in trained if not each.same_on_all_ranks
    ]
    return wrong


def table(result: Json) -> TableRows:
    found = cast(Json, result["order"])
    seconds = timed(cast("list[float]", found["seconds"]))["median_s"]
    yes = {True: "yes", False: "no"}
    rows = [
        (
            f"launch order, {found['ranks']} ranks on gloo", f"{found['tensors']} tensors x {found['iterations']}",
            f"same on all ranks: {yes[bool(found['same_on_all_ranks'])]}", f"{seconds:.3f} s per iteration", "-",
        ),
        (
            "control without the scheduler", f"{found['tensors']} tensors x 3",
            f"same on all ranks: {yes[not found['control_orders_differed']]}", f"{found['control_wrong']} wrong sums", "-",
        ),
    ]  # fmt: skip
    for one in cast("list[Json]", result["cells"]):
        paper = f"{PAPER['mean']:.1f} +-{PAPER['spread']:.1f}" if one["side"] == "scheduled" else "-"
        rows.append(
            (LABELS[str(one["side"])], f"np {one['np']}, batch {one['bs']}", "-",
             f"{one['img_per_s']:.1f} +-{one['spread']:.1f} img/s", paper)
        )  # fmt: skip
    if not result["cells"]:
        paper = f"{PAPER['mean']:.1f} +-{PAPER['spread']:.1f}"
        rows.append((LABELS["scheduled"], "needs 2 GPUs or more", "-", "not measured", paper))
    columns = ("what", "of", "order", "result", "paper [img/s per GPU]")
    return TableRows("NCCL in one agreed launch order", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    seconds = cast("list[float]", cast(Json, result["order"])["seconds"])
    caption = (
        "Left: 160 tensors in a random order on each of 3 ranks, gloo; from the second iteration on in rank 0's order. "
        "Right: the artifact has 4 Titan X, ResNet-50, batches of 64; ours where this machine has several GPUs."
    )
    with plotting.picture(path, "NCCL scheduler", caption, 2) as (left, right):
        left.plot(range(1, len(seconds) + 1), [each * 1e3 for each in seconds], ".-", color="tab:blue")
        left.set(title="launched in one order", xlabel="iteration", ylabel="ms", ylim=(0, None))
        labels = [*(LABELS[str(one["side"])] for one in cells), "KungFu, NCCL (paper)"]
        values = [*(cast(float, one["img_per_s"]) for one in cells), cast(float, PAPER["mean"])]
        colours = [*("tab:blue" for _ in cells), plotting.PAPER]
        right.bar(labels, values, color=colours)
        right.tick_params(axis="x", rotation=20, labelsize=7)
        right.set(title="throughput" if cells else "throughput: no two GPUs here", ylabel="images/s per GPU")
