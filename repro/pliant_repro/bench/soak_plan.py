"""Which fault a soak does next: a pure function of the random generator and of what is known of the job.

A fault never takes the state from everybody: one worker that has it is always left alone, on a host that the others reach. In
every other era (`ERA_S`) one worker and its host are spared altogether, so that some processes grow old enough to show whether
their memory is flat.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pliant.errors import ConfigError

ERA_S = 180.0
HEARTBEAT_S = 5.0
"""`--heartbeat-timeout` of the job."""
NOTICED_S = 1.0
"""By then the loss of a worker that was killed has been noticed."""
PAUSES_S = (0.05, 0.5, 1.0, 2.0, 4.0)
"""Times between two faults, as likely as each other."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault, and how often it is chosen."""

    about: str
    weight: float
    needs_lab: bool = False


FAULT_KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("kill -9 of a worker, or of two at once", 6),
    "stop": FaultKind("a worker stands still (SIGSTOP), for a moment or for longer than the heartbeat timeout", 3),
    "resize": FaultKind("another number of workers, or two requests at once", 5),
    "runner": FaultKind("kill -9 of a host's runner, with all of its workers; another one is started later", 1),
    "warm": FaultKind("kill -9 of the warm process that workers are forked from", 1),
    "server": FaultKind("kill -9 of the config server; it is started again", 1.5),
    "cut": FaultKind("a host is cut off, for a moment or for longer than the heartbeat timeout", 1.5, needs_lab=True),
    "slow": FaultKind("a host sends slowly for a while", 1.5, needs_lab=True),
    "disk": FaultKind(
        "the disk of record, checkpoints, logs and the server's state is full for a while", 1, needs_lab=True
    ),
    "clock": FaultKind("the clock of a host jumps, for Python's time.time()", 1),
    "stranger": FaultKind("garbage, silent connections and requests without a token", 2),
}


def parse_fault_kinds(text: str, *, in_lab: bool) -> tuple[str, ...]:
    """Return the kinds of a comma list; empty: all that are possible here.

    Raises:
        ConfigError: a kind is unknown, or needs a lab.
    """
    if not text:
        return tuple(name for name, kind in FAULT_KINDS.items() if in_lab or not kind.needs_lab)
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in names:
        if name not in FAULT_KINDS:
            raise ConfigError(f"--faults {name}: use some of {','.join(FAULT_KINDS)}")
        if FAULT_KINDS[name].needs_lab and not in_lab:
            raise ConfigError(
                f"--faults {name}: it needs network namespaces, so root; leave it out, or see `pliant doctor`"
            )
    return names


@dataclass(frozen=True, slots=True)
class Trainer:
    """A worker that trains, and so has the state."""

    worker: str
    """Its address."""
    host: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What is known of the job when a fault is chosen."""

    at_s: float
    """Since the soak began."""
    trainers: tuple[Trainer, ...]
    """Members, as the config server knows them, that have begun the newest step; the oldest first. One that a resize has just
    dismissed is none of them: it may be gone as soon as the others have lost it."""
    hosts: frozenset[int]
    """Hosts whose runner lives."""
    warm_hosts: frozenset[int]
    """Hosts that have a warm process."""
    under_way: Collection[Fault]
    """Faults that have not ended."""
    max_workers: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done to the job."""

    kind: str
    text: str
    """What is done, for the log."""
    workers: tuple[Trainer, ...] = ()
    host: int = -1
    sizes: tuple[int, ...] = ()
    lasts_s: float = 0.0
    """When it is put right, if that does not happen at once."""
    rate: str = ""
    shift_s: float = 0.0


def next_fault(chance: random.Random, now: Situation, kinds: Collection[str]) -> Fault | None:
    """Return the next fault; None if there can be none now, as while nobody trains."""
    safe = [each for each in now.trainers if not _is_touched(each, now)]
    if not safe:
        return None
    spared = now.trainers[0] if int(now.at_s / ERA_S) % 2 and now.trainers[0] in safe else None
    names = [name for name in FAULT_KINDS if name in kinds]
    if "resize" in kinds and len(now.trainers) < 2 and chance.random() < 0.5:
        names = ["resize"]
    for _ in range(8):
        name = chance.choices(names, [FAULT_KINDS[each].weight for each in names])[0]
        if (fault := _make(name, chance, now, safe, spared)) is not None:
            return fault
    return None


def next_pause_s(chance: random.Random) -> float:
    return chance.choice(PAUSES_S)


def _is_touched(trainer: Trainer, now: Situation) -> bool:
    """Return whether a fault that is under way may yet take this worker out of the job."""
    if trainer.host not in now.hosts:
        return True
    return any(
        trainer.pid in [each.pid for each in fault.workers]
        or (fault.kind in ("runner", "cut", "slow") and fault.host == trainer.host)
        for fault in now.under_way
    )


def _is_frozen(now: Situation) -> bool:
    """Return whether somebody may be given up because nothing is heard of him."""
    return any(fault.kind in ("stop", "cut") and fault.lasts_s > HEARTBEAT_S for fault in now.under_way)


def _make(
    kind: str, chance: random.Random, now: Situation, safe: list[Trainer], spared: Trainer | None
) -> Fault | None:
    may = [each for each in safe if each != spared]
    # Hosts that can be lost: somebody who is safe is elsewhere.
    hosts = [
        host
        for host in sorted(now.hosts)
        if any(each.host != host for each in safe) and (spared is None or spared.host != host)
    ]
    under_way = {fault.kind for fault in now.under_way}
    match kind:
        case "kill":
            count = 2 if len(safe) > 2 and chance.random() < 0.2 else 1
            if len(safe) <= count or len(may) < count:
                return None
            chosen = tuple(chance.sample(may, count))
            return Fault(kind, f"kill -9 of {_names(chosen)}", chosen, lasts_s=NOTICED_S)
        case "stop":
            if len(safe) < 2 or not may:
                return None
            lasts_s = round(chance.choice([0.2, 0.5, 1.0, 2.0, 2.0, 1.5 * HEARTBEAT_S]), 1)
            one = chance.choice(may)
            return Fault(kind, f"SIGSTOP of {one.worker} for {lasts_s:g} s", (one,), lasts_s=lasts_s)
        case "resize" if not (_is_frozen(now) and under_way & {"kill", "runner"}):
            # Else all that stay might be those that are about to be lost.
            sizes = [chance.randint(min(2, now.max_workers), now.max_workers)]
            if chance.random() < 0.3:
                sizes.append(chance.randint(min(2, now.max_workers), now.max_workers))
            return Fault(
                kind,
                f"resize to {' and to '.join(map(str, sizes))} at once"[: None if sizes[1:] else -8],
                sizes=tuple(sizes),
            )
        case "runner" if hosts and not under_way & {"runner", "cut"}:
            host, lasts_s = chance.choice(hosts), chance.choice([0.2, 2.0, 5.0])
            return Fault(
                kind, f"kill -9 of the runner on h{host}, back after {lasts_s:g} s", host=host, lasts_s=lasts_s
            )
        case "warm" if now.warm_hosts:
            host = chance.choice(sorted(now.warm_hosts))
            return Fault(kind, f"kill -9 of the warm process on h{host}", host=host)
        case "server" if "server" not in under_way:
            lasts_s = chance.choice([0.0, 0.5, 2.0])
            return Fault(kind, f"kill -9 of the config server, back after {lasts_s:g} s", lasts_s=lasts_s)
        case "cut" if hosts and not under_way & {"cut", "slow", "runner"}:
            host, lasts_s = chance.choice(hosts), chance.choice([0.3, 1.0, 2.0, 2.0 * HEARTBEAT_S])
            return Fault(kind, f"h{host} is cut off for {lasts_s:g} s", host=host, lasts_s=lasts_s)
        case "slow" if hosts and not under_way & {"cut", "slow"}:
            host, lasts_s = chance.choice(hosts), chance.choice([1.0, 3.0, 6.0])
            rate = chance.choice(["5mbit", "20mbit", "100mbit"])
            return Fault(kind, f"h{host} sends {rate} for {lasts_s:g} s", host=host, lasts_s=lasts_s, rate=rate)
        case "disk" if "disk" not in under_way:
            lasts_s = chance.choice([1.0, 3.0, 8.0])
            return Fault(kind, f"the disk is full for {lasts_s:g} s", lasts_s=lasts_s)
        case "clock" if now.hosts:
            host, shift_s = (
                chance.choice(sorted(now.hosts)),
                chance.choice([-86400.0, -3600.0, -7.0, 0.0, 7.0, 3600.0, 86400.0]),
            )
            return Fault(kind, f"the clock of h{host} is {shift_s:+g} s off", host=host, shift_s=shift_s)
        case "stranger":
            return Fault(kind, "strangers at every port", lasts_s=3.0)
        case _:
            return None


def _names(trainers: Collection[Trainer]) -> str:
    return " and ".join(each.worker for each in trainers)
