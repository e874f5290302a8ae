"""One worker's training: the turns of its replicas, the commit of each step, the change to another view.

A step is done by all N replicas or by none. Each replica hosted here takes its turn: its context is restored, its
batches go through the user's loop, its gradients are caught, its context is captured. In the last turn the
gradients are summed over the whole job, and with them travel the contexts and the buffers of replica 0:
who has all of it has the whole state of the job. If anything is missing because a worker was lost, the step
is torn: nothing of it counts, and it is done again in a new view.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pliant.cluster import View
from pliant.comm.engine import Engine
from pliant.comm.handle import Handle
from pliant.comm.telemetry import Pressure
from pliant.elastic.member import Alone, Member
from pliant.errors import CommError, ConfigError, EngineClosed, PliantError, TrainError, ViewChanged, WorkerLost
from pliant.train import rng, trace
from pliant.train.adapting import Adaptation, Settings, Situation
from pliant.train.buckets import Layout, blocks
from pliant.train.data import Feeder, Stream, num_batches, samples_used
from pliant.train.gradients import FIRST, Gradients
from pliant.train.loader_options import LoaderOptions
from pliant.train.optim import Averaging
from pliant.train.priority import Crossing
from pliant.train.replica import Buffers, Context, Tensors
from pliant.train.rows import Rows, Said
from pliant.train.tuning import Choice, Measured, SyncStats, Tuner

log = logging.getLogger(__name__)

LENT = "state:"
"""What the names of lent memory begin with."""


class Left(SystemExit):
    """This worker is no longer part of the job, in good order. Ends the program with exit code 0."""

    ends_at_once = True
    """Somebody waits for its device: a fork of the warm process does not take the interpreter apart (`launch.warm`)."""

    def __init__(self, why: str) -> None:
        super().__init__(0)
        self.why = why


@dataclass(slots=True)
class Progress:
    """How far the job has come."""

    epoch: int = 0
    epoch_step: int = 0
    """Steps committed in this epoch."""
    step: int = 0
    """Steps committed in all."""


@dataclass(frozen=True, slots=True)
class ViewChange:
    """A change of the workers, as one of those who stayed saw it."""

    step: int
    """The first step of the new view."""
    old_size: int
    new_size: int
    pause_s: float
    """From the end of the old view's last step to the start of the new one's first."""
    lost: bool
    """Whether a step was torn."""
    repeated: int = 0
    """Steps that this worker had begun and does again."""


@dataclass(slots=True)
class Turn:
    """The turn of one replica."""

    replica: int
    slot: int
    is_last: bool
    done: bool = False
    """Whether its gradients have been handed in."""


@dataclass(slots=True)
class Parts:
    """What the user gave."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    feeder: Feeder
    loading: LoaderOptions
    num_samples: int
    sync_buffers: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Undo:
    """The job before a step whose sums are not all here yet."""

    progress: Progress
    contexts: list[Context]
    first_buffers: Tensors
    adaptation: dict[str, Any]


@dataclass(slots=True)
class Measuring:
    """The figures of the step in progress."""

    began_s: float = 0.0
    compute_s: float = 0.0
    turn_began_s: float = 0.0
    waited_s: float = 0.0
    """At gates, when the turn began."""
    pressure: Pressure = field(default_factory=lambda: Pressure(0, 0.0))
    sent_bytes: int = 0
    last: Measured = field(default_factory=Measured)


class Trainer:
    """Runs the steps of this worker. Used by one thread, the program's own."""

    def __init__(
        self,
        member: Member | Alone,
        parts: Parts,
        num_replicas: int,
        gradients: Gradients,
        crossing: Crossing,
        tuner: Tuner,
        place: Callable[[int], Sequence[int]] | None = None,
        *,
        follows_view: bool = False,
        keeps_layout: bool = True,
    ) -> None:
        self.parts = parts
        self.follows_view = follows_view
        """Whether there shall be one replica per worker, whatever their number: weak scaling."""
        self.num_replicas = num_replicas
        self.gradients = gradients
        self.progress = Progress()
        self.contexts: list[Context] = []
        """Of all replicas, at the boundary where the last step was committed."""
        self.buffers = Buffers(parts.model)
        self.first_buffers: Tensors = self.buffers.save()
        """Replica 0's, at that boundary: what DDP would broadcast."""
        self.turn: Turn | None = None
        self.torn: CommError | None = None
        self.catching_up = False
        """Whether the program is at the end of an epoch that its state is already beyond."""
        self.switch_to: int | None = None
        """The roll that all members have agreed to enter at the next boundary."""
        self.changes: list[ViewChange] = []
        self.step_ended_s = 0.0
        """When the program came back from its last step for the next batch."""
        self.torn_s = 0.0
        """When a loss was noticed last."""
        self.engine: Engine | None = None
        self.hosted: range = range(0)
        self.settle: Callable[[], None] = lambda: None
        """How to get into the next view; `train.settling` provides it."""
        self.fetched: Handle | None = None
        """Done when everybody in the view has the state."""
        self.on_commit: Callable[[], None] = lambda: None
        self.crossing = crossing
        crossing.on_lost, crossing.on_whole = self.tear, self._whole
        crossing.on_sum = gradients.sum_is_here
        self.tuner = tuner
        self.loss_scale: Callable[[], float] = lambda: 1.0
        """What gradient scalers multiply the loss with."""
        self.averaging: Averaging | None = None
        """The optimizer, where it averages models in place of gradients."""
        self._begun = 0
        """Steps that were begun when the last loss was noticed."""
        self._way = Choice()
        """How this step's sums travel."""
        self._next_way: Choice | None = None
        self._in_flight_bytes = 0
        """What the connections were told last."""
        self._undo: Undo | None = None
        self._tracked_before: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._measuring = Measuring()
        self.watched: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
        """Put around what may take long, for whoever looks for stalls."""
        self.adaptation = Adaptation(Settings(), self, parts.loading.batch_size, None, lambda _: None)
        """What policies decide; by default nobody decides anything."""
        self._member = member
        self._place = place
        self._keeps_layout = keeps_layout
        self.rows = Rows()
        self._new_contexts: dict[int, Context] = {}
        self._new_buffers: Tensors | None = None
        self._new_order: list[int] | None = None
        self._blocks: tuple[int, ...] = ()
        self._needs_hosting = True
        self._settled_in = -1
        self._ending_change: tuple[float, int, bool, Callable[[ViewChange], None]] | None = None

    # --- a view ---

    @property
    def view(self) -> View | None:
        return self.engine.view if self.engine is not None else None

    @property
    def num_loader_workers(self) -> int:
        return self.parts.loading.num_workers

    def work_in(self, engine: Engine) -> None:
        """Take up this view: know which replicas are hosted here."""
        changed = self.engine is not None and self.engine is not engine
        self.engine = engine
        size = engine.view.size
        if self.follows_view and size != self.num_replicas:
            self._deal_anew(size)
        self._blocks = tuple(self._place(size)) if self._place else blocks(self.num_replicas, size)
        if len(self._blocks) != size or sum(self._blocks) != self.num_replicas or min(self._blocks) < 1:
            raise TrainError(
                f"blocks {self._blocks} do not place {self.num_replicas} replicas on {size} workers, one or more on each"
            )
        begin = sum(self._blocks[: engine.rank])
        self.hosted = range(begin, begin + self._blocks[engine.rank])
        self.rows.arrange(self._blocks, self.hosted)
        if changed and not self._keeps_layout:
            self.gradients.use_layout(None)
        self.gradients.arrange(engine, self._blocks)
        if self.averaging is not None:
            self.averaging.work_in(engine, self._blocks)
        self.torn, self.switch_to, self._needs_hosting = None, None, True
        self._next_way = None
        self._measuring = Measuring(pressure=engine.pressure(), sent_bytes=engine.wire_bytes)
        self.watch()
        self.adaptation.work_in(engine)
        self._forget_step()

    def watch(self) -> None:
        """Have the engine's slices in the trace, if there is one."""
        if trace.enabled() and self.engine is not None:
            self.engine.watch(_watch)

    def _deal_anew(self, num_replicas: int) -> None:
        """Go on with another number of replicas: the rest of the epoch's samples is dealt to these."""
        loading, stream = self.parts.loading, self._stream_of(0)
        used = samples_used(self.parts.num_samples, self.num_replicas, stream, loading)
        fresh = Stream(stream.epoch, consumed=used)
        states = [context.random for context in self.contexts[:num_replicas]]
        for replica in range(len(states), num_replicas):
            label = f"{self.progress.step}:{replica}".encode()
            states.append(rng.seeded(int.from_bytes(hashlib.sha256(label).digest()[:4]), self.parts.device))
        own = [context.buffers for context in self.contexts[:num_replicas]]
        own += [self.contexts[0].buffers] * (num_replicas - len(own))
        self.contexts = [Context(state, fresh, buffers) for state, buffers in zip(states, own, strict=True)]
        self.num_replicas = num_replicas
        self.gradients.num_replicas = num_replicas

    def owner_of(self, replica: int) -> int:
        """The rank that hosts a replica."""
        for rank, size in enumerate(self._blocks):
            replica -= size
            if replica < 0:
                return rank
        raise AssertionError(f"no such replica: {replica}")

    # --- the loop ---

    def steps(self) -> Iterator[Any]:
        """The batches of the rest of this epoch, for the replicas hosted here in turn."""
        self._needs_hosting = True
        self.catching_up = False
        epoch = self.progress.epoch
        try:
            while self._begin_step(epoch):
                for slot, replica in enumerate(self.hosted):
                    if not (yield from self._take_turn(slot, replica)):
                        return
                    if self.torn is not None:
                        break
                self._end_step()
        except GeneratorExit:
            # The program leaves its loop early: a step that is complete counts.
            if self.turn is not None and self.turn.is_last and self.turn.done and self.torn is None:
                self._end_step()
            raise
        finally:
            self.turn = None
            if not self.finish_sums():
                self.take_back()
            self._come_to_rest()

    def _begin_step(self, epoch: int) -> bool:
        """Be in the right view; False if the epoch is over."""
        while True:
            if self.switch_to is not None:
                self.finish_sums()
            if self.torn is not None:
                self.take_back()
            if self.torn is not None or self.switch_to is not None:
                self.settle()
            if self.progress.epoch != epoch:
                # The others had finished this epoch before they brought us up to date. What the program does at its
                # end has been done to the state that we were given.
                self.catching_up = True
                return False
            if self._needs_hosting:
                streams = {replica: self._stream_of(replica) for replica in self.hosted}
                self.parts.feeder.host(streams, self.num_replicas, self.parts.loading)
                self._needs_hosting = False
            if self.parts.feeder.remaining(self.hosted[0]) > 0:
                if not self._begin_averaging():
                    continue
                self.adaptation.begin(self.situation())
                self._choose_way()
                return True
            self.finish_sums()
            if self.torn is None:
                self._await_newcomers()
            if self.torn is None:
                return False

    def _begin_averaging(self) -> bool:
        """Have models on their way, where it is them that are averaged; False if somebody is gone."""
        if self.averaging is not None:
            try:
                self.averaging.begin(self.progress.step)
            except CommError as error:
                self.tear(error)
        return self.torn is None

    def _choose_way(self) -> None:
        """How the sums of the coming step travel. In a view's first step by buckets: newcomers know no better, and the
        order in which parameters are used is observed meanwhile."""
        assert self.engine is not None
        way = self._next_way
        if way is None and self.tuner.may_cross and self.engine.size > 1:
            self.crossing.observe()
        if way is not None and way.in_flight_bytes != self._in_flight_bytes:
            self._in_flight_bytes = way.in_flight_bytes
            self.engine.keep_below(way.in_flight_bytes)
        self._way = way or Choice()
        self.gradients.travel(self._way, self.crossing.order)
        self.gradients.begin_step(self.progress.step)
        self._begin_measuring()

    def finish_sums(self) -> bool:
        """Wait for what is still under way of the last step; False if it was torn instead."""
        self.crossing.flush()
        return self.torn is None

    def _whole(self) -> None:
        self.gradients.sums_are_whole()
        self._undo = None
        self._tracked_before.clear()

    def take_back(self) -> None:
        """A step was torn. If the one before it was not whole either, that one does not count as well."""
        self._begun = self.progress.step + 1
        if self._undo is not None:
            undo, self._undo = self._undo, None
            self.progress, self.contexts, self.first_buffers = undo.progress, undo.contexts, undo.first_buffers
            if undo.adaptation:
                self.adaptation.load_state_dict(undo.adaptation)
        for thing, state in self._tracked_before.values():
            thing.load_state_dict(state)
        self._tracked_before.clear()
        self.crossing.take_back()

    def keep_tracked(self, name: str, thing: Any, state: dict[str, Any]) -> None:
        """How a tracked object was before a step that may have to be taken back."""
        self._tracked_before.setdefault(name, (thing, state))

    def _await_newcomers(self) -> None:
        """What the program does at the end of an epoch may change what newcomers are still reading."""
        fetched, self.fetched = self.fetched, None
        if fetched is not None:
            try:
                fetched.wait()
            except CommError as error:
                self.tear(error)

    def _stream_of(self, replica: int) -> Stream:
        """Where the replica's data stand, in the epoch that the job is in."""
        stream = self.contexts[replica].stream
        while stream.epoch < self.progress.epoch:
            stream = stream.next_epoch(self.parts.loading)
        return stream

    def _take_turn(self, slot: int, replica: int) -> Generator[Any, None, bool]:
        """Give out the replica's batches until it hands in its gradients; False if the epoch ended before."""
        context = self.contexts[replica]
        turn = self.turn = Turn(replica, slot, slot == len(self.hosted) - 1)
        rng.restore(context.random, self.parts.device)
        self._load_buffers(context)
        self.gradients.begin_turn(slot)
        taken = 0
        while not turn.done and self.torn is None:
            samples = self.parts.feeder.next_size(replica)
            try:
                batch = self.parts.feeder.next(replica)
            except StopIteration:
                log.warning("epoch %d ended in the middle of an accumulation, which is dropped", self.progress.epoch)
                self.turn = None
                return False
            self._end_change()
            self._measuring.turn_began_s = time.monotonic()
            self._measuring.waited_s = self.crossing.waits.seconds
            taken += samples
            self.gradients.took(taken, self.loss_scale)
            yield batch
        return True

    def _load_buffers(self, context: Context) -> None:
        if self.parts.sync_buffers or not context.buffers:
            self.buffers.load(self.first_buffers)
        else:
            flat = torch.frombuffer(bytearray(context.buffers), dtype=torch.uint8)
            self.buffers.load(self.buffers.unpack(flat))

    @property
    def may_commit(self) -> bool:
        """Whether what the program does once per step (optimizer, scheduler, ...) shall be done now."""
        if self.turn is None:
            return not self.catching_up and self.torn is None
        return self.turn.is_last and self.turn.done and self.torn is None

    def turn_over(self) -> None:
        """The replica has handed in its gradients: keep what its next turn depends on."""
        turn = self.turn
        if turn is None:
            raise TrainError("a summed backward outside of the loader's loop: call it on a batch that the loader gave")
        turn.done = True
        self._end_measuring_turn()
        own = b"" if self.parts.sync_buffers else bytes(self.buffers.pack(self.buffers.save()).numpy())
        context = Context(rng.capture(self.parts.device), self.parts.feeder.stream(turn.replica), own)
        self._new_contexts[turn.replica] = context
        if turn.replica == 0:
            self._new_buffers = self.buffers.save()
            if self.gradients.waits_for_order:
                self._new_order = list(self.gradients.ready_order)
        if turn.is_last:
            try:
                self._exchange()
            except CommError as error:
                self.gradients.fill_in()
                self.tear(error)

    def tear(self, error: CommError) -> None:
        """The step in progress does not count."""
        if not self._member.elastic or not isinstance(error, WorkerLost | ViewChanged | EngineClosed):
            raise error  # no other roll would come of it
        log.debug("step %d is torn: %s", self.progress.step, error)
        self.gradients.halt()
        self.torn, self.torn_s = error, time.monotonic()

    # --- figures ---

    def _begin_measuring(self) -> None:
        assert self.engine is not None
        measuring, now_s = self._measuring, time.monotonic()
        sent, pressure = self.engine.wire_bytes, self.engine.pressure()
        measuring.last = Measured(
            measuring.compute_s, sent - measuring.sent_bytes, pressure.rate_since(measuring.pressure)
        )
        if trace.enabled():
            trace.event("step", f"step {self.progress.step - 1}", measuring.began_s or now_s, now_s)
        measuring.began_s, measuring.compute_s = now_s, 0.0
        measuring.sent_bytes, measuring.pressure = sent, pressure

    def _end_measuring_turn(self) -> None:
        measuring = self._measuring
        waited_s = self.crossing.waits.seconds - measuring.waited_s
        measuring.compute_s += max(0.0, time.monotonic() - measuring.turn_began_s - waited_s)

    def sync_stats(self) -> SyncStats:
        """How the sums travel now, and what the network has cost so far."""
        waits, choice = self.crossing.waits, self._way
        return SyncStats(
            choice.mode,
            waits.count,
            waits.seconds,
            waits.until_s,
            choice.slice_bytes,
            choice.in_flight_bytes,
            self.tuner.rate,
            self.tuner.r,
        )

    # --- what travels with a step ---

    def _exchange(self) -> None:
        """Sum the gradients, and tell everybody what the next step depends on."""
        engine = self.engine
        assert engine is not None, "work_in() comes first"
        if engine.view.size == 1:
            figures = self.adaptation.row()  # of the last step, as among several workers
            self.gradients.wait()
            self.switch_to = self._agreed([self._member.prepared])
            self.adaptation.read([figures])
            return
        root = self.owner_of(0)
        row = engine.all_gather(self.rows.name, self._row(), priority=FIRST)
        buffers = order = None
        if self.buffers.num_bytes:
            flat = self._packed_first_buffers()
            buffers = engine.broadcast("buffers", flat, root, priority=FIRST)
        if self.gradients.waits_for_order:
            mine = self._new_order or [0] * len(self.gradients.parameters)
            order = engine.broadcast("order", torch.tensor(mine, dtype=torch.int32), root, priority=FIRST)
        began_s = time.monotonic()
        awaited = self.gradients.under_way() if self.gradients.crosses else None
        with self.watched(f"the sums of step {self.progress.step}"):
            if awaited is None:
                self.gradients.wait()
            if self.averaging is not None:
                self.averaging.wait()
            if buffers is not None:
                found = buffers.wait()
                if self._new_buffers is None and found is not None:
                    self._new_buffers = self.buffers.unpack(found)
            if order is not None:
                told = order.wait()
                self._new_order = told.tolist() if told is not None else None
            said = self._read_rows(engine, row)
        self._heed(said)
        ended_s = time.monotonic()
        self.crossing.waits.add(began_s, ended_s)
        if trace.enabled():
            trace.event("wait", "all workers", began_s, ended_s)
        if awaited is not None:
            self.crossing.begin(awaited, self._priorities())

    def _priorities(self) -> list[int]:
        wanted = {index: place for place, index in enumerate(self.crossing.order)}
        return [wanted.get(index, len(wanted)) for index in range(len(self.gradients.parameters))]

    def _packed_first_buffers(self) -> torch.Tensor:
        if self._new_buffers is not None:
            return self.buffers.pack(self._new_buffers)
        return torch.empty(self.buffers.num_bytes, dtype=torch.uint8)

    def _row(self) -> torch.Tensor:
        said = Said(
            self.progress.step, self._member.prepared, self.tuner.choice, self._measuring.last, self.adaptation.row()
        )
        return self.rows.pack(said, self._new_contexts, self.contexts, self.num_loader_workers)

    def _read_rows(self, engine: Engine, row: Handle) -> list[Said]:
        """What everybody says, with the contexts of all replicas."""
        new, loaders = self._new_contexts, self.num_loader_workers
        rows = row.wait()
        assert rows is not None, "an all_gather has a result on every rank"
        said, complete = self.rows.read(rows, new, self.contexts, loaders, self.adaptation.row_bytes)
        if not complete:
            rest = engine.all_gather("contexts", self.rows.rest(new, loaders), priority=FIRST).wait()
            assert rest is not None, "an all_gather has a result on every rank"
            self.rows.read_rest(rest, new, loaders)
        return said

    def _heed(self, said: Sequence[Said]) -> None:
        self.switch_to = self._agreed([each.prepared for each in said])
        # The first worker decides for all; the others keep up with it, for they may be first in the next view.
        self._next_way = said[0].way
        self.tuner.learn([each.measured for each in said], decides=self.engine is not None and self.engine.rank == 0)
        if self.engine is not None and self.engine.rank != 0:
            self.tuner.choice = self._next_way
        self.adaptation.read([each.figures for each in said])

    def _agreed(self, prepared: Sequence[int]) -> int | None:
        """The roll that all are prepared for, if it is a new one. The same answer on every worker."""
        number = min(prepared)
        return number if number == max(prepared) and number > self._member.entered else None

    # --- the end of a step ---

    def _end_step(self) -> None:
        self.turn = None
        self.step_ended_s = time.monotonic()
        if self.torn is not None:
            return
        self.adaptation.expect(self.progress.step + 1)
        if self.adaptation.has_decided and not self.finish_sums():
            return  # nothing is changed between a step that may not count and the next one
        if self.crossing.is_open:
            adaptation = copy.deepcopy(self.adaptation.state_dict()) if self.adaptation.is_active else {}
            self._undo = Undo(replace(self.progress), self.contexts, self.first_buffers, adaptation)
            self.contexts = list(self.contexts)
        for replica, context in self._new_contexts.items():
            self.contexts[replica] = context
        if self._new_buffers is not None:
            self.first_buffers = self._new_buffers
        if self.gradients.waits_for_order and self._new_order is not None:
            assert not self.crossing.is_open, "a view's first step has a barrier"
            self.gradients.rebuild(self._new_order)
        self.progress.step += 1
        self.progress.epoch_step += 1
        self._forget_step()
        if self._settled_in < 0 or self._settled_in != self._member.entered:
            # Told for every roll: the server forgets it of workers that were off the roll for a while.
            self._settled_in = self._member.entered
            self._member.settled()
            self._member.unpublish(LENT)  # a step with all of them: everybody has what it needs
        self._adapt()
        self.on_commit()

    def _forget_step(self) -> None:
        self._new_contexts, self._new_buffers, self._new_order = {}, None, None

    # --- what policies decide ---

    def _adapt(self) -> None:
        self.adaptation.measured(self._measuring.compute_s)
        try:
            self.adaptation.settle(self.situation)
        except CommError as error:
            self.tear(error)

    def situation(self) -> Situation:
        """How far the job is."""
        progress, stream, loading = self.progress, self._stream_of(0), self.parts.loading
        samples = self.parts.num_samples
        left = num_batches(samples, self.num_replicas, loading, stream.consumed) - stream.batch
        return Situation(
            progress.step,
            progress.epoch,
            progress.epoch_step,
            num_batches(samples, self.num_replicas, loading),
            self._member.entered,
            self.num_replicas,
            epoch_over=left <= 0,
        )

    def set_batch_size(self, size: int) -> None:
        """Of every replica, from the next step on: what is left of the epoch is dealt anew.

        Raises:
            ConfigError: an epoch would not have one such batch.
        """
        loading, stream = self.parts.loading, self._stream_of(0)
        if num_batches(self.parts.num_samples, self.num_replicas, replace(loading, batch_size=size)) == 0:
            raise ConfigError(
                f"{self.parts.num_samples} samples give {self.num_replicas} replicas not one batch of {size}: "
                "decide for less, or use drop_last=False"
            )
        used = samples_used(self.parts.num_samples, self.num_replicas, stream, loading)
        dealt = Stream(stream.epoch, consumed=used)
        self.contexts = [context.at(dealt) for context in self.contexts]
        self.use_batch_size(size)

    def use_batch_size(self, size: int) -> None:
        """As `set_batch_size`, where the replicas' places in their data say so already."""
        self.parts.loading = replace(self.parts.loading, batch_size=size)
        self._needs_hosting = True

    def ask_for(self, num_workers: int) -> None:
        """Ask for as many workers; they come when they come."""
        threading.Thread(target=self._ask_quietly, args=(num_workers,), daemon=True).start()

    def _ask_quietly(self, num_workers: int) -> None:
        try:
            self._member.resize(num_workers)
        except PliantError as error:
            log.warning("%d workers cannot be had: %s", num_workers, error)

    def _come_to_rest(self) -> None:
        """Between epochs every worker has replica 0's buffers, and the random state of the first replica it hosts."""
        self.gradients.rest()
        if self.hosted and self.contexts:
            rng.restore(self.contexts[self.hosted[0]].random, self.parts.device)
        self.buffers.load(self.first_buffers)

    # --- the whole state, for newcomers and checkpoints ---

    def layout_json(self) -> list[list[int]] | None:
        """L2, once it is in use; under D0 nothing, for a restarted DDP begins with L1 again."""
        if self.gradients.waits_for_order or not self.gradients.sums or not self._keeps_layout:
            return None
        return self.gradients.layout.to_json()

    def use_layout_json(self, value: Sequence[Sequence[int]] | None) -> None:
        self.gradients.use_layout(Layout.from_json(value) if value is not None else None)

    def note_change(self, since_s: float, old_size: int, lost: bool, tell: Callable[[ViewChange], None]) -> None:
        """A change of view has been made; it has ended when the first batch of the new view is in hand."""
        self._ending_change = (since_s, old_size, lost, tell)

    def _end_change(self) -> None:
        if self._ending_change is None:
            return
        assert self.engine is not None
        (since_s, old_size, lost, tell), self._ending_change = self._ending_change, None
        pause_s = time.monotonic() - since_s
        repeated = max(0, self._begun - self.progress.step) if lost else 0
        change = ViewChange(self.progress.step, old_size, self.engine.view.size, pause_s, lost, repeated)
        self.changes.append(change)
        tell(change)


def _watch(what: str, name: str, index: int, peer: int, begin_s: float, end_s: float) -> None:
    """Put a slice into the trace."""
    trace.event(what, f"{name}[{index}]" + ("" if what == "back" else f" to {peer}"), begin_s, end_s)
