"""What the experiments with federated jobs share: where tables lie, jobs side by side on the cores, and what came of them.

A job here is simulated: what it does depends on its config alone, and its clock is virtual, so that it makes no difference
how many run at a time, or what else the machine does.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pliant import fed
from pliant.child import die_with
from pliant.fed.config import FedConfig
from pliant.fed.history import History
from pliant.machine import Json
from pliant_repro.figures.figures import Options, num_cores

MISSING = "no tables of clients (--data DIR, or PLIANT_DATA)"
LAST = 0.1
"""A final accuracy is the mean of the tests in this last part of the rounds: that of one test goes up and down."""


def tables(options: Options, *names: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that has all of these files; None where there is none."""
    places = [Path(options.data)] if options.data else []
    if "PLIANT_DATA" in environ:
        places.append(Path(environ["PLIANT_DATA"]) / "fl")
    return next((place for place in places if all((place / name).is_file() for name in names)), None)


def devices(options: Options) -> tuple[str, str]:
    """What a config says of devices, and a remark: the real table where there is one."""
    folder = tables(options, "devices.csv")
    if folder is None:
        return "synthetic", f"{MISSING}: synthetic devices, drawn with the quantiles of the real table"
    return str(folder / "devices.csv"), "client i has the phone of row i of the device table"


@dataclass(frozen=True, slots=True)
class Job:
    """One job of an experiment."""

    world: str
    """What data and devices are like."""
    way: str
    """What is compared: how participants are picked."""
    config: FedConfig


@dataclass(slots=True)
class Course:
    """How a job went; times are on its virtual clock."""

    world: str
    way: str
    seed: int
    rounds: list[int] = field(default_factory=list)
    """After which the model was tested."""
    times_s: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    """How long each round was."""
    invited: int = 0
    """Clients that were ever picked."""
    coverage: int = 0
    """Clients whose update ever counted."""
    updates: int = 0
    malicious: int = 0
    """Updates of clients whose labels are wrong."""
    took_s: float = 0.0
    """Of this machine, for all of it."""

    @classmethod
    def of(cls, job: Job, history: History, took_s: float) -> Course:
        return cls(
            job.world,
            job.way,
            job.config.seed,
            [point.round for point in history.points],
            [point.clock_s for point in history.points],
            [point.accuracy for point in history.points],
            [each.clock_s - each.begin_s for each in history.rounds],
            len({client for each in history.rounds for client in each.invited}),
            len({client for each in history.rounds for client in each.aggregated}),
            sum(len(each.aggregated) for each in history.rounds),
            sum(each.malicious for each in history.rounds),
            took_s,
        )

    @property
    def final(self) -> float:
        number = max(1, round(len(self.accuracies) * LAST))
        return sum(self.accuracies[-number:]) / number

    @property
    def mean_round_s(self) -> float:
        return sum(self.rounds_s) / len(self.rounds_s)

    def time_to(self, accuracy: float) -> float | None:
        """When a test first found this accuracy; None: none did."""
        return next((at for at, found in zip(self.times_s, self.accuracies, strict=True) if found >= accuracy), None)

    def rounds_to(self, accuracy: float) -> int | None:
        return next((at for at, found in zip(self.rounds, self.accuracies, strict=True) if found >= accuracy), None)

    def best_by(self, time_s: float) -> float:
        """The best accuracy that a test had found by then."""
        found = (each for at, each in zip(self.times_s, self.accuracies, strict=True) if at <= time_s)
        return max(found, default=0.0)

    def to_json(self) -> Json:
        return {
            "world": self.world, "way": self.way, "seed": self.seed, "rounds": self.rounds, "times_s": self.times_s,
            "accuracies": self.accuracies, "final_accuracy": self.final, "mean_round_s": self.mean_round_s,
            "invited": self.invited, "coverage": self.coverage, "updates": self.updates, "malicious": self.malicious,
            "took_s": self.took_s,
        }  # fmt: skip


def courses(jobs: Sequence[Job], options: Options, *, processes: int = 0) -> list[Course]:
    """All jobs, in their order, as many at a time as there are cores (or `processes`).

    Where the options name a folder for parts, jobs that an earlier run has done are not done again.
    """
    kept = Parts(Path(options.parts)) if options.parts else None
    found = [kept.load(job) if kept is not None else None for job in jobs]
    todo = [job for job, course in zip(jobs, found, strict=True) if course is None]
    if len(todo) < len(jobs):
        options.say(f"{len(jobs) - len(todo)} of {len(jobs)} jobs are done already: {options.parts}")
    fresh = _done(todo, options, min(processes or num_cores(), len(todo)), kept)
    return [course or next(fresh) for course in found]


def _done(jobs: Sequence[Job], options: Options, at_once: int, kept: Parts | None) -> Iterator[Course]:
    def told(job: Job, course: Course) -> Course:
        options.say(
            f"{course.world}, {course.way}, seed {course.seed}: {course.final:.2%} after {len(course.rounds_s)} rounds, "
            f"{course.times_s[-1] / 3600:.2f} h of them; took {course.took_s:.0f} s"
        )
        if kept is not None:
            kept.save(job, course)
        return course

    if at_once <= 1:
        yield from (told(job, _trained(job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    # Leaving a Pool ends its processes; should this one be killed, the kernel ends them.
    with context.Pool(at_once, _begin, (os.getpid(),)) as pool:
        yield from map(told, jobs, pool.imap(_trained, jobs, chunksize=1))


def _begin(parent: int) -> None:
    import torch

    die_with(parent)
    torch.set_num_threads(1)  # each job has one core: more threads would wait for each other


def _trained(job: Job) -> Course:
    from pliant.fed.rounds.loop import simulate

    begun_s = time.perf_counter()
    history = simulate(job.config)
    return Course.of(job, history, time.perf_counter() - begun_s)


class Parts:
    """Courses in a folder, each under the name of all that it depends on: its job, and the program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = hashlib.sha256()
        for path in sorted(Path(fed.__file__).parent.rglob("*.py")):
            program.update(path.read_bytes())
        self._program = program.hexdigest()

    def load(self, job: Job) -> Course | None:
        """The job's course, if it is there."""
        try:
            found = json.loads(self._path(job).read_text())
            return Course(**found)
        except (OSError, ValueError, TypeError):
            return None

    def save(self, job: Job, course: Course) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(job)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(asdict(course)))
        beside.replace(path)

    def _path(self, job: Job) -> Path:
        config = job.config.model_dump(mode="json")
        table = Path(job.config.devices)
        if table.is_file():  # by what is in it: its place may be another one each time
            config["devices"] = hashlib.sha256(table.read_bytes()).hexdigest()
        name = json.dumps([self._program, job.world, job.way, config], sort_keys=True)
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def pairs(found: Sequence[Course], world: str, first: str, second: str) -> list[tuple[Course, Course]]:
    """Both ways in one world, seed by seed."""
    by = {(course.way, course.seed): course for course in found if course.world == world}
    seeds = sorted({seed for way, seed in by if way == first} & {seed for way, seed in by if way == second})
    return [(by[first, seed], by[second, seed]) for seed in seeds]


def flat(found: Sequence[Course]) -> list[str]:
    """What even a short run must not show: an accuracy that never rises above the first test's."""
    return [
        f"{one.world}, {one.way}, seed {one.seed}: the accuracy does not rise above {one.accuracies[0]:.2%}, that of the first test"
        for one in found
        if len(one.accuracies) > 1 and not max(one.accuracies[1:]) > one.accuracies[0]
    ]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """What a handful of values says: too few of them for anything but all of it."""
    return {"median": median(values), "least": min(values), "most": max(values), "all": list(values)}
