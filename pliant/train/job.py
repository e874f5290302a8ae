"""The `Job` that a training program works with.

    job = pliant.join(replicas=4)
    model, optimizer = job.wrap(model, optimizer)
    loader = job.loader(dataset, batch_size=32)
    for epoch in job.epochs(10):
        for step in loader:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

The body of the inner loop is a turn: it runs once for each replica hosted here, with that replica's batch, random state
and buffers. The body of the outer loop runs once per step on every worker.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from pliant.adapt import Observation
from pliant.cluster import View
from pliant.elastic.member import open_member
from pliant.errors import SHADOW_EXIT, CheckpointError, CommError, ConfigError, TrainError
from pliant.identity import WorkerSpec
from pliant.train import determinism, obstacles, operators, trace
from pliant.train.assembly import Assembled, Declared, JobServices, JobSettings, Wrapped, assemble
from pliant.train.checking import StepDigests
from pliant.train.context import restore_rng, seeded_rng
from pliant.train.evaluation import NO_EVALUATION, ShardedEvaluation, all_reduce, gather, run_on_first, run_on_replicas
from pliant.train.events import Listeners, StepCommitted, ViewChange
from pliant.train.feeder import Feeder, NumberFeeder
from pliant.train.gradient_probe import GradientProbe
from pliant.train.job_control import WorkerRequests, announce
from pliant.train.job_data import Loader, make_feeder
from pliant.train.loops import EpochLoop
from pliant.train.optim import find_averaging
from pliant.train.replicas import Replicas, ReplicaSwitch
from pliant.train.sampling import LoaderOptions, loader_options
from pliant.train.shadow import Shadow
from pliant.train.step import Step, Steps
from pliant.train.sync import SyncStats
from pliant.train.trainer import Trainer
from pliant.train.wrapping import (
    StateNamespace,
    as_list,
    check_epoch,
    check_optimizers,
    trainable_parameters,
    whole_number,
)
from pliant.uncaught import NO_SHADOW, end_with, enter_shadow, explain_uncaught, is_failing

Models = torch.nn.Module | Sequence[torch.nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_STATE = "job.state"
"""The name under which the program's own state is tracked."""


class Job:
    """One worker's handle on a training job. Made by `pliant.join`."""

    def __init__(self, spec: WorkerSpec | None, settings: JobSettings) -> None:
        self._spec, self._settings = spec, settings
        self._stack = contextlib.ExitStack()
        self._member = self._stack.enter_context(open_member(spec))
        self._requests = WorkerRequests(
            self._member,
            dict(spec.resize_schedule) if spec is not None else {},
            lambda: self._parts is not None and self._parts.rendezvous.has_state,
            self._notify,
        )
        self._listeners = Listeners(commit=[self._requests.follow_schedule, self._checkpoint], view=[self._announce])
        self._declared = Declared(load_path=spec.resume if spec is not None else "")
        self._parts: Assembled | None = None
        """The parts of the job, once it runs."""
        self._shadow: Shadow | None = None
        """The warm-up of this new worker, while it lasts."""
        self._has_left_shadow = False
        """Whether the program has left its loop meanwhile. This ends with the next thing that it does with the job."""
        self._evaluation: ShardedEvaluation | None = None
        self._loop: EpochLoop | None = None
        """The loop over the steps of the present epoch; None outside of `epochs`."""
        self._is_finished = False
        determinism.pin(settings.level, torch.device("cpu"))
        if settings.allow:
            self._stack.callback(operators.allow(settings.allow))
        explain_uncaught(self._explain)
        atexit.register(self._end_program)
        if spec is not None and spec.elastic:
            self._requests.leave_on_sigterm()

    @property
    def _trainer(self) -> Trainer | None:
        return self._parts.trainer if self._parts is not None else None

    # --- who and where ---

    @property
    def replicas(self) -> int:
        """N, the number of replicas."""
        if self._declared.data is not None:
            return self._declared.data[1].count
        return self._settings.replicas or self.size

    @property
    def _view(self) -> View | None:
        """The present view; before the job runs, the one that this worker was started for."""
        engine = self._trainer.engine if self._trainer is not None else None
        if engine is not None:
            return engine.view
        return self._spec.view if self._spec is not None else None

    @property
    def rank(self) -> int:
        """This worker's rank in the present view."""
        if self._parts is not None and self._parts.trainer.engine is not None and not self.in_shadow:
            return self._parts.trainer.engine.rank
        view, me = self._view, self._member.me
        rank = view.rank_of(me) if view is not None and me in view.workers else 0
        return max(1, rank) if self.in_shadow else rank  # it is not the first, whatever it was started as

    @property
    def size(self) -> int:
        """The number of workers now."""
        return max(1, self._view.size) if self._view is not None else 1

    @property
    def in_shadow(self) -> bool:
        """Whether this new worker only warms up: what its program does until the next step, or the next epoch, has no
        effect on the job."""
        if self._has_left_shadow:
            self._leave_shadow("the program has left its loop")
        return self._shadow is not None

    @property
    def is_first(self) -> bool:
        """Whether this worker has rank 0: the one to print, and to write files."""
        return self.rank == 0

    @property
    def view(self) -> int:
        """The number of the present view; it grows with every change of the workers."""
        return max(0, self._member.entered)

    @property
    def replica(self) -> int | None:
        """The replica whose turn it is; None outside of the loop over a step."""
        running = self._shadow or self._trainer
        turn = running.turn if running is not None else None
        return turn.replica if turn is not None else None

    @property
    def hosted(self) -> range:
        """The replicas that this worker hosts now."""
        if self._shadow is not None:
            return range(self._shadow.replica, self._shadow.replica + 1)
        return self._trainer.hosted if self._trainer is not None else range(0)

    @property
    def step(self) -> int:
        """The number of committed steps; the step in progress is not counted."""
        return self._trainer.progress.step if self._trainer is not None else 0

    @property
    def epoch(self) -> int:
        return self._trainer.progress.epoch if self._trainer is not None else 0

    @property
    def batch_size(self) -> int:
        """The present batch size of one replica."""
        return self._need_trainer().replicas.loading.batch_size

    @property
    def observation(self) -> Observation | None:
        """The job after the last step, as the policies saw it. None before the second step, or if nothing is monitored."""
        return self._need_trainer().adaptation.observation

    def report(self, **values: float) -> None:
        """Add values of the step in progress to the record, beside what its turns log. The record takes those of the
        first worker."""
        adaptation = self._need_trainer().adaptation
        for name, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"job.report({name}={value!r:.60}): use a number") from None
            if not self.in_shadow:
                adaptation.values[name] = number

    def sync_stats(self) -> SyncStats:
        """Return how the sums travel now, and how long the program has waited for the network."""
        return self._need_trainer().sync.stats()

    @property
    def changes(self) -> list[ViewChange]:
        """The changes of view that this worker has stayed through."""
        return list(self._trainer.changes.seen) if self._trainer is not None else []

    # --- listeners, for records, checkpoints and measurements ---

    def on_commit(self, listener: Callable[[StepCommitted], None]) -> None:
        """Call `listener` on this worker after each committed step, before the next one begins. An error that it raises
        ends this worker, like any other error of the program."""
        self._listeners.commit.append(listener)
        self._listeners.want_values = True

    def on_view_change(self, listener: Callable[[ViewChange], None]) -> None:
        """Call `listener` on this worker after each change of the workers that it has stayed through.

        The call comes with the first batch of the new view, so `pause_s` covers the whole pause.
        """
        self._listeners.view.append(listener)

    @property
    def has_pending_updates(self) -> bool:
        """Whether sums of the last committed step are still on their way, as they may be with sync="priority"."""
        return self._trainer is not None and self._trainer.deferred.is_pending

    @property
    def prepared_view(self) -> int:
        """The newest view that this worker is connected for. It is entered at a step's boundary once all workers are
        ready."""
        return self._member.prepared

    @property
    def gradient_probe(self) -> GradientProbe | None:
        """The monitor of noise scale and variance; None if neither was asked for."""
        return self._parts.probe if self._parts is not None else None

    @property
    def replica_switch(self) -> ReplicaSwitch:
        """The object that swaps the hosted replicas between turns. A benchmark may replace it with a wrapper that
        measures."""
        return self._need_trainer().replica_switch

    @replica_switch.setter
    def replica_switch(self, switch: ReplicaSwitch) -> None:
        self._need_trainer().replica_switch = switch

    # --- what the program declares before it trains ---

    def seed(self, seed: int) -> None:
        """Seed all generators of replica r with seed + r, as a DDP script that does so on rank r. Call it where the
        script seeds.

        The model is built with the generators of replica 0, as DDP takes the model of rank 0. The other replicas'
        generators are moved as far as the program has moved these by the time of `job.epochs`.
        """
        self._declare("job.seed")
        seed = whole_number(f"job.seed({seed!r})", seed)
        device = torch.device("cuda") if torch.cuda.is_available() else None
        state = seeded_rng(seed, device)
        restore_rng(state, device)
        self._declared.rank_seed = seed, state

    def wrap(
        self,
        model: Models,
        optimizer: Optimizers,
        *old: Any,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        sync_buffers: bool = True,
        **unknown: Any,
    ) -> tuple[Any, Any]:
        """Make a plain model and optimizer, or several in a list, those of the job. Returns them.

        Args:
            find_unused_parameters: as in DDP: some parameters may get no gradient in some steps.
            bucket_cap_mb: as in DDP; it affects the bits.
            sync_buffers: if true, every replica begins a pass with the buffers of replica 0, as in DDP. If false, with
                its own.

        Raises:
            Unsliceable: replicas cannot take turns on this model; the message says why and what to do.
        """
        if old:
            raise TrainError(
                f"job.wrap takes models and optimizers, but got a {type(old[0]).__name__}, too: since version 0.2 the data go to "
                "`job.loader(dataset, batch_size=...)`, and the loop has two levels (docs/coming-from.md shows the change)"
            )
        if unknown:
            raise TrainError(
                f"job.wrap has no option {', '.join(unknown)}: leave it out, or give it to `job.loader` if it is about the data. "
                "It takes find_unused_parameters, bucket_cap_mb and sync_buffers"
            )
        self._declare("job.wrap")
        if self._declared.wrapped is not None:
            raise TrainError("job.wrap was called twice: give it all models and optimizers at once, as lists")
        models = as_list(model, torch.nn.Module, "torch.nn.Module")
        optimizers = as_list(optimizer, torch.optim.Optimizer, "torch.optim.Optimizer")
        if not models:
            raise ConfigError("job.wrap got an empty list of models: there is nothing to train")
        if bucket_cap_mb is not None and not (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0):
            raise ConfigError(f"job.wrap(bucket_cap_mb={bucket_cap_mb!r}): use a number of MiB above 0, as in DDP")
        for each in models:
            obstacles.check(each)
        parameters = [found for each in models for found in trainable_parameters(each)]
        check_optimizers(optimizers, parameters)
        device = parameters[0][1].device
        if device.type != "cpu":
            determinism.pin(self._settings.level, device)
        averaging = find_averaging(optimizers)
        if averaging is not None and len(models) > 1:
            raise ConfigError(
                f"{averaging.describe()} can average one model, but job.wrap got {len(models)}: put them into one module, or use "
                "a plain torch optimizer"
            )
        cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20))
        self._declared.wrapped = Wrapped(models, optimizers, averaging, find_unused_parameters, cap_bytes, sync_buffers)
        return model, optimizer

    def loader(self, data: Any, **loading: Any) -> Loader:
        """Return a loader that gives each replica of the job the batches of a DDP rank.

        A map-style dataset is dealt to the replicas as by DistributedSampler. With any other sampler, a batch sampler or an
        IterableDataset every replica draws from its own copy, as every rank would. What needs the rank is given as a
        function of the replica:

            job.loader(dataset, batch_size=8, sampler=lambda replica: MySampler(dataset, rank=replica, num_replicas=4))
            job.loader(lambda replica: MyStream(rank=replica, num_ranks=4), batch_size=8)

        An IterableDataset that has `state_dict` and `load_state_dict`, or whose iterator has them, continues from its state
        on another worker; without them all batches of the epoch are taken again there.

        Args:
            data: a map-style dataset, an IterableDataset, a function of the replica that returns an IterableDataset, or a
                `DataLoader`.
            loading: batch_size (of one replica), shuffle (true by default), sampler, batch_sampler, seed, num_workers and
                so on, as in DataLoader, if `data` is no DataLoader.

        Raises:
            Unsliceable: the samples cannot be given to replicas; the message says why and what to do.
            ConfigError: settings are wrong, unknown, or given twice.
        """
        self._declare("job.loader")
        if self._declared.data is not None:
            raise TrainError(
                "job.loader was called twice, but a job has one loader: use job.evaluate(dataset, batch_size) for validation data"
            )
        dataset, options = loader_options(data, **loading)
        if not options.is_dealt and self._settings.replicas is None and self._spec is not None:
            raise ConfigError(
                "replicas=None deals the samples anew when the number of workers changes, but a sampler or stream of each "
                "replica's own cannot be dealt: use pliant.join(replicas=N)"
            )

        def make() -> tuple[Feeder, Replicas]:
            return make_feeder(dataset, options, self.replicas, repeats=self._member.elastic, notify=self._notify)

        return self.use_feeder(*make(), make_again=lambda: make()[0])

    def use_feeder(
        self, feeder: Feeder, replicas: Replicas, *, make_again: Callable[[], Feeder] | None = None
    ) -> Loader:
        """Return a loader that takes the batches of each replica from `feeder`. For integrations that deal samples as
        another library does. `make_again` makes another such feeder; without it new workers do not warm up."""
        check_epoch(replicas)
        self._declared.data, self._declared.make_feeder = (feeder, replicas), make_again
        self._stack.callback(feeder.close)

        def present() -> Feeder:
            return feeder if self._shadow is None else self._shadow.feeder

        return Loader(present, replicas, lambda: self._running_loop().steps())

    def track(self, name: str, thing: Any) -> Any:
        """Make `thing` (an LR scheduler, a GradScaler, an EMA: anything with a state_dict) part of the job's state: new
        workers and checkpoints get it. Returns `thing`."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TrainError(
                f"job.track({name!r}): a {type(thing).__name__} has no state_dict and load_state_dict: give it both, or keep its "
                "values in job.state(...)"
            )
        if name in self._declared.tracked:
            there = type(self._declared.tracked[name]).__name__
            raise TrainError(f"job.track({name!r}): a {there} is tracked under this name already: use another name")
        self._declare(f"job.track({name!r})")
        self._declared.tracked[name] = thing
        return thing

    def state(self, **values: Any) -> StateNamespace:
        """Return a namespace with these values that is part of the job's state: a counter, the best score so far."""
        self._declare("job.state")
        if _STATE in self._declared.tracked:
            raise TrainError("job.state was called before: give it all values at once")
        self._declared.tracked[_STATE] = made = StateNamespace(values)
        return made

    def _declare(self, what: str) -> None:
        if self._trainer is not None:
            raise TrainError(f"{what}: the job is running; call it before job.epochs and job.steps")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate the gradients of backwards in this block, as DDP's `no_sync` does."""
        reducers = self._trainer.reducers if self._trainer is not None else ()
        for reducer in reducers:
            reducer.no_sync = True
        try:
            yield
        finally:
            for reducer in reducers:
                reducer.no_sync = False

    # --- running ---

    def epochs(self, count: int, *, start: int = 0) -> Iterator[int]:
        """Yield the epochs from `start` up to `count`, as `range(start, count)` does. A new worker, or a resumed job,
        begins at the job's present epoch, wherever its own `start` is.

        The training ends with this loop, on all workers. If they leave it by `break`, they take leave of each other when
        the program ends, or closes the job.
        """
        if self._is_finished or self._loop is not None:
            raise TrainError("job.epochs: the training has ended with the loop before; a job has one such loop")
        whole_number(f"job.epochs({count!r})", count)
        self._declared.first.epoch = whole_number(f"job.epochs(start={start!r})", start, 0)
        self._make_parts()
        if self._declared.first.epoch < count:
            yield from self._warm_up()
        trainer = self._join()
        while trainer.progress.epoch < count:
            epoch = trainer.progress.epoch
            self._loop = EpochLoop(trainer, epoch)
            yield epoch
            self._end_epoch(epoch)
        self._finish()
        self._loop = None

    def steps(self, count: int, *, start: int = 0, batch: Callable[[int], Any] | None = None) -> Iterator[Step]:
        """Yield the steps of a whole job whose program makes its own batches, from `start` up to `count`: `for replica
        in step:` yields the replicas hosted here. A new worker, or a resumed job, begins at the job's present step,
        wherever its own `start` is.

        Args:
            batch: a function of the replica that makes its batch; `for x, y in step:` then yields what it returns. As a
                loader does, it draws from the replica's generators before the outer body of the step runs: give it where
                a DDP script fetches the next batch ahead, at the end of the step before.
        """
        count, start = (
            whole_number(f"job.steps({count!r})", count, 1),
            whole_number(f"job.steps(start={start!r})", start, 0),
        )
        if batch is not None and not callable(batch):
            raise ConfigError(f"job.steps(batch={batch!r:.60}): give it a function of the replica")
        if self._loop is not None or self._declared.data is not None:
            raise TrainError(
                "job.steps is the loop of a program without job.epochs and job.loader: use either the one or the others"
            )
        options = LoaderOptions(batch_size=1, shuffle=False)
        self._declared.data = NumberFeeder(count, batch), Replicas(self.replicas, count * self.replicas, options)
        self._declared.make_feeder = lambda: NumberFeeder(count, batch)
        self._declared.first.step = self._declared.first.epoch_step = start
        return Steps(step for _ in self.epochs(1) for step in self._running_loop().steps())

    def _make_parts(self) -> None:
        if self._parts is None:
            services = JobServices(
                self._listeners, self._stack, self._requests.request_workers, self._notify, self._notify_first
            )
            self._parts = assemble(self._member, self._spec, self._settings, self._declared, services)
            if self._spec is not None and self._spec.check is not None:
                replicas, trainer = self._settings.replicas, self._parts.trainer
                self.on_commit(StepDigests(self, trainer, self._spec.worker, self._spec.check, replicas, self._finish))

    def _warm_up(self) -> Iterator[int]:
        """Yield an epoch with one step in the shadow, if this worker is started for a job that runs already."""
        if self._spec is None or not self._spec.shadow or self._declared.make_feeder is None:
            return
        assert self._parts is not None, "they are made"
        first = self._declared.first
        self._shadow = Shadow(self._parts.trainer.state, self._declared.make_feeder(), first)
        self._loop = EpochLoop(self._shadow, first.epoch)
        enter_shadow(True)
        try:
            yield first.epoch
        except GeneratorExit:  # by `break`, or by an error, which is shown first
            self._has_left_shadow = True
            raise
        self._shadow.close()
        assert self._parts is not None, "they are made"
        self._parts.trainer.warm_memory()
        self._shadow = self._evaluation = None
        enter_shadow(False)

    def _leave_shadow(self, why: str) -> NoReturn:
        """End this process: its program does not come to the end of a warm-up. The runner starts it again without one."""
        if why:
            print(f"pliant: {NO_SHADOW}: {why}", file=sys.stderr, flush=True)
        self._shadow, self._loop, self._has_left_shadow = None, None, False
        self.close()
        end_with(SystemExit(SHADOW_EXIT))

    def _join(self) -> Trainer:
        assert self._parts is not None, "they are made"
        self._member.start()
        self._parts.trainer.join()
        if self._settings.allow:
            self._notify_first(
                f"bits not promised: {', '.join(self._settings.allow)} (allowed without a deterministic kernel)"
            )
        trace.begin(self.rank)
        self._parts.trainer.trace_engine()
        return self._parts.trainer

    def _end_epoch(self, epoch: int) -> None:
        assert self._parts is not None, "the job runs"
        self._parts.trainer.end_epoch(epoch)
        self._parts.checkpointing.end_epoch(self.is_first, self._parts.trainer.wait_for_sums)

    def _finish_if_left(self) -> None:
        """End the training of a program that has left its loop by `break`."""
        loop, trainer = self._loop, self._trainer
        if loop is None or trainer is None or self._is_finished or trainer.is_broken or sys.exc_info()[0] is not None:
            return
        if loop.has_ended:
            self._end_epoch(loop.epoch)
        self._finish()

    def _finish(self) -> None:
        assert self._parts is not None, "the job runs"
        self._is_finished = True
        self._parts.trainer.finish()
        self._parts.checkpointing.end_epoch(self.is_first, self._parts.trainer.wait_for_sums)
        self._parts.checkpointing.flush()
        self._parts.trainer.adaptation.end_job()
        self._member.finish()

    def resize(self, num_workers: int) -> None:
        """Request another number of workers; 0 ends the job. It takes effect at a later step's boundary."""
        whole_number(f"job.resize({num_workers!r})", num_workers, 0)
        if self._trainer is not None:
            self._trainer.check_outer("job.resize()")
        if self.is_first:
            self._member.resize(num_workers)

    def close(self) -> None:
        """Leave the job. This happens by itself when the program ends.

        Raises:
            TrainError: the program has left its loop by `break`, and the states of the workers differ.
        """
        atexit.unregister(self._end_program)
        is_at_end = sys.exc_info()[0] is None and not is_failing() and not self._requests.exits_at_once
        if self._shadow is not None and is_at_end:
            self._leave_shadow("the program has closed its job")
        try:
            self._finish_if_left()
        finally:
            if self._shadow is not None:
                self._shadow.feeder.close()
            if self._parts is not None:
                self._parts.checkpointing.close()
            if self._trainer is not None:
                self._trainer.close()
                self._trainer.adaptation.close()
                with contextlib.suppress(CommError):
                    self._trainer.deferred.flush()
            self._stack.close()

    def _end_program(self) -> None:
        """Leave the job at the end of the program. An error, which Python would drop here, becomes its exit code."""
        if self._shadow is not None and not self._requests.exits_at_once:
            self._leave_shadow("" if is_failing() else "the program has ended")
        if is_failing() or self._requests.exits_at_once:
            self._loop = None  # the program has not come to its end: the others go on without this worker
        try:
            self.close()
        except BaseException as error:
            end_with(error)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._loop = None
        explained = self._explain(error) if error is not None else None
        self.close()
        if explained is not None:
            raise explained from error

    def _explain(self, error: BaseException) -> BaseException | None:
        """Return a better error than that of torch, if the program has called what cannot have equal bits."""
        if self._settings.level == "D0":
            return None
        return operators.explain(error, self._declared.wrapped.models if self._declared.wrapped is not None else ())

    def _need_trainer(self) -> Trainer:
        if self._trainer is None:
            raise TrainError(
                "the job has not begun yet: use this inside of `for epoch in job.epochs(k):` or `for step in job.steps(k):`"
            )
        return self._trainer

    def _running(self) -> Trainer | Shadow:
        self._running_loop()
        return self._shadow or self._need_trainer()

    def _running_loop(self) -> EpochLoop:
        if self._loop is None:
            raise TrainError(
                "the job is not training: use this inside of `for epoch in job.epochs(k):` or `for step in job.steps(k):`"
            )
        return self._loop

    def _checkpoint(self, event: StepCommitted) -> None:
        """Write a checkpoint of the committed step, if one is due or asked for."""
        assert self._parts is not None, "the job runs"
        self._parts.checkpointing.end_step(event, self._parts.trainer.wait_for_sums)

    def _announce(self, change: ViewChange) -> None:
        announce(change, self._need_trainer(), self._notify)

    # --- evaluation and metrics ---

    def evaluate(self, dataset: Any, batch_size: int = 1, **loading: Any) -> Iterator[Any]:
        """Yield this worker's share of the batches of `dataset`: N fixed shards are dealt over the workers there are.

        Add the figures of each batch with `job.total(correct=..., seen=...)`; `job.total()` returns the totals after
        the loop. They are the same bits on any number of workers, also if one is lost meanwhile. `loading` are options
        of torch's DataLoader, such as num_workers and collate_fn.
        """
        self._evaluation = ShardedEvaluation(self._running(), dataset, {"batch_size": batch_size, **loading})
        return iter(self._evaluation)

    def total(self, **figures: Any) -> dict[str, float]:
        """Add figures of a batch, in the loop over `job.evaluate`; after the loop, without arguments, return the totals."""
        if self._evaluation is None:
            raise TrainError(NO_EVALUATION)
        return self._evaluation.total(figures)

    def all_reduce(self, value: Any, op: str = "sum") -> Any:
        """Return the sum (or op="max", "min", "mean") of a number or tensor over all workers, the same on each of them.

        All workers call it, outside of turns. The result depends on the number of workers where their values do.
        """
        return all_reduce(self._running(), value, op)

    def gather(self, value: Any) -> list[Any]:
        """Return what each worker has given, in the order of ranks: numbers, strings, lists and dicts of them.

        All workers call it, outside of turns.
        """
        return gather(self._running(), value)

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the first worker only, and return its result on every worker.

        It runs with the random state of replica 0, as code for rank 0 does in a DDP script. If the first worker is lost
        meanwhile, it runs on the next one. Results are numbers, strings, tensors, and lists and dicts of them.
        """
        if not callable(function):
            raise ConfigError(f"job.on_first({function!r:.60}): give it a function without arguments")
        return run_on_first(self._running(), function)

    def on_replicas(self, function: Callable[[int], Any], *, draws: bool = True) -> list[Any]:
        """Run `function(replica)` for each of the N replicas, dealt over the workers there are, and return all results on
        every worker, in the order of replicas.

        It runs with the random state of that replica, as code that every rank runs does in a DDP script. Without `draws`
        the random numbers that it draws do not count. If a worker is lost meanwhile, others run its part. Results are
        numbers, strings, tensors, and lists and dicts of them.
        """
        if not callable(function):
            raise ConfigError(f"job.on_replicas({function!r:.60}): give it a function of the replica")
        return run_on_replicas(self._running(), function, draws=draws)

    # --- checkpoints ---

    def save(self, path: str = "") -> None:
        """Write a checkpoint once the step in progress is committed; after the loop over the loader, once the epoch has
        ended, so that a resumed job begins with the next one. Rank 0 writes it in the background.

        Without a path it goes to `--checkpoint-dir`.
        """
        if not path and not (self._spec and self._spec.checkpoint_dir):
            raise ConfigError("job.save() needs a path, or `pliant run --checkpoint-dir DIR`")
        trainer = self._need_trainer()
        assert self._parts is not None, "the trainer is a part"
        if self.in_shadow:
            return
        at_boundary = self._loop is None or (self._loop.is_running and not trainer.in_step)  # as a listener is
        if not at_boundary:
            self._parts.checkpointing.ask(path)
        elif self.is_first and trainer.wait_for_sums():
            self._parts.checkpointing.write(path)

    def load(self, path: str) -> None:
        """Start from this checkpoint: a file, or the newest of a directory. Call it before `epochs`."""
        self._declare("job.load")
        if not Path(path).exists():
            raise CheckpointError(
                f"job.load({str(path)!r}): there is no such checkpoint; give a file that job.save wrote, or its directory"
            )
        self._declared.load_path = path

    # --- messages ---

    def _notify_first(self, text: str) -> None:
        if self.rank == 0:
            self._notify(text)

    def _notify(self, text: str) -> None:
        print(text, flush=True)
