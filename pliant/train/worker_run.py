"""The life of a job on one worker: its parts are made, it warms up, enters the job, trains epoch by epoch, and ends.

A program can end in many ways: it comes to its end, leaves its loop by `break`, fails, closes its job, or is told to leave.
Each leaves the other workers with the right news: that the training is over, or that this worker is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import torch

from pliant.cluster import View
from pliant.elastic.member import open_member
from pliant.errors import SHADOW_EXIT, CommError, TrainError
from pliant.identity import WorkerSpec
from pliant.process_priority import come_back
from pliant.progress_board import ProgressBoard
from pliant.train import determinism, operators, trace
from pliant.train.assembly import Assembled, JobServices, assemble
from pliant.train.checking import StepDigests
from pliant.train.declared import Declared, JobSettings
from pliant.train.evaluation import ShardedEvaluation
from pliant.train.events import Listeners, ViewChange
from pliant.train.job_control import WorkerRequests, announce
from pliant.train.loops import EpochLoop
from pliant.train.outer_calls import OuterCalls
from pliant.train.shadow import Shadow
from pliant.train.trainer import Trainer
from pliant.train.wrapping import whole_number
from pliant.uncaught import NO_SHADOW, end_with, enter_shadow, explain_uncaught, is_failing


class WorkerRun:
    """One worker's part in a job, from `pliant.join` to the end of the program."""

    def __init__(self, spec: WorkerSpec | None, settings: JobSettings, board: ProgressBoard) -> None:
        self.spec, self.settings, self._board = spec, settings, board
        self.stack = contextlib.ExitStack()
        """Is closed with the job."""
        self.member = self.stack.enter_context(open_member(spec, board))
        self._requests = WorkerRequests(
            self.member,
            dict(spec.resize_schedule) if spec is not None else {},
            lambda: self.parts is not None and self.parts.rendezvous.has_state,
            self.notify,
        )
        self.listeners = Listeners(view=[self._announce])
        if spec is not None and spec.resize_schedule:
            self.listeners.commit.append(self._requests.follow_schedule)
        self.declared = Declared(load_path=spec.resume if spec is not None else "")
        self.parts: Assembled | None = None
        """The parts of the job, once it runs."""
        self.shadow: Shadow | None = None
        """The warm-up of this new worker, while it lasts."""
        self._has_left_shadow = False
        """Whether the program has left its loop meanwhile. This ends with the next thing that it does with the job."""
        self.evaluation: ShardedEvaluation | None = None
        """The last evaluation that the program has begun."""
        self.loop: EpochLoop | None = None
        """The loop over the steps of the present epoch; None outside of `epochs`."""
        self.is_finished = False
        """Whether the training has ended on all workers."""
        determinism.pin(settings.level, torch.device("cpu"))
        if settings.allow:
            self.stack.callback(operators.allow(settings.allow))
        explain_uncaught(self._explain)
        atexit.register(self._end_program)
        if spec is not None and spec.elastic:
            self._requests.leave_on_sigterm()

    # --- who and where ---

    @property
    def trainer(self) -> Trainer | None:
        return self.parts.trainer if self.parts is not None else None

    @property
    def view(self) -> View | None:
        """The present view; before the job runs, the one that this worker was started for."""
        parts = self.parts
        if parts is not None and parts.trainer.views.engine is not None:
            return parts.trainer.views.engine.view
        return self.spec.view if self.spec is not None else None

    @property
    def rank(self) -> int:
        """This worker's rank in the present view."""
        parts = self.parts
        if parts is not None and parts.trainer.views.engine is not None and not self.in_shadow:
            return parts.trainer.views.engine.rank
        view, me = self.view, self.member.me
        rank = view.rank_of(me) if view is not None and me in view.workers else 0
        return max(1, rank) if self.in_shadow else rank  # it is not the first, whatever it was started as

    @property
    def in_shadow(self) -> bool:
        """Whether this new worker only warms up."""
        if self._has_left_shadow:
            self._leave_shadow("the program has left its loop")
        return self.shadow is not None

    def need_trainer(self) -> Trainer:
        """Return the trainer. Raises TrainError before the job runs."""
        if self.parts is None:
            raise TrainError(
                "the job has not begun yet: use this inside of `for epoch in job.epochs(k):` or `for step in job.steps(k):`"
            )
        return self.parts.trainer

    def running_loop(self) -> EpochLoop:
        """Return the loop over the steps of the present epoch. Raises TrainError outside of `epochs`."""
        if self.loop is None:
            raise TrainError(
                "the job is not training: use this inside of `for epoch in job.epochs(k):` or `for step in job.steps(k):`"
            )
        return self.loop

    def calls(self) -> OuterCalls | Shadow:
        """Return who carries out what the program asks of all workers. Raises TrainError outside of `epochs`."""
        self.running_loop()
        return self.shadow or self._made_parts().calls

    def _made_parts(self) -> Assembled:
        assert self.parts is not None, "the job runs"
        return self.parts

    # --- from the beginning to the end ---

    def epochs(self, count: int, start: int) -> Iterator[int]:
        """Yield the epochs from `start` up to `count`; a new worker, or a resumed job, begins at the job's present one."""
        if self.is_finished or self.loop is not None:
            raise TrainError("job.epochs: the training has ended with the loop before; a job has one such loop")
        whole_number(f"job.epochs({count!r})", count)
        self.declared.first.epoch = whole_number(f"job.epochs(start={start!r})", start, 0)
        if self.parts is None:
            self._make_parts()
        if self.declared.first.epoch < count:
            yield from self._warm_up()
        trainer = self._join()
        while trainer.progress.epoch < count:
            epoch = trainer.progress.epoch
            self.loop = EpochLoop(trainer, epoch)
            yield epoch
            self._end_epoch(epoch)
        self.finish()
        self.loop = None

    def _make_parts(self) -> None:
        services = JobServices(
            self.listeners, self.stack, self._board, self._requests.request_workers, self.notify, self.notify_first
        )
        self.parts = assemble(self.member, self.spec, self.settings, self.declared, services)
        if self.spec is not None and self.spec.check is not None:
            self.listeners.add(StepDigests(self, self.spec.worker, self.spec.check))

    def _warm_up(self) -> Iterator[int]:
        """Yield an epoch with one step in the shadow, if this worker is started for a job that runs already."""
        if self.spec is None or not self.spec.shadow or self.declared.make_feeder is None:
            come_back()
            return
        first, trainer = self.declared.first, self._made_parts().trainer
        self._board.run_program(time.monotonic())
        self.shadow = Shadow(trainer.state, self.declared.make_feeder(), first)
        self.loop = EpochLoop(self.shadow, first.epoch)
        enter_shadow(True)
        try:
            yield first.epoch
        except GeneratorExit:  # by `break`, or by an error, which is shown first
            self._has_left_shadow = True
            raise
        self.shadow.close()
        trainer.views.warm_memory()
        self.shadow = self.evaluation = None
        gc.collect()  # what compilation has left behind takes 200 ms to look through: not while others wait
        enter_shadow(False)
        come_back()

    def _leave_shadow(self, why: str) -> NoReturn:
        """End this process: its program does not come to the end of a warm-up. The runner starts it again without one."""
        if why:
            print(f"pliant: {NO_SHADOW}: {why}", file=sys.stderr, flush=True)
        self.shadow, self.loop, self._has_left_shadow = None, None, False
        self.close()
        end_with(SystemExit(SHADOW_EXIT))

    def _join(self) -> Trainer:
        trainer = self._made_parts().trainer
        self.member.start()
        trainer.driver.join()
        if self.settings.allow:
            self.notify_first(
                f"bits not promised: {', '.join(self.settings.allow)} (allowed without a deterministic kernel)"
            )
        trace.begin(self.rank)
        trainer.views.trace_engine()
        return trainer

    def resize(self, num_workers: int) -> None:
        """Request another number of workers, if this worker is the first."""
        if self.parts is not None:
            self.parts.trainer.current.check_outer("job.resize()")
        if self.rank == 0:
            self.member.resize(num_workers)

    def save(self, path: str) -> None:
        """Write a checkpoint of the step in progress, or of the present state if there is none."""
        trainer, checkpointing = self.need_trainer(), self._made_parts().checkpointing
        if self.in_shadow:
            return
        at_boundary = self.loop is None or (self.loop.is_running and trainer.current.step is None)  # as a listener is
        if not at_boundary:
            checkpointing.ask(path)
        elif self.rank == 0 and trainer.driver.wait_for_sums():
            checkpointing.write(path)

    def _announce(self, change: ViewChange) -> None:
        announce(change, self.need_trainer(), self.notify)

    def _end_epoch(self, epoch: int) -> None:
        parts = self._made_parts()
        parts.trainer.end_epoch(epoch)
        parts.checkpointing.end_epoch(self.rank == 0, parts.trainer.driver.wait_for_sums)

    def finish(self) -> None:
        """End the training, together with all other workers."""
        parts = self._made_parts()
        self.is_finished = True
        parts.trainer.finish()
        parts.checkpointing.end_epoch(self.rank == 0, parts.trainer.driver.wait_for_sums)
        parts.checkpointing.flush()
        parts.trainer.adaptation.end_job()
        self.member.finish()

    # --- the end of the program ---

    def _finish_if_left(self) -> None:
        """End the training of a program that has left its loop by `break`."""
        loop, trainer = self.loop, self.trainer
        if loop is None or trainer is None or self.is_finished or trainer.driver.is_broken:
            return
        if sys.exc_info()[0] is not None:
            return
        if loop.has_ended:
            self._end_epoch(loop.epoch)
        self.finish()

    def close(self) -> None:
        """Leave the job.

        Raises:
            TrainError: the program has left its loop by `break`, and the states of the workers differ.
        """
        atexit.unregister(self._end_program)
        if sys.exc_info()[0] is not None or is_failing():
            self._board.end()
        is_at_end = sys.exc_info()[0] is None and not is_failing() and not self._requests.exits_at_once
        if self.shadow is not None and is_at_end:
            self._leave_shadow("the program has closed its job")
        try:
            self._finish_if_left()
        finally:
            if self.shadow is not None:
                self.shadow.feeder.close()
            if self.parts is not None:
                self.parts.checkpointing.close()
                self.parts.trainer.close()
                self.parts.trainer.adaptation.close()
                with contextlib.suppress(CommError):
                    self.parts.trainer.deferred.flush()
            self.stack.close()

    def fail(self, error: BaseException) -> BaseException | None:
        """Leave the job because of an error of the program: the others go on without this worker. Return a better error, if
        there is one."""
        self.loop = None
        explained = self._explain(error)
        self.close()
        return explained

    def _end_program(self) -> None:
        """Leave the job at the end of the program. An error, which Python would drop here, becomes its exit code."""
        if self.shadow is not None and not self._requests.exits_at_once:
            self._leave_shadow("" if is_failing() else "the program has ended")
        if is_failing() or self._requests.exits_at_once:
            self.loop = None  # the program has not come to its end: the others go on without this worker
        try:
            self.close()
        except BaseException as error:
            end_with(error)

    def _explain(self, error: BaseException) -> BaseException | None:
        """Return a better error than that of torch, if the program has called what cannot have equal bits."""
        if self.settings.level == "D0":
            return None
        return operators.explain(error, self.declared.wrapped.models if self.declared.wrapped is not None else ())

    # --- messages ---

    def notify(self, text: str) -> None:
        print(text, flush=True)

    def notify_first(self, text: str) -> None:
        """Print a message on the first worker only."""
        if self.rank == 0:
            self.notify(text)
