"""The scheduler is killed at every point at which it writes something down or tells a runner something, before and after.

Each time another one takes its place, on the same book and the same runs, and brings all jobs to their end: none is run
twice at once, none is forgotten, and no device is given to two.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paper_backend import PaperBackend, PaperRun, train_job

from pliant.jobs.scheduler import Scheduler
from pliant.jobs.schema import JobSpec, job_from_json
from pliant.jobs.store import JobStore
from pliant.sched import policies as schedulers

STEPS = 24
"""Of each job."""
JOBS = {"a": {"min": 1}, "b": {"min": 0, "priority": 1}, "c": {"min": 2, "max": 2}}


class Killed(BaseException):
    """No handler catches it: as far as the scheduler is concerned, it is over."""


class Fuse:
    """Kills at the n-th dangerous moment."""

    def __init__(self, left: int) -> None:
        self.left = left

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **more: Any) -> Any:
            self.burn()
            done = call(*args, **more)
            self.burn()
            return done

        return guarded


class World:
    """Runs that go on, whoever schedules them."""

    def __init__(self) -> None:
        self.backend = PaperBackend(cpu=4)
        self.lives: list[PaperRun] = []
        self.done: dict[str, int] = {}
        self.now_s = 1000.0
        start = self.backend.start

        def noted(run: Any, devices: Any) -> PaperRun:
            assert all(each.end_ for each in self.lives if each.run.spec.name == run.spec.name), "two runs of one job"
            self.lives.append(start(run, devices))
            return self.lives[-1]

        self.backend.start = noted  # type: ignore[method-assign]

    def turn(self) -> None:
        """Every living run does two steps; a program that has done all of them ends."""
        self.now_s += 1
        used: Counter[str] = Counter()
        for each in self.lives:
            if each.end_ is not None:
                continue
            used.update(each.on)
            name = each.run.spec.name
            devices = sum(each.on.values())
            each.step(self.done.get(name, 0) + 1, 2, 0.4 / devices)
            self.done[name] = self.done.get(name, 0) + 2
            if self.done[name] >= STEPS:
                each.write({"kind": "end", "step": STEPS})
                each.finish(0)
        assert used["cpu"] <= 4, f"{used} on 4 devices"


@contextmanager
def scheduler(world: World, folder: Path, fuse: Fuse, patch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    with patch.context() as guarded, JobStore(folder) as book:
        guarded.setattr(book, "save", fuse.around(book.save))
        guarded.setattr(world.backend, "start", fuse.around(world.backend.start))
        for name in ("resize", "end"):
            guarded.setattr(PaperRun, name, fuse.around(getattr(PaperRun, name)))
        made = Scheduler(
            world.backend, schedulers.make_policy("easyscale-heter"), book, interval_s=0, clock=lambda: world.now_s
        )
        made._adopt()
        yield made


def spec(name: str) -> JobSpec:
    return job_from_json(train_job(name, **JOBS[name]))


def live(world: World, folder: Path, fuse: Fuse, patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Bring the jobs to their end, or until the fuse burns; their states."""
    with scheduler(world, folder, fuse, patch) as made:
        known = {status.name for status in made.statuses()}
        for turn in range(400):
            if turn % 4 == 0 and (new := sorted(set(JOBS) - known)):
                made.submit(spec(new[0]))
                known.add(new[0])
            if turn in (14, 20) and not made.cluster()["reserved"]:
                made._do(made._state.reserve({"cpu": 3}, world.now_s), reserved=True)
            elif made.cluster()["reserved"]:
                made._do(made._state.reserve({}, world.now_s), reserved=True)
            made._look()
            world.turn()
            states = {status.name: status.state for status in made.statuses()}
            if set(states) == set(JOBS) and all(state == "finished" for state in states.values()):
                break
    return states


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory that needs no disk: the book syncs at every word."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_scheduler_killed_at_any_moment_leaves_nothing_that_the_next_one_does_not_find(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in range(1, 1000):
        folder = memory / str(moment)
        folder.mkdir()
        world, fuse = World(), Fuse(moment)
        try:
            states = live(world, folder, fuse, monkeypatch)
        except Killed:
            states = live(world, folder, Fuse(0), monkeypatch)
        assert states == dict.fromkeys(JOBS, "finished"), f"killed at moment {moment}: {states}"
        assert all(steps == STEPS for steps in world.done.values())
        if fuse.left > 0:
            break  # it was not killed any more: all moments have been tried
    assert moment > 30, "there were not as many moments as there should be"
