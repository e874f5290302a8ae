"""`pliant.join()` and the `Job` that a training program works with.

    job = pliant.join(replicas=4)
    model, optimizer, loader = job.wrap(model, optimizer, dataset, batch_size=32)
    for epoch in job.epochs(10):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

The body of the loop runs once for each replica that this worker hosts: each run is one replica's turn. Whatever belongs
to the step as a whole (the optimizer, tracked schedulers and scalers) runs in the last turn and is a no-op in the others.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pliant.adapt import Observation, Policy
from pliant.adapt.monitors import wants_stall_detection
from pliant.cluster import PortRange, Worker
from pliant.elastic.member import open_member
from pliant.errors import CheckpointError, CommError, ConfigError, NotLaunched, TrainError
from pliant.identity import WorkerSpec, worker_spec
from pliant.train import determinism, obstacles, trace
from pliant.train.adaptation import Adaptation, AdaptationSettings, adaptation_settings
from pliant.train.checkpoint import Checkpointing, set_initial_state
from pliant.train.deferred import DeferredUpdates, gate_evaluation, gate_state
from pliant.train.events import StepCommitted, ViewChange
from pliant.train.feeder import ReplicaLoader
from pliant.train.gradient_probe import GradientProbe
from pliant.train.gradients import GradientReducer
from pliant.train.optim import AveragingOptimizer, find_averaging
from pliant.train.rendezvous import JobState, Left, ViewRendezvous
from pliant.train.replicas import Blocks, Replicas, ReplicaSwitch
from pliant.train.sampling import loader_options
from pliant.train.sync import SyncStats, SyncTuner, check_sync_options
from pliant.train.trainer import Trainer, UserObjects
from pliant.train.wrapping import (
    check_epoch,
    check_optimizers,
    check_tracked,
    describe_program,
    make_probe,
    refuse_untracked_scalers,
    trainable_parameters,
    why_no_priority,
    wrap_optimizer,
    wrap_tracked,
)

__all__ = ["Job", "Left", "Loader", "StepCommitted", "ViewChange", "join"]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def join(
    replicas: int | None = None,
    *,
    determinism: str | None = None,
    sync: str = "fifo",
    slice_bytes: int | None = None,
    in_flight_bytes: int | None = None,
    blocks: Blocks | None = None,
    seed: int | None = None,
    policies: Sequence[Policy] = (),
    monitor: Mapping[str, int] | None = None,
    record: str = "",
    replay: str = "",
) -> Job:
    """Join the job that this process was started for. Without a launcher, start a job with this worker alone.

    Args:
        replicas: N, the number of data-parallel ranks of the training; fixed for the life of the job. If None, there is
            one replica per worker, and N follows the number of workers (weak scaling), so the result depends on them.
        determinism: "D0" (equal bits as long as the workers stay the same), "D1" (equal bits on any workers of one
            kind; the default) or "D2" (also on machines of different kinds, at a price).
        sync: how sums travel; it never changes a bit. "fifo": in the order in which backward makes them, and the
            optimizer waits for all. "priority": what the next forward needs first goes first, and each parameter is
            updated when its sum arrives, while the forward already runs. "auto": priority if the network is slow enough
            for it to help. ("slicing" and "baseline" exist for comparison.)
        slice_bytes: the largest slice of a gradient with priority. If None, it is tuned while running.
        in_flight_bytes: how much may be in the network at once. If None, it is tuned while running.
        blocks: a function from the number of workers to the number of replicas on each; even blocks by default.
        seed: seed all random generators of replica r with seed + r after the model was built. If None, all replicas
            start with the random state of the program, as in a DDP script with one seed.
        policies: policies that adapt the job while it runs, after those of `pliant run --policy`.
        monitor: what to measure, and every how many steps: {"noise_scale": 1, "variance": 8}. Policies add what they
            need.
        record: a file to append the facts of the run to. Its decisions can be replayed.
        replay: such a file. Its decisions on batch sizes and learning rates replace those of the policies.
    """
    if replicas is not None and (isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1):
        raise ConfigError(f"replicas={replicas!r}: use a number of 1 or more, or None for one per worker")
    try:
        spec = worker_spec()
    except NotLaunched:
        spec = None
    level = _level(determinism, spec)
    check_sync_options(sync, slice_bytes, in_flight_bytes)
    adapting = adaptation_settings(spec, policies, monitor or {}, record, replay)
    return Job(spec, replicas, level, blocks, seed, (sync, slice_bytes, in_flight_bytes), adapting)


def _level(asked: str | None, spec: WorkerSpec | None) -> determinism.Level:
    given = spec.determinism if spec is not None else ""
    if asked and given and asked.upper() != given.upper():
        raise ConfigError(f"determinism={asked!r} in the program, but --determinism {given}: give one of them")
    return determinism.level_of(asked or given or "D1")


class Loader:
    """The data loader of a job: yields the batches of the hosted replicas, in turn. Iterate over it inside
    `job.epochs`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Any]:
        trainer = self._job._running()
        return trainer.steps()

    def __len__(self) -> int:
        """Return the number of batches of one replica in an epoch, at the present batch size."""
        return self._job._need_trainer().replicas.num_batches


class Job:
    """One worker's handle on a training job. Made by `pliant.join`."""

    def __init__(
        self,
        spec: WorkerSpec | None,
        replicas: int | None,
        level: determinism.Level,
        blocks: Blocks | None,
        seed: int | None,
        sync: tuple[str, int | None, int | None] = ("fifo", None, None),
        adapting: AdaptationSettings | None = None,
    ) -> None:
        self._sync = sync
        self._adapting = adapting or AdaptationSettings()
        self._spec, self._level, self._blocks, self._seed = spec, level, blocks, seed
        self._asked = replicas
        self._stack = contextlib.ExitStack()
        self._member = self._stack.enter_context(open_member(spec))
        self._tracked: dict[str, Any] = {}
        self._trainer: Trainer | None = None
        self._state: JobState | None = None
        self._rendezvous: ViewRendezvous | None = None
        self._checkpointing: Checkpointing | None = None
        self._load_path = spec.resume if spec is not None else ""
        self._schedule = dict(spec.resize_schedule) if spec is not None else {}
        self._inside_epochs = False
        self._notified = False
        self._commit_listeners: list[Callable[[StepCommitted], None]] = []
        self._view_listeners: list[Callable[[ViewChange], None]] = []
        self.pinned = determinism.pin(level, torch.device("cpu"))
        """The settings that this level of determinism has pinned in this process."""
        atexit.register(self.close)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if spec is not None and spec.elastic and in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._leave)

    # --- who and where ---

    @property
    def replicas(self) -> int:
        """N, the number of replicas."""
        if self._trainer is not None:
            return self._trainer.replicas.count
        return self._asked or max(1, self._spec.view.size if self._spec else 1)

    @property
    def rank(self) -> int:
        """This worker's rank in the present view."""
        return self._trainer.engine.rank if self._trainer is not None and self._trainer.engine is not None else 0

    @property
    def size(self) -> int:
        """The number of workers now."""
        if self._trainer is not None and self._trainer.engine is not None:
            return self._trainer.engine.view.size
        return self._spec.view.size if self._spec is not None else 1

    @property
    def view(self) -> int:
        """The number of the present view; it grows with every change of the workers."""
        return max(0, self._member.entered)

    @property
    def replica(self) -> int | None:
        """The replica whose turn it is; None outside of the loop over the loader."""
        turn = self._trainer.turn if self._trainer is not None else None
        return turn.replica if turn is not None else None

    @property
    def hosted(self) -> range:
        """The replicas that this worker hosts now."""
        return self._trainer.hosted if self._trainer is not None else range(0)

    @property
    def step(self) -> int:
        """The number of committed steps; the step in progress is not counted."""
        return self._trainer.progress.step if self._trainer is not None else 0

    @property
    def epoch(self) -> int:
        return self._trainer.progress.epoch if self._trainer is not None else 0

    @property
    def committing(self) -> bool:
        """Whether the program may now do what belongs to the step: true in the last turn, after backward.

        With priority sync this waits for all sums of the step, because a program that asks is about to use them.
        """
        trainer = self._trainer
        if trainer is None:
            return True
        if trainer.may_commit and trainer.deferred.is_pending:
            trainer.deferred.warn_once(
                "sync: the program asks job.committing, which waits for all sums: priority cannot help"
            )
            trainer.wait_for_sums()
        return trainer.may_commit

    @property
    def batch_size(self) -> int:
        """The present batch size of one replica."""
        return self._need_trainer().replicas.loading.batch_size

    @property
    def observation(self) -> Observation | None:
        """The job after the last step, as the policies saw it. None before the second step, or if nothing is monitored."""
        return self._need_trainer().adaptation.observation

    def report(self, **values: float) -> None:
        """Add values of the step in progress (such as the loss) to the record. The record takes those of the first
        worker."""
        self._need_trainer().adaptation.values.update({name: float(value) for name, value in values.items()})

    def sync_stats(self) -> SyncStats:
        """Return how the sums travel now, and how long the program has waited for the network."""
        return self._need_trainer().sync.stats()

    @property
    def changes(self) -> list[ViewChange]:
        """The changes of view that this worker has stayed through."""
        return list(self._trainer.changes.seen) if self._trainer is not None else []

    # --- listeners, for records, checkpoints and measurements ---

    def on_commit(self, listener: Callable[[StepCommitted], None]) -> None:
        """Call `listener` on this worker after each committed step, before the next one begins."""
        self._commit_listeners.append(listener)

    def on_view_change(self, listener: Callable[[ViewChange], None]) -> None:
        """Call `listener` on this worker after each change of the workers that it has stayed through.

        The call comes with the first batch of the new view, so `pause_s` covers the whole pause.
        """
        self._view_listeners.append(listener)

    @property
    def has_pending_updates(self) -> bool:
        """Whether sums of the last committed step are still on their way, as they may be with sync="priority"."""
        return self._trainer is not None and self._trainer.deferred.is_pending

    @property
    def committed_buffers(self) -> list[torch.Tensor]:
        """The buffers of replica 0 at the last committed step: those that DDP would keep."""
        return self._need_trainer().first_buffers

    @property
    def prepared_view(self) -> int:
        """The newest view that this worker is connected for. It is entered at a step's boundary once all workers are
        ready."""
        return self._member.prepared

    @property
    def gradient_probe(self) -> GradientProbe | None:
        """The monitor of noise scale and variance; None if neither was asked for."""
        return self._need_trainer().gradients.probe

    @property
    def replica_switch(self) -> ReplicaSwitch:
        """The object that swaps the hosted replicas between turns. A benchmark may replace it with a wrapper that
        measures."""
        return self._need_trainer().replica_switch

    @replica_switch.setter
    def replica_switch(self, switch: ReplicaSwitch) -> None:
        self._need_trainer().replica_switch = switch

    # --- wrapping ---

    def wrap(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        data: Any,
        *,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        sync_buffers: bool = True,
        **loading: Any,
    ) -> tuple[torch.nn.Module, Any, Loader]:
        """Make a plain model, optimizer (or several) and dataset (or DataLoader) those of the job.

        Args:
            find_unused_parameters: as in DDP: some parameters may get no gradient in some steps.
            bucket_cap_mb: as in DDP; it affects the bits.
            sync_buffers: if true, every replica begins a step with the buffers of replica 0, as in DDP. If false, with
                its own.
            loading: batch_size, shuffle, seed, num_workers and so on, if `data` is a dataset.

        Raises:
            Unsliceable: replicas cannot take turns on this model; the message says why and what to do.
        """
        if self._trainer is not None:
            raise TrainError(
                "job.wrap was called twice: a job trains one model; wrap several modules in one ModuleList"
            )
        obstacles.check(model)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        parameters = trainable_parameters(model)
        check_optimizers(optimizers, parameters)
        averaging = find_averaging(optimizers)
        dataset, options = loader_options(data, **loading)
        device = parameters[0][1].device
        if device.type != "cpu":
            self.pinned = determinism.pin(self._level, device)
        replicas = Replicas(self.replicas, len(dataset), options)
        feeder = self._stack.enter_context(ReplicaLoader(dataset, options, replicas.count))
        check_epoch(replicas)
        follows_view = self._asked is None and self._spec is not None
        gradients = GradientReducer(
            parameters,
            replicas.count,
            find_unused=find_unused_parameters,
            cap_bytes=None if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20)),
            always_sums=follows_view,
            on_backward=lambda: trainer.end_turn(),
            before_backward=lambda: deferred.unused_parameters(),
        )
        deferred = DeferredUpdates(
            gradients.parameters,
            gradients.names,
            can_undo=self._member.elastic,
            notify=self._notify_first,
            optimizers=optimizers,
        )
        tuner = SyncTuner(self._sync_mode(model, averaging), *self._sync[1:], notify=self._notify_first)
        trainer = self._trainer = Trainer(
            self._member,
            UserObjects(model, optimizers, feeder, sync_buffers, device),
            replicas,
            gradients,
            deferred,
            tuner,
            self._blocks,
            follows_view=follows_view,
            keeps_layout=self._level != "D0",
        )
        probe = gradients.probe = make_probe(self._adapting.monitors, gradients, optimizers, averaging)
        trainer.adaptation = Adaptation(self._adapting, trainer, options.batch_size, probe, self._notify)
        trainer.loss_scale = self._loss_scale
        if self._adapting.metrics or self._adapting.tensorboard or wants_stall_detection():
            from pliant.train.exporters import start_exporters  # loads libraries that most jobs do not need

            worker = self._spec.worker if self._spec is not None else Worker("127.0.0.1", PortRange().begin)
            start_exporters(trainer, self._adapting, worker, self._stack, self._notify)
        self._member.max_members = None if follows_view else replicas.count
        program = describe_program(parameters, replicas, follows_view=follows_view)
        self._connect_state(trainer, program + (f", {averaging.describe()}" if averaging is not None else ""), device)
        assert self._rendezvous is not None
        if averaging is not None:
            averaging.attach(gradients, self._rendezvous.equalise)
            trainer.averaging = averaging
        trainer.on_commit = self._committed
        self._view_listeners.insert(0, self._rendezvous.announce)
        trainer.changes.listeners = self._view_listeners
        for each in optimizers:
            wrap_optimizer(each, self._running, lambda: self._trainer)
            gate_state(each, deferred)
        self._stack.callback(gate_evaluation(model, deferred))
        self._stack.callback(refuse_untracked_scalers(self._tracked, lambda: self._trainer))
        return model, optimizer, Loader(self)

    def _connect_state(self, trainer: Trainer, program: str, device: torch.device) -> None:
        """Set up the exchange of the job's state with other workers and with checkpoints."""
        state = self._state = JobState(trainer, self._tracked)
        directory = self._spec.checkpoint_dir if self._spec is not None else ""
        every = self._spec.checkpoint_every if self._spec is not None else 0
        self._checkpointing = Checkpointing(trainer, state, directory, every, self._level, self._notify)
        self._rendezvous = ViewRendezvous(
            self._member,
            trainer,
            state,
            f"{program}, {self._adapting}",
            determinism.fingerprint(device),
            self._level,
            self._start_job,
            self._checkpointing.write_last,
            self._notify,
        )
        trainer.enter_next_view = self._rendezvous.enter_next_view

    def _loss_scale(self) -> float:
        scalers = [thing for thing in self._tracked.values() if isinstance(thing, torch.amp.GradScaler)]
        return math.prod(scaler.get_scale() for scaler in scalers)

    def _sync_mode(self, model: torch.nn.Module, averaging: AveragingOptimizer | None) -> str:
        """Return the sync mode that was asked for, or "fifo" if this model cannot have it."""
        asked = self._sync[0]
        reason = why_no_priority(model, averaging)
        if asked == "fifo" or not reason:
            return asked
        if asked != "auto":
            self._notify(f"sync: {asked!r} is not possible, because {reason}; using 'fifo'")
        return "fifo"

    def track(self, name: str, thing: Any) -> Any:
        """Make `thing` (an LR scheduler, a GradScaler, an EMA: anything with a state_dict) part of the job's state.

        Its `step`, `update`, `update_parameters` and `unscale_` then run once per step, whatever the number of replicas
        hosted here. Returns `thing`.
        """
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TrainError(f"track({name!r}): a {type(thing).__name__} has no state_dict and load_state_dict")
        if name in self._tracked:
            raise TrainError(f"track({name!r}): there is already something under that name")
        if self._rendezvous is not None and self._rendezvous.has_state:
            raise TrainError(f"track({name!r}): the job is running; track before job.epochs")
        self._tracked[name] = thing
        if not isinstance(thing, torch.optim.Optimizer):
            wrap_tracked(name, thing, lambda: self._trainer)
        return thing

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate the gradients of backwards in this block, as DDP's `no_sync` does."""
        if self._trainer is None:
            yield
            return
        self._trainer.gradients.no_sync = True
        try:
            yield
        finally:
            self._trainer.gradients.no_sync = False

    # --- running ---

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`. A new worker, or a resumed job, begins at the job's present epoch."""
        trainer = self._need_trainer()
        check_tracked(trainer.user.optimizers, self._tracked)
        assert self._rendezvous is not None
        if not self._rendezvous.has_state:
            self._member.start()
            self._rendezvous.join()
        trace.begin(self.rank)
        trainer.trace_engine()
        self._inside_epochs = True
        try:
            while trainer.progress.epoch < count:
                epoch = trainer.progress.epoch
                yield epoch
                if trainer.progress.epoch == epoch:
                    trainer.progress.epoch += 1
                    trainer.progress.epoch_step = 0
                trainer.catching_up = False
            self._finish()
        finally:
            self._inside_epochs = False

    def _finish(self) -> None:
        """Leave once every worker has the last step: until then one of them may need this worker's state."""
        trainer = self._need_trainer()
        assert self._rendezvous is not None
        while self.size > 1:
            assert trainer.engine is not None
            try:
                trainer.engine.barrier("finish")
                break
            except CommError as error:
                trainer.mark_torn(error)
                try:
                    self._rendezvous.enter_next_view()
                except Left:
                    if not self._member.over:
                        raise
                    trainer.torn = None  # another worker has passed the barrier, so all of them have the last step
                    break
        if self._checkpointing is not None:
            self._checkpointing.flush()
        trainer.adaptation.end_job()
        self._member.finish()

    def resize(self, num_workers: int) -> None:
        """Request another number of workers; 0 ends the job. It takes effect at a later step's boundary."""
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ConfigError(f"resize({num_workers!r}): use a number of workers, 0 or more")
        if self.committing and self.rank == 0:
            self._member.resize(num_workers)

    def close(self) -> None:
        """Leave the job. This happens by itself when the program ends."""
        atexit.unregister(self.close)
        if self._checkpointing is not None:
            self._checkpointing.close()
        if self._trainer is not None:
            self._trainer.gradients.close()
            self._trainer.adaptation.close()
            with contextlib.suppress(CommError):
                if not self._trainer.wait_for_sums():
                    self._trainer.undo_step()
        self._stack.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _need_trainer(self) -> Trainer:
        if self._trainer is None:
            raise TrainError("the job has nothing to train yet: call job.wrap(model, optimizer, data) first")
        return self._trainer

    def _running(self) -> Trainer:
        trainer = self._need_trainer()
        if not self._inside_epochs:
            raise TrainError("use the loader and the optimizer inside of `for epoch in job.epochs(k):`")
        return trainer

    def _committed(self) -> None:
        """Run what follows a committed step: scheduled resizes, checkpoints, listeners."""
        trainer = self._need_trainer()
        assert self._checkpointing is not None
        if trainer.is_first:
            size = self._schedule.get(trainer.progress.step)
            if size is not None:
                trainer.request_workers(size)
        self._checkpointing.on_commit()
        if self._commit_listeners:
            progress, (duration_s, compute_s) = trainer.progress, trainer.step_times
            event = StepCommitted(
                progress.step,
                progress.epoch,
                progress.epoch_step,
                self.size,
                self.rank,
                duration_s,
                compute_s,
                trainer.adaptation.last_values,
            )
            for listener in self._commit_listeners:
                listener(event)

    # --- checkpoints ---

    def save(self, path: str = "") -> None:
        """Write a checkpoint of the step in progress once it is committed. Rank 0 writes it in the background.

        Without a path it goes to `--checkpoint-dir`.
        """
        if not path and not (self._spec and self._spec.checkpoint_dir):
            raise ConfigError("job.save() needs a path, or `pliant run --checkpoint-dir DIR`")
        self._need_trainer()
        assert self._checkpointing is not None
        self._checkpointing.request(path)

    def load(self, path: str) -> None:
        """Start from this checkpoint: a file, or the newest of a directory. Call it before `epochs`."""
        if self._rendezvous is not None and self._rendezvous.has_state:
            raise TrainError("job.load: the job is running; load before job.epochs")
        if not Path(path).exists():
            raise CheckpointError(f"{path}: there is no such checkpoint")
        self._load_path = path

    def _start_job(self, had_state: bool) -> None:
        """Set the state that the job starts with: from a checkpoint, or as the program has built it."""
        assert self._state is not None
        set_initial_state(
            self._need_trainer(),
            self._state,
            had_state,
            asked=self._load_path,
            directory=self._spec.checkpoint_dir if self._spec is not None else "",
            seed=self._seed,
            notify=self._notify,
        )

    # --- messages and signals ---

    def _notify_first(self, text: str) -> None:
        if self.rank == 0:
            self._notify(text)

    def _notify(self, text: str) -> None:
        print(text, flush=True)

    def _leave(self, signum: int, frame: object) -> None:
        """Leave the job at the next step's boundary: SIGTERM is the notice that this machine will be taken away.

        Exit at once if the job has not begun, or if it is being left already.
        """
        if self._rendezvous is None or not self._rendezvous.has_state or self._notified:
            sys.exit(0)
        self._notified = True
        self._member.leave()
