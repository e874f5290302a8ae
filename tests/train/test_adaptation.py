"""Decisions of policies: the bits are those of a DDP script that does the same, on any number of workers, live or replayed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import gang
from golden import KEPT, RankSteps, Step, run_ddp
from programs import build, digest, loading_of, may_have_children, note_nothing, one_batch, one_step, seed_all
from stage import ALL, new_workers, spec_of, staged, view_of
from subject import Task, compare
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pliant
from pliant import record
from pliant.adapt import (
    Decision,
    Observation,
    Policy,
    ProbeLinks,
    Resize,
    SetBatchSize,
    SetLearningRate,
    SetTopology,
    WorkerFigures,
)
from pliant.adapt.policy import maths_decisions
from pliant.errors import ConfigError
from pliant.train.adaptation import (
    MESSAGE_BYTES,
    AdaptationMessage,
    decode_decisions,
    encode_decisions,
    links_fact,
    step_fact,
)
from pliant.train.events import StepCommitted

pytestmark = pytest.mark.processes
REPLICAS, EPOCHS = 3, 3
Changes = Mapping[int, tuple[int, float]]
CHANGES: Changes = {2: (5, 1.0), 6: (2, 0.5), 14: (4, 2.0)}
"""After so many steps: the batch of a replica, and the factor of the learning rate. The second is an epoch's last step."""


# --- the oracle ---


def _step_with(optimizer: torch.optim.Optimizer, factor: list[float]) -> None:
    own: list[Any] = []

    def before(*_: Any) -> None:
        own[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor[0]

    def after(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _ddp(rank: int, name: str, changes: Changes) -> RankSteps:
    program = build(name)
    model = DistributedDataParallel(program.model, **program.wrapping)
    KEPT.append(model)
    if program.seed is not None:
        seed_all(program.seed + rank)
    batch_size, factor = program.loading["batch_size"], [1.0]
    _step_with(program.optimizers[0], factor)
    found: RankSteps = []
    seen: list[Any] = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(program.dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
        while order:
            padded = order + order * REPLICAS
            share = padded[: -(-len(order) // REPLICAS) * REPLICAS][rank::REPLICAS]
            order, used = [], 0
            loader: Any = DataLoader(program.dataset, batch_size=batch_size, sampler=share)
            whole = padded[: len(padded) // (REPLICAS + 1)]
            for batch in loader:
                one_batch(program, model, batch, model.no_sync, lambda *noted: seen.append(noted))
                used += batch_size * REPLICAS
                changed = changes.get(len(found) + 1)
                if changed is not None:
                    batch_size, factor[0] = changed
                ((loss, samples),) = seen
                seen.clear()
                found.append((digest(program, program.model.buffers()), (loss,), tuple(samples)))
                if changed is not None:
                    order = whole[used:]
                    break
    return found


@pytest.fixture(scope="module")
def stepwise() -> Mapping[str, Sequence[Step]]:
    """What the oracle does, by program."""
    names = ("conv", "transformer")
    return dict(zip(names, run_ddp(REPLICAS, _ddp, [(name, CHANGES) for name in names]), strict=True))


@pytest.fixture
def oracles(stepwise: Mapping[str, Sequence[Step]]) -> Mapping[str, Sequence[str]]:
    """The hashes of every step, by program."""
    return {name: [step.digest for step in steps] for name, steps in stepwise.items()}


# --- ours ---


class Scripted(Policy):
    """Decides what the test says; odd in that only the first worker of all does so."""

    def __init__(self, changes: Changes, more: Mapping[int, Sequence[Decision]], rank: int) -> None:
        self._rank, self.changes, self.more = rank, changes, more
        self.rates: list[Any] = []

    def after_step(self, seen: Observation) -> list[Decision]:
        if seen.link_rates is not None:
            return [SetTopology(strategy="RING", reason=f"rates {seen.link_rates}")]
        decided: list[Decision] = list(self.more.get(seen.step + 1, ()))
        if seen.step + 1 in self.changes and self._rank == 0:
            size, factor = self.changes[seen.step + 1]
            decided += [SetBatchSize(size=size, reason="scripted"), SetLearningRate(factor=factor, reason="scripted")]
        return decided


def _ours(
    rank: int, environ: dict[str, str], name: str, options: dict[str, Any], changes: Changes, more: Mapping[int, Any]
) -> tuple[list[str], str]:
    may_have_children()
    os.environ.update(environ)
    program = build(name)
    found: dict[int, str] = {}
    policy = Scripted(changes, more, rank)
    options = {**options, "policies": [policy] if changes or more else []}
    with pliant.join(replicas=REPLICAS, seed=program.seed, **options) as job:
        model, _ = job.wrap(program.model, program.optimizers, **program.wrapping)
        loader = job.loader(program.dataset, **loading_of(program))
        if program.scheduler is not None:
            job.track("scheduler", program.scheduler)

        def committed(event: StepCommitted) -> None:
            assert job._run.trainer is not None
            assert job._run.trainer.driver.wait_for_sums()
            found[event.step] = digest(program, program.model.buffers())

        job.on_commit(committed)
        for _ in job.epochs(EPOCHS):
            for step in loader:
                one_step(program, model, step, job.no_sync, note_nothing)
        assert job._run.trainer is not None
        engine = job._run.trainer.views.engine
        strategy = engine.strategy.name if engine is not None else ""
    return [found[step] for step in sorted(found)], strategy


def _train(
    size: int,
    name: str,
    options: dict[str, Any],
    changes: Changes = CHANGES,
    more: Mapping[int, Sequence[Decision]] | None = None,
) -> list[tuple[list[str], str]]:
    workers = new_workers(size)
    environs = [spec_of(worker, view_of(workers)).to_environ() if size > 1 else {} for worker in workers]
    with gang(_ours, [(environ, name, options, changes, more or {}) for environ in environs]) as started:
        return list(started.results(90))


@pytest.mark.parametrize(("name", "size"), [("conv", 1), ("conv", 2), ("conv", 3), ("transformer", 2)])
def test_batch_sizes_and_rates_change_as_in_a_ddp_script(
    name: str, size: int, oracles: Mapping[str, Sequence[str]]
) -> None:
    for found, _ in _train(size, name, {}):
        assert found == oracles[name]


def test_crossing_steps_change_alike(oracles: Mapping[str, Sequence[str]]) -> None:
    for found, _ in _train(3, "conv", {"sync": "priority"}):
        assert found == oracles["conv"]


def test_without_the_decisions_it_is_another_result(oracles: Mapping[str, Sequence[str]]) -> None:
    found, _ = _train(1, "conv", {}, changes={2: (4, 1.0)})[0]
    assert found[:2] == oracles["conv"][:2]
    assert found[2:] != oracles["conv"][2:]


def test_a_record_is_replayed_on_other_workers(tmp_path: Path, oracles: Mapping[str, Sequence[str]]) -> None:
    path = str(tmp_path / "record.jsonl")
    more = {4: [ProbeLinks(reason="scripted")], 9: [Resize(workers=1, reason="nobody is there to hear it")]}
    for found, strategy in _train(2, "conv", {"record": path}, more=more):
        assert found == oracles["conv"]
        assert strategy == "RING", "the probe was answered"
    facts = record.read(path)
    decided = [fact.data["decision"]["kind"] for fact in facts if fact.kind == "decision"]
    assert decided.count("set_batch_size") == 3
    assert {"set_topology", "probe_links"} <= set(decided)
    (crew,) = [fact for fact in facts if fact.kind == "workers"]
    assert (crew.step, len(crew.data["workers"]), crew.data["replicas"]) == (1, 2, REPLICAS)
    (links,) = [fact.data for fact in facts if fact.kind == "links"]
    assert links["hosts"] == sorted({name.rpartition(":")[0] for name in crew.data["workers"]})
    assert [len(row) for row in links["bytes_per_s"]] == [len(links["hosts"])] * len(links["hosts"])
    steps = [fact for fact in facts if fact.kind == "step"]
    assert [fact.step for fact in steps] == list(range(1, len(oracles["conv"]) + 1))
    assert steps[5].data["batch_size"] == 2, "as it is after the step"
    for size in (1, 3):
        for found, _ in _train(size, "conv", {"replay": path}, changes={}):
            assert found == oracles["conv"]


@pytest.mark.timeout(180)
def test_newcomers_and_survivors_go_on_with_the_decisions(
    tmp_path: Path, stepwise: Mapping[str, Sequence[Step]]
) -> None:
    """Workers come, go and are killed before, between and after the changes; the first worker is replaced, too."""
    path = tmp_path / "record.jsonl"
    a, b, c, d, e = new_workers(5)
    adapting = {"policies": [Scripted(CHANGES, {}, 0)], "record": str(path)}
    task = Task(program="conv", replicas=REPLICAS, epochs=EPOCHS, journal="", adapting=adapting)
    with staged(task, tmp_path) as stage:
        stage.change([a, b])
        stage.change([b, c, d])
        stage.change([d])
        stage.change([d, e])
        stage.kill(d)
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, stepwise["conv"], repeats=1)
    replayed = Task(program="conv", replicas=REPLICAS, epochs=EPOCHS, journal="", adapting={"replay": str(path)})
    again = tmp_path / "again"
    again.mkdir()
    with staged(replayed, again) as stage:
        stage.change([a, b, c])
        stage.open_gate(ALL)
        stage.until_over()
        compare(stage.history, stepwise["conv"])


def test_what_cannot_be_done_is_said_and_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "record.jsonl")
    more = {2: [SetTopology(strategy="HYPERCUBE", reason="why not")]}
    _train(2, "conv", {"record": path}, changes={}, more=more)
    (refused,) = [fact for fact in record.read(path) if fact.kind == "refused"]
    assert "HYPERCUBE" in refused.data["why"]


def test_a_refused_batch_takes_its_learning_rate_along() -> None:
    class TooMuch(Policy):
        def after_step(self, seen: Observation) -> list[Decision]:
            return [SetLearningRate(factor=100.0, reason="linear"), SetBatchSize(size=1000, reason="more")]

    with pliant.join(replicas=2, policies=[TooMuch()]) as job:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.wrap(model, optimizer)
        loader = job.loader(torch.randn(40, 2), batch_size=4, drop_last=True)
        for _ in job.epochs(1):
            for step in loader:
                for batch in step:
                    model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                job.report(epoch=1.0, loss=2.0)
        assert job.batch_size == 4
        assert job.observation is not None
        assert job.observation.learning_rate_factor == 1.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policies": ["fast"]}, "fast"),
        ({"monitor": {"entropy": 1}}, "entropy"),
        ({"monitor": {"variance": 0}}, "variance=0"),
        ({"replay": "no/such/file.jsonl"}, "no/such/file.jsonl"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        pliant.join(replicas=2, **options)


def test_what_a_crash_has_undone_is_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"

    def decided(size: int) -> dict[str, Any]:
        return {"policy": "P", "decision": SetBatchSize(size=size, reason="").to_json()}

    with record.Recorder(path) as recorder:
        recorder.write("decision", 1, **decided(99))
        recorder.write("start", 0)
        recorder.write("decision", 2, **decided(2))
        recorder.write("decision", 5, **decided(5))
        recorder.write("view", 4, lost=True)
        recorder.write("decision", 6, **decided(6))
        recorder.write("view", 4, lost=False)
        recorder.write("decision", 9, **decided(9))
        recorder.write("resumed", 8)
        recorder.write("decision", 9, **decided(10))
    found = maths_decisions(str(path))
    assert {step: [each.to_json()["size"] for each in decisions] for step, decisions in found.items()} == {
        2: [2],
        6: [6],
        9: [10],
    }
    with record.Recorder(path) as recorder:
        recorder.write("gap", 12, lost=3, why="No space left on device")
    with pytest.raises(
        ConfigError, match=r"3 facts before step 12 are missing \(No space left on device\), decisions perhaps"
    ):
        maths_decisions(str(path))
    with record.Recorder(path) as recorder:
        recorder.write("start", 0)
    assert maths_decisions(str(path)) == {}, "the gap is in another run"


FIGURES = WorkerFigures(name="a:1", step_s=0.5, compute_s=0.25, comm_bytes=3e6, comm_s=0.125, egress_bytes=1e6)
DECIDED = [("one", SetBatchSize(size=64, reason="more")), ("other", Resize(workers=2, reason="fewer"))]


def test_a_row_says_what_it_was_given() -> None:
    message = AdaptationMessage(len(encode_decisions(DECIDED)), 12.5, FIGURES, b"probed")
    row = message.to_bytes()
    assert len(row) == MESSAGE_BYTES + len(b"probed")
    assert AdaptationMessage.from_bytes("a:1", row) == message


def test_decisions_travel() -> None:
    assert decode_decisions(encode_decisions(DECIDED)) == DECIDED
    assert decode_decisions(encode_decisions([])) == []


def _seen(**more: float) -> Observation:
    return Observation(step=3, epoch=1, view=5, replicas=4, batch_size=8, strategy="RING", workers=(FIGURES,), **more)


def test_what_is_not_known_is_no_fact() -> None:
    assert "noise_scale" not in step_fact(_seen(), {})
    assert "values" not in step_fact(_seen(), {})
    found = step_fact(_seen(noise_scale=2.0), {"loss": 0.5})
    assert (found["noise_scale"], found["values"], found["workers"]) == (2.0, {"loss": 0.5}, 1)


def test_a_step_says_how_its_time_divides_and_whom_the_others_waited_for() -> None:
    def seen(*workers: WorkerFigures) -> dict[str, Any]:
        return step_fact(Observation(step=3, workers=workers), {})

    late = WorkerFigures(name="a:1", step_s=1.0, compute_s=0.5, wait_s=0.1)
    early = WorkerFigures(name="a:2", step_s=1.0, compute_s=0.3, wait_s=0.6)
    found = seen(early, late, early)
    assert (found["compute_s"], found["wait_s"]) == (pytest.approx(1.1 / 3), pytest.approx(1.3 / 3))
    assert (found["slowest"], found["slowest_s"]) == (1, 0.9)
    assert seen(late, early, early)["slowest"] == 0
    assert "slowest" not in seen(late), "there is nobody who would wait"
    assert "wait_s" not in seen(WorkerFigures(name="a:1")), "the first step of a view"
    assert "gpu_bytes" not in found
    gpus = [
        replace(each, gpu_bytes=held * 2.0**30, gpu_use=use) for each, held, use in ((late, 3, 0.5), (early, 2, 1.0))
    ]
    assert {name: value for name, value in seen(*gpus).items() if "gpu" in name} == {
        "gpu_bytes": 3 << 30,
        "gpu_use": 0.75,
    }


def test_links_are_those_between_hosts() -> None:
    rates = ((0.0, 9.0, 1.4), (9.0, 0.0, 9.0), (2.6, 9.0, 0.0))
    found = links_fact(["a", "a", "b"], rates)
    assert found == {"hosts": ["a", "b"], "bytes_per_s": [[0, 1], [3, 0]]}
