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

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pliant.adapt import Observation
from pliant.errors import CheckpointError, ConfigError, TrainError
from pliant.identity import WorkerSpec
from pliant.progress_board import ProgressBoard
from pliant.train.context import restore_rng, seeded_rng
from pliant.train.declared import Declared, JobSettings
from pliant.train.evaluation import NO_EVALUATION, ShardedEvaluation, all_reduce, gather, run_on_first, run_on_replicas
from pliant.train.events import StepCommitted, ViewChange
from pliant.train.feeder import Feeder, NumberFeeder
from pliant.train.gradient_probe import GradientProbe
from pliant.train.job_data import Loader, make_feeder
from pliant.train.replicas import Replicas, ReplicaSwitch
from pliant.train.sampling import LoaderOptions, loader_options
from pliant.train.step import Step, Steps
from pliant.train.sync import SyncStats
from pliant.train.worker_run import WorkerRun
from pliant.train.wrapping import StateNamespace, whole_number

Models = torch.nn.Module | Sequence[torch.nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Job:
    """One worker's handle on a training job. Made by `pliant.join`."""

    def __init__(self, spec: WorkerSpec | None, settings: JobSettings, board: ProgressBoard | None = None) -> None:
        self._run = WorkerRun(spec, settings, board or ProgressBoard())

    # --- who and where ---

    @property
    def replicas(self) -> int:
        """N, the number of replicas."""
        if self._run.declared.data is not None:
            return self._run.declared.data[1].count
        return self._run.settings.replicas or self.size

    @property
    def rank(self) -> int:
        """This worker's rank in the present view."""
        return self._run.rank

    @property
    def size(self) -> int:
        """The number of workers now."""
        view = self._run.view
        return max(1, view.size) if view is not None else 1

    @property
    def in_shadow(self) -> bool:
        """Whether this new worker only warms up: what its program does until the next step, or the next epoch, has no
        effect on the job."""
        return self._run.in_shadow

    @property
    def is_first(self) -> bool:
        """Whether this worker has rank 0: the one to print, and to write files."""
        return self._run.rank == 0

    @property
    def view(self) -> int:
        """The number of the present view; it grows with every change of the workers."""
        return max(0, self._run.member.entered)

    @property
    def replica(self) -> int | None:
        """The replica whose turn it is; None outside of the loop over a step."""
        parts = self._run.parts
        if parts is None:
            return None
        turn = (self._run.shadow or parts.trainer).current.turn
        return turn.replica if turn is not None else None

    @property
    def hosted(self) -> range:
        """The replicas that this worker hosts now."""
        if (shadow := self._run.shadow) is not None:
            return range(shadow.replica, shadow.replica + 1)
        parts = self._run.parts
        return parts.trainer.views.hosted if parts is not None else range(0)

    @property
    def step(self) -> int:
        """The number of committed steps; the step in progress is not counted."""
        parts = self._run.parts
        return parts.trainer.progress.step if parts is not None else 0

    @property
    def epoch(self) -> int:
        parts = self._run.parts
        return parts.trainer.progress.epoch if parts is not None else 0

    @property
    def batch_size(self) -> int:
        """The present batch size of one replica."""
        return self._run.need_trainer().replicas.loading.batch_size

    @property
    def observation(self) -> Observation | None:
        """The job after the last step, as the policies saw it. None before the second step, or if nothing is monitored."""
        return self._run.need_trainer().adaptation.observation

    def report(self, **values: float) -> None:
        """Add values of the step in progress to the record, beside what its turns log. The record takes those of the
        first worker."""
        adaptation = self._run.need_trainer().adaptation
        for name, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"job.report({name}={value!r:.60}): use a number") from None
            if not self.in_shadow:
                adaptation.values[name] = number

    def sync_stats(self) -> SyncStats:
        """Return how the sums travel now, and how long the program has waited for the network."""
        return self._run.need_trainer().sync.stats()

    @property
    def changes(self) -> list[ViewChange]:
        """The changes of view that this worker has stayed through."""
        parts = self._run.parts
        return list(parts.trainer.views.changes.seen) if parts is not None else []

    # --- listeners, for records, checkpoints and measurements ---

    def on_commit(self, listener: Callable[[StepCommitted], None]) -> None:
        """Call `listener` on this worker after each committed step, before the next one begins. An error that it raises
        ends this worker, like any other error of the program."""
        self._run.listeners.add(listener)

    def on_view_change(self, listener: Callable[[ViewChange], None]) -> None:
        """Call `listener` on this worker after each change of the workers that it has stayed through.

        The call comes with the first batch of the new view, so `pause_s` covers the whole pause.
        """
        self._run.listeners.view.append(listener)

    @property
    def has_pending_updates(self) -> bool:
        """Whether sums of the last committed step are still on their way, as they may be with sync="priority"."""
        parts = self._run.parts
        return parts is not None and parts.trainer.deferred.is_pending

    @property
    def prepared_view(self) -> int:
        """The newest view that this worker is connected for. It is entered at a step's boundary once all workers are
        ready."""
        return self._run.member.prepared

    @property
    def gradient_probe(self) -> GradientProbe | None:
        """The monitor of noise scale and variance; None if neither was asked for."""
        return self._run.parts.probe if self._run.parts is not None else None

    @property
    def replica_switch(self) -> ReplicaSwitch:
        """The object that swaps the hosted replicas between turns. A benchmark may replace it with a wrapper that
        measures."""
        return self._run.need_trainer().outer.switch

    @replica_switch.setter
    def replica_switch(self, switch: ReplicaSwitch) -> None:
        self._run.need_trainer().outer.switch = switch

    # --- what the program declares before it trains ---

    def seed(self, seed: int) -> None:
        """Seed all generators of replica r with seed + r, as a DDP script that does so on rank r. Call it where the
        script seeds.

        The model is built with the generators of replica 0, as DDP takes the model of rank 0. The other replicas'
        generators are moved as far as the program has moved these by the time of `job.epochs`.
        """
        declared = self._declare("job.seed")
        seed = whole_number(f"job.seed({seed!r})", seed)
        device = torch.device("cuda") if torch.cuda.is_available() else None
        state = seeded_rng(seed, device)
        restore_rng(state, device)
        declared.rank_seed = seed, state

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
        self._declare("job.wrap").wrap(
            model,
            optimizer,
            self._run.settings.level,
            find_unused=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            sync_buffers=sync_buffers,
        )
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
        if self._declare("job.loader").data is not None:
            raise TrainError(
                "job.loader was called twice, but a job has one loader: use job.evaluate(dataset, batch_size) for validation data"
            )
        dataset, options = loader_options(data, **loading)
        if not options.is_dealt and self._run.settings.replicas is None and self._run.spec is not None:
            raise ConfigError(
                "replicas=None deals the samples anew when the number of workers changes, but a sampler or stream of each "
                "replica's own cannot be dealt: use pliant.join(replicas=N)"
            )

        def make() -> tuple[Feeder, Replicas]:
            return make_feeder(
                dataset, options, self.replicas, repeats=self._run.member.elastic, notify=self._run.notify
            )

        return self.use_feeder(*make(), make_again=lambda: make()[0])

    def use_feeder(
        self, feeder: Feeder, replicas: Replicas, *, make_again: Callable[[], Feeder] | None = None
    ) -> Loader:
        """Return a loader that takes the batches of each replica from `feeder`. For integrations that deal samples as
        another library does. `make_again` makes another such feeder; without it new workers do not warm up."""
        run = self._run
        run.declared.use_feeder(feeder, replicas, make_again)
        run.stack.callback(feeder.close)

        def present() -> Feeder:
            return feeder if run.shadow is None else run.shadow.feeder

        return Loader(present, replicas, lambda: run.running_loop().steps())

    def track(self, name: str, thing: Any) -> Any:
        """Make `thing` (an LR scheduler, a GradScaler, an EMA: anything with a state_dict) part of the job's state: new
        workers and checkpoints get it. Returns `thing`."""
        self._declare(f"job.track({name!r})").track(name, thing)
        return thing

    def state(self, **values: Any) -> StateNamespace:
        """Return a namespace with these values that is part of the job's state: a counter, the best score so far."""
        return self._declare("job.state").add_state(values)

    def _declare(self, what: str) -> Declared:
        """Return what the program has declared so far. Raises TrainError once the job runs."""
        if self._run.parts is not None:
            raise TrainError(f"{what}: the job is running; call it before job.epochs and job.steps")
        return self._run.declared

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate the gradients of backwards in this block, as DDP's `no_sync` does."""
        reducers = self._run.parts.trainer.reducers if self._run.parts is not None else ()
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
        return self._run.epochs(count, start)

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
        declared = self._run.declared
        if self._run.loop is not None or declared.data is not None:
            raise TrainError(
                "job.steps is the loop of a program without job.epochs and job.loader: use either the one or the others"
            )
        options = LoaderOptions(batch_size=1, shuffle=False)
        declared.data = NumberFeeder(count, batch), Replicas(self.replicas, count * self.replicas, options)
        declared.make_feeder = lambda: NumberFeeder(count, batch)
        declared.first.step = declared.first.epoch_step = start
        return Steps(step for _ in self.epochs(1) for step in self._run.running_loop().steps())

    def resize(self, num_workers: int) -> None:
        """Request another number of workers; 0 ends the job. It takes effect at a later step's boundary."""
        whole_number(f"job.resize({num_workers!r})", num_workers, 0)
        self._run.resize(num_workers)

    def close(self) -> None:
        """Leave the job. This happens by itself when the program ends.

        Raises:
            TrainError: the program has left its loop by `break`, and the states of the workers differ.
        """
        self._run.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._run.close()
        elif (explained := self._run.fail(error)) is not None:
            raise explained from error

    # --- evaluation and metrics ---

    def evaluate(self, dataset: Any, batch_size: int = 1, **loading: Any) -> Iterator[Any]:
        """Yield this worker's share of the batches of `dataset`: N fixed shards are dealt over the workers there are.

        Add the figures of each batch with `job.total(correct=..., seen=...)`; `job.total()` returns the totals after
        the loop. They are the same bits on any number of workers, also if one is lost meanwhile. `loading` are options
        of torch's DataLoader, such as num_workers and collate_fn.
        """
        run = self._run
        run.evaluation = ShardedEvaluation(run.calls(), dataset, {"batch_size": batch_size, **loading})
        return iter(run.evaluation)

    def total(self, **figures: Any) -> dict[str, float]:
        """Add figures of a batch, in the loop over `job.evaluate`; after the loop, without arguments, return the totals."""
        if self._run.evaluation is None:
            raise TrainError(NO_EVALUATION)
        return self._run.evaluation.total(figures)

    def all_reduce(self, value: Any, op: str = "sum") -> Any:
        """Return the sum (or op="max", "min", "mean") of a number or tensor over all workers, the same on each of them.

        All workers call it, outside of turns. The result depends on the number of workers where their values do.
        """
        return all_reduce(self._run.calls(), value, op)

    def gather(self, value: Any) -> list[Any]:
        """Return what each worker has given, in the order of ranks: numbers, strings, lists and dicts of them.

        All workers call it, outside of turns.
        """
        return gather(self._run.calls(), value)

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the first worker only, and return its result on every worker.

        It runs with the random state of replica 0, as code for rank 0 does in a DDP script. If the first worker is lost
        meanwhile, it runs on the next one. Results are numbers, strings, tensors, and lists and dicts of them.
        """
        if not callable(function):
            raise ConfigError(f"job.on_first({function!r:.60}): give it a function without arguments")
        return run_on_first(self._run.calls(), function)

    def on_replicas(self, function: Callable[[int], Any], *, draws: bool = True) -> list[Any]:
        """Run `function(replica)` for each of the N replicas, dealt over the workers there are, and return all results on
        every worker, in the order of replicas.

        It runs with the random state of that replica, as code that every rank runs does in a DDP script. Without `draws`
        the random numbers that it draws do not count. If a worker is lost meanwhile, others run its part. Results are
        numbers, strings, tensors, and lists and dicts of them.
        """
        if not callable(function):
            raise ConfigError(f"job.on_replicas({function!r:.60}): give it a function of the replica")
        return run_on_replicas(self._run.calls(), function, draws=draws)

    # --- checkpoints ---

    def save(self, path: str = "") -> None:
        """Write a checkpoint once the step in progress is committed; after the loop over the loader, once the epoch has
        ended, so that a resumed job begins with the next one. Rank 0 writes it in the background.

        Without a path it goes to `--checkpoint-dir`.
        """
        if not path and not (self._run.spec and self._run.spec.checkpoint_dir):
            raise ConfigError("job.save() needs a path, or `pliant run --checkpoint-dir DIR`")
        self._run.save(path)

    def load(self, path: str) -> None:
        """Start from this checkpoint: a file, or the newest of a directory. Call it before `epochs`."""
        declared = self._declare("job.load")
        if not Path(path).exists():
            raise CheckpointError(
                f"job.load({str(path)!r}): there is no such checkpoint; give a file that job.save wrote, or its directory"
            )
        declared.load_path = path
