"""Hugging Face's Trainer as an elastic job: the program, and its result, stay the same when workers come and go.

    from pliant.integrations.huggingface import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=args, train_dataset=dataset, replicas=4)
    trainer.train()

The result has the bits of the same program under `torchrun --nproc-per-node 4` with transformers.Trainer: samples are
dealt as accelerate deals them, and gradient accumulation, mixed precision and the count of tokens are the Trainer's.

The Trainer's own loop is the outer body of a step: clipping, optimizer, scheduler, logs, evaluation, checkpoints and
callbacks run once per step on every worker. Where it calls `training_step`, all replicas hosted here take their turns.
A worker that joins gets the Trainer's state, the history of its logs, and the state of callbacks that can export it.

Differences from torchrun: the logged loss is added in another order, so its last digits may differ. Random numbers that
the model draws in an evaluation do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import pliant
from pliant.errors import ConfigError, TrainError
from pliant.integrations.rank_loader import RankLoader, deal_batches, seeded_order
from pliant.torchvision_import import import_torchvision
from pliant.train.sampling import LoaderOptions

with contextlib.suppress(ConfigError):  # torchvision may not be installed
    import_torchvision()  # transformers imports it, which fails beside a torch for CPUs

import transformers
from accelerate.state import GradientState, PartialState
from accelerate.utils import send_to_device
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, rotate_checkpoints, seed_worker

STRATEGIES = ("random", "sequential")
JOB_FILE = "replicas.safetensors"
"""What the job adds to a checkpoint of the Trainer: the state of all replicas."""
_OF_WORKER = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
"""Fields of the Trainer's state that belong to one worker."""
_SAID_BY_TRAINER = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")


class Inputs(dict[str, Any]):
    """What the Trainer takes for a batch: a step of the job. All its batches belong to the last of its substeps."""

    def __init__(self, step: pliant.train.step.Step | None) -> None:
        super().__init__()
        self.step = step
        self.flos = 0.0
        self.tokens = 0


class TrainerProgress:
    """The Trainer's own state, as part of the job's."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {name: value for name, value in vars(trainer.state).items() if name not in _OF_WORKER}
        counts = {name: float(getattr(trainer, name, 0.0)) for name in _SAID_BY_TRAINER}
        exported = [each.state() for each in self._exporters()]
        return {"text": json.dumps([state, counts, exported, trainer.evaluated_at_start])}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        state, counts, exported, trainer.evaluated_at_start = json.loads(saved["text"])
        vars(trainer.state).update(state)
        trainer._tr_loss = torch.tensor(counts.pop("_tr_loss"), device=trainer.args.device)
        counts["_globalstep_last_logged"] = int(counts["_globalstep_last_logged"])
        vars(trainer).update(counts)
        for each, values in zip(self._exporters(), exported, strict=True):
            own = values["args"] if each is trainer.control else {}
            vars(each).update(own | values["attributes"])

    def _exporters(self) -> list[Any]:
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [each for each in callbacks if isinstance(each, ExportableState)]


class EvaluationRounds:
    """The batches of an evaluation: round by round, those that N ranks evaluate at the same time."""

    def __init__(self, trainer: ElasticTrainer, dataset: Any, batch_size: int, options: dict[str, Any]) -> None:
        self._trainer, self._num_ranks, self._options = trainer, trainer.num_ranks, options
        length, drop_last = len(dataset), trainer.args.dataloader_drop_last
        self._dealt = deal_batches(torch.arange(length), self._num_ranks, batch_size, drop_last=drop_last)
        self._length = self._dealt.shape[0] * self._num_ranks if drop_last else -(-length // batch_size)
        self.dataset, self.batch_size = dataset, batch_size
        self.remainder = -1 if drop_last else length % batch_size
        self.end_of_dataloader = False
        """As in accelerate's loaders: the samples of the last batch that count, and whether it has come."""

    def __len__(self) -> int:
        return self._length

    def batches_of(self, rank: int) -> Iterator[Any]:
        """Yield the batches of a rank. They are loaded one ahead, as accelerate does."""
        upcoming = iter(DataLoader(self.dataset, batch_sampler=self._dealt[:, rank].tolist(), **self._options))
        waiting = next(upcoming, None)
        for batch in upcoming:
            yield waiting
            waiting = batch
        if waiting is not None:
            yield waiting

    def __iter__(self) -> Iterator[Any]:
        """Yield all batches, on a single worker that evaluates for all ranks."""
        state = GradientState()
        self.end_of_dataloader, number, together = False, 0, []
        state._add_dataloader(self)
        try:
            for batch in DataLoader(self.dataset, batch_sampler=self._dealt.flatten(0, 1).tolist(), **self._options):
                together.append(batch)
                if len(together) < self._num_ranks:
                    continue
                self._trainer.round_items = self._trainer.count_items(together)
                for each in together[: self._length - number]:
                    number += 1
                    self.end_of_dataloader = number == self._length
                    yield each
                together = []
        finally:
            self._trainer.round_items = None
            state._remove_dataloader(self)


class Replayed:
    """The batches of an evaluation that is done already: their sizes."""

    def __init__(self, rounds: EvaluationRounds, sizes: list[int | None]) -> None:
        self._rounds, self._sizes = rounds, sizes
        self.dataset = rounds.dataset

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Any]:
        state, rounds = GradientState(), self._rounds
        rounds.end_of_dataloader = False
        state._add_dataloader(rounds)
        try:
            for number, size in enumerate(self._sizes):
                rounds.end_of_dataloader = number == len(self._sizes) - 1
                yield {"replayed": torch.empty(size or 0)}
        finally:
            state._remove_dataloader(rounds)


class ElasticTrainer(transformers.Trainer):
    """A Trainer that trains as a job of `replicas` replicas. `join` holds further keywords of `pliant.join`.

    Raises:
        ConfigError: from `train`, for arguments of the Trainer that a job cannot have; the message names the remedy.
    """

    def __init__(
        self, *args: Any, replicas: int | None = None, join: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.job: pliant.Job | None = None
        """Set by `train`."""
        self._asked = (replicas, join or {})
        self._feeder: RankLoader | None = None
        self._loader: Any = None
        self._num_epochs = 0
        self._epochs: Iterator[int] = iter(())
        self._epoch: int | None = None
        """The job's epoch; None if there are no more."""
        self._steps: Any = None
        """The steps of this epoch, while training."""
        self._first_step: Any = None
        """The first step of this epoch, if the Trainer has not asked for it yet."""
        self.round_items: torch.Tensor | None = None
        """The items of all batches that N ranks evaluate at the same time."""
        self.evaluated_at_start = False
        super().__init__(*args, **kwargs)

    @property
    def num_ranks(self) -> int:
        """N, the number of ranks under torchrun."""
        return self._asked[0] or 1

    # --- a job around the Trainer's loop ---

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as the Trainer does. It can be called once."""
        if self.job is not None:
            raise TrainError("train was called twice: a job trains once; make another ElasticTrainer")
        self._check(trial)
        folder = self._folder_of(resume_from_checkpoint)
        replicas, options = self._asked
        job = self.job = pliant.join(replicas, **options)
        if folder is not None:
            job.load(os.path.join(folder, JOB_FILE))
        self._follow()
        # The Trainer calls `self.training_step` once per batch; a subclass's own method is called in turns.
        self.training_step = self._take_turns  # type: ignore[method-assign]
        try:
            trained = super().train(folder, None, ignore_keys_for_eval)
            while self._epoch is not None:  # a training that stops early ends at the same step for all
                self._epoch = next(self._epochs, None)
        finally:
            del self.training_step
            self._steps = None
            job.close()
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(self._folder, self.args.save_total_limit, best)
        return trained

    def _check(self, trial: Any) -> None:
        given: Any = self.args
        config = given.accelerator_config
        if self._asked[0] is None:
            raise ConfigError("replicas=None: the Trainer plans its steps for N ranks; give ElasticTrainer(replicas=N)")
        if given.world_size > 1:
            raise ConfigError("the Trainer was started by torchrun: start it with `pliant run`, or alone")
        if given.n_gpu > 1:
            raise ConfigError(f"{given.n_gpu} GPUs in one worker: use `pliant run`, which gives each worker one")
        if self.train_dataset is None:
            raise ConfigError("train_dataset=None: there is nothing to train on")
        if isinstance(self.train_dataset, IterableDataset) or not hasattr(self.train_dataset, "__len__"):
            raise ConfigError(
                f"train_dataset is a {type(self.train_dataset).__name__} without a length, which accelerate reads on one rank "
                "for all: use a map-style dataset (with __len__ and __getitem__)"
            )
        if trial is not None:
            raise ConfigError("a job trains once, so it cannot search hyperparameters: start one job for each trial")
        accumulation = config.gradient_accumulation_kwargs or {}
        whole = "leave it out: each replica is a whole model"
        for is_bad, setting, value, remedy in (
            (
                given.train_sampling_strategy not in STRATEGIES,
                "train_sampling_strategy",
                given.train_sampling_strategy,
                f"use one of {', '.join(STRATEGIES)}",
            ),
            (given.auto_find_batch_size, "auto_find_batch_size", True, "find the batch size on one worker first"),
            (not given.dataloader_in_order, "dataloader_in_order", False, "the order would depend on timing; use True"),
            (given.ddp_static_graph, "ddp_static_graph", True, "leave it out: it changes nothing here"),
            (given.ignore_data_skip, "ignore_data_skip", True, "leave it out: a job keeps its place in the data"),
            (given.fsdp, "fsdp", given.fsdp, whole),
            (given.deepspeed, "deepspeed", given.deepspeed, whole),
            (config.split_batches, "split_batches", True, "divide per_device_train_batch_size by N instead"),
            (config.dispatch_batches, "dispatch_batches", True, "leave it out: every replica loads its batches"),
            (not config.even_batches, "even_batches", False, "use True: a step takes a batch of every rank"),
            (not config.use_seedable_sampler, "use_seedable_sampler", False, "use True, the default"),
            (accumulation.get("sync_each_batch"), "sync_each_batch", True, "leave it out: a step has one sum"),
        ):
            if is_bad:
                raise ConfigError(f"{setting}={value!r} is not possible in a job: {remedy}")

    def get_train_dataloader(self) -> Any:
        """Return a loader that the Trainer may ask for the number of batches; the batches come with the steps."""
        if self.job is None:
            return super().get_train_dataloader()
        dataset, options = self._source(self.train_dataset, "Training")
        given, num_workers = self.args, self.args.dataloader_num_workers
        seed = torch.initial_seed() if given.data_seed is None else given.data_seed
        self._feeder = RankLoader(
            dataset,
            LoaderOptions(
                batch_size=self._train_batch_size,
                drop_last=given.dataloader_drop_last,
                sampler_drop_last=given.dataloader_drop_last,
                worker_init_fn=_Seeding(num_workers) if num_workers else None,
                **{**options, "pin_memory": options["pin_memory"] and torch.cuda.is_available()},
            ),
            self.job.replicas,
            seeded_order(len(dataset), seed) if given.train_sampling_strategy == "random" else None,
            given.gradient_accumulation_steps,
            seeds_by_rank=True,
        )
        batches: list[list[int]] = [[]] * self._feeder.num_batches
        return DataLoader(dataset, batch_sampler=batches, generator=torch.Generator())

    def _source(self, dataset: Any, description: str) -> tuple[Any, dict[str, Any]]:
        """Return the dataset without unused columns, and options for its DataLoader."""
        given, collate = self.args, self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):  # of the library `datasets`
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        options: dict[str, Any] = {
            "collate_fn": collate,
            "num_workers": given.dataloader_num_workers,
            "pin_memory": given.dataloader_pin_memory,
        }
        if given.dataloader_num_workers:
            options["persistent_workers"] = given.dataloader_persistent_workers
            options["prefetch_factor"] = given.dataloader_prefetch_factor
            options["multiprocessing_context"] = given.dataloader_multiprocessing_context
        return dataset, options

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        found = super().set_initial_training_values(args, dataloader)
        self._num_epochs = found[0]
        return found

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        job, optimizer, model = self.job, self.optimizer, self.model
        assert job is not None, "train has joined"
        assert model is not None, "the Trainer has prepared it"
        assert optimizer is not None, "the Trainer has made it"
        assert self._feeder is not None, "the Trainer has asked for its loader"
        job.wrap(
            model,
            getattr(optimizer, "optimizer", optimizer),  # the optimizer inside accelerate's wrapper
            find_unused_parameters=self._finds_unused(),
            bucket_cap_mb=self.args.ddp_bucket_cap_mb,
            sync_buffers=self.args.ddp_broadcast_buffers is not False,
        )
        self._loader = job.use_feeder(self._feeder, self._feeder.replicas)
        job.track("scheduler", self.lr_scheduler)
        if self.accelerator.scaler is not None:
            job.track("scaler", self.accelerator.scaler)
        job.track("trainer", TrainerProgress(self))
        self._epochs = job.epochs(self._num_epochs)
        self._epoch = next(self._epochs, None)
        self._follow()
        return prepared

    def _finds_unused(self) -> bool:
        """Return what the Trainer tells DDP."""
        asked = self.args.ddp_find_unused_parameters
        if asked is not None:
            return bool(asked)
        if not isinstance(self.model, transformers.PreTrainedModel):
            return True
        return not (self.model.is_gradient_checkpointing or self.args.gradient_checkpointing)

    # --- epochs, steps, turns ---

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        assert self.job is not None, "train has joined"
        while self._epoch is not None and self._epoch < epoch:
            self._epoch = next(self._epochs, None)
        if self._epoch != epoch:
            return  # the job had passed it when this worker joined
        self._steps = self._loader.__iter__()
        step = self._first_step = next(self._steps, None)
        if step is None:
            return  # the others had completed it
        if step.index:  # a new worker, or a resumed job, begins in the middle
            done = step.index * self.args.gradient_accumulation_steps
            kwargs |= {"resume_from_checkpoint": "", "epochs_trained": epoch, "steps_trained_in_current_epoch": done}
        super()._run_epoch(model, epoch, *args, **kwargs)  # type: ignore[no-untyped-call]
        steps, self._steps = self._steps, iter(())
        if self.control.should_epoch_stop or self.control.should_training_stop:
            steps.close()
        else:
            next(steps, None)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        if self._steps is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        step, self._first_step = self._first_step or next(self._steps, None), None
        if step is None:
            return [], None  # the others have completed the epoch, and we have their state
        self._follow()
        return [*[Inputs(None)] * (num_batches - 1), Inputs(step)], None

    def _take_turns(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of a whole step for every replica hosted here."""
        step, job, device = inputs.step, self.job, self.args.device
        if step is None:
            return torch.zeros((), device=device)
        assert job is not None, "train has joined"
        total = self._count_items(step)
        for batches in step:
            items = self._get_num_items_in_batch(batches, device) if total is None else total
            loss, flos, tokens = torch.zeros((), device=device), 0.0, 0
            for number, batch in enumerate(batches):
                with contextlib.nullcontext() if number == len(batches) - 1 else job.no_sync():
                    loss += type(self).training_step(self, model, batch, items)
                flos += float(self.floating_point_ops(batch))
                tokens += self._count_tokens(batch)
            step.log(loss=loss, flos=flos, tokens=tokens)
        self._follow()
        inputs.flos, inputs.tokens = step["flos"] * job.replicas, round(step["tokens"] * job.replicas)
        return torch.tensor(step["loss"], device=device)

    def _count_items(self, step: Any) -> torch.Tensor | None:
        """Return the number of items that all ranks have in this step, if the loss is a mean over them."""
        if self.num_ranks == 1 or not self._averages_items():
            return None
        for batches in step:
            found = self._get_num_items_in_batch(batches, self.args.device)
            step.log(items=_number(found))
            step.no_backward()
        mean = step["items"]
        return None if mean < 0 else torch.tensor(round(mean * self.num_ranks), device=self.args.device)

    def _averages_items(self) -> bool:
        accepts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return bool(self.args.average_tokens_across_devices and accepts)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._averages_items() and num_items_in_batch is not None:
            loss: Any = found[0] if return_outputs else found
            loss *= self.num_ranks  # DDP takes the mean over all ranks
        return found

    def floating_point_ops(self, inputs: Any) -> int:
        return inputs.flos if isinstance(inputs, Inputs) else super().floating_point_ops(inputs)  # type: ignore[return-value]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if isinstance(inputs, Inputs):
            self.state.num_input_tokens_seen += inputs.tokens
        else:
            super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]

    def _count_tokens(self, batch: Any) -> int:
        seen = self.state.num_input_tokens_seen
        self._track_num_input_tokens(batch)
        tokens, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen - seen, seen
        return tokens

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) * self.num_ranks

    # --- evaluation ---

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_training") or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)
        dataset, options = self._source(dataset, description)
        return EvaluationRounds(self, dataset, batch_size, {**options, "persistent_workers": False})

    def count_items(self, batches: list[Any]) -> Any:
        """Return the number of items in these batches, if the loss is a mean over those of all ranks."""
        return super()._get_num_items_in_batch(batches, self.args.device) if self._averages_items() else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self.round_items is not None:
            return self.round_items
        return super()._get_num_items_in_batch(batch_samples, device)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self._steps is None and self.evaluated_at_start:
            return {}  # a new worker: the others have evaluated before the first step
        found = super()._evaluate(*args, **kwargs)
        self.evaluated_at_start = True
        return found

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as N ranks do. While training, each worker evaluates the batches of the replicas that it hosts."""
        given = self.args
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        whole = given.batch_eval_metrics or "inputs" in given.include_for_metrics
        if not self.is_in_train or whole or not isinstance(dataloader, EvaluationRounds):
            return super().evaluation_loop(dataloader, *rest)
        loss_only = given.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        sizes, outcomes = self._evaluate_together(dataloader, loss_only, ignore_keys)
        remaining, preprocess = iter(outcomes), self.preprocess_logits_for_metrics
        self.prediction_step = lambda *_, **__: next(remaining)  # type: ignore[method-assign]
        self.preprocess_logits_for_metrics = None
        try:
            return super().evaluation_loop(Replayed(dataloader, sizes), *rest)  # type: ignore[arg-type]
        finally:
            self.preprocess_logits_for_metrics = preprocess
            del self.prediction_step

    def _evaluate_together(
        self, rounds: EvaluationRounds, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[list[int | None], list[Any]]:
        """Return the size of each batch and what the model said to it. Every worker evaluates as the ranks of the
        replicas that it hosts."""
        job, model, device = self.job, self.model, self.args.device
        assert job is not None, "train has joined"
        assert model is not None, "it is trained"
        model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()  # type: ignore[union-attr]
        counts: list[list[int]] = []
        if job.replicas > 1 and self._averages_items():
            counts = job.on_replicas(
                lambda rank: [_number(self.count_items([batch])) for batch in rounds.batches_of(rank)], draws=False
            )

        def evaluate(rank: int) -> list[Any]:
            outcomes = []
            for number, batch in enumerate(rounds.batches_of(rank)):
                if number * job.replicas + rank < len(rounds):
                    total = sum(each[number] for each in counts) if counts else -1
                    self.round_items = torch.tensor(total, device=device) if total >= 0 else None
                    size = find_batch_size(batch)  # type: ignore[no-untyped-call]
                    outcomes.append((size, self._predict(model, batch, loss_only, ignore_keys)))
            self.round_items = None
            return outcomes

        found = job.on_replicas(evaluate)
        self._follow()
        ordered = [found[number % job.replicas][number // job.replicas] for number in range(len(rounds))]
        return [size for size, _ in ordered], [outcome for _, outcome in ordered]

    def _predict(self, model: Any, inputs: Any, loss_only: bool, ignore_keys: list[str] | None) -> Any:
        loss, logits, labels = self.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
        if logits is not None and self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)  # type: ignore[arg-type]
        outcome: Any = send_to_device((loss, logits, labels), torch.device("cpu"))
        return outcome

    # --- checkpoints ---

    @property
    def _folder(self) -> str:
        return str(self.args.output_dir)

    def _folder_of(self, asked: str | bool | None) -> str | None:
        """Return the checkpoint to resume from."""
        if not asked:
            return None
        if asked is True:
            folders = Path(self._folder).glob("checkpoint-*/" + JOB_FILE)
            whole = sorted(folders, key=lambda path: int(path.parent.name.partition("-")[2]))
            if not whole:
                raise ConfigError(
                    f"resume_from_checkpoint=True, but no checkpoint-* in {self._folder} has the {JOB_FILE} that ElasticTrainer "
                    "writes: leave the argument out to begin at step 0"
                )
            return str(whole[-1].parent)
        if not Path(asked, JOB_FILE).exists():
            raise ConfigError(
                f"resume_from_checkpoint={str(asked)!r}: there is no {JOB_FILE} with the state of all replicas, because a plain "
                "Trainer has written it, or it was not completed; use one that ElasticTrainer has completed"
            )
        return str(asked)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the Trainer's files on the first worker, and the job's file beside them once the step counts."""
        limit = self.args.save_total_limit
        if self.job is not None and limit:
            self.args.save_total_limit = limit + 1  # one more stays until this one is complete
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.job is not None:
            self.state.best_model_checkpoint = self.job.gather(self.state.best_model_checkpoint)[0]
            self._follow()
            if not self.args.save_only_model:
                self.job.save(str(Path(self._folder, f"checkpoint-{self.state.global_step}", JOB_FILE)))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.job is None:  # else the job's file has those of all replicas
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.job is None:
            super()._load_rng_state(checkpoint)

    # --- what one worker does for all ---

    def _follow(self) -> None:
        """Make the first worker the one that prints and writes files, for transformers and accelerate."""
        assert self.job is not None, "train has joined"
        place, state, is_first = PartialState(), self.state, self.job.is_first
        place.process_index = place.local_process_index = self.job.rank
        is_promoted = is_first and not state.is_world_process_zero
        state.is_world_process_zero = state.is_local_process_zero = is_first
        for each in self.callback_handler.callbacks if is_promoted else ():
            if isinstance(each, transformers.ProgressCallback):
                each.on_train_begin(self.args, state, self.control)  # type: ignore[no-untyped-call]

    def is_world_process_zero(self) -> bool:
        return self.job is None or self.job.is_first

    def is_local_process_zero(self) -> bool:
        return self.is_world_process_zero()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does. All workers keep the first one's figures, times among them."""
        super().log(logs, *args, **kwargs)
        if self.job is not None and self.is_in_train:
            row = self.state.log_history[-1] = self.job.gather(self.state.log_history[-1])[0]
            logs.update({name: row[name] for name in logs if name in row})
            self._follow()


def _number(items: Any) -> int:
    return -1 if items is None else int(items)


class _Seeding:
    """Seeds a loader process as the Trainer does. (The loader has added what depends on the rank to its seed.)"""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def __call__(self, worker: int) -> None:
        seed_worker(worker, num_workers=self._num_workers, rank=0)
