"""Policies, driven through made-up jobs whose truth is known: what they decide, when they leave it, what they hand over."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_job import Job, batch_sizes, noisy, run, worker_counts
from scripted import run_script

from pliant.adapt import (
    Decision,
    Observation,
    Policies,
    Policy,
    SetBatchSize,
    SetLearningRate,
    registry,
)
from pliant.adapt.batch_size import GrowBatchSize, KungFuBatchSize, ScheduledBatchSize, lr_factor
from pliant.adapt.goodput_policy import Goodput
from pliant.adapt.size import Provision, ScheduledSize, next_size
from pliant.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.py"


# --- the batch size, by the noise scale ---


def test_the_batch_grows_with_the_noise_and_no_further() -> None:
    job, decided = run(GrowBatchSize(lr="none"), 3000, noise_scale=noisy(lambda step: min(3000.0, 100.0 + step)))
    sizes = batch_sizes(decided)
    assert sizes == sorted(sizes)
    assert len(sizes) >= 4
    assert 400 <= job.batch <= 850, "4 replicas, a noise scale of 3000"
    assert all(after >= 1.5 * before for before, after in zip([32, *sizes], sizes, strict=False))
    assert all(after <= 2 * before for before, after in zip([32, *sizes], sizes, strict=False))


def test_a_batch_changes_once_per_epoch_at_most() -> None:
    job = Job(noise_scale=lambda step: 1e6)
    policies = Policies([GrowBatchSize(max_batch=512, warmup=5)])
    epochs = []
    for _ in range(200):
        before = job.batch
        job.run(policies, 1)
        if job.batch != before:
            epochs.append(job.epoch)
    assert len(epochs) == 4
    assert len(set(epochs)) == len(epochs)


def test_without_a_clear_gain_nothing_changes() -> None:
    truth = 4 * 32 * 1.3  # above the batch, but not by the least growth
    assert run(GrowBatchSize(lr="none"), 3000, noise_scale=noisy(lambda step: truth, 0.2))[1] == []
    assert run(GrowBatchSize(), 500, noise_scale=lambda step: None)[1] == []
    assert run(GrowBatchSize(), 500, noise_scale=lambda step: -100.0)[1] == []
    assert run(GrowBatchSize(), 500, noise_scale=lambda step: float("nan"))[1] == []


def test_growth_stops_at_the_ceilings() -> None:
    assert run(GrowBatchSize(max_batch=100), 3000, noise_scale=lambda step: 1e9)[0].batch == 100
    few = run(GrowBatchSize(warmup=1), 300, noise_scale=lambda step: 1e9, samples=4 * 100)[0]
    assert few.batch <= 128, "an epoch has one step at least, about"


def test_an_interval_lets_it_change_within_an_epoch() -> None:
    job, decided = run(GrowBatchSize(interval=50, warmup=1), 400, noise_scale=lambda step: 1e6, samples=10**7)
    steps = [step for step, decision in decided if isinstance(decision, SetBatchSize)]
    assert job.batch == 1024
    assert job.epoch == 0
    assert all(later - earlier >= 50 for earlier, later in itertools.pairwise(steps))


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows(rule: str, factor: float) -> None:
    job, decided = run(GrowBatchSize(max_batch=128, lr=rule, warmup=5), 200, noise_scale=lambda step: 1e6)
    assert job.batch == 128
    assert job.factor == factor
    assert len([1 for _, each in decided if isinstance(each, SetLearningRate)]) == (0 if rule == "none" else 2)


def test_adascale_follows_the_noise_by_more_than_a_per_cent() -> None:
    assert lr_factor("adascale", 4 * 128, 128, 0.0) == 1
    assert lr_factor("adascale", 4 * 128, 128, 1e9) == pytest.approx(4)
    assert lr_factor("adascale", 2 * 128, 128, 256) == pytest.approx(1.5)
    job, decided = run(GrowBatchSize(max_batch=64), 2000, noise_scale=lambda step: 300.0 + step)
    factors = [each.factor for _, each in decided if isinstance(each, SetLearningRate)]
    assert job.factor == pytest.approx(lr_factor("adascale", 2 * 128, 128, 2300), rel=0.011)
    assert 5 < len(factors) < 30
    assert all(abs(after / before - 1) > 0.01 for before, after in itertools.pairwise(factors))


def test_a_batch_that_is_about_to_change_is_not_followed_backwards() -> None:
    _, decided = run(GrowBatchSize(lr="linear", warmup=1), 400, noise_scale=lambda step: 1e7)
    factors = [each.factor for _, each in decided if isinstance(each, SetLearningRate)]
    assert factors == [2.0, 4.0, 8.0, 16.0, 32.0]


def test_kungfus_rule_doubles_whenever_the_ratio_has_risen() -> None:
    job, decided = run(KungFuBatchSize(max_batch=256), 2000, noise_scale=lambda step: 100.0 + 10 * step)
    assert batch_sizes(decided) == [64, 128, 256]
    assert job.factor == 1.0
    assert run(KungFuBatchSize(), 1000, noise_scale=lambda step: -50.0)[1] == []
    falling, _ = run(KungFuBatchSize(), 1000, noise_scale=lambda step: 5000.0 - step)
    assert falling.batch == 32


# --- schedules ---


def test_scheduled_batch_sizes_begin_at_their_steps() -> None:
    _, decided = run(ScheduledBatchSize({10: 64, 20: 64, 30: 16}, lr="linear"), 50)
    assert [(step, each.size) for step, each in decided if isinstance(each, SetBatchSize)] == [(11, 64), (31, 16)]
    assert [each.factor for _, each in decided if isinstance(each, SetLearningRate)] == [2.0, 1.0]


def test_scheduled_sizes_are_asked_for_once() -> None:
    job, decided = run(ScheduledSize({0: 2, 10: 4, 30: 1}), 40)
    assert worker_counts(decided) == [2, 4, 1]
    assert job.workers == 1
    job = Job(workers=3, step=25)  # resumed in the midst of it
    assert worker_counts(job.run(Policies([ScheduledSize({0: 2, 10: 4, 30: 1})]), 10)) == [4, 1]


# --- the number of workers, by throughput ---


def saturating(best: int, alpha: float = 1 / 3) -> Callable[[int, int], float]:
    """One replica per worker; each worker up to `best` adds twice what it must, those after it a third of that."""

    def step_s(workers: int, batch: int) -> float:
        rate = 1.0
        for size in range(2, workers + 1):
            rate *= 1 + alpha / size * (2.0 if size <= best else 0.33)
        return 0.1 * workers / rate

    return step_s


def until_done(policy: Provision, job: Job) -> None:
    while not policy.done and job.step < 5000:
        job.run(Policies([policy]), 50)
    job.run(Policies([policy]), 50)
    assert policy.done


@pytest.mark.parametrize("best", [1, 2, 3, 5])
def test_provisioning_stops_at_the_best_size_in_every_run(best: int) -> None:
    for seed in range(20):
        policy, job = Provision(change_step=20), Job(step_s=saturating(best), replicas=0, spread=0.1, seed=seed)
        until_done(policy, job)
        assert job.workers == best, f"seed {seed}: {policy.history}"


def test_provisioning_is_right_though_machines_become_slower() -> None:
    """While the second worker is tried, something else slows all of them down."""
    for seed in range(10):
        policy, job = Provision(change_step=40), Job(replicas=0, spread=0.05, seed=seed)
        job.step_s = slowed(job, saturating(3))
        until_done(policy, job)
        assert job.workers in (2, 3), f"seed {seed}: {policy.history}"


def slowed(job: Job, truth: Callable[[int, int], float]) -> Callable[[int, int], float]:
    return lambda workers, batch: truth(workers, batch) * (1.35 if job.step > 45 else 1.0)


def test_a_close_call_is_measured_longer() -> None:
    bar = 1 + 1 / 6
    close, clear = Provision(change_step=20), Provision(change_step=20)
    run(close, 70, step_s=lambda workers, batch: 0.1 * workers / (bar * 1.01) ** (workers - 1), replicas=0, spread=0.02)
    run(clear, 70, step_s=saturating(9), replicas=0, spread=0.02)
    assert [workers for workers, _ in close.history] == [1], "the second size is still being measured"
    assert [workers for workers, _ in clear.history] == [1, 2]


def test_provisioning_waits_for_slow_machines_and_gives_up_on_those_that_never_come() -> None:
    slow = Provision(change_step=10)
    job, decided = run(slow, 700, step_s=saturating(2), replicas=0, comes_after=60)
    assert (job.workers, slow.done) == (2, True)
    never = Provision(change_step=10, give_up_s=5.0)
    job, decided = run(never, 700, step_s=saturating(5), replicas=0, never_above=2)
    assert (job.workers, never.done) == (2, True)
    assert worker_counts(decided) == [2, 3, 2], "the wish is withdrawn"


def test_provisioning_passes_over_sizes_that_cannot_help() -> None:
    """Of 4 replicas on 3 workers, one has 2: as slow as 2 workers."""
    assert [next_size(each, 4) for each in (1, 2, 3, 4)] == [2, 4, 4, None]
    assert [next_size(each, 12) for each in (1, 2, 3, 4, 6)] == [2, 3, 4, 6, 12]
    assert [next_size(each, 0, 3) for each in (1, 2, 3)] == [2, 3, None]
    job, decided = run(
        Provision(change_step=10, max_workers=8), 500, step_s=lambda workers, batch: 0.1 * -(-4 // workers)
    )
    assert worker_counts(decided) == [2, 4]
    assert job.workers == 4


def test_provisioning_begins_anew_when_others_change_the_workers() -> None:
    policy, job = Provision(change_step=10), Job(step_s=saturating(9), replicas=0)
    policies = Policies([policy])
    job.run(policies, 18)
    assert job.workers == 2
    job.workers, job.view = 1, job.view + 1  # one was lost
    job.run(policies, 100)
    assert job.workers > 2


# --- both ---


def adaptdl(fixed_s: float, sample_s: float, sync_s: float, per_worker_s: float) -> Callable[[int, int], float]:
    def step_s(workers: int, batch: int) -> float:
        sync = sync_s + per_worker_s * (workers - 2) if workers > 1 else 0.0
        return fixed_s + sample_s * batch + sync

    return step_s


def test_goodput_finds_batch_and_workers() -> None:
    truth = adaptdl(0.02, 0.001, 0.02, 0.004)
    policy = Goodput(interval=20, max_workers=8, max_batch=512)
    job, decided = run(policy, 4000, step_s=truth, noise_scale=noisy(lambda step: 2000.0, 0.2), replicas=0, spread=0.05)

    def worth(workers: int, batch: int) -> float:
        total = workers * batch
        return total / truth(workers, batch) * (2000 + 32) / (2000 + total)

    best = max(worth(workers, batch) for workers in range(1, 9) for batch in (32, 45, 64, 91, 128, 181, 256, 362, 512))
    assert worth(job.workers, job.batch) >= 0.8 * best, (job.workers, job.batch)
    assert worth(job.workers, job.batch) >= 3 * worth(1, 32)
    assert len(batch_sizes(decided)) + len(worker_counts(decided)) < 20, "it comes to rest"
    late = [step for step, each in decided if step > 3000 and not isinstance(each, SetLearningRate)]
    assert late == []


def test_goodput_takes_no_workers_that_add_nothing() -> None:
    policy = Goodput(interval=20, max_workers=8, max_batch=64)
    truth = adaptdl(0.0, 0.001, 0.2, 0.05)  # sums take longer than everything
    job, _ = run(policy, 2000, step_s=truth, noise_scale=lambda step: 1e4, replicas=0, spread=0.02)
    assert job.workers == 1
    assert job.batch == 64


def test_goodput_with_a_fixed_number_of_replicas() -> None:
    policy = Goodput(interval=20)
    job, decided = run(
        policy, 2000, step_s=lambda workers, batch: -(-4 // workers) * (0.01 + 1e-4 * batch), noise_scale=lambda step: 600.0
    )  # fmt: skip
    assert job.workers == 4
    assert 32 <= job.batch <= 256
    assert 3 not in worker_counts(decided)


def test_goodput_keeps_what_is_nearly_as_good() -> None:
    """A batch 1.4 x as large would give 3 % more."""
    _, decided = run(
        Goodput(interval=20, max_workers=1), 2000, step_s=lambda workers, batch: 0.001 * batch + 0.004,
        noise_scale=lambda step: 1e5, replicas=0, spread=0.05,
    )  # fmt: skip
    assert len(batch_sizes(decided)) <= 2


def test_goodput_gives_up_on_workers_that_never_come() -> None:
    policy = Goodput(interval=10, give_up_s=3.0)
    job, decided = run(
        policy, 1000, step_s=lambda workers, batch: 0.1, noise_scale=lambda step: 1e5, replicas=0, never_above=1
    )
    assert worker_counts(decided) == [2, 1]
    assert job.workers == 1


def test_under_a_scheduler_goodput_decides_on_the_batch_only_and_provision_on_nothing() -> None:
    truth = adaptdl(0.02, 0.001, 0.02, 0.004)
    policy = Goodput(interval=20, max_workers=8, max_batch=512)
    job, decided = run(policy, 2000, step_s=truth, noise_scale=lambda step: 2000.0, may_resize=False)
    assert worker_counts(decided) == []
    assert job.batch > 32
    _, decided = run(Goodput(interval=20, max_workers=8), 2000, step_s=truth, noise_scale=lambda step: 2000.0)
    assert worker_counts(decided), "it would have asked for workers"
    _, decided = run(Provision(change_step=20), 2000, step_s=truth, may_resize=False)
    assert decided == []


# --- together ---


class Fixed(Policy):
    """Wants the same in every step."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size = name, size

    @property
    def name(self) -> str:
        return self._name

    def before_step(self, seen: Observation) -> Decision:
        return SetBatchSize(size=self._size, reason=self._name)

    def after_step(self, seen: Observation) -> list[Decision]:
        return [SetBatchSize(size=self._size, reason=self._name), SetLearningRate(factor=2.0, reason=self._name)]


def test_the_first_to_decide_has_it_and_after_goes_backwards() -> None:
    both = Policies([Fixed("a", 1), Fixed("b", 2)])
    assert [(name, each.reason) for name, each in both.ask("before_step", Job().seen())] == [("a", "a")]
    assert [(name, each.kind) for name, each in both.ask("after_step", Job().seen())] == [
        ("b", "set_batch_size"),
        ("b", "set_learning_rate"),
    ]


def test_needs_are_those_of_all_at_the_shortest_interval() -> None:
    class Rarely(Policy):
        needs = {"noise_scale": 10, "variance": 8}  # noqa: RUF012

    assert Policies([Rarely(), GrowBatchSize()]).needs == {"noise_scale": 1, "variance": 8}


def test_what_is_no_policy_or_no_decision_is_refused() -> None:
    with pytest.raises(ConfigError, match="derive it from"):
        Policies([object()])  # type: ignore[list-item]

    class Wrong(Policy):
        def after_step(self, seen: Observation) -> Any:
            return ["grow"]

    with pytest.raises(ConfigError, match="Wrong.after_step answered 'grow'"):
        Policies([Wrong()]).ask("after_step", Job().seen())


def build_all() -> Policies:
    return Policies(
        [
            GrowBatchSize(interval=40, warmup=5),
            KungFuBatchSize(),
            ScheduledSize({100: 2, 300: 4}),
            Provision(change_step=15),
            Goodput(interval=20),
            ScheduledBatchSize({350: 48}, lr="sqrt"),
        ]
    )


@pytest.mark.parametrize("policy", range(len(build_all().policies)))
@pytest.mark.parametrize("at", [1, 7, 61, 200])
def test_a_copy_that_takes_over_goes_on_as_the_first_would(policy: int, at: int) -> None:
    """As on a newcomer: another object, with the state as it travels."""

    def job() -> Job:
        return Job(
            step_s=adaptdl(0.02, 0.001, 0.01, 0.001), noise_scale=noisy(lambda step: 500.0 + 5 * step),
            replicas=8, spread=0.1, seed=3, comes_after=2,
        )  # fmt: skip

    undisturbed = job().run(Policies([build_all().policies[policy]]), 400)
    assert undisturbed, "it decides something"
    first, second = (Policies([build_all().policies[policy]]) for _ in range(2))
    handed = job()
    handed.run(first, at)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    handed.run(first, 0)
    assert handed.run(second, 400 - at) == undisturbed


def test_all_together_ask_for_one_thing_of_each_kind() -> None:
    job = Job(step_s=adaptdl(0.02, 0.001, 0.01, 0.001), noise_scale=noisy(lambda step: 500.0 + 5 * step), replicas=8)
    policies = build_all()
    for _ in range(600):
        job.run(policies, 1)
        kinds = [decision.kind for _, decision in job._pending]
        assert len(kinds) <= 2 * len(set(kinds))  # a step's, and an epoch's


# --- by name ---


def test_policies_by_name() -> None:
    grow = registry.parse("grow-batch-size: threshold=2, max_batch=64, lr=linear")
    assert isinstance(grow, GrowBatchSize)
    assert (grow.threshold, grow.max_batch) == (2.0, 64)
    scheduled = registry.parse("scheduled-batch-size:10=64,20=128,lr=sqrt")
    assert isinstance(scheduled, ScheduledBatchSize)
    assert scheduled.schedule == {10: 64, 20: 128}
    assert isinstance(registry.parse("pliant.adapt.size:Provision:max_workers=3"), Provision)
    assert [registry.parse(name).name for name in ("scheduled-size:5=0", "goodput", "interference")] == [
        "ScheduledSize",
        "Goodput",
        "Interference",
    ]


class Unlike(Policy):
    """A policy of a user, with options of several types."""

    def __init__(self, anything=1, switch: bool = False, number: int | None = None) -> None:  # type: ignore[no-untyped-def]
        self.given = [anything, switch, number]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ("anything=2,switch=no,number=3", [2, False, 3]),
        ("anything=2.5,switch=on", [2.5, True, None]),
        ("anything=word,switch=1", ["word", True, None]),
    ],
)
def test_options_have_the_types_of_the_constructor(options: str, given: list[object]) -> None:
    policy = registry.parse(f"test_policy:Unlike:{options}")
    assert policy.given == given  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grow", "there is no 'grow'; use grow-batch-size"),
        ("provision:speed=3", "'speed=3' is no option of it: there are change_step, alpha"),
        ("provision:change_step", "'change_step' is no option"),
        ("provision:change_step=many", "change_step=many: use a value of type int"),
        ("test_policy:Unlike:switch=perhaps", "switch=perhaps: use a value of type bool"),
        ("provision:change_step=1", "change_step=1"),
        ("grow-batch-size:lr=cubic", "use one of none, linear, sqrt, adascale"),
        ("scheduled-size", "the schedule is empty"),
        ("scheduled-size:ten=2", "there are STEP=SIZE"),
        ("scheduled-batch-size:10=0", "SIZE from 1"),
        ("nowhere:Policy", "cannot import nowhere"),
        ("json:loads", "json has no policy 'loads'"),
    ],
)
def test_what_is_wrong_is_named_with_what_there_is(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.parse(text)
    assert words in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.processes
def test_the_example_of_a_users_own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    own = registry.parse("policy:DoubleWhenNoisy:most=64")
    assert batch_sizes(run(own, 400, noise_scale=lambda step: 10.0 * step)[1]) == [64]
    [said] = run_script(EXAMPLE)
    assert "policy DoubleWhenNoisy: batch size 8 per replica" in said
