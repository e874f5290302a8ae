"""A job of the live scheduler: what is asked of it, what it has, and what has become of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pliant.sched.cluster import ScheduledJob
from pliant.sched.live.ground import Counts
from pliant.sched.live.jobfile import JobSpec
from pliant.sched.live.throughput import Devices, Throughput, key

WAITING, STARTING, RUNNING, PUT_OFF = "waiting", "starting", "running", "put-off"
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
_SAVED = (
    "number", "submitted_s", "state", "target", "asked", "told", "run", "ending", "started_s", "ended_s", "exit_code", "why",
    "losses", "step", "record_from",
)  # fmt: skip


@dataclass(slots=True)
class LiveJob:
    """One job. Devices without an entry are none."""

    spec: JobSpec
    number: int
    """In the order of submission."""
    submitted_s: float
    state: str = WAITING
    target: dict[str, int] = field(default_factory=dict)
    """The devices that the policy has given it."""
    asked: dict[str, int] = field(default_factory=dict)
    """The devices that its runner shall have: the target, as soon as they are free. Empty without a run."""
    told: dict[str, int] = field(default_factory=dict)
    """The devices that its runner knows of, and may start workers on."""
    occupied: dict[str, int] = field(default_factory=dict)
    """The devices that its processes are on."""
    run: int = 0
    """The number of its present or last run."""
    ending: str = ""
    """What it was told to end for: PUT_OFF or STOPPED."""
    kill_at_s: float | None = None
    """It was told to end, and is killed if it has not by then."""
    started_s: float | None = None
    """The first time."""
    ended_s: float | None = None
    exit_code: int | None = None
    why: str = "waits for devices"
    """The last decision, in words."""
    step: int | None = None
    losses: int = 0
    """Runs that were lost since it last did a step."""
    record_from: int = 0
    """Where in its record, in bytes, the facts of its present run begin."""
    throughput: Throughput = field(default_factory=lambda: Throughput(1))
    before: Devices = ()
    """What it had before it grew to its present devices; empty once it is known which ones are faster."""
    avoided: dict[Devices, float] = field(default_factory=dict)
    """Devices on which it was slower, and until when that is believed."""

    def __post_init__(self) -> None:
        self.throughput.replicas = self.spec.replicas

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_over(self) -> bool:
        return self.state in (FINISHED, FAILED, STOPPED)

    @property
    def is_active(self) -> bool:
        """Whether it has a run."""
        return bool(self.asked)

    def used(self, kind: str) -> int:
        """Devices that nobody else can have now: those it may use, and those it has not left yet."""
        if self.ending:
            return self.occupied.get(kind, 0)
        return max(self.asked.get(kind, 0), self.told.get(kind, 0), self.occupied.get(kind, 0))

    @property
    def is_unheard(self) -> bool:
        """Whether its runner could not be told yet what is asked."""
        return self.told != self.asked

    @property
    def is_leaving(self) -> bool:
        """Whether it is still on devices that it shall not have."""
        return any(count > self.asked.get(kind, 0) for kind, count in self.occupied.items())

    @property
    def is_measured(self) -> bool:
        """Whether it is known how fast it is on what it has: before that, it is given no more."""
        return self.state == RUNNING and self.asked == self.target and self.throughput.steps_per_s is not None

    def for_policy(self, rank: int, kinds: Mapping[str, int], now_s: float) -> ScheduledJob:
        """As the policies see it. They only order jobs by their time of submission, so the rank among all takes its
        place: priority comes before age.

        `kinds` are the types there are, with how many could be given now.
        """
        mine = [kind for kind in self.spec.devices or kinds if kind in kinds]
        held = {kind: count for kind, count in self.target.items() if count}
        room = next((kind for kind in mine if kinds[kind] >= max(1, self.spec.min)), mine[0])
        # One that may not mix types stays on its own; one that waits takes the best that has room.
        preferred = mine[0] if self.spec.mixed else next((kind for kind in mine if kind in held), room)
        most = self.spec.max if not held or self.is_measured else sum(held.values())
        return ScheduledJob(
            name=self.name,
            submitted_s=float(rank),
            number=rank,
            replicas=self.spec.replicas,
            types=self.throughput.types(mine, self.spec.speed),
            preferred=preferred,
            mixed=self.spec.mixed,
            min_devices=self.spec.min,
            max_devices=most,
            held=held,
            avoided=frozenset(devices for devices, until_s in self.avoided.items() if now_s < until_s),
        )

    def may_use(self, kinds: Counts) -> bool:
        """Whether any of its types is there."""
        return any(kind in kinds for kind in self.spec.devices or kinds)

    def status(self) -> dict[str, Any]:
        """JobStatus of the API."""
        return {
            "name": self.name,
            "state": self.state,
            "replicas": self.spec.replicas,
            "devices": {kind: count for kind, count in self.asked.items() if count},
            "workers": sum(self.occupied.values()) if self.state == RUNNING else 0,
            "step": self.step,
            "steps_per_s": self.throughput.steps_per_s if self.state == RUNNING else None,
            "submitted_s": self.submitted_s,
            "started_s": self.started_s,
            "ended_s": self.ended_s,
            "exit_code": self.exit_code,
            "why": self.why,
        }

    def to_json(self) -> dict[str, Any]:
        """What a scheduler that begins anew must know; the rest can be seen."""
        saved = {name: getattr(self, name) for name in _SAVED}
        avoided = [[list(map(list, devices)), until_s] for devices, until_s in self.avoided.items()]
        return {"spec": self.spec.to_json(), **saved, "throughput": self.throughput.to_json(), "avoided": avoided}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LiveJob:
        spec = JobSpec.from_json(value["spec"])
        job = cls(
            spec=spec,
            **{name: value[name] for name in _SAVED},
            throughput=Throughput.from_json(spec.replicas, value["throughput"]),
            avoided={key(dict(map(tuple, devices))): until_s for devices, until_s in value["avoided"]},
        )
        job.throughput.place(job.asked)
        return job
