"""Hugging Face's Trainer on a job: the bits of the same program under torchrun, on any workers.

The oracle is transformers.Trainer itself on N gloo processes, with accelerate's own loader and DDP around the model.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import multiprocessing
import os
import random
import runpy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gang import Gang, addresses, gang, listen, say, specs, torchrun

from pliant.cluster import View
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import ConfigError, TrainError
from pliant.integrations.rank_loader import deal_batches, drawn_order, seeded_order

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parent.parent / "examples" / "huggingface.py"
N = 3
Model = torch.nn.Module


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """Random words. The first label says whether the first word is larger than the second."""

    def __init__(self, length: int, *, noise: bool = False) -> None:
        draw = torch.Generator().manual_seed(2)
        self.words = torch.randint(1, 11, (length, 6), generator=draw)
        self.lengths = torch.randint(2, 7, (length,), generator=draw).tolist()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index].clone()
        if self.noise:  # from all generators that a loader process seeds
            words[random.randrange(6)] = int(torch.randint(1, 11, ()))
        return {"input_ids": words, "labels": (words[0] > words[1]).long()}


def masked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers; the number of labels that count differs between batches."""
    words = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": words, "labels": torch.where(torch.rand(words.shape) < 0.5, words, -100)}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def large_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return 50 * torch.nn.functional.cross_entropy(outputs.logits, labels)


def classifier() -> Model:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=11, max_position_embeddings=8, **sizes))


def language_model() -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=16, n_layer=1, n_head=2))


def program(name: str, **changes: Any) -> tuple[dict[str, Any], Callable[[Any], None]]:
    """Return the arguments of the Trainer, and what the program does to it before it trains."""
    from transformers import EarlyStoppingCallback, TrainingArguments

    usual = {
        "output_dir": name, "num_train_epochs": 2, "per_device_train_batch_size": 3, "learning_rate": 2e-3, "seed": 3,
        "warmup_steps": 2, "logging_steps": 3, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip

    def settle(trainer: Any) -> None:
        pass

    match name:
        case "accumulates":  # five batches of each rank: the last step of an epoch takes one
            usual |= {
                "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
                "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "accuracy",
                "save_total_limit": 2, "per_device_eval_batch_size": 4,
            }  # fmt: skip
            given = {
                "model": classifier(),
                "train_dataset": Sentences(40),
                "eval_dataset": Sentences(17),
                "compute_metrics": accuracy,
                "callbacks": [EarlyStoppingCallback(9)],
            }
        case "masks":
            usual |= {
                "gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all", "eval_strategy": "epoch",
                "save_strategy": "steps", "save_steps": 2,
            }  # fmt: skip
            eval_set = [{**each, "labels": each["input_ids"]} for each in Sentences(10)]
            given = {"model": language_model(), "train_dataset": Sentences(40), "eval_dataset": eval_set}
            given["data_collator"] = masked
        case "scales":
            usual |= {
                "dataloader_num_workers": 2,
                "max_steps": 9,
                "optim": "adamw_torch",
                "average_tokens_across_devices": False,
            }
            given = {"model": classifier(), "train_dataset": Sentences(32, noise=True), "compute_loss_func": large_loss}

            def settle(trainer: Any) -> None:  # as fp16 does on a GPU; the first steps overflow
                trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)

    return {**given, "args": TrainingArguments(**{**usual, **changes})}, settle


def digest(trainer: Any) -> str:
    optimizer = trainer.optimizer.state_dict()["state"]
    parts = [trainer.model.state_dict()[name] for name in sorted(trainer.model.state_dict())]
    parts += [tensor for place in sorted(optimizer) for tensor in optimizer[place].values()]
    scaler = trainer.accelerator.scaler
    rest = [trainer.lr_scheduler.get_last_lr(), scaler and scaler.state_dict()]
    data = b"".join(part.detach().numpy().tobytes() for part in parts) + repr(rest).encode()
    return hashlib.sha256(data).hexdigest()


def facts(trainer: Any) -> dict[str, Any]:
    timed = ("runtime", "per_second", "loss", "preparation_time", "grad_norm")
    rows = trainer.state.log_history
    return {
        "digest": digest(trainer),
        "logs": [{name: row[name] for name in row if not name.endswith(timed) or name == "eval_loss"} for row in rows],
        "losses": [row["loss"] for row in rows if "loss" in row],
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "step": trainer.state.global_step,
        "first": trainer.is_world_process_zero(),
        "rows": repr(rows),
        "skipped": trainer.state.global_step - trainer.lr_scheduler.last_epoch,
    }


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    os.environ.update(values)
    reset()  # accelerate remembers the world it has seen first
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def oracle(name: str, ranks: dict[str, str]) -> dict[str, Any]:
    """The same program with transformers.Trainer under torchrun."""
    import transformers

    with environment(ranks):
        given, settle = program(name)
        trainer = transformers.Trainer(**given)
        settle(trainer)
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        found = facts(trainer)
        del trainer, given
        reset()
        gc.collect()  # DDP ends before its process group
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return found


def ours(name: str, environ: dict[str, str], resume: Any = None, **changes: Any) -> dict[str, Any]:
    from pliant.integrations.huggingface import ElasticTrainer

    other = {key: changes.pop(key) for key in ("replicas", "callbacks", "train_dataset") if key in changes}
    with environment(environ):
        given, settle = program(name, **changes)
        trainer = ElasticTrainer(**{"replicas": N, **given, **other})
        settle(trainer)
        for callback in other.get("callbacks", ()):
            callback.trainer = trainer
        trainer.train(resume_from_checkpoint=resume)
        found = facts(trainer)
        with pytest.raises(TrainError, match="train was called twice"):
            trainer.train()
        return found


def allow_loader_processes() -> None:
    """In a process of a gang: allow children, which Python denies to daemons, forked as in any script."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)


PROGRAMS = ("accumulates", "masks", "scales")


def _work(rank: int, worlds: Sequence[Sequence[dict[str, str]]], members: Sequence[Any], folder: str) -> dict[str, Any]:
    os.environ.update({"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"})
    allow_loader_processes()
    importlib.import_module("pliant.integrations.huggingface")  # so that transformers finds its torchvision
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for number, name in enumerate(PROGRAMS):
            with folder_of(folder, f"{name}-oracle"):
                found[f"oracle {name}"] = oracle(name, worlds[number][rank])
            with folder_of(folder, "workers"):
                found[f"workers {name}"] = ours(name, members[number][rank])
            if rank == 0:
                with folder_of(folder, "alone"):
                    found[f"alone {name}"] = ours(name, {})
        with folder_of(folder, "two"):
            if rank < 2:
                found["oracle of two"] = oracle("masks", worlds[-1][rank])
                found["two"] = ours("masks", {}, replicas=2, output_dir=f"masks-{rank}")
        with folder_of(folder, "example"):
            found["example"] = _example(members[-1][rank] if rank < 2 else {})
        if rank == 0:
            with folder_of(folder, "alone"):
                found["resumed"] = _resume()
            found["refused"] = _refusals(Path(folder))
        say(found)
        if rank < 2:
            with folder_of(folder, "elastic"):
                return ours("masks", listen(200), callbacks=[gate()] if rank == 0 else [])
    return {}


@contextlib.contextmanager
def folder_of(parent: str, name: str) -> Iterator[None]:
    Path(parent, name).mkdir(exist_ok=True)
    with contextlib.chdir(Path(parent, name)):
        yield


def gate() -> Any:
    """A callback that waits after step 2 until another worker is ready to join, and after step 4 to be killed."""
    import transformers

    class Gate(transformers.TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                say("waiting for another worker")
                deadline_s = time.monotonic() + 60
                while self.trainer.job.prepared_view <= self.trainer.job.view:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)  # pacing a poll with a deadline
            if state.global_step == 4:
                say(self.trainer.job.size)
                listen(60)

    return Gate()


def _example(environ: dict[str, str]) -> str:
    """Return what the example prints at its end."""
    said = io.StringIO()
    with environment(environ), contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["huggingface.py", "--epochs", "1", "--samples", "40"])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue().rpartition("model ")[2]


def _resume() -> list[dict[str, Any]]:
    """Resume the training of "masks" in the middle of its second epoch."""
    whole = ours("masks", {}, resume="masks/checkpoint-4")
    Path("masks/checkpoint-6/replicas.safetensors").unlink()  # as if the job had ended before it was written
    return [whole, ours("masks", {}, resume=True)]


def _refusals(folder: Path) -> dict[str, str]:
    said = {}
    for name, value in {
        "train_sampling_strategy": "group_by_length",
        "auto_find_batch_size": True,
        "ddp_static_graph": True,
        "ignore_data_skip": True,
        "split_batches": True,
        "even_batches": False,
        "sync_each_batch": True,
        "resume": str(folder / "masks-oracle" / "masks" / "checkpoint-4"),
        "replicas": None,
        "train_dataset": iter(()),
    }.items():
        changes: dict[str, Any] = {name: value}
        if name in ("split_batches", "even_batches"):
            changes = {"accelerator_config": {name: value}}
        elif name == "sync_each_batch":
            changes = {"accelerator_config": {"gradient_accumulation_kwargs": {name: value}}}
        with pytest.raises(ConfigError) as caught:
            ours("scales", {}, **changes)
        said[name] = str(caught.value)
    return said


def test_the_bits_are_those_of_the_trainer_under_torchrun(tmp_path: Path) -> None:
    """On three workers, on one, with two replicas, resumed, and through a newcomer and a kill -9."""
    sizes = [*[N] * len(PROGRAMS), 2]
    members = [[each.to_environ() for each in specs(addresses("A" * size), timeout_s=60)] for size in sizes]
    with contextlib.ExitStack() as stack:
        worlds = [stack.enter_context(torchrun(size)) for size in sizes]
        started = stack.enter_context(gang(_work, [(worlds, members, str(tmp_path))] * N))
        found = started.results(200)
        survivor = _through_changes(started, stack)
    for name in PROGRAMS:
        stock, alone = found[0][f"oracle {name}"], found[0][f"alone {name}"]
        for each in (*(rank[f"workers {name}"] for rank in found), alone):
            assert_same(each, stock)
        assert found[1][f"workers {name}"]["rows"] == found[0][f"workers {name}"]["rows"], "times among them"
        assert [rank[f"workers {name}"]["first"] for rank in found] == [True, False, False]
    assert found[0]["oracle scales"]["skipped"] > 1, "steps with gradients that are too large"
    first, _, alone = (rank["example"] for rank in found)
    assert first == alone != "", "two workers and one"
    assert_same(found[1]["two"], found[1]["oracle of two"])
    stock = found[0]["oracle masks"]
    assert found[1]["two"]["digest"] != stock["digest"], "another number of replicas"
    for each in (*found[0]["resumed"], survivor):
        assert_same(each, stock)
    assert survivor["first"], "the only one that is left"
    written = {path.relative_to(tmp_path / "elastic").as_posix() for path in tmp_path.glob("elastic/*/*/*.safetensors")}
    assert written >= {f"masks/checkpoint-{step}/replicas.safetensors" for step in (2, 4, 6)}
    for name, remedy in {
        "train_sampling_strategy": "'group_by_length' is not possible in a job: use one of random, sequential",
        "auto_find_batch_size": "find the batch size on one worker first",
        "ddp_static_graph": "leave it out",
        "ignore_data_skip": "a job keeps its place in the data",
        "split_batches": "divide per_device_train_batch_size by N instead",
        "even_batches": "use True",
        "sync_each_batch": "leave it out",
        "resume": "use one that ElasticTrainer has completed",
        "replicas": "give ElasticTrainer(replicas=N)",
        "train_dataset": "use a map-style dataset",
    }.items():
        assert remedy in found[0]["refused"][name]


def assert_same(found: dict[str, Any], stock: dict[str, Any]) -> None:
    for fact in ("digest", "logs", "best", "tokens", "flos", "step"):
        assert found[fact] == stock[fact], fact
    assert found["losses"] == pytest.approx(stock["losses"], rel=1e-5)


def _through_changes(started: Gang, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Begin with the first worker; let the second join; kill the first. Return what the second has found."""
    server = stack.enter_context(ConfigServer(ServerConfig(port=0, open=True)).running())
    client = stack.enter_context(ConfigClient(server.url))
    first, second = (replace(each, elastic=True) for each in specs(addresses("AA"), config_server=server.url))
    hosts = first.view.runners
    for rank, spec, view in ((0, first, View(0, (first.worker,), hosts)), (1, second, first.view)):
        client.put(view)
        started.tell(rank, replace(spec, view=view).to_environ())
        assert started.hear(0) == ("waiting for another worker" if rank == 0 else 2)
    started.kill(0)
    client.lost(first.worker, "killed")
    result: dict[str, Any] = started.hear(1, 60)
    return result


@pytest.mark.parametrize("length", [1, 6, 7, 12, 31])
@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_are_dealt_as_accelerate_does(length: int, drop_last: bool) -> None:
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
    from torch.utils.data import BatchSampler, RandomSampler

    seeded = SeedableRandomSampler(range(length), data_seed=5)
    drawn = RandomSampler(range(length), generator=torch.Generator())
    for rank in range(N):
        drawn.generator.manual_seed(5)
        for epoch in range(3):
            seeded.set_epoch(epoch)
            for sampler, order in ((seeded, seeded_order(length, 5)), (drawn, drawn_order(length, 5))):
                batches = BatchSampler(sampler, 2, drop_last)
                dealt = deal_batches(order(epoch), N, 2, drop_last=drop_last)
                assert dealt[:, rank].tolist() == list(BatchSamplerShard(batches, N, rank))
