"""A coordinator and its workers, as real processes: the same bits whichever worker does the work, whatever happens to it."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gang import FULL, free_port
from patience import until
from worker_processes import SECRET, Disturbed, JobOutcome, Nursery, held, impostor, outcome, sha256, small

from pliant import record
from pliant.errors import LaunchError, TrainError
from pliant.fed.aggregation import FedAvg
from pliant.fed.config import FedConfig
from pliant.fed.coordinator import ConnectedWorker, Coordinator, UnitBatch
from pliant.fed.data.build import build_task
from pliant.fed.messages import fingerprint, pack_model
from pliant.fed.rounds.loop import simulate
from pliant.fed.trainer import InProcess
from pliant.fed.work import Training, Unit, UnitResult, Update, Weights, Workers, training_units
from pliant.ui.timeline import JobTimeline

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


# The same bits


@pytest.mark.parametrize(
    ("participants", "batching", "workers"),
    [(6, 1, (1, 2, 4)), (3, 3, (2,)), (6, 3, (4,))]
    if not FULL
    else [(k, batching, (1, 2, 4)) for k in (3, 6, 7) for batching in (1, 3)],
)
def test_the_model_does_not_depend_on_who_trains(
    ward: Nursery, tmp_path: Path, no_leaks: None, participants: int, batching: int, workers: tuple[int, ...]
) -> None:
    config = small(participants=participants, batching=batching)
    expected = outcome(config)
    for count in workers:
        with Coordinator(config, secret=SECRET) as coordinator:
            children = ward.started(tmp_path, coordinator, count)
            assert outcome(config, coordinator) == expected
        assert [child.wait() for child in children] == [0] * count


def test_a_job_without_rounds_does_not_depend_on_it_either(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(participants=3, aggregator="fed-buff", concurrency=6)
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.started(tmp_path, coordinator, 2)
        assert outcome(config, coordinator) == outcome(config)


def test_the_record_says_who_works_how_long_rounds_take_and_who_is_waited_for(
    ward: Nursery, tmp_path: Path, no_leaks: None
) -> None:
    config = small(participants=6, batching=1)
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.started(tmp_path, coordinator, 2)
        coordinator.wait_for(2, 60)
        names = sorted(worker.name for worker in coordinator.workers())
        simulate(config, workers=coordinator, folder=tmp_path / "several")
    facts = record.read(tmp_path / "several" / "record.jsonl")
    assert [fact.data["workers"] for fact in facts if fact.kind == "workers"] == [names]
    work = [fact.data for fact in facts if fact.kind == "work"]
    assert len(work) == config.rounds
    for each in work:
        assert each["slowest"] in names
        assert 0 <= each["wait_s"] < each["round_s"] + each["test_s"]
    timeline = JobTimeline()
    timeline.add(facts)
    told = dict(timeline.facts)
    assert told["others wait for"].startswith("worker ")
    assert told["in real time"].startswith("a round takes ")
    assert timeline.federated is not None
    assert timeline.federated.workers == tuple(names)
    # The control: a process that trains alone has no workers, and waits for nobody.
    simulate(config, folder=tmp_path / "alone")
    facts = record.read(tmp_path / "alone" / "record.jsonl")
    assert not [fact for fact in facts if fact.kind == "workers" or "slowest" in fact.data]
    assert len([fact for fact in facts if fact.kind == "work"]) == config.rounds


def test_the_worker_with_the_last_result_is_waited_for() -> None:
    coordinator = Coordinator(small(), secret=SECRET)
    for number in (1, 2, 3):
        coordinator._workers[number] = ConnectedWorker(number, f"w{number}", None, ready=True)  # type: ignore[arg-type]
    layout, payload = pack_model(Weights.of(build_task(small()).model()))
    for ended_s in ({1: 5.0, 2: 8.0, 3: 5.0}, {1: 10.0, 2: 10.5}, {3: 20.0}):
        coordinator._note_waits(UnitBatch([], layout, payload, 1, ended_s=ended_s))
    found = coordinator.take_figures()
    assert (found.workers, found.slowest, found.wait_s) == (("w1", "w2", "w3"), "w2", 2.25)
    assert coordinator.take_figures().wait_s == 0


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


# What happens to workers


def test_a_worker_is_killed_and_another_joins(
    ward: Nursery, tmp_path: Path, no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.started(tmp_path, coordinator, 2)

        def disturb() -> None:
            victim = until(held(tmp_path, coordinator), "a unit in somebody's hands")
            os.kill(victim, signal.SIGKILL)
            until(lambda: victim not in [each.pid for each in coordinator.workers()], "its loss")
            ward.worker(tmp_path, coordinator.address)
            coordinator.wait_for(2, 60)

        assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 2, disturb)) == expected
        assert len(coordinator.workers()) == 2
    assert "of its units go to others" in caplog.text
    assert sorted(child.wait() for child in ward.children[-3:]) == [-9, 0, 0]


def test_all_workers_are_killed_and_the_job_waits(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    with Coordinator(config, secret=SECRET) as coordinator:
        first = ward.started(tmp_path, coordinator, 2)

        def disturb() -> None:
            until(held(tmp_path, coordinator), "a unit in somebody's hands")
            for child in first:
                child.kill()
            until(lambda: not coordinator.workers(), "their loss")
            ward.worker(tmp_path, coordinator.address)

        assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 3, disturb)) == expected


def test_a_silent_worker_is_given_up_and_may_come_back(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    with Coordinator(config, secret=SECRET, silence_s=0.6) as coordinator:
        children = ward.started(tmp_path, coordinator, 2)
        stopped: list[int] = []

        def disturb() -> None:
            stopped.append(until(held(tmp_path, coordinator), "a unit in somebody's hands"))
            os.kill(stopped[0], signal.SIGSTOP)
            until(lambda: stopped[0] not in [each.pid for each in coordinator.workers()], "its loss")

        assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 2, disturb)) == expected
        os.kill(stopped[0], signal.SIGCONT)
        coordinator.wait_for(2, 30)
    assert [child.wait() for child in children] == [0, 0]
    assert any("silent" in child.said() or "lost the coordinator" in child.said() for child in children)


def test_terminated_it_leaves_at_once_and_nothing_is_to_blame(
    ward: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(tmp_path)
    expected = outcome(config)
    caplog.set_level(logging.INFO, "pliant")
    with Coordinator(config, secret=SECRET) as coordinator:

        def disturb() -> None:
            for _ in range(4):  # a unit in the hands of three who are lost would be given up
                ward.worker(tmp_path, coordinator.address)
                victim = until(held(tmp_path, coordinator), "a unit in somebody's hands")
                os.kill(victim, signal.SIGTERM)
                until(lambda: not coordinator.workers(), "its end")
            ward.worker(tmp_path, coordinator.address)

        assert outcome(config, Disturbed(coordinator, tmp_path / "gate", 1, disturb)) == expected
    assert "has left: it was told to end" in caplog.text
    assert [child.wait() for child in ward.children[-5:]] == [143] * 4 + [0]


def test_a_unit_that_kills_workers_is_given_up_by_name(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(model="small_task:dying", participants=1)
    with Coordinator(config, secret=SECRET) as coordinator:
        for _ in range(3):
            ward.worker(tmp_path, coordinator.address)
        with pytest.raises(LaunchError, match=r"round 1, client \d+: 3 workers were lost"):
            outcome(config, coordinator)


def test_a_unit_that_fails_everywhere_says_why(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small(model="small_task:failing")
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.worker(tmp_path, coordinator.address)
        with pytest.raises(TrainError, match=r"round 1, client \d+ failed 3 times.*ZeroDivisionError: this model"):
            outcome(config, coordinator)


def test_units_that_nobody_waits_for_are_dropped(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    config = small()
    task = build_task(config)
    model = Weights.of(task.model())
    units = training_units(range(12), [3] * 12, round_number=1, lr=0.1, batching=1)
    with Coordinator(config, secret=SECRET) as coordinator:
        ward.started(tmp_path, coordinator, 1)
        half = coordinator.run(model, units)
        next(half)
        with pytest.raises(TrainError, match="still under way"):
            next(coordinator.run(model, units))
        half.close()  # type: ignore[attr-defined]
        assert len(list(coordinator.run(model, units))) == 12
        assert list(coordinator.run(model, [])) == []
        coordinator.fail("enough")
        with pytest.raises(LaunchError, match="enough"):
            next(coordinator.run(model, units))


# What happens to the coordinator


def test_the_coordinator_is_killed_and_goes_on_from_its_checkpoint(ward: Nursery, tmp_path: Path) -> None:
    config = small(tmp_path, rounds=6, checkpoint_every=2)
    expected = outcome(config)
    port = free_port("127.0.0.1")
    killed = ward.start(tmp_path / "coordinator-1", "_coordinator", config, str(tmp_path), port, 4)
    workers = [ward.worker(tmp_path, f"127.0.0.1:{port}") for _ in range(2)]
    until(lambda: list(tmp_path.glob("held-*")), "a unit of round 4 in somebody's hands")
    killed.kill()
    assert killed.wait() == -9
    again = ward.start(tmp_path / "coordinator-2", "_coordinator", config, str(tmp_path), port, 0)
    until(lambda: "listening" in again.said(), "the new coordinator")
    (tmp_path / "gate").unlink()
    assert again.wait() == 0, again.said()
    found: JobOutcome = eval(again.said().splitlines()[-1])
    assert found == expected
    assert [child.wait() for child in workers] == [0, 0]
    assert all("lost the coordinator" in child.said() for child in workers)


def test_the_job_ends_while_a_worker_is_at_work(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    """It finishes what nobody wants any more, and ends well."""
    config = small(tmp_path)
    with Coordinator(config, secret=SECRET) as coordinator:
        (child,) = ward.started(tmp_path, coordinator, 1)

        def disturb() -> None:
            until(held(tmp_path, coordinator), "a unit in somebody's hands")
            coordinator.fail("enough")
            coordinator.close(over=True)

        with pytest.raises(LaunchError, match="enough"):
            outcome(config, Disturbed(coordinator, tmp_path / "gate", 1, disturb))
    assert child.wait() == 0, child.said()


def test_what_one_server_has_taken_back_the_next_one_is_done(ward: Nursery, tmp_path: Path, no_leaks: None) -> None:
    """The second unit is ahead at the one, and taken over by another; the next server's second unit has the same number."""
    config = small(tmp_path, participants=2)
    port = free_port("127.0.0.1")
    with Coordinator(config, port=port, secret=SECRET) as coordinator:
        (child,) = ward.started(tmp_path, coordinator, 1)

        def disturb() -> None:
            until(held(tmp_path, coordinator), "a unit in somebody's hands")
            with impostor(coordinator, task=fingerprint(build_task(config))):
                until(
                    lambda: [e for e in coordinator.workers() if e.name == "impostor" and e.holding],
                    "a unit taken over",
                )
                coordinator.fail("enough")

        with pytest.raises(LaunchError, match="enough"):
            outcome(config, Disturbed(coordinator, tmp_path / "gate", 1, disturb))
        coordinator.close(over=False)
    with Coordinator(config, port=port, secret=SECRET) as coordinator:
        assert outcome(config, coordinator) == outcome(config)
    assert child.wait() == 0


def test_who_waits_hears_of_the_end_just_before_its_units_are_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    model = Weights.of(build_task(config).model())
    units = training_units([1, 2], [1, 1], round_number=1, lr=0.1, batching=1)
    with Coordinator(config, secret=SECRET) as coordinator:
        start = coordinator._start

        def late(*given: object) -> object:
            coordinator.fail("enough")
            return start(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(coordinator, "_start", late)
        with pytest.raises(LaunchError, match="enough"):
            list(coordinator.run(model, units))


def test_without_a_coordinator_it_waits_as_long_as_it_was_told(ward: Nursery, tmp_path: Path) -> None:
    child = ward.worker(tmp_path, f"127.0.0.1:{free_port('127.0.0.1')}", "--patience", "0.3")
    assert child.wait() == 1
    assert "no coordinator at 127.0.0.1" in child.said()
