"""Optimizers that average models, through the job: their values, computed again by hand, while workers come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from averaging import ALPHA, MOMENTUM, RATE, Record, Steps, elastic, fixed
from stage import new_workers

from pliant.train.optim import peer_of


def _momentum(record: Record) -> Any:
    gradient = record.before - record.target
    return gradient if record.momentum is None else MOMENTUM * record.momentum + gradient


def _averaged(steps: Steps, size: int | None = None) -> int:
    """Hold the steps of SMA against the formula; how many there were. `size` in place of the right one is a control."""
    whole = {step: found for step, found in steps.items() if len(found) == found[0].size}
    for found in whole.values():
        total = np.sum([record.before for record in found.values()], axis=0)
        for record in found.values():
            mean = total / (size or record.size)
            wanted = (1 - ALPHA) * record.before + ALPHA * mean - RATE * _momentum(record)
            assert np.allclose(record.after, wanted, rtol=1e-12), record
    return len(whole)


def _summed(steps: Steps) -> int:
    """Hold steps of synchronous SGD against the formula; how many there were."""
    for found in steps.values():
        assert len({(record.after.tobytes(), record.momentum_after.tobytes()) for record in found.values()}) == 1
        gradient = np.mean([record.before - record.target for record in found.values()], axis=0)
        for record in found.values():
            old = 0 if record.momentum is None else MOMENTUM * record.momentum
            assert np.allclose(record.after, record.before - RATE * (old + gradient), rtol=1e-12), record
    return len(steps)


def _continued(steps: Steps) -> None:
    """Everybody goes on with its own model and momentum; who is new, with those of one other."""
    for step, found in steps.items():
        last = {record.after.tobytes(): record for record in steps.get(step - 1, {}).values()}
        for record in found.values() if last else ():
            assert record.before.tobytes() in last, f"a model that nobody had before step {step}"
            source = last[record.before.tobytes()]
            assert record.momentum is not None
            assert record.momentum.tobytes() == source.momentum_after.tobytes(), "model and momentum of two workers"
            if record.size == len(last):  # else ranks are others, or models are the same
                assert record.rank == source.rank


def _come_and_go(kind: str) -> tuple[Steps, int]:
    """Two workers, then three, then the first one is killed. Returns what they did, and the first step of three."""
    first, second, third = new_workers(3)
    with elastic(kind) as driver:
        driver.start([first, second])
        for _ in range(6):
            driver.round()
        driver.start([first, second, third])
        driver.until_rolled(3)
        driver.until_size(3, 12)
        driver.round(victim=first)
        driver.until_size(2, 4)
        steps = driver.steps
    sizes = [len(steps[step]) for step in sorted(steps)]
    assert sorted(steps) == list(range(len(steps)))
    grown = sizes.index(3)
    assert sizes == [2] * grown + [3] * 13 + [2] * 4, sizes
    return steps, grown


@pytest.mark.processes
def test_synchronous_averaging_follows_the_number_of_workers() -> None:
    steps, grown = _come_and_go("sma")
    assert _averaged(steps) == len(steps)
    _continued(steps)
    newcomer, elder = steps[grown][2], steps[grown][0]
    assert newcomer.before.tobytes() == elder.before.tobytes()
    assert newcomer.momentum is not None
    assert elder.momentum is not None
    assert newcomer.momentum.tobytes() == elder.momentum.tobytes()
    with pytest.raises(AssertionError):
        _averaged(steps, size=2)  # what a constant size would give


@pytest.mark.processes
def test_pairs_include_the_newcomer() -> None:
    steps, grown = _come_and_go("pair")
    _continued(steps)
    chosen = set()
    for step, found in sorted(steps.items()):
        for record in found.values():
            last = steps.get(step - 1, {})
            pulled = record.before
            if record.peer is not None:
                assert record.peer == peer_of(record.rank, record.size, step, seed=3)
                chosen.add((record.size, record.rank, record.peer))
                if len(last) == record.size:  # else ranks were others, or the peer was new
                    pulled = last[record.peer].after
            else:
                assert len(last) != record.size, "a peer of the step before was not used"
            if record.peer is None or len(last) == record.size:
                wanted = (record.before + pulled) / 2 - RATE * _momentum(record)
                assert np.allclose(record.after, wanted, rtol=1e-12), record
    assert {(3, 0, 2), (3, 1, 2), (3, 2, 0), (3, 2, 1)} <= chosen, sorted(chosen)
    assert grown >= 6


@pytest.mark.processes
def test_adaptive_sgd_changes_and_stays_equal() -> None:
    steps, grown = _come_and_go("adaptive")
    change = 4
    assert grown > change
    before = {step: found for step, found in steps.items() if step < change}
    after = {step: found for step, found in steps.items() if step >= change}
    assert _averaged(before) == change
    assert _summed(after) == len(steps) - change
    _continued(before)
    _continued(after)
    last, first = steps[change - 1], steps[change]
    assert last[0].after.tobytes() != last[1].after.tobytes()
    for record in first.values():
        assert record.before.tobytes() == last[0].after.tobytes()
        assert record.momentum is not None
        assert record.momentum.tobytes() == last[0].momentum_after.tobytes()


@pytest.mark.processes
def test_a_death_at_the_change() -> None:
    """The first worker is killed when the others are about to be given its state: they get that of the next."""
    workers = new_workers(3)
    with elastic("adaptive") as driver:
        driver.start(workers)
        for _ in range(3):
            driver.round()
        driver.round(victim=workers[0])
        driver.until_size(2, 3)
        steps = driver.steps
    assert [len(steps[step]) for step in sorted(steps)] == [3] * 4 + [2] * 3
    assert _averaged({step: found for step, found in steps.items() if step < 4}) == 4
    assert _summed({step: found for step, found in steps.items() if step >= 4}) == 3
    assert {record.before.tobytes() for record in steps[4].values()} == {steps[3][1].after.tobytes()}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["sma", "pair"])
def test_a_checkpoint_holds_the_first_workers_model(kind: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "it.safetensors")
    with fixed(kind, 2, (3, saved)) as driver:
        for _ in range(4):
            driver.round()
        assert driver.stop() == ["finished", "finished"]
        last = driver.steps[2]
    with fixed(kind, 2, (0, "", saved)) as driver:
        resumed = driver.round()
    assert last[0].after.tobytes() != last[1].after.tobytes()
    for record in resumed:
        assert (record.step, record.before.tobytes()) == (3, last[0].after.tobytes())
        assert record.momentum is not None
        assert record.momentum.tobytes() == last[0].momentum_after.tobytes()
