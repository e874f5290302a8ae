"""Simulated federated jobs of Oort's experiments: where tables lie, jobs side by side on the cores, and how they went.

A job depends on its config alone, and its clock is virtual, so it makes no difference how many jobs run at a time or what else
the machine does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

from pliant.child import die_with
from pliant.fed.config import FedConfig
from pliant.fed.history import History
from pliant_repro.figures.figure import Options
from pliant_repro.figures.formatting import Result, num_cores

MISSING = "no tables of clients (--data DIR, or PLIANT_DATA)"


def tables(options: Options, *names: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder that has all of these files; None where there is none."""
    places = [Path(options.data)] if options.data else []
    if "PLIANT_DATA" in environ:
        places.append(Path(environ["PLIANT_DATA"]) / "fl")
    return next((place for place in places if all((place / name).is_file() for name in names)), None)


def device_table(options: Options) -> tuple[str, str]:
    """Return what a config says about devices, and a remark: the real table where there is one."""
    folder = tables(options, "devices.csv")
    if folder is None:
        return "synthetic", f"{MISSING}: synthetic devices, drawn with the quantiles of the real table"
    return str(folder / "devices.csv"), "client i has the phone of row i of the device table"


# --- jobs and how they went ---


@dataclass(frozen=True, slots=True)
class FedRun:
    """One job of an experiment: what data and devices are like (`world`), how participants are picked (`way`), config."""

    world: str
    way: str
    config: FedConfig


@dataclass(slots=True)
class FedCourse:
    """The course of a job; times are on its virtual clock."""

    world: str
    way: str
    seed: int
    rounds: list[int] = field(default_factory=list)
    """Rounds after which the model was tested."""
    times_s: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    """Duration of each round."""
    coverage: int = 0
    """Clients whose update ever counted."""
    updates: int = 0
    malicious: int = 0
    """Updates of clients whose labels are wrong."""
    took_s: float = 0.0
    """Seconds of this machine for the whole job."""

    @classmethod
    def of(cls, run: FedRun, history: History, took_s: float) -> FedCourse:
        rounds, points = history.rounds, history.points
        return cls(
            run.world,
            run.way,
            run.config.seed,
            [point.round for point in points],
            [point.clock_s for point in points],
            [point.accuracy for point in points],
            [each.clock_s - each.begin_s for each in rounds],
            len({client for each in rounds for client in each.aggregated}),
            sum(len(each.aggregated) for each in rounds),
            sum(each.malicious for each in rounds),
            took_s,
        )

    @property
    def final(self) -> float:
        """Mean accuracy of the last tenth of the tests, because that of one test varies."""
        return fmean(self.accuracies[-max(1, round(len(self.accuracies) / 10)) :])

    @property
    def mean_round_s(self) -> float:
        return fmean(self.rounds_s)

    def time_to(self, accuracy: float) -> float | None:
        """Return the time of the first test that found this accuracy; None if none did."""
        tests = zip(self.times_s, self.accuracies, strict=True)
        return next((at_s for at_s, found in tests if found >= accuracy), None)

    def rounds_to(self, accuracy: float) -> int | None:
        tests = zip(self.rounds, self.accuracies, strict=True)
        return next((number for number, found in tests if found >= accuracy), None)

    def to_json(self) -> Result:
        kept = {name: value for name, value in asdict(self).items() if name != "rounds_s"}
        return kept | {"final_accuracy": self.final, "mean_round_s": self.mean_round_s}


def run_jobs(runs: Sequence[FedRun], options: Options, *, processes: int = 0) -> list[FedCourse]:
    """Run all jobs and return their courses in order; as many at a time as there are cores (or `processes`)."""
    found, at_once = [], min(processes or num_cores(), len(runs))
    with contextlib.ExitStack() as stack:
        courses: Iterable[FedCourse] = map(_run_job, runs)
        if at_once > 1:
            # Leaving a Pool ends its processes; should this process be killed, the kernel ends them.
            context = multiprocessing.get_context("spawn")
            courses = stack.enter_context(context.Pool(at_once, _begin, (os.getpid(),))).imap(_run_job, runs)
        for course in courses:
            done = f"{course.final:.2%} after {len(course.rounds_s)} rounds, {course.times_s[-1] / 3600:.2f} h of them"
            options.say(f"{course.world}, {course.way}, seed {course.seed}: {done}; took {course.took_s:.0f} s")
            found.append(course)
    return found


def _begin(parent: int) -> None:
    import torch

    die_with(parent)
    torch.set_num_threads(1)  # each job has one core: more threads would wait for each other


def _run_job(run: FedRun) -> FedCourse:
    from pliant.fed.rounds.loop import simulate

    begun_s = time.perf_counter()
    history = simulate(run.config)
    return FedCourse.of(run, history, time.perf_counter() - begun_s)


def flat_courses(found: Sequence[FedCourse]) -> list[str]:
    """Return what even a short run must not show: an accuracy that never rises above the first test's."""
    return [
        f"{one.world}, {one.way}, seed {one.seed}: the accuracy does not rise above {one.accuracies[0]:.2%}, that of the first test"
        for one in found
        if len(one.accuracies) > 1 and max(one.accuracies[1:]) <= one.accuracies[0]
    ]


def spread(values: Sequence[float]) -> Result:
    """Return a handful of values: they are too few for anything but all of them."""
    return {"median": median(values), "least": min(values), "most": max(values), "all": list(values)}


def median_of_all(values: Sequence[float | None]) -> float | None:
    """Return the median if every value is known."""
    known = [value for value in values if value is not None]
    return median(known) if values and len(known) == len(values) else None
