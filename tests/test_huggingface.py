"""Hugging Face's Trainer on a job: the bits of the same Trainer under DDP, alone and on two workers.

The oracle is a plain Trainer on two gloo processes, which wraps the model in DistributedDataParallel by itself; only its samples are
dealt by torch's DistributedSampler, as ours are, and not by accelerate.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gang import FULL, addresses, run, specs, torchrun

from pliant import record
from pliant.errors import ConfigError, TrainError

EXAMPLE = Path(__file__).parent.parent / "examples" / "huggingface.py"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
EPOCHS, SAMPLES = 2, 88  # 44 for each replica: the last batch is short


def digest(model: Any) -> str:
    state = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def _oracle(example: dict[str, Any], *, seed: int) -> str:
    import torch
    import transformers
    from torch.utils.data.distributed import DistributedSampler

    class Dealt(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = DistributedSampler(self.train_dataset, seed=seed)
            collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=8, sampler=sampler, collate_fn=collate)

        def _run_epoch(self, model: Any, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
            train_dataloader.sampler.set_epoch(epoch)
            super()._run_epoch(model=model, epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    arguments = example["arguments"](EPOCHS)
    arguments.average_tokens_across_devices = False  # the mean of a batch over its own tokens, as ours
    trainer = Dealt(model=example["model"](), args=arguments, train_dataset=example["Pairs"](SAMPLES))
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    return digest(trainer.model)


def _ours(example: dict[str, Any], environ: dict[str, str], **options: Any) -> dict[str, Any]:
    os.environ.update(environ)
    arguments = example["arguments"](EPOCHS)
    for name, value in options.items():
        setattr(arguments, name, value)
    pairs = example["Pairs"](SAMPLES)
    trainer = example["ElasticTrainer"](
        model=example["model"](), args=arguments, train_dataset=pairs, eval_dataset=pairs, replicas=2
    )
    trainer.train()
    with pytest.raises(TrainError, match="train was called twice"):
        trainer.train()
    return {
        "digest": digest(trainer.model),
        "first": trainer.is_world_process_zero(),
        "logged": len(trainer.state.log_history),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "rate": trainer.lr_scheduler.get_last_lr(),
    }


def _refusals(example: dict[str, Any]) -> dict[str, str]:
    said = {}
    for name, value in (
        ("gradient_accumulation_steps", 2),
        ("fp16", True),
        ("train_sampling_strategy", "group_by_length"),
    ):
        arguments = example["arguments"](1)
        setattr(arguments, name, value)
        trainer = example["ElasticTrainer"](
            model=example["model"](), args=arguments, train_dataset=example["Pairs"](8), replicas=2
        )
        with pytest.raises(ConfigError) as caught:
            trainer.train()
        said[name] = str(caught.value)
    with pytest.raises(ConfigError, match="--resume auto"):
        trainer.train(resume_from_checkpoint=True)
    return said


def _work(rank: int, ranks: Sequence[dict[str, str]], members: Sequence[dict[str, str]], place: str) -> dict[str, Any]:
    os.chdir(place)
    with contextlib.redirect_stdout(io.StringIO()):
        example = runpy.run_path(str(EXAMPLE))
        # It evaluates and saves after each epoch, which changes no bit: the other does not.
        kept = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1}
        found: dict[str, Any] = {"pair": _ours(example, members[rank], **kept)}
        for name in members[rank]:
            os.environ.pop(name)
        if rank == 0:
            found["alone"] = _ours(example, {})
            found["stopped"] = _ours(example, {}, max_steps=7)
            found["other"] = _ours(example, {}, seed=4)["digest"]
            found["refused"] = _refusals(example)
        os.environ.update(ranks[rank])  # accelerate remembers the world it has seen first
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        found["oracle"] = _oracle(example, seed=3)
    return found


def test_the_bits_are_those_of_the_trainer_under_ddp(tmp_path: Path) -> None:
    members = [member.to_environ() for member in specs(addresses("AA"), timeout_s=60)]
    with torchrun(2) as ranks:
        places = [{**environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"} for environ in ranks]
        first, second = run(_work, 2, places, members, str(tmp_path), timeout_s=280)
    oracle = first["oracle"]
    assert second["oracle"] == oracle
    assert first["pair"]["digest"] == second["pair"]["digest"] == first["alone"]["digest"] == oracle
    assert first["other"] != oracle, "another seed"
    assert (first["alone"]["step"], first["alone"]["epoch"]) == (12, 2)
    assert (first["stopped"]["step"], first["stopped"]["digest"] != oracle) == (7, True)
    assert [each["pair"]["first"] for each in (first, second)] == [True, False]
    assert first["pair"]["logged"] == 2 + first["alone"]["logged"], "two evaluations"
    assert second["pair"]["logged"] == 0
    assert [path.name for path in (tmp_path / "huggingface-run").glob("checkpoint-*")] == ["checkpoint-12"]
    assert first["pair"]["rate"] == first["alone"]["rate"]
    assert "that many times the replicas" in first["refused"]["gradient_accumulation_steps"]
    assert "use bf16=True" in first["refused"]["fp16"]
    assert "use one of random, sequential" in first["refused"]["train_sampling_strategy"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not FULL, reason="imports for half a minute: PLIANT_FULL=1")
def test_a_killed_worker_changes_no_bit(tmp_path: Path) -> None:
    """As it is started; the first worker is killed in mid-run, and nobody comes in its place."""
    alone = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
    )
    kept, state = tmp_path / "run.jsonl", tmp_path / "state.json"
    command = [str(Path(sys.executable).with_name("pliant")), "run", "-q", "-w", "-np", "2", "--max-restarts", "0"]
    files = ["--record", str(kept), "--state-file", str(state), str(EXAMPLE)]
    with subprocess.Popen([*command, *files], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as runner:
        try:
            deadline_s = time.monotonic() + 240
            while not kept.exists() or len(kept.read_text().splitlines()) < 50:
                assert time.monotonic() < deadline_s
                assert runner.poll() is None
                time.sleep(0.02)  # pacing a poll with a deadline
            workers = json.loads(state.read_text())["workers"]
            os.kill(workers[min(workers)]["pid"], signal.SIGKILL)
            said, _ = runner.communicate(timeout=240)
        finally:
            runner.kill()
    assert runner.returncode == 0
    views = [fact for fact in record.read(kept) if fact.kind == "view"]
    assert [(fact.data["old"], fact.data["new"], fact.data["lost"]) for fact in views] == [(2, 1, True)]
    assert alone.stdout.strip().splitlines()[-1] in said
