"""A job that is interrupted goes on to the bits that it would have had; what is not its own, it refuses."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fed_jobs import Crash, config_of, lines_of, loop_of, state_of
from gang import FULL

from pliant.errors import CheckpointError
from pliant.fed import trainer
from pliant.fed.rounds.federation import CHECKPOINT_FILE
from pliant.fed.rounds.storage import PERF, RECORD
from pliant.train import checkpoint_file

JOBS: dict[str, dict[str, Any]] = {
    "oort, yogi, privacy": {
        "selector": {"kind": "oort", "noise_factor": 0.1, "pacer_step": 1},
        "aggregator": "fed-yogi",
        "privacy": {"clip": 1.0, "noise_multiplier": 0.3},
        "batching": 3,
    },
    "random with an account, away at times": {
        "selector": "random",
        "availability": "synthetic",
        "clock_factor": 2000.0,
        "privacy": {"clip": 1.0, "noise_multiplier": 0.3},
    },
    "buffered, privacy, away at times": {
        "aggregator": {"kind": "fed-buff", "max_staleness": 3},
        "availability": "synthetic",
        "clock_factor": 2000.0,
        "concurrency": 15,
        "privacy": {"where": "client", "clip": 1.0, "noise_multiplier": 0.1},
    },
    "refl, q-fedavg, a deadline": {
        "selector": "refl",
        "aggregator": "q-fedavg",
        "availability": "synthetic",
        "deadline_s": 4.0,
        "local": {"longer": True},
    },
    "buffered with Oort": {"aggregator": "fed-buff", "malicious": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("job", list(JOBS))
def test_interrupted_anywhere_it_ends_with_the_same_bits(job: str, tmp_path: Path) -> None:
    config = config_of(**JOBS[job])
    whole = loop_of(config, tmp_path / "whole")
    whole.run()
    wanted = state_of(whole), lines_of(tmp_path / "whole"), (tmp_path / "whole" / PERF).read_bytes()
    calls = config.rounds + len(whole.recorder.history.points)
    for crash_at in range(1, calls + 1) if FULL else (2, calls - 3, calls - 1):
        folder = tmp_path / f"crash {crash_at}"
        with pytest.raises(Crash):
            loop_of(config, folder, crash_at=crash_at).run()
        resumed = loop_of(config, folder)
        resumed.run()
        assert (state_of(resumed), lines_of(folder), (folder / PERF).read_bytes()) == wanted
    other = loop_of(config.model_copy(update={"seed": 1}))
    other.run()
    differs = {name for name, bits in state_of(other).items() if bits != wanted[0][name]}
    assert differs >= {"model", "selector", "clock_s"}, "another seed is another job"


def test_stopped_and_started_it_repeats_no_round(tmp_path: Path) -> None:
    config = config_of(checkpoint_every=100)
    whole = loop_of(config)
    history = whole.run()
    for number in range(1, 8):
        once = iter([False, True])
        part = loop_of(config, tmp_path, stop=lambda once=once: next(once))  # type: ignore[misc]
        assert part.run().why == ("stopped" if number < 6 else "rounds")
        assert part.round == min(number, 6)
    assert part.recorder.history.rounds == history.rounds
    assert part.recorder.history.points == history.points
    assert state_of(part) == state_of(whole)
    assert [fact["kind"] for fact in lines_of(tmp_path)].count("end") == 1


def test_a_job_that_is_done_can_be_given_more_rounds(tmp_path: Path) -> None:
    loop_of(config_of(rounds=4), tmp_path).run()
    longer, whole = loop_of(config_of(rounds=6), tmp_path), loop_of(config_of(rounds=6))
    longer.run()
    whole.run()
    assert state_of(longer) == state_of(whole)


def forget_preset(config: dict[str, Any]) -> None:
    """Make the config one of the time when jobs were stored without the preset."""
    assert config["selector"]["options"].pop("preset") == "paper"


def test_a_job_of_the_former_default_preset_goes_on_once_its_file_names_it(tmp_path: Path) -> None:
    selector = {"kind": "oort", "preset": "paper"}
    whole = loop_of(config_of(selector=selector), tmp_path / "whole")
    whole.run()
    old = tmp_path / "old"
    loop_of(config_of(selector=selector, rounds=4), old).run()
    found = checkpoint_file.read(old / CHECKPOINT_FILE)
    meta: dict[str, Any] = dict(found.meta)
    forget_preset(meta["config"])
    checkpoint_file.CheckpointImage(replace(found, meta=meta), None).write(old / CHECKPOINT_FILE)
    first, *rest = (old / RECORD).read_text().splitlines(keepends=True)
    fact = json.loads(first)
    forget_preset(fact["config"])
    (old / RECORD).write_text("".join([json.dumps(fact) + "\n", *rest]))
    for unnamed in ("oort", {"kind": "oort"}):
        with pytest.raises(
            CheckpointError, match="preset='paper', this one has .*'balanced': write `preset: paper` into"
        ):
            loop_of(config_of(selector=unnamed), old).run()
    resumed = loop_of(config_of(selector=selector), old)
    resumed.run()
    assert state_of(resumed) == state_of(whole)


def test_new_jobs_store_the_preset(tmp_path: Path) -> None:
    for number, config in enumerate((config_of(selector="oort"), config_of())):
        loop_of(config, tmp_path / str(number)).run()
        stored = checkpoint_file.read(tmp_path / str(number) / CHECKPOINT_FILE).meta["config"]
        assert stored["selector"] == {"kind": "oort", "options": {"preset": "balanced"}}  # type: ignore[index, call-overload]
        assert lines_of(tmp_path / str(number))[0]["config"]["selector"] == stored["selector"]  # type: ignore[index, call-overload]


def test_how_many_train_at_once_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(batching=None, participants=12, data={"clients": 20})
    first = loop_of(config, tmp_path, crash_at=1)
    with pytest.raises(Crash):
        first.run()
    shares = len(os.sched_getaffinity(0))
    assert first.batching in (1, *trainer.candidates(20, 12, "cpu", min(max(shares, 2), 8)))

    def again(*_: object) -> int:
        raise AssertionError("it was measured before")

    monkeypatch.setattr("pliant.fed.rounds.loop.choose_batching", again)
    second = loop_of(config, tmp_path)
    second.run()
    assert second.batching == first.batching == lines_of(tmp_path)[0]["batching"]


def test_on_something_else_than_it_was_begun_on_it_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_of(config_of(rounds=4), tmp_path).run()
    monkeypatch.setattr(torch, "__version__", "9.9.9+cpu")
    with pytest.raises(
        CheckpointError, match="was begun on cpu with torch .*, and this process computes on cpu with torch 9.9.9,"
    ):
        loop_of(config_of(rounds=6), tmp_path).run()


def test_what_was_written_before_the_first_checkpoint_is_written_again(tmp_path: Path) -> None:
    config = config_of()
    with pytest.raises(Crash):
        loop_of(config, tmp_path, crash_at=2).run()
    (tmp_path / CHECKPOINT_FILE).unlink()
    loop_of(config, tmp_path).run()
    loop_of(config, tmp_path / "whole").run()
    assert lines_of(tmp_path) == lines_of(tmp_path / "whole")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job that is done; tests copy what they damage."""
    made = tmp_path_factory.mktemp("job")
    loop_of(config_of(rounds=2, aggregator="fed-yogi"), made).run()
    return made


def copied(folder: Path, to: Path) -> Path:
    for name in (CHECKPOINT_FILE, RECORD):
        (to / name).write_bytes((folder / name).read_bytes())
    return to / CHECKPOINT_FILE


@pytest.mark.parametrize("place", [0, 5, 100, 0.5, 0.9, -1])
def test_a_damaged_checkpoint_is_refused(place: float, folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    data = bytearray(path.read_bytes())
    data[int(place * len(data)) if isinstance(place, float) else int(place)] ^= 4
    path.write_bytes(data)
    before = (tmp_path / RECORD).read_bytes()
    with pytest.raises(CheckpointError, match="checkpoint.safetensors"):
        loop_of(config_of(rounds=3, aggregator="fed-yogi"), tmp_path).run()
    assert (tmp_path / RECORD).read_bytes() == before, "nothing is lost by trying"


def test_a_checkpoint_that_was_cut_short_is_refused(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="torn.*remove it to begin the job anew"):
        loop_of(config_of(rounds=3, aggregator="fed-yogi"), tmp_path).run()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    stranger = checkpoint_file.Checkpoint(7, 0, 4, state={"weight": torch.zeros(3)})
    checkpoint_file.CheckpointImage(stranger, None).write(tmp_path / CHECKPOINT_FILE)
    with pytest.raises(CheckpointError, match="no checkpoint of a federated job"):
        loop_of(config_of(), tmp_path).run()
    (tmp_path / CHECKPOINT_FILE).write_bytes(pickle.dumps({"round": 3}) * 20)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        loop_of(config_of(), tmp_path).run()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"seed": 4}, r"seed=0, this one has seed=4"),
        ({"local": {"lr": 0.2}}, r"local\.lr=0\.1, this one has local\.lr=0\.2"),
        ({"aggregator": "fed-avg"}, r"aggregator\.kind='fed-yogi'"),
        ({"aggregator": {"kind": "fed-yogi", "lr": 0.5}}, r"aggregator\.options\.lr=None"),
        ({"privacy": {"clip": 2.0}}, r"privacy=None"),
        ({"data": {"clients": 50}}, r"data\.clients=60"),
    ],
)
def test_a_checkpoint_of_another_config_is_refused_with_the_field(
    more: dict[str, Any], field: str, folder: Path, tmp_path: Path
) -> None:
    copied(folder, tmp_path)
    with pytest.raises(CheckpointError, match=field):
        loop_of(config_of(**{"rounds": 3, "aggregator": "fed-yogi"} | more), tmp_path).run()


def test_a_record_that_is_not_the_checkpoints_is_refused(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    lines = (tmp_path / RECORD).read_bytes().splitlines(keepends=True)
    (tmp_path / RECORD).write_bytes(b"".join(lines[:2]))
    config = config_of(rounds=3, aggregator="fed-yogi")
    with pytest.raises(CheckpointError, match="ends with round 1, and the checkpoint beside it with round 2"):
        loop_of(config, tmp_path).run()
    (tmp_path / RECORD).unlink()
    with pytest.raises(CheckpointError, match="put it back, or use another folder"):
        loop_of(config, tmp_path).run()
    (tmp_path / CHECKPOINT_FILE).unlink()
    loop_of(config_of(name="mine"), tmp_path).run()
    (tmp_path / CHECKPOINT_FILE).unlink()
    with pytest.raises(CheckpointError, match="name='mine'"):
        loop_of(config_of(name="yours"), tmp_path).run()
