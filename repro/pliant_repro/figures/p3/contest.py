"""What the figures of P3 have in common: a contest of `pliant bench priority`, and the paper's axes.

Models and rates are scaled by the same factor, so that the ratio of traffic to compute is the paper's: what is called
4 Gbit/s in a figure was 400 Mbit/s here, for ResNet-50. Compute is paced. A lab needs root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pliant.machine import Json
from pliant_repro.bench.priority import sweep as priority
from pliant_repro.bench.priority.options import PriorityOptions
from pliant_repro.figures.figures import Options
from pliant_repro.profiles import SCALES

CAPTION = (
    "Ours: 4 nodes as network namespaces of one machine; sizes and rates divided by the same factor, compute paced. "
    "Paper: 4 machines with a P4000 each, MXNet."
)
COLOURS = {"baseline": "tab:red", "slicing": "tab:orange", "priority": "tab:blue", "ddp": "tab:green"}


def sweep(
    options: Options,
    model: str,
    gbps: Sequence[float],
    modes: Sequence[str],
    *,
    nodes: int = 4,
    slices: Sequence[int | None] = (None,),
    iters: int = 8,
    repeat: int = 1,
    utilisation: bool = False,
) -> Json:
    """A contest at rates that stand for the paper's `gbps`; the result of the bench."""
    asked = PriorityOptions(
        model=model,
        nodes=nodes,
        rates=tuple(round(each * 1e9 / SCALES[model]) for each in gbps),
        modes=tuple(modes),
        slices=tuple(slices),
        iters=iters,
        repeat=repeat,
        warmup=6 if options.quick else 10,
        utilisation=utilisation,
    )
    said: list[str] = []

    def tell(what: str, fraction: float) -> None:
        stage = what.partition(":")[0] if ":" in what else "starting"
        if stage not in said:
            said.append(stage)
            options.say(f"{model}, {nodes} nodes: {stage}")

    return priority.run(asked, {"model": model, "nodes": nodes, "gbps": list(gbps), "modes": list(modes)}, tell)


def cells_of(result: Json) -> list[Json]:
    return cast("list[Json]", result["cells"])


def complaints_of(result: Json) -> list[str]:
    """What makes a contest worthless: a mode that failed, or other bits."""
    return [] if result["ok"] else [str(remark) for remark in cast("list[str]", result["remarks"])]


def remarks_of(results: Sequence[Json]) -> list[str]:
    return list(dict.fromkeys(remark for result in results for remark in cast("list[str]", result["remarks"])))


def gbps_of(one: Json) -> float:
    """The paper's bandwidth that a cell stands for."""
    return cast(float, one["rate_mbit"]) * SCALES[str(one["model"])] / 1000


def number(one: Json | None, key: str) -> float | None:
    """A cell's value, or None where there is no cell or no value."""
    value = one.get(key) if one is not None else None
    return float(value) if isinstance(value, (int, float)) else None


def pick(cells: Sequence[Json], **wanted: object) -> Json | None:
    """The first cell with these values."""
    return next((one for one in cells if all(one.get(key) == value for key, value in wanted.items())), None)


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
