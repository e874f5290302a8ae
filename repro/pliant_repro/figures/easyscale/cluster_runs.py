"""EasyScale's job list on its cluster of 64 GPUs: what figures 14 and 15 are drawn from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pliant.sched import traces
from pliant.sched.compare import PolicyRun, SimulationSetting, compare
from pliant.sched.simulate import SimulationOutcome
from pliant.sched.traces import like_easyscale
from pliant_repro.figures.figures import Options

CLUSTER = "v100=32,p100=16,t4=16"
POLICIES = ("yarn-cs", "yarn-cs-gang", "easyscale-homo", "easyscale-heter")
PUBLISHED = {
    "yarn-cs": (8904.9685, 16560.0),
    "easyscale-homo": (1070.5008, 6720.0),
    "easyscale-heter": (676.7497, 6000.0),
}
"""Seconds: mean JCT, makespan."""
NEEDED = (
    "the artifact's step times were never published: ours are those of its figure 12, in proportion to the batch size",
    "the artifact charges 20 s for a job's first start only; ours charges every start and every change of devices",
    "gangs larger than their device type share its devices",
)


@dataclass(frozen=True, slots=True)
class Ran:
    """All policies on one job list."""

    setting: SimulationSetting
    outcomes: Mapping[PolicyRun, SimulationOutcome]
    remarks: tuple[str, ...]


def data_folder(options: Options, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the artifact's files lie; None where they do not."""
    places = [Path(options.data)] if options.data else []
    if "PLIANT_DATA" in environ:
        places.append(Path(environ["PLIANT_DATA"]) / "cluster" / "easyscale")
    return next((place for place in places if (place / "test.csv").is_file()), None)


def run(options: Options, policies: tuple[str, ...] = POLICIES) -> Ran:
    """The artifact's own list where there is one, else one like it."""
    folder = data_folder(options)
    if folder is not None:
        trace = traces.read(str(folder / "test.csv"))
        source = f"the artifact's list of {len(trace.entries)} jobs"
    else:
        trace = traces.Trace("easyscale", tuple(like_easyscale()))
        source = (
            "no test.csv of the artifact (--data DIR): a list of as many jobs with its applications, sizes and span"
        )
    setting = SimulationSetting(trace=trace, cluster=CLUSTER)
    options.say(f"{source}, {', '.join(policies)}")
    outcomes = compare(policies, setting, processes=1)
    return Ran(setting, outcomes, (source, *trace.notes, *NEEDED))
