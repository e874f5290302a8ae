"""A pool and its executors on loopback, as real processes: the same bits whoever does the work, and whatever happens to them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from executing import TOKEN, BatchOutcome, Disturbed, Nursery, held, outcome, proved, say, sha256, small
from gang import FULL, free_port
from patience import until

from pliant.errors import LaunchError, TrainError
from pliant.fed.aggregation import FedAvg
from pliant.fed.config import FedConfig
from pliant.fed.data.build import build_task
from pliant.fed.executors import wire
from pliant.fed.executors.executor import fingerprint
from pliant.fed.executors.mail import Address, Mail
from pliant.fed.executors.pool import Pool
from pliant.fed.trainer import InProcess
from pliant.fed.work import Training, Unit, UnitResult, Update, Weights, Workers, training_units

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


# The same bits


@pytest.mark.parametrize(
    ("participants", "batching", "executors"),
    [(6, 1, (1, 2, 4)), (3, 3, (2,)), (6, 3, (4,))]
    if not FULL
    else [(k, batching, (1, 2, 4)) for k in (3, 6, 7) for batching in (1, 3)],
)
def test_the_model_does_not_depend_on_who_trains(
    ward: Nursery, tmp_path: Path, no_leaks: None, participants: int, batching: int, executors: tuple[int, ...]
) -> None:
    config = small(participants=participants, batching=batching)
    expected = outcome(config)
    for count in executors:
        with Pool(config, token=TOKEN) as pool:
            children = ward.started(tmp_path, pool, count)
            assert outcome(config, pool) == expected
        assert [child.wait() for child in children] == [0] * count


def test_a_job_without_rounds_does_not_depend_on_it_either(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(participants=3, aggregator="fed-buff", concurrency=6)
    with Pool(config, token=TOKEN) as pool:
        ward.started(tmp_path, pool, 2)
        assert outcome(config, pool) == outcome(config)


class InOrderOfArrival:
    """Results as they might come, not in their order."""

    def __init__(self, config: FedConfig) -> None:
        self._workers = InProcess(build_task(config))

    def run(self, model: Weights, units: Sequence[Unit]) -> Iterator[UnitResult]:
        done = list(self._workers.run(model, units))
        if isinstance(units[0], Training):
            random.Random(3).shuffle(done)
        yield from done


class Careless(FedAvg):
    """Folds in whatever order."""

    def add(self, update: Update) -> None:
        self._last = None
        super().add(update)


def test_folded_in_the_order_of_arrival_the_bits_would_differ() -> None:
    """The negative control: the hashes of the tests above would show it, and the parts in between would refuse it."""
    config = small()
    task = build_task(config)
    model = Weights.of(task.model())
    units = training_units(range(6), [3] * 6, round_number=1, lr=0.1, batching=1)

    def folded(workers: Workers) -> str:
        fold = Careless()
        fold.begin(model)
        for done in workers.run(model, units):
            assert isinstance(done, tuple)
            fold.add(done[0].update)
        return sha256(fold.finish())

    assert folded(InProcess(task)) == folded(InProcess(task))
    assert folded(InProcess(task)) != folded(InOrderOfArrival(config))
    with pytest.raises(TrainError, match="something else came back"):
        outcome(config, InOrderOfArrival(config))


# What happens to executors


def test_an_executor_is_killed_and_another_joins(
    ward: Nursery, tmp_path: Path, no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    with Pool(config, token=TOKEN) as pool:
        ward.started(tmp_path, pool, 2)

        def disturb() -> None:
            victim = until(held(tmp_path, pool), "a unit in somebody's hands")
            os.kill(victim, signal.SIGKILL)
            until(lambda: victim not in [each.pid for each in pool.executors()], "its loss")
            ward.executor(tmp_path, pool.address)
            pool.wait_for(2, 60)

        assert outcome(config, Disturbed(pool, tmp_path / "gate", 2, disturb)) == expected
        assert len(pool.executors()) == 2
    assert "of its units go to others" in caplog.text
    assert sorted(child.wait() for child in ward.children[-3:]) == [-9, 0, 0]


def test_all_executors_are_killed_and_the_job_waits(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    with Pool(config, token=TOKEN) as pool:
        first = ward.started(tmp_path, pool, 2)

        def disturb() -> None:
            until(held(tmp_path, pool), "a unit in somebody's hands")
            for child in first:
                child.kill()
            until(lambda: not pool.executors(), "their loss")
            ward.executor(tmp_path, pool.address)

        assert outcome(config, Disturbed(pool, tmp_path / "gate", 3, disturb)) == expected


def test_a_silent_executor_is_given_up_and_may_come_back(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    with Pool(config, token=TOKEN, silence_s=0.6) as pool:
        children = ward.started(tmp_path, pool, 2)
        stopped: list[int] = []

        def disturb() -> None:
            stopped.append(until(held(tmp_path, pool), "a unit in somebody's hands"))
            os.kill(stopped[0], signal.SIGSTOP)
            until(lambda: stopped[0] not in [each.pid for each in pool.executors()], "its loss")

        assert outcome(config, Disturbed(pool, tmp_path / "gate", 2, disturb)) == expected
        os.kill(stopped[0], signal.SIGCONT)
        pool.wait_for(2, 30)
    assert [child.wait() for child in children] == [0, 0]
    assert any("silent" in child.said() or "lost the server" in child.said() for child in children)


def test_terminated_it_leaves_at_once_and_nothing_is_to_blame(
    ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    caplog.set_level(logging.INFO, "pliant")
    with Pool(config, token=TOKEN) as pool:

        def disturb() -> None:
            for _ in range(4):  # a unit in the hands of three who are lost would be given up
                ward.executor(tmp_path, pool.address)
                victim = until(held(tmp_path, pool), "a unit in somebody's hands")
                os.kill(victim, signal.SIGTERM)
                until(lambda: not pool.executors(), "its end")
            ward.executor(tmp_path, pool.address)

        assert outcome(config, Disturbed(pool, tmp_path / "gate", 1, disturb)) == expected
    assert "has left: it was told to end" in caplog.text
    assert [child.wait() for child in ward.children[-5:]] == [143] * 4 + [0]


def test_a_unit_that_kills_executors_is_given_up_by_name(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(model="small_task:dying", participants=1)
    with Pool(config, token=TOKEN) as pool:
        for _ in range(3):
            ward.executor(tmp_path, pool.address)
        with pytest.raises(LaunchError, match=r"round 1, client \d+: 3 executors were lost"):
            outcome(config, pool)


def test_a_unit_that_fails_everywhere_says_why(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(model="small_task:failing")
    with Pool(config, token=TOKEN) as pool:
        ward.executor(tmp_path, pool.address)
        with pytest.raises(TrainError, match=r"round 1, client \d+ failed 3 times.*ZeroDivisionError: this model"):
            outcome(config, pool)


def test_units_that_nobody_waits_for_are_dropped(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small()
    task = build_task(config)
    model = Weights.of(task.model())
    units = training_units(range(12), [3] * 12, round_number=1, lr=0.1, batching=1)
    with Pool(config, token=TOKEN) as pool:
        ward.started(tmp_path, pool, 1)
        half = pool.run(model, units)
        next(half)
        with pytest.raises(TrainError, match="still under way"):
            next(pool.run(model, units))
        half.close()  # type: ignore[attr-defined]
        assert len(list(pool.run(model, units))) == 12
        assert list(pool.run(model, [])) == []
        pool.fail("enough")
        with pytest.raises(LaunchError, match="enough"):
            next(pool.run(model, units))


# What happens to the server


def test_the_server_is_killed_and_goes_on_from_its_checkpoint(ward: Nursery, tmp_path: Path) -> None:
    config = small(tmp_path, rounds=6, checkpoint_every=2)
    expected = outcome(config)
    port = free_port("127.0.0.1")
    server = ward.start(tmp_path / "server-1", "_server", config, str(tmp_path), port, 4)
    executors = [ward.executor(tmp_path, f"127.0.0.1:{port}") for _ in range(2)]
    until(lambda: list(tmp_path.glob("held-*")), "a unit of round 4 in somebody's hands")
    server.kill()
    assert server.wait() == -9
    again = ward.start(tmp_path / "server-2", "_server", config, str(tmp_path), port, 0)
    until(lambda: "listening" in again.said(), "the new server")
    (tmp_path / "gate").unlink()
    assert again.wait() == 0, again.said()
    found: BatchOutcome = eval(again.said().splitlines()[-1])
    assert found == expected
    assert [child.wait() for child in executors] == [0, 0]
    assert all("lost the server" in child.said() for child in executors)


def test_the_job_ends_while_an_executor_is_at_work(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    """It finishes what nobody wants any more, and ends well."""
    config = small(tmp_path)
    with Pool(config, token=TOKEN) as pool:
        (child,) = ward.started(tmp_path, pool, 1)

        def disturb() -> None:
            until(held(tmp_path, pool), "a unit in somebody's hands")
            pool.fail("enough")
            pool.close(over=True)

        with pytest.raises(LaunchError, match="enough"):
            outcome(config, Disturbed(pool, tmp_path / "gate", 1, disturb))
    assert child.wait() == 0, child.said()


def test_what_one_server_has_taken_back_the_next_one_is_done(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    """The second unit is ahead at the one, and taken over by another; the next server's second unit has the same number."""
    config = small(tmp_path, participants=2)
    port = free_port("127.0.0.1")
    with Pool(config, port=port, token=TOKEN) as pool:
        (child,) = ward.started(tmp_path, pool, 1)

        def disturb() -> None:
            until(held(tmp_path, pool), "a unit in somebody's hands")
            with proved(pool.address) as thief:
                say(thief, wire.Kind.READY, {"task": fingerprint(build_task(config))})
                until(lambda: [e for e in pool.executors() if e.name == "fake" and e.holding], "a unit of the thief's")
                pool.fail("enough")

        with pytest.raises(LaunchError, match="enough"):
            outcome(config, Disturbed(pool, tmp_path / "gate", 1, disturb))
        pool.close(over=False)
    with Pool(config, port=port, token=TOKEN) as pool:
        assert outcome(config, pool) == outcome(config)
    assert child.wait() == 0


def test_who_waits_hears_of_the_end_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just before its units are given out; and when the pool's own thread fails."""
    config = small()
    model = Weights.of(build_task(config).model())
    units = training_units([1, 2], [1, 1], round_number=1, lr=0.1, batching=1)
    with Pool(config, token=TOKEN) as pool:
        encode = pool._encode

        def late(weights: Weights) -> None:
            encode(weights)
            pool.fail("enough")
            pool.executors()  # its thread has done all that it was told

        monkeypatch.setattr(pool, "_encode", late)
        with pytest.raises(LaunchError, match="enough"):
            list(pool.run(model, units))
    broken = Pool(config, token=TOKEN)

    async def beat() -> None:
        while broken._desk._batch is None:
            await asyncio.sleep(0.01)  # pacing a poll
        raise RuntimeError("out of order")

    monkeypatch.setattr(broken._desk, "_beat", beat)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with broken, pytest.raises(LaunchError, match="the pool of executors has failed.*out of order"):
        list(broken.run(model, units))


def test_a_unit_that_is_given_anew_is_done() -> None:
    """It was taken back after it had been begun, so nobody has used up the mark."""
    mail = Mail(Address(host="127.0.0.1", port=1, token=TOKEN))
    mail.connection = 1
    for kind in (wire.Kind.UNIT, wire.Kind.CANCEL, wire.Kind.UNIT):
        mail._put(wire.Frame(kind, {"id": 7}))
        assert ((1, 7) in mail.cancelled) is (kind is wire.Kind.CANCEL)
    assert mail.inbox.qsize() == 2


def test_without_a_server_it_waits_as_long_as_it_was_told(ward: Nursery, tmp_path: Path) -> None:
    child = ward.executor(tmp_path, f"127.0.0.1:{free_port('127.0.0.1')}", "--patience", "0.3")
    assert child.wait() == 1
    assert "no server at 127.0.0.1" in child.said()
