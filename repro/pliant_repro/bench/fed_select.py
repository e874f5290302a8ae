"""`pliant bench fed --what select`: how long one selection takes, and how much memory, for very many clients.

Each side runs in a process of its own, so that its peak of memory is its own. There are three populations: nobody has taken
part yet, half of the clients have, all have. The peer is the same rule one client after the other in plain Python, which is
how Oort's published programs are written; it is our own code, and does no more than score, sort and draw.
"""

from __future__ import annotations

import json
import math
import random
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.contest import Progress, Summary, check_choice, check_least, form, measure_apart, quantile

GOAL_S = 0.1
GOAL_BYTES = 500e6
EXPLORED = (0.0, 0.5, 1.0)
"""Shares of the clients that have taken part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectOptions:
    """Options of `pliant bench fed --what select`."""

    clients: int = 1_000_000
    pick: int = 100
    preset: str = "paper"
    repeat: int = 10
    peers: str = "loops"
    seed: int = 7
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        from pliant.fed.selection.selectors import preset

        preset(self.preset)
        check_least(("--clients", self.clients, 1), ("--pick", self.pick, 1), ("--repeat", self.repeat, 1))
        if self.clients > 50_000_000:
            raise ConfigError(f"--clients {self.clients}: use at most 50,000,000")
        if self.pick > self.clients:
            raise ConfigError(f"--pick {self.pick} of --clients {self.clients}: pick as many as there are, or fewer")
        check_choice("--peers", self.peers, ("loops", "none"))


def run(options: SelectOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Measure each population on each side, and return the result."""
    sides = ("ours", "loops") if options.peers == "loops" else ("ours",)
    found: dict[tuple[float, str], Json] = {}
    todo = [(share, side) for share in EXPLORED for side in sides]
    for number, (share, side) in enumerate(todo):
        progress(f"{side}, {share:.0%} have taken part", number / len(todo))
        task = json.dumps({"options": asdict(options), "share": share, "side": side})
        limit_s, remedy = options.timeout_s, "use fewer --clients"
        found[share, side] = measure_apart(__name__, task, who=side, timeout_s=limit_s, remedy=remedy)
    progress("done", 1.0)
    cells: list[Json] = []
    for share in EXPLORED:
        ours, loops = found[share, "ours"], found.get((share, "loops"))
        speedup = {"speedup": cast(float, loops["median_s"]) / cast(float, ours["median_s"])} if loops else {}
        cells.append({"explored": share, "ours": ours, "peers": {"loops": {**loops, **speedup}} if loops else {}})
    slowest = max(cells, key=lambda cell: cast(float, cast(Json, cell["ours"])["median_s"]))
    ours = cast(Json, slowest["ours"])
    most_bytes = max(cast(int, cast(Json, cell["ours"])["peak_bytes"]) for cell in cells)
    remarks = ["memory is the peak of the whole process, with interpreter and NumPy"]
    if options.peers == "loops":
        remarks.append("the peer `loops` is our own plain-Python rendering of the rule, one client after the other")
    return form(
        "fed select",
        args,
        cast(float, ours["median_s"]) <= GOAL_S and most_bytes < GOAL_BYTES,
        remarks,
        ours={**ours, "peak_bytes": most_bytes},
        peers=slowest["peers"],
        bound=None,
        goal={"median_s": GOAL_S, "peak_bytes": GOAL_BYTES},
        cells=cells,
    )


# --- in the measuring process ---


def measure_ours(options: SelectOptions, share: float) -> Json:
    """Measure selections of the selector that the rounds use, each followed by its feedback, which is not timed."""
    import numpy as np

    from pliant.fed.selection.selectors import make_selector

    draw = np.random.default_rng(options.seed)
    selector = make_selector("oort", seed=options.seed, preset=options.preset)
    duration_s, size = draw.lognormal(3, 1, options.clients), draw.integers(1, 300, options.clients).astype(np.float64)
    selector.register(np.arange(options.clients), duration_s=duration_s, size=size)
    if known := int(share * options.clients):
        before = draw.permutation(options.clients)[:known]
        selector.feedback(before, utility=size[before] * draw.random(known), duration_s=duration_s[before])
    wall_s, cpu_s = [], []
    for _ in range(options.repeat + 1):
        begun_s, used_s = time.perf_counter(), time.process_time()
        picked = selector.select(options.pick)
        wall_s.append(time.perf_counter() - begun_s)
        cpu_s.append(time.process_time() - used_s)
        selector.feedback(picked, utility=size[picked] * draw.random(len(picked)), duration_s=duration_s[picked])
    return _summarise(wall_s[1:], cpu_s[1:])


def measure_loops(options: SelectOptions, share: float) -> Json:
    """Measure the same rule on a dictionary of clients; at most three selections."""
    draw = random.Random(options.seed)
    clients = {
        number: [draw.random() * 300, draw.lognormvariate(3, 1), int(number < share * options.clients)]
        for number in range(options.clients)
    }
    wall_s, cpu_s = [], []
    for number in range(min(options.repeat, 3)):
        begun_s, used_s = time.perf_counter(), time.process_time()
        looped_selection(clients, options.pick, number + 2, draw)
        wall_s.append(time.perf_counter() - begun_s)
        cpu_s.append(time.process_time() - used_s)
    return _summarise(wall_s, cpu_s)


def looped_selection(clients: Mapping[int, list[float]], pick: int, number: int, draw: random.Random) -> list[int]:
    """Select as Oort does, in plain Python: clients are [utility, seconds, last round], 0 for never."""
    round_s = sorted(seconds for _, seconds, _ in clients.values())[len(clients) // 10]
    known = [each for each, (_, _, last) in clients.items() if last]
    fresh = [each for each, (_, _, last) in clients.items() if not last]
    share = max(0.9 * 0.98 ** (number - 1), 0.2)
    explore = min(pick - min(int(pick * (1 - share)), len(known)), len(fresh))
    exploit = min(pick - explore, len(known))
    picked: list[int] = []
    if exploit:
        utilities = sorted(clients[each][0] for each in known)
        clip = utilities[min(int(len(utilities) * 0.95), len(utilities) - 1)]
        scores = {}
        for each in known:
            utility, seconds, last = clients[each]
            score = min(utility, clip) + math.sqrt(0.1 * math.log(number) / last)
            scores[each] = score * (round_s / seconds) ** 2 if seconds > round_s else score
        ranked = sorted(scores, key=lambda each: -scores[each])
        pool = [each for each in ranked if scores[each] >= 0.95 * scores[ranked[exploit - 1]]]
        picked += sorted(pool, key=lambda each: draw.expovariate(max(scores[each], 1e-9)))[:exploit]
    if explore:
        window = sorted(fresh, key=lambda each: clients[each][1])[: 5 * explore]
        picked += sorted(window, key=lambda each: draw.expovariate(1 / clients[each][1]))[:explore]
    return picked


def _summarise(wall_s: list[float], cpu_s: list[float]) -> Json:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**Summary.of(wall_s).to_json(), "cpu_s": quantile(cpu_s, 0.5), "peak_bytes": peak_bytes}


def main() -> None:
    task = json.loads(sys.argv[1])
    measure = measure_ours if task["side"] == "ours" else measure_loops
    print(json.dumps(measure(SelectOptions(**task["options"]), task["share"])))


if __name__ == "__main__":
    main()
