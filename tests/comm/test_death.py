"""One of four workers dies, stops, is cut off or leaves: every survivor soon names it.

Real processes, over shared memory (one host) and over TCP (two). Survivors can continue among themselves, and at the
end nothing is left of the job.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gang import FULL, Gang, addresses, gang, job, joined, left_behind, listen, say, specs
from pliant_repro.lab.hosts import Lab, missing_for_lab
from pliant_repro.lab.namespaces import labs

from pliant.cluster import View, Worker
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.errors import WorkerLost
from pliant.identity import WorkerSpec

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_server", "no_leaks")]

TIMEOUT_S = 1.5
ONE_HOST, TWO_HOSTS = "AAAA", "AABB"
WAITING, IDLE = "in the middle of collectives", "while it is idle"


@dataclass(frozen=True)
class Outcome:
    """How a survivor learned of a loss."""

    worker: str
    rank: int
    why: str
    at_s: float
    again_s: float
    """Time until the next submission failed, too."""
    went_on: bool
    """Whether the survivors could still reduce among themselves."""


# --- in the workers ---


def survivor(rank: int, spec: WorkerSpec, when: str, namespace: str = "") -> Outcome:
    """Reduce until a worker is lost."""
    if namespace:
        enter(namespace)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with joined(spec, are_watched=bool(namespace)) as engine:
        engine.barrier()
        if when == IDLE:
            say("up")
            listen()
        return lost(engine, forever=when != IDLE)


def lost(engine: Engine, forever: bool) -> Outcome:
    try:
        for step in range(1_000_000 if forever else 1):
            for handle in everything(engine):
                handle.wait(20)
            if step == 3:
                say("up")
    except WorkerLost as error:
        at_s = time.monotonic()
        return Outcome(error.worker, error.rank, error.why, at_s, fails_again(engine), go_on(engine, error.rank))
    raise AssertionError("nobody was lost")


def everything(engine: Engine) -> list[Handle]:
    """Submit one collective of each kind at once."""
    return [
        *(engine.all_reduce(f"gradient {i}", torch.ones(200_000)) for i in range(3)),
        engine.reduce("reduce", torch.ones(100_000), root=1),
        engine.broadcast("broadcast", torch.ones(100_000), root=3),
        engine.all_gather("all_gather", torch.ones(50_000)),
        engine.gather("gather", torch.ones(50_000), root=2),
    ]


def fails_again(engine: Engine) -> float:
    begin_s = time.monotonic()
    with pytest.raises(WorkerLost):
        engine.all_reduce("next", torch.ones(10)).wait(20)
    return time.monotonic() - begin_s


def go_on(engine: Engine, without: int) -> bool:
    others = [rank for rank in range(engine.size) if rank != without]
    total = torch.ones(300_000)
    engine.all_reduce("survivors", total, ranks=others).wait(20)
    return bool((total == len(others)).all())


def enter(namespace: str) -> None:
    """Move this process to another network namespace."""
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(fd, 0) == 0, os.strerror(ctypes.get_errno())
    os.close(fd)


# --- in the test ---


def check(outcomes: Sequence[Outcome], victim: WorkerSpec, since_s: float, within_s: float) -> None:
    rank = victim.view.rank_of(victim.worker)
    for outcome in outcomes:
        assert (outcome.worker, outcome.rank) == (str(victim.worker), rank), f"blames the wrong worker: {outcome}"
        took_s = outcome.at_s - since_s
        assert took_s <= within_s, f"took {took_s:.2f} s, not {within_s:g} s: {outcome}"
        assert outcome.again_s < 0.5, f"the next submission waited {outcome.again_s:.2f} s: {outcome}"
        assert outcome.went_on, f"the survivors' own sum was wrong: {outcome}"


def ready(started: Gang, ranks: Sequence[int] = range(4)) -> None:
    assert started.results(30, ranks) == ["up"] * len(ranks)


def others(victim: int) -> list[int]:
    return [rank for rank in range(4) if rank != victim]


KILLED = (signal.SIGKILL, 10.0, 1.0, "its connection")
STOPPED = (signal.SIGSTOP, TIMEOUT_S, TIMEOUT_S + 1, "silent for")
LEAVES = (signal.SIGTERM, 10.0, 1.0, "it left the job")


@pytest.mark.parametrize(
    ("hosts", "victim", "when", "how"),
    [
        pytest.param(ONE_HOST, 0, WAITING, KILLED, id="killed-shm-0-busy"),
        pytest.param(ONE_HOST, 2, IDLE, KILLED, id="killed-shm-2-idle"),
        pytest.param(TWO_HOSTS, 0, IDLE, KILLED, id="killed-tcp-0-idle"),
        pytest.param(TWO_HOSTS, 2, WAITING, KILLED, id="killed-tcp-2-busy"),
        pytest.param(ONE_HOST, 0, WAITING, STOPPED, id="stopped-shm-0-busy"),
        pytest.param(TWO_HOSTS, 2, IDLE, STOPPED, id="stopped-tcp-2-idle"),
        pytest.param(ONE_HOST, 2, WAITING, LEAVES, id="leaves-shm-2-busy"),
        pytest.param(TWO_HOSTS, 2, WAITING, LEAVES, id="leaves-tcp-2-busy"),
        *(
            pytest.param(hosts, victim, when, how)
            for hosts, victim, when, how in itertools.product(
                (ONE_HOST, TWO_HOSTS), (0, 2), (WAITING, IDLE), (KILLED, STOPPED)
            )
            if FULL
        ),
    ],
)
def test_survivors_name_a_worker_that_is_gone(
    hosts: str, victim: int, when: str, how: tuple[signal.Signals, float, float, str]
) -> None:
    sig, timeout_s, within_s, reason = how
    members = specs(addresses(hosts), timeout_s=timeout_s)
    with job(survivor, members, when) as started:
        ready(started)
        since_s = started.kill(victim, sig)
        if when == IDLE:
            for rank in others(victim):
                started.tell(rank, "submit")
        outcomes = started.results(20, others(victim))
        check(outcomes, members[victim], since_s, within_s)
        assert all(reason in outcome.why for outcome in outcomes), outcomes


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS])
def test_two_workers_die_at_once(hosts: str) -> None:
    members = specs(addresses(hosts), timeout_s=10)
    with job(until_lost, members, (1, 2)) as started:
        ready(started)
        since_s = started.kill(0)
        started.kill(3)
        for rank, at_s, total in started.results(20, [1, 2]):
            assert rank in (0, 3), f"blames rank {rank}"
            assert at_s - since_s < 1.0, f"took {at_s - since_s:.2f} s"
            assert total == 2.0, "the sum of the two that are left"


def until_lost(rank: int, spec: WorkerSpec, left: Sequence[int] = ()) -> tuple[int, float, float]:
    """Return the rank that was lost first, when it was noticed, and what the ranks in `left` could still sum."""
    with joined(spec) as engine:
        try:
            for step in range(1_000_000):
                engine.all_reduce("gradient", torch.ones(300_000)).wait(20)
                if step == 3:
                    say("up")
        except WorkerLost as error:
            at_s, total = time.monotonic(), torch.ones(300_000)
            if left:
                engine.all_reduce("left", total, ranks=left).wait(20)
            return error.rank, at_s, total.mean().item()
    raise AssertionError("nobody was lost")


@pytest.mark.usefixtures("full")
@pytest.mark.timeout(900)
def test_kill_9_at_many_moments() -> None:
    moments = random.Random(5)
    for _ in range(60):
        hosts, victim = moments.choice([ONE_HOST, TWO_HOSTS, "ABCD"]), moments.randrange(4)
        members = specs(addresses(hosts), timeout_s=10)
        with job(survivor, members, WAITING) as started:
            ready(started)
            time.sleep(moments.uniform(0, 0.05))  # where in a collective the signal strikes is what varies
            since_s = started.kill(victim)
            check(started.results(20, others(victim)), members[victim], since_s, within_s=1.0)


def test_a_worker_that_wakes_after_it_was_given_up_learns_it() -> None:
    members = specs(addresses(TWO_HOSTS), timeout_s=TIMEOUT_S)
    with job(until_lost, members) as started:
        ready(started)
        started.kill(1, signal.SIGSTOP)
        assert [rank for rank, _, _ in started.results(20, others(1))] == [1, 1, 1]
        started.kill(1, signal.SIGCONT)
        assert started.hear(1, 10)[0] in others(1)


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS])
def test_one_that_holds_the_interpreter_lock_is_slow_and_not_lost(hosts: str) -> None:
    """On other hosts that takes a runner there, which would end a process that is stopped."""
    with job(hold_lock, specs(addresses(hosts), timeout_s=0.5)) as started:
        assert started.results(20) == [4.0] * 4


def hold_lock(rank: int, spec: WorkerSpec) -> float:
    """Reduce twice; between that one rank can do nothing for four times the timeout."""
    with joined(spec, are_watched=True) as engine:
        engine.barrier()
        if rank == 2:
            ctypes.PyDLL(None).usleep(2_000_000)
        total = torch.ones(3_000_000)  # more than the kernel keeps for one who reads nothing
        engine.all_reduce("gradient", total).wait(20)
        return total.mean().item()


@pytest.mark.root
@pytest.mark.parametrize("victim", [0, 3] if FULL else [3])
def test_survivors_name_a_worker_whose_link_is_cut(victim: int) -> None:
    missing = missing_for_lab()
    if missing:
        pytest.skip("; ".join(missing))
    with Lab(num_hosts=4).up() as lab:
        members = specs(["127.0.0.1"] * 4, timeout_s=TIMEOUT_S)
        members = on_hosts(members, lab.addresses)
        arguments = [(spec, WAITING, lab.namespaces[rank]) for rank, spec in enumerate(members)]
        with gang(survivor, arguments) as started:
            pids = [started.pid(rank) for rank in range(4)]
            ready(started)
            since_s = time.monotonic()
            lab.cut(victim)
            outcomes = started.results(20, others(victim))
            check(outcomes, members[victim], since_s, within_s=TIMEOUT_S + 1)
        assert left_behind(members, pids) == []
        name = lab.name
    assert name not in labs(), "the lab is left"
    assert not list(Path("/run/netns").glob(f"pliant-{name}-*")), "namespaces are left"


def on_hosts(members: Sequence[WorkerSpec], hosts: Sequence[str]) -> list[WorkerSpec]:
    """Return the same job with each worker on a host of its own."""
    workers = tuple(Worker(host, spec.worker.port) for host, spec in zip(hosts, members, strict=True))
    view = View(0, workers, tuple(Worker(host, 1) for host in hosts))
    timeout_s = members[0].heartbeat_timeout_s
    return [
        WorkerSpec(worker=worker, view=view, secret=members[0].secret, heartbeat_timeout_s=timeout_s)
        for worker in workers
    ]
