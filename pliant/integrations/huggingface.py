"""Hugging Face's Trainer as an elastic job: the program, and its result, stay the same when workers come and go.

    from pliant.integrations.huggingface import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=args, train_dataset=dataset, replicas=4)
    trainer.train()

To the Trainer, this is a single process with one batch per step. `training_step` runs the turns of all hosted replicas for
that batch. What the Trainer does once per step (clipping, optimizer, scheduler, logs) happens once.

Differences from a Trainer under torchrun: samples are dealt as by torch's DistributedSampler. The loss of a batch is the
mean over its own tokens. The logged loss is that of the replicas on the first worker. Every worker evaluates on the whole
evaluation set, so that all make the same decisions, and random numbers drawn there do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import pliant
from pliant.errors import ConfigError, TrainError
from pliant.torchvision_import import import_torchvision
from pliant.train.sampling import loader_options, num_batches

with contextlib.suppress(ConfigError):  # torchvision may not be installed
    import_torchvision()  # transformers imports it, which fails beside a torch for CPUs

import transformers
from transformers.trainer_utils import TrainOutput

STRATEGIES = ("random", "sequential")


class StepLoader:
    """The training data as the Trainer sees them: one item per step, the batch of the first turn."""

    def __init__(self, owner: ElasticTrainer, length: int) -> None:
        self._owner, self._length = owner, length
        self.dataset = owner.train_dataset

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._owner.begin_epoch()


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
        self._loader: Any = None
        self._epochs: Iterator[int] = iter(())
        self._epoch: int | None = None
        """The job's epoch; None if there are no more."""
        self._turns: Any = None
        self._given = 0
        """Steps of the Trainer's epoch so far."""
        super().__init__(*args, **kwargs)

    # --- a job around the Trainer's loop ---

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as the Trainer does. It can be called once."""
        if resume_from_checkpoint:
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: a checkpoint of the Trainer has one replica's state; use "
                "`pliant run --checkpoint-dir DIR --checkpoint-every N`, and `--resume auto`"
            )
        if self.job is not None:
            raise TrainError("train was called twice: a job trains once; make another ElasticTrainer")
        self._check()
        replicas, options = self._asked
        self.job = pliant.join(replicas, **options)
        try:
            trained = super().train(None, *args, **kwargs)
            while self._epoch is not None:  # a training that stops early ends at the same step for all
                self._epoch = next(self._epochs, None)
            return trained
        finally:
            self.job.close()

    def _check(self) -> None:
        given = self.args
        if given.gradient_accumulation_steps > 1:
            raise ConfigError(
                f"gradient_accumulation_steps={given.gradient_accumulation_steps}: replicas on one worker take turns; use "
                "that many times the replicas instead"
            )
        if given.fp16:
            raise ConfigError("fp16=True: a job cannot track the scaler inside of accelerate; use bf16=True")
        if given.train_sampling_strategy not in STRATEGIES:
            raise ConfigError(
                f"train_sampling_strategy={given.train_sampling_strategy!r}: samples are dealt to replicas as by torch's "
                f"DistributedSampler; use one of {', '.join(STRATEGIES)}"
            )
        if given.world_size > 1:
            raise ConfigError("the Trainer was started by torchrun: start it with `pliant run`, or alone")
        if given.n_gpu > 1:
            raise ConfigError(f"{given.n_gpu} GPUs in one worker: use `pliant run`, which gives each worker one")

    def get_train_dataloader(self) -> Any:
        dataset, options = self._data()
        assert self.job is not None, "train has joined"
        return StepLoader(self, num_batches(len(dataset), self.job.replicas, options))

    def _data(self) -> tuple[Any, Any]:
        if self.train_dataset is None:
            raise ConfigError("train_dataset=None: there is nothing to train on")
        return loader_options(self.train_dataset, **self._loading())

    def _loading(self) -> dict[str, Any]:
        given = self.args
        loading = {
            "batch_size": self._train_batch_size,
            "shuffle": given.train_sampling_strategy == "random",
            "seed": given.seed if given.data_seed is None else given.data_seed,
            "collate_fn": self._get_collator_with_removed_columns(self.data_collator, description="training"),
            "num_workers": given.dataloader_num_workers,
            "drop_last": given.dataloader_drop_last,
            "pin_memory": given.dataloader_pin_memory and torch.cuda.is_available(),
        }
        if given.dataloader_num_workers:
            loading["persistent_workers"] = given.dataloader_persistent_workers
            loading["prefetch_factor"] = given.dataloader_prefetch_factor
        return loading

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        given = self.args
        prepared = super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        job, optimizer = self.job, self.optimizer
        assert job is not None, "train has joined"
        assert self.model is not None, "the Trainer has prepared it"
        assert optimizer is not None, "the Trainer has made it"
        checkpointing = given.gradient_checkpointing or getattr(self.model, "is_gradient_checkpointing", False)
        unused = given.ddp_find_unused_parameters
        _, _, self._loader = job.wrap(
            self.model,
            getattr(optimizer, "optimizer", optimizer),  # the optimizer inside accelerate's wrapper
            self.train_dataset,
            find_unused_parameters=not checkpointing if unused is None else unused,
            bucket_cap_mb=given.ddp_bucket_cap_mb,
            sync_buffers=given.ddp_broadcast_buffers is not False,
            **self._loading(),
        )
        job.track("scheduler", self.lr_scheduler)
        self._epochs = job.epochs(-(-max_steps // len(train_dataloader)))
        self._epoch = next(self._epochs, None)
        self._follow()
        return prepared

    # --- epochs, steps, turns ---

    def begin_epoch(self) -> Iterator[Any]:
        """Yield the steps that are left of the job's epoch. A new worker begins in the middle of one."""
        self._turns = iter(self._loader)
        for batch in self._turns:
            self._given += 1
            self._follow()
            yield batch

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        if self._epoch is None or epoch < self._epoch:
            return  # the job had passed it when this worker joined
        self._given, stops = 0, self.control.should_training_stop
        super()._run_epoch(model, epoch, *args, **kwargs)  # type: ignore[no-untyped-call]
        if self._turns is not None:
            self._turns.close()  # if it was stopped early, a complete step counts
        if not self._given:  # the others had completed the epoch: it was not empty
            self.control.should_training_stop = stops
        self._epoch = next(self._epochs, None)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward for every hosted replica. A torn step is repeated."""
        assert self.job is not None, "train has joined"
        losses = [super().training_step(model, inputs, num_items_in_batch)]
        while not self.job.committing:
            batch = next(self._turns, None)
            if batch is None:
                break  # the others have completed the epoch, and we have their state
            model.zero_grad()
            losses.append(super().training_step(model, batch, self._get_num_items_in_batch([batch], self.args.device)))
        return torch.stack(losses).mean()

    def _follow(self) -> None:
        """Tell the Trainer the job's progress, which a new worker cannot have counted."""
        assert self.job is not None, "train has joined"
        self.state.global_step = self.job.step
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.job.rank == 0

    # --- what one worker does for all ---

    def is_world_process_zero(self) -> bool:
        return self.job is None or self.job.rank == 0

    def is_local_process_zero(self) -> bool:
        return self.is_world_process_zero()

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) * (self.job.replicas if self.job is not None else 1)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            super()._save_checkpoint(*args, **kwargs)
