"""What simulated policies did, in the one form of all benches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pliant.machine import Json, machine
from pliant.sched.compare import Run, Setting
from pliant.sched.outcome import in_use, rows, summary
from pliant.sched.schedulers import registry as schedulers
from pliant.sched.simulate import Outcome

MAX_ROWS = 2000
"""A table of all jobs is part of the result up to so many."""
BASELINES = ("yarn-cs", "yarn-cs-gang")
OURS = ("easyscale-heter", "easyscale-homo")
POLLUX_NOTES = (
    "a placement is its smallest rotation; measured ones are interpolated in the batch of a device, others linearly in "
    "(nodes, devices, batch) over Delaunay triangles, whose choice among equals follows the order of the points",
    "epochs end at whole seconds (half to even); who ends by rounding down at the second of a round has its devices in that "
    "round still; the first round is one interval after the clock starts",
    "tiresias counts pauses as service, lets smaller jobs pass one that does not fit, and never promotes a job again",
    "optimus counts steps from the end of the present epoch, and predicts for packed nodes of four",
    "new devices come from the node with the most free ones, the first of equals; who keeps its number keeps its place",
)
"""Where the description of the published simulator leaves a choice, what was chosen: what its program does."""

RESERVED_NOTE = (
    "reserved devices are free at the next round, except where a policy never takes devices back (yarn-cs, yarn-cs-gang): "
    "there they are when the jobs on them have ended"
)


def result(setting: Setting, outcomes: Mapping[Run, Outcome], args: Mapping[str, object]) -> Json:
    """Everything about one trace under several policies."""
    policies: dict[str, Json] = {}
    for run, outcome in outcomes.items():
        numbers: Json = dict(summary(outcome))
        if run.live:
            policies[run.policy]["live_resize"] = numbers
            continue
        numbers["about"] = schedulers.POLICIES[run.policy].about
        numbers["allocated"] = [[round(time, 3), round(count, 3)] for time, count in in_use(outcome)]
        if len(outcome.jobs) <= MAX_ROWS:
            numbers["per_job"] = rows(outcome)
        policies[run.policy] = numbers
    name = next((each for each in OURS if each in policies), next(iter(policies)))
    ours = policies[name]
    return {
        "bench": "sim",
        "args": dict(args),
        "ours": {"policy": name, "median_s": ours["jct_median_s"], "iqr_s": None, "mean_s": ours["jct_mean_s"]},
        "peers": {each: _peer(numbers, ours) for each, numbers in policies.items() if each != name},
        "bound": None,
        "policies": policies,
        "factors": factors(policies),
        "machine": machine(),
        "ok": True,
        "remarks": remarks(setting),
    }


def _peer(numbers: Json, ours: Json) -> Json:
    return {
        "median_s": numbers["jct_median_s"],
        "iqr_s": None,
        "speedup": over(numbers, ours, "jct_mean_s"),
        "makespan_speedup": over(numbers, ours, "makespan_s"),
    }


def over(one: Json, other: Json, key: str) -> float | None:
    """One's seconds over the other's."""
    above, below = one[key], other[key]
    return above / below if isinstance(above, int | float) and isinstance(below, int | float) and below else None


def factors(policies: Mapping[str, Json]) -> Json:
    """How much shorter jobs take than under each baseline, on average, and the makespan."""
    return {
        f"{name} over {base}": {
            key: over(policies[base], policies[name], f"{key}_s") for key in ("jct_mean", "makespan")
        }
        for base in BASELINES
        for name in policies
        if base in policies and name not in BASELINES
    }


def remarks(setting: Setting) -> list[str]:
    notes: Sequence[str] = POLLUX_NOTES if setting.trace.form == "pollux" else ()
    charged = f"every start and every change of devices is charged {setting.restart_s:g} s"
    if setting.live_pause_s is not None:
        charged += f"; live_resize: a change of devices is charged the {setting.live_pause_s:g} s of a live resize"
    reserved = [RESERVED_NOTE] if setting.reservations else []
    return [charged, *reserved, *setting.trace.notes, *notes]
