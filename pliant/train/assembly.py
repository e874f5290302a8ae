"""The parts of a job, made from what `pliant.join` and the program have said, and put together in one place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pliant.adapt.monitors import StallDetector, wants_stall_detection
from pliant.cluster import PortRange, Worker
from pliant.comm.order import Order
from pliant.comm.process_group import GroupOffer
from pliant.elastic.member import Member
from pliant.errors import TrainError
from pliant.identity import WorkerSpec
from pliant.progress_board import ProgressBoard
from pliant.stall_rule import StallRule
from pliant.tokens import job_token
from pliant.train import backward_calls, determinism
from pliant.train.adaptation import Adaptation
from pliant.train.checkpoint import Checkpointing, set_initial_state
from pliant.train.context import RngState, capture_rng, seeded_rng
from pliant.train.current_step import CurrentStep
from pliant.train.declared import Declared, JobSettings, Wrapped
from pliant.train.deferred import DeferredUpdates, gate_evaluation
from pliant.train.driver import PhaseDriver
from pliant.train.events import Listeners, Progress, ViewChanges
from pliant.train.gradient_probe import GradientProbe
from pliant.train.gradients import GradientReducer
from pliant.train.group_path import GroupPath
from pliant.train.guard import Guard
from pliant.train.heap import keep_freed_memory
from pliant.train.job_state import JobState
from pliant.train.lone_steps import LoneSteps
from pliant.train.meeting import MeetingWatch
from pliant.train.outer_calls import OuterCalls
from pliant.train.outer_code import OuterCode
from pliant.train.outer_draws import Draws
from pliant.train.pass_exchange import PassExchange, StallWatch
from pliant.train.passes import Passes
from pliant.train.phases import PhaseMachine
from pliant.train.rendezvous import ViewRendezvous
from pliant.train.step_batches import StepBatches
from pliant.train.sync import SyncController, SyncTuner
from pliant.train.trainer import Trainer
from pliant.train.views import WorkerViews
from pliant.train.wrapping import (
    check_tracked,
    defer_optimizer,
    describe_names,
    describe_program,
    device_of,
    hook_optimizer,
    make_probe,
    refuse_untracked_scalers,
    trainable_parameters,
    why_no_priority,
)


@dataclass(frozen=True, slots=True)
class JobServices:
    """What a job does for its parts."""

    listeners: Listeners
    stack: contextlib.ExitStack
    """Is closed with the job."""
    board: ProgressBoard
    request_workers: Callable[[int], None]
    notify: Callable[[str], None]
    notify_first: Callable[[str], None]
    """The same, on the first worker only."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts that the job itself uses."""

    trainer: Trainer
    calls: OuterCalls
    rendezvous: ViewRendezvous
    checkpointing: Checkpointing
    probe: GradientProbe | None


def assemble(
    member: Member, spec: WorkerSpec | None, settings: JobSettings, declared: Declared, services: JobServices
) -> Assembled:
    """Make the parts of a job.

    Raises:
        TrainError: the program has not declared a model, or no data.
    """
    wrapped, data = declared.wrapped, declared.data
    if wrapped is None:
        raise TrainError("the job has nothing to train yet: call job.wrap(model, optimizer) first")
    if data is None:
        raise TrainError("the job has no data yet: call job.loader(dataset, batch_size=...) first, or use job.steps")
    feeder, replicas = data
    averaging, adapting, tracked = wrapped.averaging, settings.adapting, declared.tracked
    # They may have been moved since they were wrapped.
    device = device_of(wrapped.models, is_free=settings.level == "D0")
    if device.type == "cpu":
        keep_freed_memory()
    order = settings.order or default_order(device)
    follows_view = settings.replicas is None and spec is not None
    check_tracked(wrapped.optimizers, tracked)
    mode = _sync_mode(settings.sync, wrapped, tracked, services.notify)
    tuner = SyncTuner(
        mode,
        settings.slice_bytes,
        settings.in_flight_bytes,
        notify=services.notify_first,
    )
    parameters = [trainable_parameters(model) for model in wrapped.models]
    stalls = services.stack.enter_context(StallDetector(services.notify)) if wants_stall_detection() else None
    stall_watch: StallWatch = stalls.watch if stalls is not None else lambda _: contextlib.nullcontext()
    rule = StallRule(spec.stall_timeout_s if spec is not None else None)
    meetings = MeetingWatch(services.board, rule, member.give_up if member.elastic else None)
    services.stack.callback(meetings.close)

    @contextlib.contextmanager
    def await_sum(name: str) -> Iterator[None]:
        with stall_watch(name), meetings.awaiting(f"the sum of {name}"):
            yield

    deferred = DeferredUpdates(
        [parameter for _, parameter in parameters[0]],
        [name for name, _ in parameters[0]],
        can_undo=member.elastic,
        notify=services.notify_first,
        optimizers=wrapped.optimizers,
        stall_watch=await_sum,
    )
    deferring: dict[str, Any] = {"before_backward": deferred.unused_parameters} if tuner.may_defer else {}
    group = None
    is_plain = mode == "fifo" and averaging is None and len(parameters) == 1  # else sums could begin in any order
    if is_plain and all(parameter.device == device for _, parameter in parameters[0]):
        offer = GroupOffer.of(device, encrypted=spec is not None and bool(spec.tls_cert))
        group = GroupPath(offer, device, "tree" if order == "tree" else "ddp") if offer.backend else None
    reducers = [
        GradientReducer(
            found,
            replicas.count,
            order=order,
            keeps_on_host=settings.gradients == "host",
            find_unused=wrapped.find_unused,
            cap_bytes=wrapped.cap_bytes,
            always_sums=follows_view,
            prefix=f"{number}:" if len(parameters) > 1 else "",
            group=group,
            **deferring,
        )
        for number, found in enumerate(parameters)
    ]
    probe = reducers[0].probe = make_probe(adapting.monitors, reducers, wrapped.optimizers, averaging)
    progress = Progress()
    adaptation = Adaptation(adapting, progress, replicas, probe, services.request_workers, services.notify)
    adaptation.order, adaptation.not_promised = order, settings.allow
    state = JobState(
        wrapped.models,
        wrapped.optimizers,
        tracked,
        replicas,
        reducers,
        adaptation,
        progress,
        averaging,
        keeps_layout=settings.level != "D0",
        sync_buffers=wrapped.sync_buffers,
    )
    directory, every = (spec.checkpoint_dir, spec.checkpoint_every) if spec is not None else ("", 0)
    program = describe_program(parameters, replicas, order, follows_view=follows_view)
    program += f", {averaging.describe()}" if averaging is not None else ""
    program += f", tracks {describe_names(tracked)}" if tracked else ""
    listeners, about = services.listeners, dict[str, object](level=settings.level, order=order, program=program)
    checkpointing = Checkpointing(state, directory, every, about, services.notify, listeners.wake)
    listeners.add_occasional(lambda event: checkpointing.end_step(event, driver.wait_for_sums), every)
    listeners.view.append(lambda _: listeners.wake())
    start_random = _start_random(settings.seed, declared.rank_seed, device)

    def start_job(had_state: bool) -> None:
        set_initial_state(
            state,
            device,
            had_state,
            asked=declared.load_path,
            directory=directory,
            random=start_random,
            first=declared.first,
            order=order,
            program=program,
            notify=services.notify,
        )

    def before_end(is_between_steps: bool) -> None:
        if views.rank == 0:
            checkpointing.write_last(is_between_steps=is_between_steps)

    rendezvous = ViewRendezvous(
        member,
        state,
        f"{program}, {adapting}",
        determinism.fingerprint(device, settings.allow),
        settings.level,
        start_job,
        before_end,
        lambda engine: meetings.begin(engine, -1, f"the change to view {engine.view.number}"),
    )
    if settings.level != "D0":
        watch = determinism.SettingsWatch(device, settings.verify)
        listeners.add_occasional(watch.end_step, settings.verify)
        listeners.view.append(watch.enter_view)
    if averaging is not None:
        averaging.attach(reducers[0], rendezvous.equalise)
    if adapting.metrics or adapting.tensorboard:
        from pliant.train.exporters import start_exporters  # loads libraries that most jobs do not need

        worker = spec.worker if spec is not None else Worker("127.0.0.1", PortRange().begin)
        token = "" if spec is None else spec.token or job_token(spec.secret)
        start_exporters(adaptation, adapting, worker, token, services.stack, stalls)
    guard = Guard(state, settings.verify)
    state.is_guarded = guard.is_on and averaging is None
    member.max_members = None if follows_view else replicas.count
    sync = SyncController(reducers, deferred, tuner)
    watched = [each for reducer in reducers for each in reducer.parameters] if member.elastic else []
    current = CurrentStep(progress, watched)
    batches = StepBatches(feeder, replicas, progress, device)
    outer = OuterCode(state, batches, device)
    exchange = PassExchange(state, guard, stall_watch, device)
    machine = PhaseMachine(elastic=member.elastic, keeps_start=sync.may_defer)
    changes = ViewChanges(services.listeners.view)
    views = WorkerViews(
        member,
        state,
        batches,
        exchange,
        sync,
        guard,
        changes,
        services.board,
        device,
        settings.blocks,
        follows_view=follows_view,
    )
    passes = Passes(machine, member, state, views, exchange, current, batches, outer, deferred, sync, guard)
    driver = PhaseDriver(machine, member, state, rendezvous, views, passes, current, outer, deferred, meetings)
    lone = LoneSteps(
        machine, member, state, views, current, batches, outer, feeder, services.board, may_defer=sync.may_defer
    )
    trainer = Trainer(
        member,
        state,
        driver,
        views,
        passes,
        exchange,
        lone,
        current,
        batches,
        outer,
        feeder,
        deferred,
        sync,
        services.listeners,
        services.board,
        loss_scale=lambda: _loss_scale(tracked),
    )
    calls = OuterCalls(state, driver, views, current, batches, outer, trainer.settle, device)
    _hook_program(wrapped, tracked, trainer, services.stack, may_defer=tuner.may_defer)
    for each in lone.watches:
        services.stack.callback(backward_calls.listen(each.expect_backward))
    return Assembled(trainer, calls, rendezvous, checkpointing, probe)


def default_order(device: torch.device) -> Order:
    """Return the order of a job on this device whose user has not asked for one.

    On CPUs stock DDP has an order, gloo's, which it is worth having the bits of. On GPUs DDP runs on NCCL, whose order depends
    on the machines, so the order is free to be the one that costs the least.
    """
    return "tree" if device.type == "cuda" else "ddp"


def _hook_program(
    wrapped: Wrapped, tracked: dict[str, Any], trainer: Trainer, stack: contextlib.ExitStack, *, may_defer: bool
) -> None:
    """Attach what watches over the program's own objects, until the job is closed."""

    def factor() -> float:
        return trainer.adaptation.learning_rate_factor

    for optimizer in wrapped.optimizers:
        if may_defer:
            defer_optimizer(
                optimizer, trainer.deferred, trainer.current.check_outer, lambda: trainer.is_taken_back, factor
            )
        else:
            stack.callback(hook_optimizer(optimizer, trainer.current, trainer.adaptation))
    if may_defer:
        stack.callback(gate_evaluation(wrapped.models[0], trainer.deferred))
    stack.callback(refuse_untracked_scalers(tracked))


def _start_random(
    seed: int | None, rank_seed: tuple[int, RngState] | None, device: torch.device
) -> Callable[[int], RngState]:
    """Return the function that gives a replica its first random state."""
    present = capture_rng(device)
    if rank_seed is not None:
        first, before = rank_seed
        draws = Draws.between(before, present)

        def moved(replica: int) -> RngState:
            state = seeded_rng(first + replica, device)
            return state if draws is None else draws.apply(state)

        return moved
    if seed is not None:
        return lambda replica: seeded_rng(seed + replica, device)
    return lambda _: present


def _loss_scale(tracked: dict[str, Any]) -> float:
    """Return the product of all gradient scalers' factors."""
    return math.prod(thing.get_scale() for thing in tracked.values() if isinstance(thing, torch.amp.GradScaler))


def _sync_mode(asked: str, wrapped: Wrapped, tracked: dict[str, Any], notify: Callable[[str], None]) -> str:
    """Return the sync mode that was asked for, or "fifo" if this program cannot have it."""
    reason = why_no_priority(wrapped.models, wrapped.averaging, tracked)
    if asked == "fifo" or not reason:
        return asked
    if asked != "auto":
        notify(f"sync: {asked!r} is not possible, because {reason}; using 'fifo'")
    return "fifo"
