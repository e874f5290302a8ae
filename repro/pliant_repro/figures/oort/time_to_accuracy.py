"""Oort, time to accuracy: participants picked by what they teach and how fast they are, beside participants picked at random.

Both ways run with the same data, devices, initial model, rounds, over-commitment and tests, seed by seed; times are on the
virtual clock. The claims, for Fashion-MNIST on 500 clients with unequal labels and the phones of the device table: 80 % is
reached in a time at least 1.5 times shorter in the median, never in a longer one, and the model ends as accurate. Where
all data and devices are alike there is nothing to choose, and both must take the same time. The worlds between, and one
where large clients are slow, are shown and not judged.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from pliant.cli import plotting
from pliant.fed.config import DataConfig, FedConfig, LocalConfig, NamedOptions
from pliant.machine import Json
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.oort import federated
from pliant_repro.figures.oort.federated import Course, Job

NAME = "oort-time-to-accuracy"
WORLDS = {
    "unequal": "Dirichlet(0.1) labels, phones of the table",
    "alike": "IID data, equal devices",
    "iid": "IID data, phones of the table",
    "equal devices": "Dirichlet(0.1) labels, equal devices",
    "large is slow": "Dirichlet(0.1) labels, the more data the slower the phone",
    "yogi": "Dirichlet(0.1) labels, phones of the table, FedYogi instead of FedAvg",
}
MAIN, ALIKE, SORTED, YOGI = "unequal", "alike", "large is slow", "yogi"
WAYS = {"random": NamedOptions(kind="random"), "oort": NamedOptions(kind="oort", options={"exploration_decay": 0.95})}
"""The paper's setting, but for how soon it stops exploring: 500 clients are explored sooner than 14,000."""
COLOURS = {"random": "tab:orange", "oort": "tab:blue"}
MORE, LESS_ACCURATE, TIE = 1.5, 0.005, (0.9, 1.1)
"""How much shorter the time must be, how much less accurate the end may be, and what counts as no difference."""
TARGETS = (0.7, 0.75, 0.8)
PAPER = {
    "time_to_accuracy": "1.2x to 14.1x shorter than random, final accuracy 1.3 to 9.8 points higher",
    "replication": "1.1x to 2.2x, from the files that PyramidFL has published of Oort's program",
    "hardware": "68 P100; OpenImage, Speech Commands, Reddit, StackOverflow; 1,600 to 1.7 million clients, 100 in a round",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How much of it."""

    seeds: tuple[int, ...]
    rounds: int
    model: str
    worlds: tuple[str, ...]
    clients: int = 500
    evaluate_every: int = 5

    @property
    def target(self) -> float:
        return TARGETS[-1]


def setting(options: Options) -> Setting:
    if options.quick:
        return Setting(seeds=(0,), rounds=options.steps or 60, model="mlp", worlds=(MAIN, ALIKE))
    if options.full:
        return Setting(seeds=(0, 1, 2, 3, 4), rounds=options.steps or 600, model="cnn", worlds=tuple(WORLDS))
    usual = tuple(world for world in WORLDS if world != YOGI)
    return Setting(seeds=(0, 1, 2, 3, 4), rounds=options.steps or 300, model="mlp", worlds=usual)


def run(options: Options) -> Json:
    chosen = setting(options)
    table, said = federated.devices(options)
    with tempfile.TemporaryDirectory(prefix="pliant-oort-") as folder:
        jobs = [job for world in chosen.worlds for job in jobs_of(world, chosen, table, Path(folder))]
        options.say(f"{len(jobs)} jobs of up to {chosen.rounds} rounds; {said}")
        found = federated.courses(jobs, options)
    return result_of(found, chosen, options, [said])


def jobs_of(world: str, chosen: Setting, devices: str, folder: Path) -> list[Job]:
    """Every seed both ways, one after the other."""
    jobs = []
    for seed in chosen.seeds:
        plain = config_of(world, chosen, devices, seed)
        if world == SORTED:
            plain = plain.model_copy(update={"devices": str(large_is_slow(plain, folder / f"devices-{seed}.csv"))})
        jobs += [job_of(world, way, selector, plain) for way, selector in WAYS.items()]
    return jobs


def job_of(world: str, way: str, selector: NamedOptions, plain: FedConfig) -> Job:
    return Job(world, way, plain.model_copy(update={"selector": selector, "name": f"{world}-{way}"}))


def config_of(world: str, chosen: Setting, devices: str, seed: int) -> FedConfig:
    unequal = world not in (ALIKE, "iid")
    judged_to_the_end = world == MAIN
    return FedConfig(
        seed=seed,
        data=DataConfig(clients=chosen.clients, partition="dirichlet" if unequal else "iid", alpha=0.1),
        model=chosen.model,
        local=LocalConfig(steps=10, batch_size=20, lr=0.05),
        participants=20,
        overcommit=1.3,
        rounds=chosen.rounds,
        target=0.0 if judged_to_the_end else chosen.target,
        aggregator=NamedOptions(kind="fed-yogi" if world == YOGI else "fed-avg"),
        devices="equal" if world in (ALIKE, "equal devices") else devices,
        # Where all rounds are equally long, the tests are what time is measured with.
        evaluate_every=1 if world == ALIKE else chosen.evaluate_every,
        batching=10,
    )


def large_is_slow(config: FedConfig, path: Path) -> Path:
    """The devices that the config's clients have, dealt anew: the more samples a client has, the slower its own."""
    from pliant.fed.clients import SimulatedClients
    from pliant.fed.data.build import build_task

    sizes = build_task(config).sizes
    world = SimulatedClients.of(config, len(sizes), 0)
    took_s = world.round_s(config.local.steps)
    rows = np.empty(len(sizes), np.int64)
    rows[np.argsort(sizes, kind="stable")] = np.argsort(took_s, kind="stable")
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("compute_ms_per_sample", "down_kbps", "up_kbps"))
        columns = (world.devices.compute_ms, world.devices.down_kbps, world.devices.up_kbps)
        lines.writerows(zip(*(column[rows].tolist() for column in columns), strict=True))
    return path


# --- what it shows ---


def result_of(found: Sequence[Course], chosen: Setting, options: Options, remarks: Sequence[str]) -> Json:
    worlds = {world: compared(found, world, chosen.target) for world in chosen.worlds}
    complaints = judge(worlds) if not options.quick else federated.flat(found)
    main = worlds[MAIN]
    return form(
        NAME,
        options,
        ours={"median_s": main["oort"]["time_s"], "worlds": worlds, "targets": targets(found)},
        paper=PAPER,
        cells=[course.to_json() for course in found],
        complaints=complaints,
        remarks=[*remarks, *_remarks(worlds, chosen, judged=not options.quick)],
        judged=not options.quick,
        target_accuracy=chosen.target,
        model=chosen.model,
    )


def compared(found: Sequence[Course], world: str, target: float) -> dict[str, Any]:
    """Both ways in one world: the ratio of times of each seed, and what they ended with."""
    both = federated.pairs(found, world, "random", "oort")
    ratios = [ratio(random, oort, target) for random, oort in both]
    known = [each for each in ratios if each is not None]
    told: dict[str, Any] = {
        "about": WORLDS[world],
        "ratio": federated.spread(known) if len(known) == len(ratios) else None,
        "ratios": ratios,
        "bounds_only": [
            oort.seed for random, oort in both if random.time_to(target) is None and oort.time_to(target) is not None
        ],
        "neither": [oort.seed for random, oort in both if random.time_to(target) is oort.time_to(target) is None],
        "final_difference": federated.spread([oort.final - random.final for random, oort in both]),
        "accuracy_of_random_when_oort_is_done": median([random.best_by(oort.times_s[-1]) for random, oort in both]),
    }
    for way, ones in (("random", [one for one, _ in both]), ("oort", [one for _, one in both])):
        times = [one.time_to(target) for one in ones]
        reached = [each for each in times if each is not None]
        rounds = [each for one in ones if (each := one.rounds_to(target)) is not None]
        told[way] = {
            "time_s": median(reached) if len(reached) == len(times) else None,
            "rounds": median(rounds) if len(rounds) == len(times) else None,
            "final_accuracy": median([one.final for one in ones]),
            "mean_round_s": median([one.mean_round_s for one in ones]),
            "coverage": median([one.coverage for one in ones]),
        }
    return told


def ratio(random: Course, oort: Course, target: float) -> float | None:
    """Random's time over Oort's; where random never got there, at least so much; None where Oort did not."""
    own_s, other_s = oort.time_to(target), random.time_to(target)
    if own_s is None:
        return None
    return (other_s if other_s is not None else max(random.times_s[-1], own_s)) / own_s


def targets(found: Sequence[Course]) -> dict[str, Any]:
    """The ratio at lower accuracies, too, which one seed's luck with one test decides less."""
    both = federated.pairs(found, MAIN, "random", "oort")
    told = {}
    for target in TARGETS:
        ratios = [each for random, oort in both if (each := ratio(random, oort, target)) is not None]
        told[f"{target:g}"] = federated.spread(ratios) if ratios else None
    return told


def judge(worlds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    wrong = []
    main, alike = worlds[MAIN], worlds.get(ALIKE)
    if main["ratio"] is None:
        wrong.append("oort did not reach the accuracy with every seed")
    else:
        if main["ratio"]["median"] < MORE:
            wrong.append(f"the time is {main['ratio']['median']:.2f} times shorter in the median: not {MORE}")
        if main["ratio"]["least"] < 1:
            wrong.append(f"with one seed oort takes longer than random: {main['ratio']['least']:.2f}")
    if main["final_difference"]["median"] < -LESS_ACCURATE:
        wrong.append(f"oort ends {-main['final_difference']['median']:.2%} less accurate than random")
    if alike is not None:
        between = alike["ratio"]["median"] if alike["ratio"] is not None else None
        if between is None or not TIE[0] <= between <= TIE[1]:
            wrong.append(f"with IID data on equal devices the ratio is {between}: not within {TIE[0]} to {TIE[1]}")
    return wrong


def _remarks(worlds: Mapping[str, Mapping[str, Any]], chosen: Setting, *, judged: bool) -> list[str]:
    said = [
        f"{chosen.model}, 20 participants of 26 invited, 10 steps of 20 samples, SGD 0.05, FedAvg by samples; Oort as in the paper "
        "but for exploration_decay 0.95: 500 clients are explored sooner than thousands",
        "times are on the virtual clock, to the first test that finds the accuracy; a final accuracy is the mean of the tests in the "
        "last tenth of the rounds, of which both ways have equally many",
        "of 5 seeds, least to most is a 94 % interval of the median" if len(chosen.seeds) == 5 else "",
        "" if judged else "--quick is too short for the claims: it was judged only whether accuracies rise",
    ]
    for world, told in worlds.items():
        if told["ratio"] is not None and told["ratio"]["least"] < 1 and world != ALIKE:
            said.append(
                f"{world}: with some seeds oort is no faster (least ratio {told['ratio']['least']:.2f}, median {told['ratio']['median']:.2f})"
            )
        if told["neither"]:
            said.append(f"{world}: neither way reached the accuracy with seeds {told['neither']}")
        elif told["ratio"] is None and world != MAIN:
            said.append(f"{world}: oort did not reach the accuracy with every seed")
        if told["bounds_only"]:
            said.append(
                f"{world}: random never reached the accuracy with seeds {told['bounds_only']}; ratios are lower bounds"
            )
    random, oort = worlds[MAIN]["random"], worlds[MAIN]["oort"]
    if random["rounds"] and oort["rounds"]:
        said.append(
            f"{MAIN}: oort needs {oort['rounds']:g} rounds to the accuracy and random {random['rounds']:g}; "
            f"a round takes {oort['mean_round_s']:.0f} s and {random['mean_round_s']:.0f} s"
        )
    worst = worlds[MAIN]["final_difference"]["least"]
    if worst < -LESS_ACCURATE:
        said.append(f"with one seed oort ends {-worst:.2%} less accurate than random")
    return [each for each in said if each]


def table(result: Json) -> TableRows:
    rows = []
    for world, told in cast("dict[str, dict[str, Any]]", cast("Json", result["ours"])["worlds"]).items():
        random, oort, shorter = told["random"], told["oort"], told["ratio"]
        rows.append(
            (
                world,
                _hours(random["time_s"]),
                _hours(oort["time_s"]),
                f"{shorter['median']:.2f}x ({shorter['least']:.2f}-{shorter['most']:.2f})" if shorter else "-",
                f"{random['rounds'] or '-'} / {oort['rounds'] or '-'}",
                f"{random['mean_round_s']:.0f} / {oort['mean_round_s']:.0f} s",
                f"{random['final_accuracy']:.2%} / {oort['final_accuracy']:.2%}" if world == MAIN else "-",
            )
        )
    columns = ("world", "random", "oort", "shorter", "rounds", "mean round", "final accuracy")
    target = cast(float, result["target_accuracy"])
    return TableRows(f"hours on the virtual clock to {target:.0%}; medians of seeds (least-most)", columns, tuple(rows))


def _hours(time_s: float | None) -> str:
    return f"{time_s / 3600:.2f} h" if time_s else "never"


def plot(result: Json, path: Path) -> None:
    caption = (
        "Left: one line for each seed. Right: a dot for each seed. Virtual clock; Fashion-MNIST on 500 clients, 20 in a round. "
        "Paper: 1.2 to 14.1 times shorter on four larger tasks; from PyramidFL's files of Oort's program: 1.1 to 2.2."
    )
    worlds = cast("dict[str, dict[str, Any]]", cast("Json", result["ours"])["worlds"])
    with plotting.picture(path, "Time to accuracy: Oort beside random", caption, 2) as [left, right]:
        named = set()
        for one in cast("list[dict[str, Any]]", result["cells"]):
            if one["world"] == MAIN:
                label = None if one["way"] in named else one["way"]
                named.add(one["way"])
                hours = [each / 3600 for each in one["times_s"]]
                left.plot(hours, one["accuracies"], color=COLOURS[one["way"]], label=label, alpha=0.6, linewidth=1)
        left.axhline(cast(float, result["target_accuracy"]), color=plotting.PAPER, linestyle=":")
        left.set(xlabel="hours on the virtual clock", ylabel="accuracy")
        left.legend(fontsize=8)
        for place, told in enumerate(worlds.values()):
            known = [each for each in told["ratios"] if each is not None]
            right.plot([place] * len(known), known, "o", color=COLOURS["oort"], alpha=0.5)
        right.axhline(1.0, color=plotting.PAPER)
        right.axhline(MORE, color=plotting.PAPER, linestyle=":")
        right.set_xticks(range(len(worlds)), list(worlds), rotation=25, fontsize=8)
        right.set(ylabel="random's time over Oort's")
