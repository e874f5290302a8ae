"""The guard: workers that differ are found, with the name of what differs, and in the right step."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gang import gang
from stage import new_workers, spec_of, view_of
from torch import nn
from torch.utils.data import TensorDataset

import pliant
from pliant.cluster import Worker
from pliant.errors import PROGRAM_EXIT, ConfigError, TrainError
from pliant.identity import format_verify, parse_verify
from pliant.train.context import DataPosition, ReplicaContext, seeded_rng
from pliant.train.guard import CAUSES, Guard, describe_difference
from pliant.train.replicas import ModelBuffers
from pliant.train.state_parts import LARGE_BYTES, StatePart, checksum_of, digests_of, parts_of

WORKERS = [Worker("10.0.0.1", port) for port in (1, 2, 3)]


# --- checksums ---


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("length", [1, 7, 600, LARGE_BYTES + 13])
def test_one_flipped_bit_anywhere_changes_the_checksum(dtype: torch.dtype, length: int) -> None:
    tensor = torch.ones(length).to(dtype)
    raw = tensor.view(torch.uint8)
    seen = {checksum_of([StatePart("parameter", "w", tensor)])}
    places = [0, len(raw) // 2, len(raw) - 1]
    for number, place in enumerate(dict.fromkeys(places)):
        raw[place] ^= 1
        seen.add(checksum_of([StatePart("parameter", "w", tensor)]))
        assert len(seen) == number + 2
        raw[place] ^= 1
    assert checksum_of([StatePart("parameter", "w", tensor)]) in seen


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4, 5)], ids=str)
def test_scalars_and_empty_and_transposed_tensors_have_a_checksum(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    whole = checksum_of([StatePart("parameter", "w", tensor)])
    assert whole == checksum_of([StatePart("parameter", "w", tensor.clone())])
    if len(shape) > 2:
        turned = tensor.transpose(0, 1)
        assert whole != checksum_of([StatePart("parameter", "w", turned)])
        assert checksum_of([StatePart("parameter", "w", turned)]) == checksum_of(
            [StatePart("parameter", "w", turned.contiguous())]
        )


def test_rows_that_change_places_are_noticed() -> None:
    table = torch.arange(4 * LARGE_BYTES, dtype=torch.float32).view(-1, 64)
    assert checksum_of([StatePart("parameter", "w", table)]) != checksum_of(
        [StatePart("parameter", "w", table.flip(0))]
    )


def test_the_same_bits_in_another_memory_have_the_same_checksum() -> None:
    whole = torch.randn(2 * LARGE_BYTES + 1)
    aligned, shifted = whole[:-1].clone(), torch.cat([torch.zeros(1), whole])[1:-1]  # 4 bytes off a word
    image = torch.randn(2, 3, 256, 64)
    for one, other in ((aligned, shifted), (image, image.to(memory_format=torch.channels_last))):
        assert checksum_of([StatePart("parameter", "w", one)]) == checksum_of([StatePart("parameter", "w", other)])


def a_state(optimizer_class: Any = torch.optim.Adam, num_models: int = 1, seed: int = 0, **tracked: Any) -> Any:
    torch.manual_seed(seed)
    models = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(num_models)]
    optimizers = [optimizer_class(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    contexts = [ReplicaContext(seeded_rng(r), DataPosition(batch=1)) for r in range(2)]
    buffers = ModelBuffers(models)
    replicas = SimpleNamespace(contexts=contexts, num_loader_workers=0)
    return SimpleNamespace(
        models=models, optimizers=optimizers, tracked=tracked, replicas=replicas, buffers=buffers,
        first_buffers=buffers.save(), averaging=None,
        adaptation=SimpleNamespace(is_active=True, batch_size=2, learning_rate_factor=1.0),
    )  # fmt: skip


def test_every_part_of_the_state_has_a_name_that_its_user_knows() -> None:
    state = a_state(
        **{"job.state": SimpleNamespace(state_dict=lambda: {"best": 0.5, "rows": [1, {"x": torch.ones(2)}]})}
    )
    names = [part.name for part in parts_of(state, state.first_buffers)]
    assert names[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert names[4:7] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert {"exp_avg of 0.weight (Adam)", "step of 1.bias (Adam)", "lr (Adam)", "betas 0 (Adam)"} <= set(names)
    assert {
        "job.state best",
        "job.state rows 1 x",
        "the random state of replica 1",
        "the batch size that a policy has set",
    } <= set(names)
    assert len(set(names)) == len(names)
    several = [part.name for part in parts_of(a_state(num_models=2), a_state(num_models=2).first_buffers)]
    assert {"model 1 0.weight", "model 1 1.running_var", "exp_avg of model 1 0.bias (Adam 1)"} <= set(several)
    assert len(set(several)) == len(several)


def test_a_change_of_any_part_changes_the_checksum() -> None:
    counter = SimpleNamespace(value=1)
    state = a_state(counter=SimpleNamespace(state_dict=lambda: {"value": counter.value}))
    guard = Guard(state)
    seen = [guard.checksum()]
    assert guard.checksum() == seen[0] == Guard(a_state(counter=state.tracked["counter"])).checksum()

    def changed() -> None:
        seen.append(guard.checksum())
        assert len(set(seen)) == len(seen)

    with torch.no_grad():
        state.models[0][0].bias[1] += 1e-7
    changed()
    state.first_buffers[0][0] += 1
    changed()
    state.optimizers[0].state[state.models[0][1].weight]["exp_avg_sq"][0] += 1
    changed()
    state.optimizers[0].param_groups[0]["lr"] = 0.05
    changed()
    counter.value = 2
    changed()
    state.replicas.contexts[1] = state.replicas.contexts[1].with_random(seeded_rng(9))
    changed()


def test_numbers_stand_for_themselves_in_digests() -> None:
    found = digests_of([StatePart("", "lr", 0.1), StatePart("", "w", torch.ones(2)), StatePart("", "text", "x" * 100)])
    assert found["lr"] == "0.1"
    assert found["w"].startswith("sha256:")
    assert found["text"].startswith("sha256:")


# --- when, and what is said ---


def test_the_guard_is_due_every_so_many_steps_and_soon_after_a_change() -> None:
    guard, engine = Guard(a_state(), 3), mock.Mock()
    guard.enter_view()
    assert guard.is_due(0, 2), "workers that begin compare at once"
    guard.enter_view()
    assert not guard.is_due(7, 2), "the first step of a new view has more to do"
    assert guard.is_due(8, 2)
    assert guard.is_due(8, 2), "the step was torn: the turns are taken again"
    assert guard.compare(engine, [5, 5], 8) == ""
    assert [step for step in range(8, 16) if guard.is_due(step, 2)] == [9, 12, 15]
    assert not guard.is_due(9, 1), "a worker alone has nobody to compare with"
    assert guard.compare(engine, [0, 0], 8) == ""
    engine.all_gather_bytes.assert_not_called()
    off = Guard(a_state(), 0)
    off.enter_view()
    assert not off.is_due(0, 2)
    averaged = a_state()
    averaged.averaging = object()
    assert not Guard(averaged, 1).is_due(0, 2), "such models differ by design"


def test_the_message_names_the_first_part_the_odd_worker_and_the_last_good_step() -> None:
    rows = [{"w": "sha256:1", "lr": "0.1"}, {"w": "sha256:1", "lr": "0.1"}, {"w": "sha256:2", "lr": "0.2"}]
    said = describe_difference(rows, WORKERS[:3], 200, 100)
    assert said.startswith(
        "step 200: the workers do not have the same state. 10.0.0.1:3 (rank 2) differs from 10.0.0.1:1"
    )
    assert "(rank 0) and 1 more in: w, and 1 more of 2 parts. At step 100 they were equal." in said
    assert said.endswith(CAUSES)
    alone = describe_difference([{"lr": "0.1"}, {"lr": "0.2"}], WORKERS[:2], 0, None)
    assert "in: lr (0.2 instead of 0.1)." in alone
    assert "were equal" not in alone
    assert "not there" in describe_difference([{"a": "1", "b": "2"}, {"a": "1"}], WORKERS[:2], 0, None)
    assert "damaged memory" in describe_difference([{"a": "1"}, {"a": "1"}], WORKERS[:2], 0, None)


def test_how_often_is_a_number_or_off() -> None:
    assert [parse_verify(text) for text in ("", "off", "1", "250")] == [None, 0, 1, 250]
    assert [format_verify(steps) for steps in (None, 0, 7)] == ["", "off", "7"]
    for wrong in ("0", "-1", "often", "1.5"):
        with pytest.raises(ConfigError, match="--verify"):
            parse_verify(wrong)
    with pytest.raises(ConfigError, match="verify=-1"):
        pliant.join(verify=-1)


# --- real workers ---


def train(fault: str) -> None:
    """Train 3 replicas; `fault` is what is wrong with the program, or with the memory of rank 1."""
    torch.manual_seed(5)
    with pliant.join(replicas=3, sync="priority" if "deferred" in fault else "fifo") as job:
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        job.wrap(model, optimizer)
        state, turns = job.state(seen=0), 0
        loader = job.loader(TensorDataset(torch.randn(72, 4), torch.randint(0, 2, (72,))), batch_size=4)
        for _ in job.epochs(1):
            for step in loader:
                for x, y in step:
                    turns += 1
                    if fault == "counter" and step.number >= 2:
                        optimizer.param_groups[0]["lr"] = 0.1 / turns
                    nn.functional.cross_entropy(model(x), y).backward()
                if fault == "draws" and step.number == 2 and job.is_first:
                    torch.rand(3)
                if "memory" in fault and step.number == 2 and job.rank == 1:
                    model[2].weight.data.view(torch.int32)[1, 2] ^= 1
                if fault == "state" and step.number == 2:
                    state.seen += turns
                optimizer.step()
                optimizer.zero_grad()


def train_all(rank: int, plan: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Train with each fault in turn; return the errors."""
    errors = []
    for fault, environ in plan:
        with mock.patch.dict(os.environ, environ):
            try:
                train(fault)
                errors.append("")
            except TrainError as error:
                errors.append(str(error))
    return errors


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_workers_that_differ_end_in_the_next_comparison_and_go_on_unnoticed_without_it() -> None:
    cases = {
        ("counter", 1): "step 2: * in: lr (Adam) (0.0333",
        ("counter", 2): "step 2: * in: lr (Adam) (0.0333",
        ("draws", 1): "before the loop over step 3 the workers",
        ("memory", 1): "step 3: * in: 2.weight. At step 2 they were equal",
        ("memory", 2): "step 4: * in: 2.weight. At step 2 they were equal",
        ("state", 1): "step 3: * in: job.state seen (3 instead of 6). At step 2",
        ("deferred memory", 1): "step 3: * in: 2.weight. At step 2 they were equal",
        ("none", 1): "",
        ("deferred", 1): "",
        **{(fault, 0): "" for fault in ("counter", "draws", "memory", "state")},
    }
    plans: list[list[tuple[str, dict[str, str]]]] = [[], []]
    for fault, every in cases:
        view = view_of(new_workers(2))
        for rank, plan in enumerate(plans):
            plan.append((fault, spec_of(view.workers[rank], view, verify=every).to_environ()))
    with gang(train_all, [(plan,) for plan in plans]) as started:
        first, second = started.results(100)
    assert first == second, "all workers find the same"
    for (case, expected), found in zip(cases.items(), first, strict=True):
        head, _, rest = expected.partition(" * ")
        assert found.startswith(head), (case, found)
        assert rest in found, (case, found)
        assert bool(found) == bool(expected), (case, found)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_watched_job_ends_at_once_when_its_workers_differ(tmp_path: Path) -> None:
    """Workers that were started again would differ again."""
    program = tmp_path / "train.py"
    program.write_text(f"import sys\nsys.path[:0] = {sys.path!r}\nfrom test_guard import train\ntrain('memory')\n")
    command = [
        str(Path(sys.executable).with_name("pliant")),
        "run",
        "-q",
        "-w",
        "-np",
        "2",
        "--verify",
        "1",
        str(program),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ended.returncode == PROGRAM_EXIT, ended.stderr
    assert "step 3: the workers do not have the same state" in ended.stderr
    assert ended.stderr.count("Traceback") == 1
    assert "replacing" not in ended.stderr
    assert "lost" not in ended.stderr
