"""Real processes move from view to view: as planned, after a death, with a worker that returns, with forked children."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gang import FULL, addresses, gang, left_behind, listen, say, specs
from views import check_sums, opened, subview

from pliant.cluster import View, Worker
from pliant.comm.memory import Span
from pliant.errors import CommError, ViewChanged, WorkerLost
from pliant.identity import WorkerSpec

MIXED = ["AAA", "AAB", "ABC"] if FULL else ["AAB"]
"""Hosts on which some ranks share memory and some do not, so that both transports are used."""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("fork_server", "no_leaks"),
    pytest.mark.timeout(60),
]


def plan(workers: Sequence[Worker], count: int) -> list[View]:
    """Return permutations of the workers, some without one of them; the first and the last have all."""
    chance, found = random.Random(5), []
    for number in range(count):
        order = chance.sample(list(workers), len(workers))
        if 0 < number < count - 1 and chance.random() < 0.4:
            order.pop()
        found.append(subview(number, order))
    return found


def wanderer(rank: int, spec: WorkerSpec, planned: list[View]) -> int:
    """Enter all views at the same points of the program as the others."""
    with opened(spec) as transport:
        transport.connect(spec.view.workers, 0, timeout_s=20)
        entered = 0
        for view in planned:
            if spec.worker in view.workers:
                check_sums(transport.enter(view), spec.worker, length=20_000)
                entered += 1
        return entered


@pytest.mark.parametrize("hosts", MIXED)
def test_fifty_changes_of_the_view(hosts: str) -> None:
    members = specs(addresses(hosts))
    planned = plan(members[0].view.workers, 50)
    with gang(wanderer, [(spec, planned) for spec in members]) as started:
        entered = started.results(50)
        for process in started.processes:
            process.join(10)
        assert left_behind(members, []) == []
    assert entered == [sum(spec.worker in view.workers for view in planned) for spec in members]
    assert min(entered) < 50, "nobody was ever left out"


def hasty(rank: int, spec: WorkerSpec, planned: list[View]) -> tuple[int, int]:
    """Leave each view in the midst of its collectives; return how many were complete, and how many were not."""
    chance, buffers = random.Random(rank), []
    complete = given_up = 0
    with opened(spec) as transport:
        buffers = [transport.empty(size) for size in (10, 1000, 300_000)]
        transport.connect(spec.view.workers, 0, timeout_s=20)
        for view in planned:
            if spec.worker not in view.workers:
                continue
            engine = transport.enter(view)
            engine.barrier()  # nobody is in the old view any more
            check_sums(engine, spec.worker, length=5_000)
            for buffer in buffers:
                buffer.fill_(1.0)
            waiting = [engine.all_reduce(f"shared {i}", buffer) for i, buffer in enumerate(buffers)]
            waiting += [engine.all_reduce(f"private {i}", torch.ones(100_000)) for i in range(5)]
            waiting += [engine.all_gather("gather", torch.ones(100_000)), engine.request(0, "nothing", torch.ones(1))]
            time.sleep(chance.choice([0, 0, 0.001, 0.003, 0.01]))  # where it leaves is what varies
            transport.abort(ViewChanged("left"))
            for handle in waiting[:-1]:
                try:
                    value = handle.wait()
                    assert value is not None
                    assert bool((value == (1 if handle is waiting[-2] else view.size)).all()), f"wrong: {handle.name}"
                    complete += 1
                except ViewChanged:
                    given_up += 1
    return complete, given_up


@pytest.mark.parametrize("hosts", MIXED)
def test_views_are_left_at_odd_moments(hosts: str) -> None:
    members = specs(addresses(hosts))
    planned = plan(members[0].view.workers, 30)
    with gang(hasty, [(spec, planned) for spec in members]) as started:
        counts = started.results(50)
    assert sum(complete for complete, _ in counts) > 0
    assert sum(given_up for _, given_up in counts) > 0


def bereaved(rank: int, spec: WorkerSpec) -> tuple[str, bool, str]:
    """Reduce until a worker dies; continue without it on the same buffers."""
    with opened(spec) as transport:
        lost: list[str] = []
        transport.on_lost = lambda worker, why: lost.append(str(worker))
        transport.connect(spec.view.workers, 0, timeout_s=20)
        engine, buffer = transport.enter(spec.view), transport.empty(400_000)
        try:
            for step in range(1_000_000):
                buffer.fill_(rank + 1)
                engine.all_reduce("gradient", buffer).wait()
                if step == 3:
                    say("up")
        except WorkerLost as error:
            dead = error.worker
        left = [worker for worker in spec.view.workers if str(worker) != dead]
        with pytest.raises(WorkerLost):
            transport.enter(View(1, spec.view.workers, spec.view.runners))
        engine = transport.enter(subview(1, left))
        engine.barrier()  # from here on nobody is in the old view, so the buffer is ours alone
        for _ in range(20):
            buffer.fill_(rank + 1)
            engine.all_reduce("gradient", buffer).wait()
            expected = sum(spec.view.rank_of(worker) + 1 for worker in left)
            assert bool((buffer == expected).all())
        check_sums(engine, spec.worker)
        return dead, lost == [dead], "up"


@pytest.mark.parametrize(("hosts", "victim"), [("AABB", 0), ("AAAA", 2), *([("AABB", 2), ("AAAA", 0)] if FULL else ())])
def test_survivors_continue_without_a_dead_worker(hosts: str, victim: int) -> None:
    members = specs(addresses(hosts))
    others = [rank for rank in range(4) if rank != victim]
    with gang(bereaved, [(spec,) for spec in members]) as started:
        assert started.results(30) == ["up"] * 4
        started.kill(victim)
        assert started.results(30, others) == [(str(members[victim].worker), True, "up")] * 3


def stayer(rank: int, spec: WorkerSpec) -> str:
    """Connect, lose rank 1, and connect to it again."""
    with opened(spec) as transport:
        transport.connect(spec.view.workers, 0, timeout_s=20)
        check_sums(transport.enter(spec.view), spec.worker)
        say("met")
        assert listen() == "again"
        transport.connect(spec.view.workers, 1, timeout_s=20)
        check_sums(transport.enter(View(1, spec.view.workers, spec.view.runners)), spec.worker)
        return "met again"


def mortal(rank: int, spec: WorkerSpec, number: int) -> str:
    with opened(spec) as transport:
        transport.connect(spec.view.workers, number, timeout_s=20)
        check_sums(transport.enter(View(number, spec.view.workers, spec.view.runners)), spec.worker)
        say("met")
        return str(listen())


@pytest.mark.parametrize("hosts", ["AAA", "ABC"])
def test_a_worker_that_was_killed_comes_back_under_its_name(hosts: str) -> None:
    members = specs(addresses(hosts))
    with gang(stayer, [(members[0],), (members[2],)]) as rest, gang(mortal, [(members[1], 0)]) as first:
        assert rest.results(30) + first.results(30) == ["met"] * 3
        first.kill(0)
        first.processes[0].join(10)
        with gang(mortal, [(members[1], 1)]) as second:
            for rank in (0, 1):
                rest.tell(rank, "again")
            assert second.hear(0, 30) == "met"
            assert rest.results(30) == ["met again"] * 2
            second.tell(0, "done")
            assert second.hear(0, 30) == "done"


FAILED = 123_457
"""Elements of a sum that fails with each loss."""


def survivor_of_many(rank: int, spec: WorkerSpec, times: int) -> tuple[list[int], list[int]]:
    """Sum with a worker that is killed again and again; return how many pieces of shared memory were mapped each
    time, and how many were kept for sums that had failed."""
    gc.disable()  # what is not used any more must go at once: torch has so many objects that a collection is rare
    mapped, kept = [], []
    with opened(spec) as transport:
        for number in range(times):
            transport.connect(spec.view.workers, number, timeout_s=20)
            engine = transport.enter(View(number, spec.view.workers, spec.view.runners))
            check_sums(engine, spec.worker)
            mapped.append(Path("/proc/self/maps").read_text().count("memfd:pliant "))
            kept.append(sum(type(each) is Span and len(each.flat) == FAILED for each in gc.get_objects()))
            say("met")
            with pytest.raises(WorkerLost):
                engine.all_reduce("never", torch.ones(FAILED)).wait(20)
    return mapped, kept


def test_the_memory_of_those_that_are_gone_is_given_back_at_once() -> None:
    members, times = specs(addresses("AA")), 5
    with gang(survivor_of_many, [(members[0], times)]) as rest:
        for number in range(times):
            with gang(mortal, [(members[1], number)]) as newcomer:
                assert newcomer.results(30) == ["met"]
                assert rest.hear(0, 30) == "met"
                newcomer.kill(0)
        mapped, kept = rest.results(30)[0]
    assert len(set(mapped)) == 1, f"mapped pieces after each change: {mapped}"
    assert kept == [0] * times, f"pieces of failed sums that were kept after each change: {kept}"


def parent(rank: int, spec: WorkerSpec) -> float:
    """Fork a child in rank 0 that outlives it; in rank 1 return the time at which rank 0 was lost."""
    with opened(spec) as transport:
        transport.connect(spec.view.workers, 0, timeout_s=20)
        engine = transport.enter(spec.view)
        engine.barrier()
        if rank == 0:
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            say(child)
            listen()
        say("up")
        with pytest.raises(WorkerLost):
            engine.all_reduce("never", torch.ones(10)).wait(20)
        return time.monotonic()


@pytest.mark.parametrize("hosts", ["AA", "AB"])
def test_a_child_does_not_hide_its_parents_death(hosts: str) -> None:
    members = specs(addresses(hosts), timeout_s=30)
    with gang(parent, [(spec,) for spec in members]) as started:
        child = started.hear(0, 30)
        try:
            assert started.hear(1, 30) == "up"
            since_s = started.kill(0)
            assert started.hear(1, 30) - since_s < 1.0
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def waiting(rank: int, spec: WorkerSpec) -> list[str]:
    """Wait for a worker that never comes, until the timeout and until cancelled; return the errors."""
    found = []
    with opened(spec) as transport:
        for cancelled in (None, lambda: True):
            with pytest.raises(CommError) as caught:
                transport.connect(spec.view.workers, 7, timeout_s=0.3 if cancelled is None else 20, cancelled=cancelled)
            found.append(str(caught.value))
    return found


def test_a_worker_that_does_not_come_is_named() -> None:
    members = specs(addresses("AAB"))
    for missing in (0, 2):
        present = members[1]
        spec = WorkerSpec(
            worker=present.worker, view=subview(7, [members[missing].worker, present.worker]), secret=b"x"
        )
        with gang(waiting, [(spec,)]) as started:
            timed_out, cancelled = started.hear(0, 30)
        for said in (timed_out, cancelled):
            assert str(members[missing].worker) in said, said
            assert "view 7" in said, said
        assert "waited 0.3 s" in timed_out
        assert "told not to" in cancelled


def test_a_peer_that_moves_on_late_is_not_taken_for_lost() -> None:
    """A worker that waits for a slow one to enter the next view is not silent, and does not take the slow one for silent."""
    members = specs(addresses("AB"), timeout_s=0.5)
    with gang(slow, [(spec,) for spec in members]) as started:
        assert started.results(30) == ["done", "done"]


def slow(rank: int, spec: WorkerSpec) -> str:
    with opened(spec) as transport:
        transport.connect(spec.view.workers, 0, timeout_s=20)
        check_sums(transport.enter(spec.view), spec.worker)
        if rank == 0:
            time.sleep(1.5)  # longer than the heartbeats' timeout: this is what is being tested
        check_sums(transport.enter(View(1, spec.view.workers, spec.view.runners)), spec.worker)
        return "done"
