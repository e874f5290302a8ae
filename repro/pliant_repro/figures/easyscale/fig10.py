"""EasyScale, figure 10: replicas on one device need the memory of one worker, packed workers that of all of them.

Ours: N replicas in one process. Packing: N processes of stock DDP on the same device, which is a GPU or, without one, a
core of the CPU. On a GPU the memory is what torch has reserved at the peak; on a CPU it is what the processes have of
their own, in which our copies of the replicas' gradients count, too: on a GPU they are in the host's
memory and not in the device's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pliant.cli import plotting
from pliant.errors import LaunchError
from pliant.machine import Json
from pliant_repro.figures import trials
from pliant_repro.figures.figures import Options, TableRows, form, timed
from pliant_repro.figures.trials import Task, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "easyscale-fig10"
COUNTS = (1, 2, 4, 8, 16)
USUAL = (1, 4, 16)
FLAT_CUDA = 1.03
"""The device's memory may grow by so much from the fewest to the most replicas."""
GROWTH_CPU = 0.5
"""On a CPU, a replica may add so much of what a packed worker adds."""
PAPER: dict[str, dict[str, object]] = {
    "resnet50": {
        "batch": 32,
        "packed_mib": {"1": 4802.75, "2": 9601.75, "3": 14402.75, "4": 19201.75, "5": 24002.75, "6": 28801.75, "7": 32424.75},
        "replicas_mib": 4856.75,
        "out_of_memory_from": 8,
        "throughput": {"1": 0.868, "2": 0.930, "16": 0.941},
    },
    "shufflenetv2": {
        "batch": 512,
        "packed_mib": {"1": 21636.75},
        "replicas_mib": 21654.75,
        "out_of_memory_from": 2,
        "throughput": {"1": 0.988, "16": 0.995},
    },
}  # fmt: skip


def run(options: Options) -> Json:
    models = options.choose_models(quick=("resnet50",), usual=("resnet50", "shufflenetv2"))
    counts = (1, 4) if options.quick else COUNTS if options.full else USUAL
    steps = options.choose_steps(quick=4, usual=6, full=30)
    cells = [cell for model in models for cell in _cells(model, counts, steps, options)]
    on_gpu = options.where != "cpu"
    complaints = [text for model in models for text in judge(model, [c for c in cells if c["model"] == model], on_gpu)]
    return form(
        NAME,
        options,
        ours=cast("Mapping[str, object]", cells[0]["ours"]),
        paper=PAPER,
        cells=cells,
        complaints=complaints,
        remarks=[
            "throughput in the picture is relative to one packed worker, as in the paper",
            *([] if on_gpu else ["on a CPU the gradients of all replicas count as ours: memory grows by them"]),
        ],
    )


def _cells(model: str, counts: Sequence[int], steps: int, options: Options) -> list[Json]:
    cells: list[Json] = []
    for count in counts:
        task = _task(model, count, steps, options)
        options.say(f"{model}: {count} packed DDP processes")
        try:
            packed = _numbers(trials.ddp(task), task.replicas)
        except LaunchError as error:
            packed = {"median_s": None, "iqr_s": None, "failure": str(error).splitlines()[-1]}
        options.say(f"{model}: {count} replicas in one process")
        ours = _numbers(trials.alone(task), task.replicas)
        mine_s, theirs_s = ours["median_s"], packed["median_s"]
        packed["speedup"] = theirs_s / mine_s if isinstance(theirs_s, float) and isinstance(mine_s, float) else None
        cells.append({"model": model, "replicas": count, "ours": ours, "peers": {"packed": packed}})
    return cells


def _task(model: str, replicas: int, steps: int, options: Options) -> Task:
    return Task(
        model=model, scale=options.size, steps=steps, replicas=replicas, device=options.where,
        flags=("--memory",) if options.where != "cpu" else ("--memory", "--one-core"),
    )  # fmt: skip


def _numbers(trial: Trial, replicas: int) -> dict[str, object]:
    times = timed(trial.step_times_s())
    step_s = times["median_s"]
    return {**times, "memory_bytes": trial.peak_bytes(), "replicas_per_s": replicas / step_s if step_s else None}


def judge(model: str, cells: Sequence[Mapping[str, object]], on_gpu: bool) -> list[str]:
    """Where memory is not as the figure claims."""
    ours = {cast(int, cell["replicas"]): _memory(cell, None) for cell in cells}
    packed = {cast(int, cell["replicas"]): _memory(cell, "packed") for cell in cells}
    most, least = max(ours), min(ours)
    if most == least:
        return []
    if on_gpu:
        growth = ours[most] / ours[least]
        return [f"{model}: memory grows {growth:.2f}x to {most} replicas"] if growth > FLAT_CUDA else []
    if packed[most] == 0:
        return []  # so many workers did not even start
    mine, theirs = ours[most] - ours[least], packed[most] - packed[least]
    if mine > GROWTH_CPU * theirs:
        return [
            f"{model}: {most - least} more replicas take {_mib(mine)} MiB, as many packed workers {_mib(theirs)} MiB"
        ]
    return []


def _memory(cell: Mapping[str, object], peer: str | None) -> int:
    numbers = cell["ours"] if peer is None else cast("Mapping[str, object]", cell["peers"])[peer]
    return cast(int, cast("Mapping[str, object]", numbers).get("memory_bytes", 0))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):.0f}"


def table(result: Json) -> TableRows:
    rows = []
    for cell in cast("list[Json]", result["cells"]):
        numbers = [cast(Json, cell["ours"]), cast("dict[str, Json]", cell["peers"])["packed"]]
        memory = [_mib(cast(int, each["memory_bytes"])) if "memory_bytes" in each else "failed" for each in numbers]
        speed = [_rate(each.get("replicas_per_s")) for each in numbers]
        rows.append((str(cell["model"]), str(cell["replicas"]), *memory, *speed, *_paper(cell)))
    columns = ("model", "N", "ours, MiB", "packed", "ours, 1/s", "packed", "paper, MiB", "packed")
    return TableRows(
        "memory and mini-batches per second of N replicas, beside N packed DDP processes", columns, tuple(rows)
    )


def _rate(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-"


def _paper(cell: Json) -> tuple[str, str]:
    paper = PAPER.get(str(cell["model"]))
    if paper is None:
        return "-", "-"
    packed = cast("dict[str, float]", paper["packed_mib"]).get(str(cell["replicas"]))
    return f"{paper['replicas_mib']:.0f}", f"{packed:.0f}" if packed else "too much"


def plot(result: Json, path: Path) -> None:
    cells = cast("list[Json]", result["cells"])
    models = list(dict.fromkeys(str(cell["model"]) for cell in cells))
    on = cast(Json, result["args"])["device"]
    caption = (
        f"Ours: {on}, sizes '{cast(Json, result['args'])['scale']}'; on a CPU host memory, the gradients of all replicas "
        "included. Paper: one 32 GB V100, ResNet50 with batch 32 and ShuffleNetV2 with 512; packing runs out of memory at "
        "8 and 2 workers; throughput 0.87-0.94 and 0.99 of one packed worker."
    )
    title = "Memory and throughput of N replicas, relative to one packed worker"
    with plotting.picture(path, title, caption, 2 * len(models)) as panels:
        for number, model in enumerate(models):
            mine = [cell for cell in cells if cell["model"] == model]
            counts = [cast(int, cell["replicas"]) for cell in mine]
            axes = panels[2 * number]
            base = _memory(mine[0], "packed") or 1
            axes.plot(counts, [_memory(cell, None) / base for cell in mine], "o-", label="ours")
            axes.plot(counts, [_memory(cell, "packed") / base or float("nan") for cell in mine], "s-", label="packed")
            _plot_paper(axes, model)
            axes.set(title=f"{model}: memory", xlabel="replicas", ylabel="of one packed worker")
            plotting.log_axes(axes)
            axes.legend(fontsize=8)
            rates = {name: [_of(cell, name) for cell in mine] for name in ("ours", "packed")}
            one = rates["packed"][0] or 1.0
            scaled = {name: [value and value / one for value in values] for name, values in rates.items()}
            published = cast("dict[str, float]", PAPER.get(model, {}).get("throughput", {}))
            scaled["paper, EasyScale"] = [published.get(str(count)) for count in counts]
            colours = {"paper, EasyScale": plotting.PAPER}
            plotting.bars(panels[2 * number + 1], [str(count) for count in counts], scaled, colours)
            panels[2 * number + 1].set(title=f"{model}: throughput", xlabel="replicas")


def _plot_paper(axes: Axes, model: str) -> None:
    paper = PAPER.get(model)
    if paper is None:
        return
    packed = cast("dict[str, float]", paper["packed_mib"])
    one = packed["1"]
    axes.plot(
        [int(n) for n in packed], [m / one for m in packed.values()], "s:", color=plotting.PAPER, label="paper, packed"
    )
    flat = cast(float, paper["replicas_mib"]) / one
    axes.plot([1, 16], [flat, flat], "o:", color=plotting.PAPER, label="paper, EasyScale")


def _of(cell: Json, name: str) -> float | None:
    numbers = cell["ours"] if name == "ours" else cast(Json, cell["peers"])[name]
    value = cast(Json, numbers).get("replicas_per_s")
    return value if isinstance(value, float) else None
