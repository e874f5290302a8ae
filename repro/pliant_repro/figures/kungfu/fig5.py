"""KungFu, figure 5: other traffic at the root of a star, and the topology that avoids it.

A STAR between namespaces of this machine; at about step 30 other traffic leaves the root's host for an outsider. Three
runs: with adaptation, without, and a longer quiet one in which nothing may change. Layers wait for as long as a K80
would compute them; sizes and rates are divided so that their ratio is the published one. Needs root.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pliant.cli import plotting
from pliant.machine import Json
from pliant_repro.bench.scaling import published
from pliant_repro.bench.stats import quantile
from pliant_repro.figures.figures import Options, TableRows, form
from pliant_repro.figures.kungfu import fig5_trial as trials
from pliant_repro.figures.kungfu.fig5_trial import Setting, Trial
from pliant_repro.lab.hosts import Lab
from pliant_repro.lab.rates import format_rate

NAME = "kungfu-fig5"
PAPER_RATES = (30.2, 29.4, 26.5, 29.4, 31.4, 28.9, 28.7, 28.0, 25.8, 27.9, 28.6, 19.2, 20.9, 23.3, 26.2, 26.9)
"""Images per second and GPU from iteration 20 on, as the artifact prints them."""
PAPER_FIRST = 20
PAPER = {"before": 29.0, "under_interference": 19.2, "after": 26.9, "recovery": 0.93, "steps_to_recovery": 4}
SLOW = 0.8
RECOVERED = 0.9
SOON = 5
"""Steps after the vote within which the throughput must be back."""
VOTED = 3
"""Steps within which there must be a majority."""


def run(options: Options) -> Json:
    setting, quiet_steps = sizes(options)
    quiet = Setting(
        workers=setting.workers, batch=2, kappa=setting.kappa * setting.batch / 2, bits_per_s=setting.bits_per_s,
        steps=quiet_steps, timeout_s=setting.timeout_s,
    )  # fmt: skip
    runs: dict[str, Trial] = {}
    with Lab(num_hosts=setting.workers + 1, rate=format_rate(setting.bits_per_s)).up() as lab:
        options.say(f"{setting.workers} workers, STAR, {format_rate(setting.bits_per_s)}: with adaptation")
        runs["adapting"] = trials.run(lab, setting)
        options.say("without adaptation")
        runs["fixed"] = trials.run(lab, without(setting))
        if quiet_steps:
            options.say(f"{quiet_steps} quiet steps")
            runs["quiet"] = trials.run(lab, quiet)
    return result_of(runs, options)


def sizes(options: Options) -> tuple[Setting, int]:
    """The run with adaptation, and how many quiet steps there are."""
    workers, batch, kappa = (4, 4, 160.0) if options.quick else (8, 32, 40.0) if options.full else (8, 8, 160.0)
    steps = options.choose_steps(quick=42, usual=70, full=100)
    # The published root's link, as slow as the gradients are small and as fast as the steps are short. A smaller star has
    # a smaller share of its traffic at the root.
    scale = 8 / kappa * published.BATCH / batch * (workers - 1) / (published.STAR_NODES - 1)
    setting = Setting(
        workers=workers,
        batch=batch,
        kappa=kappa,
        bits_per_s=round(published.star_bytes_per_s() * scale),
        steps=steps,
        begin_step=min(22 if options.quick else 26, steps // 2),
        # What is left must do for a host's own gradients, which a small star leaves less time for.
        traffic_share=0.6 if options.quick else 0.7,
        timeout_s=900.0 if options.full else 200.0,
    )
    return setting, 0 if options.quick else 500


def without(setting: Setting) -> Setting:
    """The same without adaptation, and only as long as it takes to see the difference."""
    begin = setting.begin_step or 0
    return Setting(
        workers=setting.workers, batch=setting.batch, kappa=setting.kappa, bits_per_s=setting.bits_per_s,
        steps=min(setting.steps, begin + 16), adapt=False, begin_step=begin, timeout_s=setting.timeout_s,
        traffic_share=setting.traffic_share,
    )  # fmt: skip


def result_of(runs: dict[str, Trial], options: Options) -> Json:
    """The figure out of its runs."""
    cells = [cell(name, trial) for name, trial in runs.items()]
    ours = cells[0]
    setting = runs["adapting"].setting
    remarks = [
        f"{setting.workers} namespaces of one machine instead of 8 VMs with a K80 each; ResNet-50 paced as on a K80, "
        f"sizes divided by {setting.kappa:g}; the other traffic leaves the root's host on {setting.connections} "
        f"connections with {setting.traffic_share:.0%} of its link; what the root receives is not disturbed",
        "the topology is chosen from links that are measured at that moment, while KungFu always takes the star of rank 1; "
        "where hosts share the sums, a step is shorter than with a star in quiet times, so more than 100% can come back",
        "full size: 8 machines with a GPU each and an outsider, experimental/adapt_strategy/adapt_strategy.py under "
        "`pliant run` on every one; --full has batches of 32 here",
    ]
    if "quiet" not in runs:
        remarks.append("the 500 quiet steps are left out with --quick")
    return form(
        NAME,
        options,
        ours={key: ours[key] for key in ("before", "under_interference", "after", "recovery", "steps_to_vote", "steps_to_recovery")},
        paper=PAPER,
        cells=cells,
        complaints=judge(cells),
        remarks=remarks,
        lines=runs["adapting"].lines,
    )  # fmt: skip


def cell(name: str, trial: Trial) -> Json:
    """What one run has shown."""
    rates, begun = trial.rates, trial.traffic_begun
    usual = quantile(rates[min(5, len(rates) // 4) : begun], 0.5)
    slow = None if begun is None else next((k for k in range(begun, len(rates)) if rates[k] < SLOW * usual), None)
    voted = next((step for step in trial.consensus if slow is not None and step > slow), None)
    changed = next((step for step in trial.changes if slow is not None and step > slow), None)
    disturbed = rates[slow:changed] if slow is not None else []
    after = rates[changed + 1 :] if changed is not None else []
    since_vote = rates[voted + 1 :] if voted is not None else []
    back = next((k for k, rate in enumerate(since_vote) if rate >= RECOVERED * usual), None)
    return {
        "run": name,
        "workers": trial.setting.workers,
        "steps": len(rates),
        "img_per_s": rates,
        "votes": {str(step): count for step, count in trial.votes.items()},
        "before": usual,
        "traffic_begun": begun,
        "slow_from": slow,
        "steps_to_vote": voted - slow if voted is not None and slow is not None else None,
        "changed_at": changed,
        "num_changes": len(trial.changes),
        "num_alarms": len(trial.consensus),
        "decisions": trial.decisions,
        "slower_on_links": {str(step): times for step, times in trial.compared.items()},
        "under_interference": quantile(disturbed, 0.5) if disturbed else None,
        "after": quantile(after, 0.5) if after else None,
        "recovery": max(since_vote[:SOON]) / usual if since_vote else None,
        "recovery_median": quantile(after, 0.5) / usual if after else None,
        "steps_to_recovery": back + 1 if back is not None else None,
        "ours": {"median_s": trial.setting.batch / usual, "iqr_s": None},
    }


def judge(cells: Sequence[Json]) -> list[str]:
    """The figure's claims: a vote at once, a change that brings the throughput back, and none in quiet times."""
    named = {str(one["run"]): one for one in cells}
    ours, fixed, quiet = named["adapting"], named["fixed"], named.get("quiet")
    wrong = []
    if ours["slow_from"] is None:
        return ["the other traffic has not slowed the star down: nothing can be shown"]
    voted, recovery = cast("int | None", ours["steps_to_vote"]), cast("float | None", ours["recovery"])
    if voted is None or voted > VOTED:
        wrong.append(f"a majority after {voted} steps, not within {VOTED}" if voted else "no majority was reached")
    if recovery is None or ours["changed_at"] is None:
        wrong.append("the topology was not changed")
    elif recovery < RECOVERED:
        wrong.append(f"{recovery:.0%} of the throughput within {SOON} steps of the vote, not {RECOVERED:.0%}")
    lasting = cast("float | None", fixed["under_interference"])
    if lasting is None or lasting > SLOW * cast(float, fixed["before"]):
        wrong.append("without adaptation it was not slower, either")
    if quiet is not None and quiet["num_changes"]:
        wrong.append(f"{quiet['num_changes']} changes in {quiet['steps']} quiet steps")
    return wrong


def table(result: Json) -> TableRows:
    rows = [
        (
            str(one["run"]), _rate(one["before"]), _rate(one["under_interference"]), _rate(one["after"]),
            _share(one["recovery"]), _steps(one["steps_to_vote"]), _steps(one["steps_to_recovery"]),
            f"{one['num_changes']} in {one['steps']}",
        )
        for one in cast("list[Json]", result["cells"])
    ]  # fmt: skip
    rows.append(("paper", "29.0", "19.2", "26.9", "93%", "1", "4", "1"))
    columns = ("run", "before", "disturbed", "after", "in 5 steps", "voted", "90% after", "changes")
    return TableRows(
        "STAR with other traffic at its root: img/s per worker, share of it regained, steps", columns, tuple(rows)
    )


def _rate(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "-"


def _share(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) else "-"


def _steps(value: object) -> str:
    return "-" if value is None else str(value)


def plot(result: Json, path: Path) -> None:
    cells = {str(one["run"]): one for one in cast("list[Json]", result["cells"])}
    ours = cells["adapting"]
    caption = (
        "Ours: namespaces of one machine, ResNet-50 paced as on a K80, sizes and rates scaled. Paper: 8 VMs with a K80 "
        "each, from iteration 20 on, where the artifact's log begins."
    )
    with plotting.picture(path, "Other traffic at the root of a star", caption) as [axes]:
        for name, label, colour in (("adapting", "adapting", "tab:blue"), ("fixed", "STAR throughout", "tab:red")):
            axes.plot(cast("list[float]", cells[name]["img_per_s"]), label=label, color=colour)
        places = range(PAPER_FIRST, PAPER_FIRST + len(PAPER_RATES))
        axes.plot(places, PAPER_RATES, label="paper", color=plotting.PAPER)
        for key, label, style in (("traffic_begun", "other traffic", ":"), ("changed_at", "new topology", "--")):
            if ours[key] is not None:
                axes.axvline(cast(float, ours[key]), label=label, color="0.3", linestyle=style, linewidth=0.8)
        axes.set(xlabel="step", ylabel="img/s per worker", ylim=(0, None))
        axes.legend(fontsize=8)
