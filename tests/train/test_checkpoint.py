"""Checkpoints are whole or absent: torn files, full disks, sudden death, and readers that are not us."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from full_disk import limited_files, small_disk
from gang import gang, say, warm_up
from safetensors import safe_open
from test_state_tree import assert_same
from torch import nn

import pliant
from pliant.errors import CheckpointError, TrainError
from pliant.files import LineFile
from pliant.record import Recorder
from pliant.train import checkpoint_file
from pliant.train.checkpoint import (
    Checkpoint,
    Checkpointing,
    CheckpointWriter,
    _find_start,
    _why_none,
    begin_run,
    load_checkpoint,
    newest_checkpoint,
    run_in,
)
from pliant.train.events import StepCommitted

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0, 4)},
    "step": torch.tensor(3), "c": torch.ones(2, dtype=torch.complex128), "f8": torch.ones(3).to(torch.float8_e5m2),
    "mask": torch.tensor([True]), "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "lr": 0.1, "betas": (0.9, 0.999), "best": float("inf"),
}  # fmt: skip


def at(step: int, **state: object) -> Checkpoint:
    return Checkpoint(
        step, step // 10, 4, {"torch": torch.__version__}, state or STATE, [b"r0", b"", b"\x00\xff" * 9, b"r3"]
    )


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    checkpoint_file.CheckpointImage(checkpoint, into=None).write(path)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def writer(tmp_path: Path, said: list[str], no_leaks: None) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(tmp_path, notify=said.append)
    yield writer
    writer.flush()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine.safetensors", at(123))
    for path in (tmp_path / "mine.safetensors", tmp_path):
        found = load_checkpoint(path)
        assert (found.step, found.epoch, found.num_replicas) == (123, 12, 4)
        assert found.meta == {"torch": torch.__version__}
        assert found.contexts == at(123).contexts
        assert_same(STATE, found.state)
    assert names(tmp_path) == ["mine.safetensors"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_checkpoints_are_private_records_and_logs_as_the_umask_says(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_checkpoint(tmp_path / "mine.safetensors", at(1))
        with Recorder(tmp_path / "run.jsonl") as recorder:
            recorder.write("start", 0)
        log = LineFile(tmp_path / "worker.stdout.log")
        log.open()
        log.append(b"hello\n")
        log.close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"mine.safetensors": 0o600, "run.jsonl": mode, "worker.stdout.log": mode}


@pytest.mark.parametrize(
    "state", [None, 5, [], {"only": "text"}, torch.ones(2), {"pliant.sha256": torch.ones(1)}], ids=repr
)
def test_any_state(tmp_path: Path, state: object) -> None:
    write_checkpoint(tmp_path / "x.safetensors", Checkpoint(0, 0, 0, {}, state))
    found = load_checkpoint(tmp_path / "x.safetensors")
    assert repr(found.state) == repr(state)
    assert (found.contexts, found.meta) == ([], {})


def test_the_package_reads_our_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    write_checkpoint(
        tmp_path / "x.safetensors", at(7, model=model.state_dict(), double=torch.ones(1, dtype=torch.float64))
    )
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["step"] == "7"
        assert file.metadata()["format"] == "pt"
        for name, tensor in model.state_dict().items():
            assert torch.equal(file.get_tensor(f"model.{name}"), tensor)
        assert file.get_tensor("double").dtype == torch.float64
        assert bytes(file.get_tensor("pliant.context.0")) == b"r0"


def test_a_snapshot_is_taken_before_save_returns(writer: CheckpointWriter, tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    for step in (1, 2, 3):
        weight.fill_(step)
        writer.save(at(step, w=weight))
        weight.fill_(-1)
    writer.flush()
    assert names(tmp_path) == ["step-000000002.safetensors", "step-000000003.safetensors"]  # keep=2
    assert load_checkpoint(tmp_path).state["w"].unique().tolist() == [3]  # type: ignore[index]
    assert load_checkpoint(tmp_path / "step-000000002.safetensors").state["w"].unique().tolist() == [2]  # type: ignore[index]
    assert writer.latest == newest_checkpoint(tmp_path) == tmp_path / "step-000000003.safetensors"


def test_shapes_may_change_between_saves(writer: CheckpointWriter, tmp_path: Path) -> None:
    for step, shape in enumerate([(3,), (2, 3), (3,), ()]):
        writer.save(
            at(step, a=torch.full(shape, step), b=torch.ones(shape, dtype=torch.float64 if step % 2 else torch.int8))
        )
        writer.flush()
        assert_same(torch.full(shape, step), load_checkpoint(tmp_path).state["a"])  # type: ignore[index]


def test_named_ones_are_kept(writer: CheckpointWriter, tmp_path: Path) -> None:
    writer.save(at(1), name="best")
    for step in range(2, 6):
        writer.save(at(step))
    writer.save(at(9), name="final.safetensors")
    writer.flush()
    assert names(tmp_path) == [
        "best.safetensors", "final.safetensors", "step-000000004.safetensors", "step-000000005.safetensors",
    ]  # fmt: skip
    assert newest_checkpoint(tmp_path) == tmp_path / "final.safetensors"
    for name in ("../evil", "", ".hidden", "a/b"):
        with pytest.raises(TrainError, match="named"):
            writer.save(at(1), name=name)


def test_later_steps_of_another_run_are_left_alone(writer: CheckpointWriter, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-000000200.safetensors", at(200))
    for step in (1, 2, 3):
        writer.save(at(step))
    writer.flush()
    assert [int(name[5:14]) for name in names(tmp_path)] == [2, 3, 200]


def test_state_that_cannot_be_kept_is_the_callers_error(writer: CheckpointWriter, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"state\['fn'\]"):
        writer.save(at(1, fn=print))
    with pytest.raises(TrainError, match="meta"):
        writer.save(Checkpoint(1, 0, 1, {"x": object()}))
    writer.save(at(2))
    writer.flush()
    assert names(tmp_path) == ["step-000000002.safetensors"]


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    match how:
        case "cut":
            del raw[-7:]
        case "cut in the header":
            del raw[40:]
        case "empty":
            raw.clear()
        case "longer":
            raw += b"\0"
        case "data":
            raw[-100] ^= 1
        case "zeros":
            raw[len(raw) // 2 :] = bytes(len(raw) - len(raw) // 2)
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["cut", "cut in the header", "empty", "longer", "data", "zeros"])
def test_a_torn_file_is_named_and_the_one_before_it_used(tmp_path: Path, said: list[str], how: str) -> None:
    for step in (10, 20):
        write_checkpoint(tmp_path / f"step-{step:09d}.safetensors", at(step))
    torn = tmp_path / "step-000000020.safetensors"
    damage(torn, how)
    assert newest_checkpoint(tmp_path, notify=said.append) == tmp_path / "step-000000010.safetensors"
    assert load_checkpoint(tmp_path, notify=said.append).step == 10
    assert len(said) == 2
    assert all(str(torn) in line for line in said)
    with pytest.raises(CheckpointError, match="step-000000020"):
        load_checkpoint(torn)


def test_no_flipped_bit_passes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, Checkpoint(1, 2, 3, {"a": 1}, {"w": torch.ones(2)}, [b"c"]))
    raw = path.read_bytes()
    for position in range(len(raw)):
        path.write_bytes(raw[:position] + bytes([raw[position] ^ (1 << position % 8)]) + raw[position + 1 :])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_all_torn(tmp_path: Path, said: list[str]) -> None:
    write_checkpoint(tmp_path / "step-000000001.safetensors", at(1))
    damage(tmp_path / "step-000000001.safetensors", "data")
    assert newest_checkpoint(tmp_path, notify=said.append) is None
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_checkpoint(tmp_path, notify=said.append)


def test_wrong_files(tmp_path: Path, said: list[str]) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, tmp_path / "theirs.safetensors")
    (tmp_path / "text.safetensors").write_text("hello, this is no checkpoint at all")
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    for name in ("theirs.safetensors", "text.safetensors", "model.pt"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            load_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match="No such file"):
        load_checkpoint(tmp_path / "absent")
    assert newest_checkpoint(tmp_path, notify=said.append) is None
    assert newest_checkpoint(tmp_path / "absent") is None
    assert said == []  # others' files in the directory are nobody's fault


def test_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, at(1))
    path.write_bytes(path.read_bytes().replace(b'"pliant.checkpoint":"2"', b'"pliant.checkpoint":"9"'))
    with pytest.raises(CheckpointError, match="format '9'"):
        load_checkpoint(path)


def test_a_checkpoint_of_version_0_1_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    path.write_bytes((Path(__file__).parent / "checkpoint-0.1.safetensors").read_bytes())
    assert newest_checkpoint(tmp_path) == path
    found = load_checkpoint(path)
    assert (found.step, found.epoch, found.num_replicas, found.meta) == (123, 12, 4, {"torch": "2.13"})
    assert found.contexts == at(123).contexts
    assert_same(
        {"w": torch.arange(6.0).reshape(2, 3), "c": torch.ones(2, dtype=torch.complex128), "lr": 0.1}, found.state
    )
    for position in (-1, -40, -100):
        raw = bytearray(path.read_bytes())
        raw[position] ^= 1
        (tmp_path / "damaged").write_bytes(raw)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(tmp_path / "damaged")


def train_after(checkpoint: Path | None) -> tuple[list[int], list[torch.Tensor], float]:
    """The program that wrote job-0.1.safetensors after its fifth step, under version 0.1, in the loop of two levels."""
    torch.manual_seed(5)
    data = torch.rand(24, 4)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    numbers = []
    with pliant.join(replicas=3) as job:
        job.wrap(model, optimizer)
        loader = job.loader(data, batch_size=2)
        job.track("scheduler", scheduler)
        if checkpoint is not None:
            job.load(str(checkpoint))
        for _ in job.epochs(2):
            for step in loader:
                numbers.append(step.number)
                for x in step:
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return numbers, [*model.parameters(), *model.buffers()], float(scheduler.get_last_lr()[0])


def test_a_job_goes_on_from_a_checkpoint_of_version_0_1(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, expected, rate = train_after(None)
    found_numbers, found, found_rate = train_after(Path(__file__).parent / "job-0.1.safetensors")
    assert (numbers, found_numbers, rate) == (list(range(8)), [5, 6, 7], found_rate)
    # Not to the bit: the file was written on another processor, perhaps with other threads.
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    assert "at step 5" in capsys.readouterr().out


def test_a_job_that_has_lost_its_state_goes_back_as_little_as_it_can(tmp_path: Path, said: list[str]) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    write_checkpoint(own / "step-000000006.safetensors", at(6))
    write_checkpoint(other / "step-000000004.safetensors", at(4))
    write_checkpoint(other / "later.safetensors", at(9))
    sixth, fourth, ninth = (
        own / "step-000000006.safetensors",
        other / "step-000000004.safetensors",
        other / "later.safetensors",
    )
    for asked, directory, begins, goes_on in [
        ("", own, None, sixth),
        ("auto", own, sixth, sixth),
        (str(fourth), own, fourth, sixth),
        (str(ninth), own, ninth, ninth),
        (str(other), own, other, ninth),
        (str(fourth), "", fourth, fourth),
        (str(fourth), tmp_path / "empty", fourth, fourth),
        ("", "", None, None),
    ]:
        assert _find_start(asked, str(directory), False, said.append) == begins
        assert _find_start(asked, str(directory), True, said.append) == goes_on
    assert not said


def test_a_job_that_has_lost_its_state_takes_no_checkpoint_of_another_run(tmp_path: Path, said: list[str]) -> None:
    folder = tmp_path / "run"
    run = begin_run(str(folder))
    third, ninth = folder / "step-000000003.safetensors", folder / "step-000000009.safetensors"
    write_checkpoint(ninth, replace(at(9), meta={"run": "another"}))
    assert _find_start("", str(folder), True, said.append) is None
    why = _why_none(str(folder), run)
    assert all(each in why for each in (f"of this run ({run})", "is of run another", f"`--resume {ninth}`"))
    write_checkpoint(third, replace(at(3), meta={"run": run}))
    for asked, begins, goes_on in [("", None, third), ("auto", ninth, ninth), (str(ninth), ninth, ninth)]:
        assert _find_start(asked, str(folder), False, said.append) == begins
        assert _find_start(asked, str(folder), True, said.append) == goes_on
    later = begin_run(str(folder))
    assert run_in(str(folder)) == later != run
    assert _find_start("", str(folder), True, said.append) is None, "it is of the run before"
    assert not said
    assert begin_run("")
    assert run_in(str(tmp_path / "nowhere")) == ""


def test_one_that_is_due_where_an_epoch_is_left_waits_for_its_end() -> None:
    """Else a resumed job would go on with the steps of the epoch that the program has left."""
    made = Checkpointing(mock.Mock(), "folder", 3, {"level": "D1"}, print)

    def end_step(step: int, *, leaves_epoch: bool = False) -> None:
        made.end_step(StepCommitted(step, 0, step, 1, 0, 0.0, 0.0, {}, leaves_epoch), lambda: True)

    with mock.patch.object(Checkpointing, "write") as write:
        end_step(3)
        end_step(5, leaves_epoch=True)
        made.end_epoch(True, lambda: True)
        assert write.call_args_list == [mock.call("")]
        end_step(6, leaves_epoch=True)
        assert write.call_count == 1
        made.end_epoch(True, lambda: True)
        made.end_epoch(True, lambda: True)
        assert write.call_args_list == [mock.call("")] * 2
        made.ask("mine")
        end_step(9, leaves_epoch=True)
        assert write.call_args_list[2:] == [mock.call("mine")], "the program has asked for this state"


def test_a_run_whose_id_found_no_room_goes_on_from_its_own_checkpoints_only(tmp_path: Path) -> None:
    older = begin_run(str(tmp_path))
    with limited_files(0):
        run = begin_run(str(tmp_path))
    assert run_in(str(tmp_path)) == "", "a job that loses all workers now must not go on from another run"
    writer = CheckpointWriter(tmp_path, run=run)
    writer.save(at(1))
    writer.flush()
    assert run_in(str(tmp_path)) == run != older


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as found:
        yield found.path


@pytest.mark.root
def test_disk_full(disk: Path, said: list[str]) -> None:
    """The message names path, need and remedy; nothing is left; the one before stays; a smaller one fits again."""
    writer = CheckpointWriter(disk, notify=said.append)
    for step, size in ((1, 9), (2, 1 << 20)):
        writer.save(at(step, w=torch.zeros(size)))
    writer.flush()
    [line] = said
    for part in (str(disk / "step-000000002.safetensors"), "bytes needed", "No space left", "free some"):
        assert part in line
    assert names(disk) == ["step-000000001.safetensors"]
    writer.save(at(3))
    writer.flush()
    assert len(said) == 1
    assert load_checkpoint(disk).step == 3


LIMITED = """
import resource, sys, torch
from pliant.train.checkpoint import CheckpointWriter
from pliant.train.checkpoint_file import Checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
writer = CheckpointWriter(sys.argv[1], notify=print)
for step, size in ((1, 9), (2, 1 << 20), (3, 9)):
    writer.save(Checkpoint(step, 0, 1, {}, {"w": torch.zeros(size)}))
"""


def test_file_too_large_in_a_program_that_just_ends(tmp_path: Path) -> None:
    """The limit hits the second of three saves; the third is written although nobody waits for it."""
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, timeout=60)
    (said,) = done.stdout.splitlines()
    assert "File too large" in said
    assert "4,19" in said  # 4 MiB and a little
    assert load_checkpoint(tmp_path).step == 3
    assert names(tmp_path) == ["step-000000001.safetensors", "step-000000003.safetensors"]


def test_unwritable_directory(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = CheckpointWriter(tmp_path / "file" / "sub", notify=said.append)
    writer.save(at(1))
    writer.flush()
    assert len(said) == 1
    assert "Not a directory" in said[0]
    (tmp_path / "file").unlink()
    writer.save(at(2))  # the way is free now
    writer.flush()
    assert len(said) == 1
    assert load_checkpoint(tmp_path / "file" / "sub").step == 2


def endless(rank: int, directory: Path) -> None:
    """In another process: write one checkpoint, and never come to the end of a second."""
    writer = CheckpointWriter(directory)
    writer.save(Checkpoint(1, 0, 1, {}, {"w": torch.ones(1 << 20)}))
    writer.flush()
    checkpoint_file.os.fsync = lambda fd: (say("writing"), signal.pause())  # all written, none renamed
    writer.save(Checkpoint(2, 0, 1, {}, {"w": torch.ones(1 << 20)}))
    writer.flush()


@pytest.fixture(scope="module")
def fork_server() -> None:
    """Before `no_leaks` counts descriptors."""
    warm_up()


def test_killed_while_writing(tmp_path: Path, fork_server: None, writer: CheckpointWriter) -> None:
    with gang(endless, [(tmp_path,)]) as started:
        assert started.hear(0) == "writing"
        writer.save(at(0))  # a second writer does not take the first's file for a leftover while it lives
        writer.flush()
        [folder] = [path for path in tmp_path.glob(".*") if path.is_dir()]
        assert list(folder.iterdir()), "the file of a living writer is gone"
        started.kill(0)
        started.processes[0].join(10)
    assert load_checkpoint(tmp_path).step == 1
    writer.save(at(3))
    writer.flush()
    assert not [name for name in names(tmp_path) if name.startswith(".")], "the dead writer's file should be gone"
    assert load_checkpoint(tmp_path).step == 3


def test_readers_never_see_half_a_file(writer: CheckpointWriter, tmp_path: Path, said: list[str]) -> None:
    write_checkpoint(tmp_path / "same.safetensors", at(0, w=torch.zeros(1 << 16)))
    stop = threading.Event()

    def read() -> set[int]:
        seen = set()
        while not stop.is_set():
            found = load_checkpoint(tmp_path / "same.safetensors")
            assert found.state["w"].unique().tolist() == [found.step]  # type: ignore[index]
            seen.add(found.step)
        return seen

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for step in range(1, 20):
            writer.save(at(step, w=torch.full((1 << 16,), float(step))), name="same")
        writer.flush()
        stop.set()
        assert reading.result(timeout=30)
    assert said == []
