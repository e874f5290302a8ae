"""Oort, taken apart: what its penalty for slow clients, its pacer and its exploration do, each by its absence.

The setting is that of `oort-time-to-accuracy`. The claims: without the penalty (round_penalty 0) rounds take longer, towards
random's; without the pacer (pacer_delta 0) the model ends no better, or needs no fewer rounds to the accuracy; without
exploration fewer clients are ever heard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from pliant.cli import plotting
from pliant.fed.config import NamedOptions
from pliant.machine import Json
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.oort import federated, time_to_accuracy
from pliant_repro.figures.oort.federated import Course
from pliant_repro.figures.oort.time_to_accuracy import MAIN, Setting, config_of, job_of

NAME = "oort-ablation"
OORT = time_to_accuracy.WAYS["oort"]
WAYS = {
    "random": time_to_accuracy.WAYS["random"],
    "oort": OORT,
    "no penalty": NamedOptions(kind="oort", options=OORT.options | {"round_penalty": 0.0}),
    "no pacer": NamedOptions(kind="oort", options=OORT.options | {"pacer_delta": 0.0}),
    "no exploration": NamedOptions(kind="oort", options=OORT.options | {"exploration_factor": 0.0, "exploration_min": 0.0}),
}
COLOURS = {
    "random": "tab:orange", "oort": "tab:blue", "no penalty": "tab:red", "no pacer": "tab:green",
    "no exploration": "tab:purple",
}  # fmt: skip
SAME = 0.002
"""Final accuracies that differ by less are alike: about what a second seed changes in a median."""
PAPER = {
    "no penalty": "as many rounds to the accuracy, but longer ones",
    "no pacer": "fast at first, a lower final accuracy",
    "hardware": "OpenImage and StackOverflow on 68 P100; the breakdown was published as a figure",
}


def setting(options: Options) -> Setting:
    if options.quick:
        return Setting(seeds=(0,), rounds=options.steps or 45, model="mlp", worlds=(MAIN,))
    if options.full:
        return Setting(seeds=(0, 1, 2, 3, 4), rounds=options.steps or 600, model="cnn", worlds=(MAIN,))
    return Setting(seeds=(0, 1, 2), rounds=options.steps or 150, model="mlp", worlds=(MAIN,))


def run(options: Options) -> Json:
    chosen = setting(options)
    table, said = federated.devices(options)
    jobs = [
        job_of(MAIN, way, selector, config_of(MAIN, chosen, table, seed))
        for seed in chosen.seeds
        for way, selector in WAYS.items()
    ]
    options.say(f"{len(jobs)} jobs of {chosen.rounds} rounds; {said}")
    return result_of(federated.courses(jobs, options), chosen, options, [said])


def result_of(found: Sequence[Course], chosen: Setting, options: Options, remarks: Sequence[str]) -> Json:
    ours = {way: numbers([one for one in found if one.way == way], chosen.target) for way in WAYS}
    said = [
        *remarks,
        f"{chosen.model}, {len(chosen.seeds)} seeds, {chosen.rounds} rounds; medians over the seeds",
        "without exploration a new client is picked only where those tried before are too few: at first, and in the place of "
        "those who have taken part often enough",
    ]
    for way in ("no pacer", "no exploration"):
        if not options.quick and ours[way]["final_accuracy"] > ours["oort"]["final_accuracy"]:
            said.append(
                f"{way}: the model ends with {ours[way]['final_accuracy']:.2%}, with all parts with "
                f"{ours['oort']['final_accuracy']:.2%}; what this part is for shows in rounds or in clients, not in the end's accuracy"
            )
    if options.quick:
        said.append("--quick is too short for the claims: it was judged only whether accuracies rise")
    return form(
        NAME,
        options,
        ours={"median_s": ours["oort"]["time_s"], "ways": ours},
        paper=PAPER,
        cells=[course.to_json() for course in found],
        complaints=judge(ours) if not options.quick else federated.flat(found),
        remarks=said,
        judged=not options.quick,
        target_accuracy=chosen.target,
    )


def numbers(found: Sequence[Course], target: float) -> dict[str, Any]:
    times = [each for one in found if (each := one.time_to(target)) is not None]
    rounds = [each for one in found if (each := one.rounds_to(target)) is not None]
    return {
        "mean_round_s": median([one.mean_round_s for one in found]),
        "final_accuracy": median([one.final for one in found]),
        "finals": [one.final for one in found],
        "coverage": median([one.coverage for one in found]),
        "invited": median([one.invited for one in found]),
        "reached": len(times),
        "time_s": median(times) if len(times) == len(found) else None,
        "rounds": median(rounds) if len(rounds) == len(found) else None,
    }


def judge(ours: Mapping[str, Mapping[str, Any]]) -> list[str]:
    wrong = []
    full, random = ours["oort"], ours["random"]
    penalty, pacer, exploration = ours["no penalty"], ours["no pacer"], ours["no exploration"]
    if not full["mean_round_s"] < penalty["mean_round_s"]:
        wrong.append(
            f"without the penalty rounds take {penalty['mean_round_s']:.1f} s, with it {full['mean_round_s']:.1f} s: not longer"
        )
    if not penalty["mean_round_s"] - full["mean_round_s"] > (random["mean_round_s"] - full["mean_round_s"]) / 2:
        wrong.append(
            f"without the penalty rounds take {penalty['mean_round_s']:.1f} s: nearer to oort's than to random's "
            f"{random['mean_round_s']:.1f} s"
        )
    if not exploration["coverage"] < full["coverage"]:
        wrong.append(
            f"without exploration {exploration['coverage']:g} clients are heard, with it {full['coverage']:g}: not fewer"
        )
    if not no_better(pacer, full):
        wrong.append(
            f"without the pacer the model ends with {pacer['final_accuracy']:.2%} and needs {pacer['rounds']} rounds; "
            f"with it {full['final_accuracy']:.2%} and {full['rounds']}: better in both"
        )
    return wrong


def no_better(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether it ends no more accurate, or needs no fewer rounds."""
    if one["final_accuracy"] <= other["final_accuracy"] + SAME or one["rounds"] is None:
        return True
    return other["rounds"] is not None and bool(one["rounds"] >= other["rounds"])


def table(result: Json) -> TableRows:
    rows = []
    for way, one in cast("dict[str, dict[str, Any]]", cast("Json", result["ours"])["ways"]).items():
        rows.append(
            (
                way,
                f"{one['mean_round_s']:.1f} s",
                f"{one['coverage']:g}",
                f"{one['rounds']:g}" if one["rounds"] is not None else "not all",
                f"{one['time_s'] / 3600:.2f} h" if one["time_s"] is not None else "not all",
                f"{one['final_accuracy']:.2%}",
            )
        )
    target = cast(float, result["target_accuracy"])
    columns = ("selector", "mean round", "clients heard", f"rounds to {target:.0%}", "time", "final accuracy")
    return TableRows("Oort without one of its parts; medians of seeds", columns, tuple(rows))


def plot(result: Json, path: Path) -> None:
    caption = (
        "Virtual clock; Fashion-MNIST on 500 clients, 20 in a round; one line for each seed. Paper: without the penalty "
        "rounds are longer, without the pacer the start is fast and the end less accurate."
    )
    with plotting.picture(path, "Oort without one of its parts", caption, 2) as [left, right]:
        named: set[str] = set()
        for one in cast("list[dict[str, Any]]", result["cells"]):
            way = one["way"]
            label = None if way in named else way
            named.add(way)
            hours = [each / 3600 for each in one["times_s"]]
            left.plot(hours, one["accuracies"], color=COLOURS[way], label=label, alpha=0.6, linewidth=1)
            right.plot(one["rounds"], one["accuracies"], color=COLOURS[way], label=label, alpha=0.6, linewidth=1)
        for axes, label in ((left, "hours on the virtual clock"), (right, "rounds")):
            axes.axhline(cast(float, result["target_accuracy"]), color=plotting.PAPER, linestyle=":")
            axes.set(xlabel=label, ylabel="accuracy")
            axes.legend(fontsize=8)
