"""`pliant bench fed`: how fast participants are picked (select), and how many clients are trained in a second (simulate).

`select` has three populations: nobody has taken part yet, half of the clients have, all have. The peer is the same rule one
client after the other in plain Python, which is how Oort's published programs are written.

`simulate` gives all sides the same network, samples, steps and cores. `ours` is a coordinator and one worker for each core, as
`pliant submit` starts them; `flower` is its Ray backend with one CPU for each client, so that it, too, uses every core; `bare`
is one process that trains one client after the other and does nothing else.

Each turn of a side is a process of its own (`python -m pliant_repro.bench.fed TASK`): memory and caches are its own.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro.contest import (
    Progress,
    Summary,
    Timings,
    check_least,
    form,
    interleave,
    measure_apart,
    paired_ratios,
    quantile,
)

SELECT_GOAL_S, SELECT_GOAL_BYTES = 0.1, 500e6
EXPLORED = (0.0, 0.5, 1.0)
"""Shares of the clients that have taken part."""
GOAL = 2.0
"""Goal for the ratio of clients per second to Flower."""
OURS, FLOWER, BARE = "ours", "flower", "bare"
SELECT_S, TURN_S = 300.0, 600.0
"""How long one side may take."""
SEED = 7


def _check_pick(clients: int, pick: int, repeat: int) -> None:
    check_least(("--clients", clients, 1), ("--pick", pick, 1), ("--repeat", repeat, 1))
    if pick > clients:
        raise ConfigError(f"--pick {pick} of --clients {clients}: pick as many as there are, or fewer")


# --- select ---


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectOptions:
    """Options of `pliant bench fed --what select`."""

    clients: int = 1_000_000
    pick: int = 100
    repeat: int = 10
    """Selections that count."""

    def __post_init__(self) -> None:
        _check_pick(self.clients, self.pick, self.repeat)
        if self.clients > 50_000_000:
            raise ConfigError(f"--clients {self.clients}: use at most 50,000,000")


def run_select(options: SelectOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Measure each population on each side, and return the result."""
    cells: list[Json] = []
    for number, share in enumerate(EXPLORED):
        found: dict[str, Json] = {}
        for side in (OURS, "loops"):
            progress(f"{side}, {share:.0%} have taken part", number / len(EXPLORED))
            task = {"what": "select", "side": side, "share": share, "options": asdict(options)}
            found[side] = measure_apart(__name__, task, who=side, timeout_s=SELECT_S)
        ours, loops = found[OURS], found["loops"]
        speedup = cast(float, loops["median_s"]) / cast(float, ours["median_s"])
        cells.append({"explored": share, "ours": ours, "peers": {"loops": {**loops, "speedup": speedup}}})
    progress("done", 1.0)
    slowest = max(cells, key=lambda cell: cast(float, cast(Json, cell["ours"])["median_s"]))
    ours = cast(Json, slowest["ours"])
    most_bytes = max(cast(int, cast(Json, cell["ours"])["peak_bytes"]) for cell in cells)
    return form(
        "fed select",
        args,
        cast(float, ours["median_s"]) <= SELECT_GOAL_S and most_bytes < SELECT_GOAL_BYTES,
        [
            "memory is the peak of the whole process, with interpreter and NumPy",
            "the peer `loops` is our own plain-Python rendering of the rule, one client after the other",
        ],
        ours={**ours, "peak_bytes": most_bytes},
        peers=slowest["peers"],
        bound=None,
        goal={"median_s": SELECT_GOAL_S, "peak_bytes": SELECT_GOAL_BYTES},
        cells=cells,
    )


# --- simulate ---


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """Options of `pliant bench fed --what simulate`."""

    clients: int = 100
    pick: int = 20
    rounds: int = 15
    """Rounds of a turn that count."""
    repeat: int = 4
    """Turns of each side."""

    def __post_init__(self) -> None:
        _check_pick(self.clients, self.pick, self.repeat)
        check_least(("--rounds", self.rounds, 1))


@dataclass(slots=True)
class FedTimings(Timings):
    """Turns of one side, whose iterations are rounds of clients."""

    facts: Json | None = None
    """What the side said of itself in its last turn."""


def run_simulate(options: SimulateOptions, args: Mapping[str, object], progress: Progress) -> Json:
    """Let the sides take turns, and return the result."""

    def take_turn(side: str, timings: FedTimings, turn: int) -> None:
        task = {"what": "simulate", "side": side, "options": asdict(options)}
        found = measure_apart(__name__, task, who=side, timeout_s=TURN_S)
        timings.rounds.append(cast("list[float]", found.pop("seconds")))
        timings.facts = found

    sides = {side: FedTimings() for side in (OURS, FLOWER, BARE)}
    interleave(sides, options.repeat, take_turn, progress)
    if sides[OURS].failure:
        raise LaunchError(sides[OURS].failure)
    return simulate_result(options, args, sides)


def simulate_result(options: SimulateOptions, args: Mapping[str, object], sides: Mapping[str, FedTimings]) -> Json:
    ours, flower = sides[OURS], sides[FLOWER]
    peers: dict[str, Json] = {}
    for side in (FLOWER, BARE):
        timings = sides[side]
        if timings.failure:
            peers[side] = {"clients_per_s": None, "failure": timings.failure}
            continue
        paired = paired_ratios(timings.rounds, ours.rounds)
        spread = {"speedup": quantile(paired, 0.5), "speedup_least": min(paired), "speedup_most": max(paired)}
        peers[side] = {**_clients_per_s(options, timings), **spread}
    ratio = cast("float | None", peers[FLOWER].get("speedup"))
    remarks = [f"{side} is out: {timings.failure}" for side, timings in sides.items() if timings.failure]
    if (ours.facts or {}).get("data") != "fashion-mnist":
        remarks.append("Fashion-MNIST is not installed (apt install dataset-fashion-mnist): noise of its shape instead")
    remarks.append(f"bare is one process on one core; the others have {len(os.sched_getaffinity(0))}")
    if options.repeat < 3:
        remarks.append("too few turns to believe the spread; use --repeat 4 or more")
    return form(
        "fed simulate",
        args,
        not flower.failure and (ratio or 0.0) >= GOAL,
        remarks,
        ours=_clients_per_s(options, ours),
        peers=peers,
        ratio=ratio,
        bound=None,
        goal={"ratio": GOAL},
    )


def _clients_per_s(options: SimulateOptions, timings: FedTimings) -> Json:
    return {
        "clients_per_s": options.pick / quantile(timings.seconds, 0.5),
        "turns_clients_per_s": [options.pick / quantile(turn, 0.5) for turn in timings.rounds],
        **Summary.of(timings.seconds).to_json(),
        **(timings.facts or {}),
    }


# --- selecting, in the measuring process, which shall not load torch ---


def select_ours(clients: int, pick: int, repeat: int, share: float) -> Json:
    """Measure selections of the selector that the rounds use, each followed by its feedback, which is not timed."""
    import numpy as np

    from pliant.fed.selection.selectors import make_selector

    draw = np.random.default_rng(SEED)
    selector = make_selector("oort", seed=SEED, preset="paper")
    duration_s, size = draw.lognormal(3, 1, clients), draw.integers(1, 300, clients).astype(np.float64)
    selector.register(np.arange(clients), duration_s=duration_s, size=size)
    if known := int(share * clients):
        before = draw.permutation(clients)[:known]
        selector.feedback(before, utility=size[before] * draw.random(known), duration_s=duration_s[before])

    def select(_: int) -> Callable[[], None]:
        picked = selector.select(pick)
        utility = size[picked] * draw.random(len(picked))
        return lambda: selector.feedback(picked, utility=utility, duration_s=duration_s[picked])

    return _time_selections(select, repeat + 1, uncounted=1)


def select_by_loops(clients: int, pick: int, repeat: int, share: float) -> Json:
    """Measure the same rule on a dictionary of clients; at most three selections."""
    draw = random.Random(SEED)
    population = {
        number: [draw.random() * 300, draw.lognormvariate(3, 1), int(number < share * clients)]
        for number in range(clients)
    }

    def select(number: int) -> Callable[[], None]:
        looped_selection(population, pick, number + 2, draw)
        return lambda: None

    return _time_selections(select, min(repeat, 3))


def _time_selections(select: Callable[[int], Callable[[], None]], count: int, uncounted: int = 0) -> Json:
    """Time calls of `select`, but not what each of them returns to be called after it."""
    wall_s, cpu_s = [], []
    for number in range(count):
        begun_s, used_s = time.perf_counter(), time.process_time()
        afterwards = select(number)
        wall_s.append(time.perf_counter() - begun_s)
        cpu_s.append(time.process_time() - used_s)
        afterwards()
    status = Path("/proc/self/status").read_text().splitlines()
    # Not getrusage: its peak survives exec, and would be that of the process that started this one.
    peak_bytes = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    times = Summary.of(wall_s[uncounted:]).to_json()
    return {**times, "cpu_s": quantile(cpu_s[uncounted:], 0.5), "peak_bytes": peak_bytes}


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


# --- the measuring process ---


def measure(task: Mapping[str, object], folder: str) -> Json:
    """Measure the side that the task names, in this process."""
    options, side = cast("dict[str, int]", task["options"]), task["side"]
    if task["what"] == "select":
        select = select_ours if side == OURS else select_by_loops
        return select(**options, share=cast(float, task["share"]))
    from pliant_repro.bench import fed_sides

    config = fed_sides.make_job(options["clients"], options["pick"], options["rounds"])
    rounds = options["rounds"] + 1  # the first one starts everything
    if side == OURS:
        found = fed_sides.simulate_ours(config, rounds, folder)
    elif side == BARE:
        found = fed_sides.simulate_bare(config, rounds)
    else:
        os.environ |= {"FLWR_HOME": folder, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        try:
            from pliant_repro.bench import fed_flower
        except ImportError as error:
            raise ConfigError(f"Flower's simulation is not installed ({error}): pip install 'pliant[flower]'") from None
        found = fed_flower.measure(config, rounds, folder)
    return {**found, "seconds": cast("list[float]", found["seconds"])[1:], "data": config.data.kind}


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints must not be taken for the answer
    with tempfile.TemporaryDirectory(prefix="pliant-") as folder:
        found = measure(json.loads(sys.argv[1]), folder)
    print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main()
