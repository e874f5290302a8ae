"""Transports move from view to view on the same connections, with all workers in one process."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from views import QUICK, everybody_sums, subview

from pliant.cluster import Worker
from pliant.comm.mesh import MeshConfig
from pliant.comm.probe import latencies
from pliant.comm.transport import Transport, loopback_transports, view_of
from pliant.errors import CommError, ConfigError, InvalidView, ViewChanged

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(60)]


def test_a_view_of_one_folds_alone_and_grows() -> None:
    workers = view_of("AAB").workers
    with loopback_transports(workers, QUICK) as made:
        alone = made[0].enter(subview(0, workers[:1]))
        parts, total = [torch.full((10,), float(i)) for i in range(3)], torch.empty(10)
        alone.all_reduce("sum", total, contributions=parts, parts=[3]).wait()
        assert torch.equal(total, torch.full((10,), 3.0))
        everybody_sums(made, subview(1, workers))


def test_who_is_alone_has_no_second_thread_until_it_is_needed() -> None:
    workers = view_of("AA").workers
    with loopback_transports(workers[:1], QUICK) as [alone]:
        before = threading.active_count()
        alone.enter(subview(0, workers[:1]))
        alone.lend("state", [torch.ones(3)])
        alone.reclaim("")
        engine = alone.enter(subview(1, workers[:1]))
        assert (alone.reactor.thread_number, threading.active_count()) == (0, before)
        total = torch.ones(2)
        engine.all_reduce("sum", total).wait()
        assert torch.equal(total, torch.ones(2))
        assert threading.active_count() == before + 1
        assert alone.reactor.thread_number > 0
    with pytest.raises(CommError):
        engine.all_reduce("sum", torch.ones(2))


def test_who_is_closed_and_never_needed_a_thread_starts_none() -> None:
    workers = view_of("AA").workers
    with loopback_transports(workers[:1], QUICK) as [alone]:
        before = threading.active_count()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, pytest.raises(CommError):
        alone.add_connection(workers[1], ours)
    assert (ours.fileno(), threading.active_count()) == (-1, before)


def test_many_threads_need_it_at_once() -> None:
    with loopback_transports(view_of("A").workers, QUICK) as [alone]:
        engine = alone.enter(view_of("A"))
        ready = threading.Barrier(8)

        def use(number: int) -> None:
            ready.wait(10)
            engine.add_torn_callback(lambda error: None)
            engine.all_reduce(f"sum {number}", torch.ones(2)).wait()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(use, range(8)))


def test_open_collectives_fail_and_the_old_engine_refuses_more() -> None:
    workers = view_of("AB").workers
    with loopback_transports(workers, QUICK) as made:
        old = [transport.enter(subview(0, workers)) for transport in made]
        waiting = [old[0].all_reduce("never", torch.ones(100_000)), old[0].broadcast("nor this", torch.ones(5), root=1)]
        made[0].enter(subview(1, workers))
        for handle in waiting:
            with pytest.raises(ViewChanged, match="from view 0 to 1"):
                handle.wait(5)
        for call in (
            lambda: old[0].all_reduce("again", torch.ones(1)),
            lambda: old[0].request(1, "x", torch.ones(1)),
            lambda: latencies(old[0]),
        ):
            with pytest.raises(ViewChanged):
                call()
        with pytest.raises(ConfigError, match="does not come after"):
            made[0].enter(subview(1, workers))
        with pytest.raises(InvalidView, match="is not in view 2"):
            made[0].enter(subview(2, workers[1:]))


def test_frames_of_a_later_view_wait_and_those_of_an_earlier_one_are_discarded() -> None:
    workers = view_of("ABB").workers
    with loopback_transports(workers, QUICK) as made:
        old = [transport.enter(subview(0, workers)) for transport in made]
        tensors = [torch.ones(3_000_000) for _ in made]  # more than the kernel holds
        slow = old[2].all_reduce("unfinished", tensors[2])
        unfinished = old[1].all_reduce("unfinished", tensors[1])
        fast = [made[rank].enter(subview(1, workers)) for rank in (0, 1)]
        early = [engine.all_reduce("sum", torch.ones(2_000_000)) for engine in fast]
        with pytest.raises(ViewChanged):
            unfinished.wait(5)
        with pytest.raises(ViewChanged, match="has moved on"):
            slow.wait(5)  # the others cannot take part in it any more, and have said so
        last = made[2].enter(subview(1, workers))
        mine = torch.ones(2_000_000)
        last.all_reduce("sum", mine).wait()
        assert bool((mine == 3).all())
        for handle in early:
            assert bool((handle.wait() == 3).all())


def test_a_slower_peer_completes_what_the_faster_has_left() -> None:
    """Rank 0 has finished view 0 as soon as the kernel has its bytes; rank 1 has not even begun."""
    workers = view_of("AB").workers
    with loopback_transports(workers, QUICK) as made:
        old = [transport.enter(subview(0, workers)) for transport in made]
        old[0].broadcast("last", torch.full((5000,), 7.0), root=0).wait()
        new = made[0].enter(subview(1, workers))
        sums = new.all_reduce("sum", torch.ones(1_000_000))
        received = torch.zeros(5000)
        old[1].broadcast("last", received, root=0).wait(5)
        assert bool((received == 7).all())
        made[1].enter(subview(1, workers)).all_reduce("sum", torch.ones(1_000_000)).wait()
        sums.wait()


def test_abort_ends_what_is_open_and_what_comes_later() -> None:
    workers = view_of("AB").workers
    with loopback_transports(workers, QUICK) as made:
        made[0].abort(CommError("nothing to end yet"))
        engine = made[0].enter(subview(0, workers))
        made[1].enter(subview(0, workers))
        waiting = engine.all_reduce("never", torch.ones(10))
        made[0].abort(CommError("enough"))
        for handle in (waiting, engine.all_reduce("later", torch.ones(10)), engine.request(1, "x", torch.ones(1))):
            with pytest.raises(CommError, match="enough"):
                handle.wait(5)
        assert made[0].engine is engine
        everybody_sums(made, subview(1, workers))


def test_lent_memory_is_read_as_it_is_through_views() -> None:
    workers = view_of("AAB").workers
    with loopback_transports(workers, QUICK) as made:
        state = made[0].empty((300, 1000))
        made[0].lend("state:a", [state])
        made[0].lend("other", [state])
        with pytest.raises(ConfigError, match="contiguous tensors"):
            made[0].lend("strided", [torch.ones(4, 4).t()])
        for number in range(3):
            ranks = [transport.enter(subview(number, workers)) for transport in made]
            state.fill_(number)  # no copy was made: this is what they get
            for engine in ranks:
                assert bool((engine.request(0, "state:a", torch.empty(300, 1000)).wait() == number).all())
        made[0].reclaim("state:")
        with pytest.raises(CommError, match="stored"):
            ranks[1].request(0, "state:a", torch.empty(300, 1000)).wait()
        ranks[2].request(0, "other", torch.empty(300, 1000)).wait()


def test_a_goodbye_is_told_apart_from_a_loss() -> None:
    workers = view_of("AB").workers
    with loopback_transports(workers, QUICK) as made:
        left, lost = queue.SimpleQueue[Worker](), queue.SimpleQueue[Worker]()
        made[0].on_left, made[0].on_lost = left.put, lambda worker, why: lost.put(worker)
        made[1].close()
        assert left.get(timeout=30) == workers[1]
        assert lost.empty()


def test_a_worker_that_answers_keeps_its_name_and_a_silent_one_loses_it() -> None:
    workers = (*view_of("AB").workers, Worker("C", 10009))
    with loopback_transports(workers[:2], QUICK) as made:
        lost: list[tuple[Worker, str]] = []
        made[0].on_lost = lambda worker, why: lost.append((worker, why))
        assert made[0].admit(workers[2]), "nobody has this name"
        assert not made[0].admit(workers[1]), "it is connected, and lives"
        ours, silent = socket.socketpair()
        with silent:
            made[0].add_connection(workers[2], ours)
            assert made[0].is_connected(workers[2])
            assert made[0].admit(workers[2]), "it does not answer"
        assert not made[0].is_connected(workers[2])
        assert [worker for worker, _ in lost] == [workers[2]]
        assert "under its name" in lost[0][1]
        refused: list[str] = []

        def enter(worker: Worker, why: str) -> None:
            with pytest.raises(ConfigError) as caught:
                made[0].enter(subview(9, workers[:2]))
            refused.append(str(caught.value))

        made[0].on_lost = enter
        ours, gone = socket.socketpair()
        gone.close()
        made[0].add_connection(workers[2], ours)
        assert made[0].admit(workers[2]), "it has hung up"
        assert "cannot wait for itself" in refused[0]
        everybody_sums(made, subview(0, workers[:2]))


def test_a_member_without_a_connection_is_named_and_nothing_changes() -> None:
    workers = (*view_of("AB").workers, Worker("C", 10009))
    with loopback_transports(workers[:2], QUICK) as made:
        engine = made[0].enter(subview(0, workers[:2]))
        waiting = engine.all_reduce("sum", torch.ones(10))
        with pytest.raises(CommError, match="no connection to C:10009"):
            made[0].enter(subview(1, workers))
        assert made[0].engine is engine
        made[1].enter(subview(0, workers[:2])).all_reduce("sum", torch.ones(10)).wait()
        waiting.wait()


def test_where_no_thread_can_be_made_it_is_said_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Worker("127.0.0.1", port) for port in (20000, 20001))
    with contextlib.ExitStack() as stack:
        config = MeshConfig(secret=b"for tests")
        one, other = (stack.enter_context(Transport(me, config, QUICK).open()) for me in (first, second))
        start, full = threading.Thread.start, [True]

        def start_or_not(thread: threading.Thread) -> None:
            if thread.name == "pliant-connect" and full.pop():
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_not)
        with pytest.raises(CommError, match=r"cannot connect to 127\.0\.0\.1:20000 \(can't start new thread\)"):
            other.connect([first, second], 1, timeout_s=30)
        full.append(False)
        other.connect([first, second], 1, timeout_s=30)
        one.connect([first, second], 1, timeout_s=30)
