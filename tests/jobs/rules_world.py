"""The rules of the live scheduler as a world in which runners do what they are told when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paper_backend import train_job

from pliant.jobs.rules import Action, Demand, ManagedJob, NoteEvent, ResizeRun, RunEnd, SchedulerState
from pliant.jobs.scheduler import demand_of
from pliant.jobs.schema import job_from_json
from pliant.sched import policies as schedulers
from pliant.sched.tenants import Tenant


def spec(name: str, **said: Any) -> Demand:
    return demand_of(job_from_json(train_job(name, **said)))


class World:
    """A state, and runners that do what they are told when the test says so."""

    def __init__(self, policy: str = "easyscale-heter", tenants: Sequence[Tenant] = (), **devices: int) -> None:
        self.now_s = 1000.0
        self.state = SchedulerState(schedulers.make_policy(policy), devices or {"cpu": 4}, tenants=tenants)
        self.done: list[Action] = []
        self.deaf: set[str] = set()

    def do(self, actions: list[Action]) -> list[Action]:
        """What was decided, without the notes; runners hear it, unless they are not up yet."""
        self.done += actions
        for action in actions:
            if isinstance(action, ResizeRun) and action.job not in self.deaf:
                self.state.set_told(action.job)
        return [action for action in actions if not isinstance(action, NoteEvent)]

    def submit(self, name: str, tenant: str = "", **said: Any) -> list[Action]:
        return self.do(self.state.submit(spec(name, **said), self.now_s, tenant))

    def submit_rigid(self, name: str, devices: int, tenant: str = "") -> list[Action]:
        """Submit a job that runs on so many devices or not at all, as federated jobs do."""
        demand = Demand(name=name, replicas=devices, min=devices, max=devices, rigid=True)
        return self.do(self.state.submit(demand, self.now_s, tenant))

    def job(self, name: str) -> ManagedJob:
        return self.state.jobs[name]

    def settle(self, *names: str) -> None:
        """These runners have heard what they were told, and done it."""
        for name in names or self.state.jobs:
            self.state.set_told(name)
            self.state.set_occupied(name, self.job(name).asked)

    def look(self, later_s: float = 0.0) -> list[Action]:
        self.now_s += later_s
        return self.do(self.state.check_time(self.now_s))

    def steps(self, name: str, step_s: float = 0.1, count: int = 10) -> list[Action]:
        """The job does some steps on what it has."""
        self.settle(name)
        job, actions = self.job(name), []
        for _ in range(count):
            workers = sum(job.asked.values())
            actions += self.state.add_step(name, (job.step or 0) + 1, workers, step_s, self.now_s)
        return self.do(actions)

    def allocate(self) -> list[Action]:
        return self.do(self.state.allocate(self.now_s))

    def end(self, name: str, code: int | None = 0, *, finished: bool = False) -> list[Action]:
        return self.do(self.state.end_run(name, RunEnd(code, self.now_s), self.now_s, finished=finished))

    def reserve(self, **wanted: int) -> list[Action]:
        return self.do(self.state.reserve(wanted, self.now_s))

    def grown(self, name: str) -> None:
        """Let a job grow, at the same speed for each device, until it has all that it can use."""
        for _ in range(4):
            devices = sum(self.job(name).asked.values())
            self.steps(name, 0.4 / devices)
            self.allocate()
        self.steps(name, 0.1)
