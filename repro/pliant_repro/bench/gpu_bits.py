"""The part `bits` of `pliant bench gpu`: digests after every step, of several placements, of two runs of each, and of DDP.

In the order of a tree, 1, 2 and 4 processes are compared with each other, in two runs of each. In DDP's order they are also
compared with stock DDP on gloo with tensors on the device. Two cells more have a GradScaler, and `sync="priority"`. Controls
show that the comparison can fail: the two orders differ from each other, and so does a training of which one bit was flipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from pliant_repro import contest
from pliant_repro.bench.gpu_parts import (
    SEED,
    Clock,
    DevicePool,
    GpuOptions,
    Part,
    ask_all,
    describe_failure,
    device_of,
    process_bytes,
    started,
)
from pliant_repro.bench.train import TrainingTask
from pliant_repro.contest import Progress

TAMPERED_STEP = 2
"""Step after which one bit of the control is flipped."""
OVERLAP_STEPS = 6
"""Steps of the priority cell without digests, which would wait for the updates: these are to overlap."""
REFUSED = "adaptive_avg_pool2d_backward"
"""Operator without a deterministic kernel on CUDA. `reflection_pad2d_backward`, which torch's manual lists too, has one."""
NO_TIME = "no time was left"


@dataclass(frozen=True, slots=True)
class Group:
    """One training whose digests are compared with others of its cell."""

    model: str
    mode: str
    side: str
    num_workers: int
    number: int = 0
    """Number of the run."""
    order: str = "tree"
    """Order of the sums, as an argument of `pliant.join`."""
    tampered: bool = False
    """Whether this is the control, of which one bit is flipped."""

    @property
    def name(self) -> str:
        words = (self.model, self.mode, self.side, self.num_workers, self.number, self.order, "x" * self.tampered)
        return "_".join(str(word) for word in words if word != "")

    @property
    def shown(self) -> str:
        who = "DDP on gloo" if self.side == "ddp" else "ours"
        return f"{who} on {self.num_workers}, run {self.number + 1}"

    @property
    def is_oracle(self) -> bool:
        """Whether this order is DDP's."""
        return self.order == "ddp"


Digests = list[tuple[str, str]]
"""Digests after every step: of parameters and optimizer, and of the buffers."""


@dataclass(slots=True)
class Outcome:
    """What the workers of a group have told."""

    digests: Digests = field(default_factory=list)
    overlapped: int | None = None
    """How many of the steps before the digests were committed while updates were under way."""
    failure: str = ""
    is_late: bool = False
    """Whether there are no digests because the time of the part was over."""


def orders_to_compare(options: GpuOptions) -> tuple[str, ...]:
    """Return the orders that are compared, the one with all placements and two runs first."""
    return (options.order,) if options.order else ("tree", "ddp")


def groups_of(options: GpuOptions, orders: Sequence[str]) -> list[Group]:
    """Return all trainings, those of eager networks first, so that they are done if time is short."""
    sizes = [count for count in (1, 2, 4) if count <= options.replicas]
    has_oracle = "ddp" in orders
    groups: list[Group] = []
    for model, mode in sorted(options.cells, key=lambda cell: ("eager", "fp16", "priority", "compiled").index(cell[1])):
        if mode in ("fp16", "priority"):
            order = "ddp" if has_oracle else orders[0]
            several = [count for count in sizes if mode == "fp16" or count > 1] or sizes
            groups += [Group(model, mode, "ddp", options.replicas, order=order)] if has_oracle else []
            groups += [Group(model, mode, "pliant", count, order=order) for count in several]
            continue
        groups += [Group(model, mode, "ddp", options.replicas, order="ddp")] if has_oracle else []
        groups += [Group(model, mode, "pliant", count, number, orders[0]) for number in (0, 1) for count in sizes]
        groups += [Group(model, mode, "pliant", count, 0, order) for order in orders[1:] for count in sizes]
    return [*groups, control_of(groups)]


def control_of(groups: Sequence[Group]) -> Group:
    """Return the control: the training of the smallest network on one worker, with one bit flipped on the way."""
    ours = [group for group in groups if group.side == "pliant" and group.mode != "priority"] or list(groups)
    size = {"gpt2": 2, "resnet50": 1, "vit": 1}
    smallest = min(ours, key=lambda group: size.get(group.model, 0))
    first = next(group for group in ours if (group.model, group.mode) == (smallest.model, smallest.mode))
    return replace(first, tampered=True)


def run_bits(options: GpuOptions, progress: Progress, pool: DevicePool, found: Part) -> None:
    """Compare the digests of all groups; as many run at the same time as the pool has room for."""
    orders = orders_to_compare(options)
    groups = groups_of(options, orders)
    found.columns = ("network", "order", "placements", "two runs", "DDP", "digest after the last step")
    clock = Clock(options.limit_s)
    done: list[Group] = []

    def train(group: Group) -> Outcome:
        try:
            outcome = train_group(group, options, pool, clock, found)
        except Exception as error:  # of this thread; the other groups go on
            outcome = Outcome(failure=describe_failure(error))
        done.append(group)
        progress(f"bits: {group.model} {group.mode}", len(done) / len(groups))
        return outcome

    with ThreadPoolExecutor(len(groups) + 1) as threads:
        refusal = threads.submit(refuse, options, pool, clock) if options.device == "cuda" else None
        outcomes = dict(zip(groups, threads.map(train, groups), strict=True))
    for cell in dict.fromkeys((group.model, group.mode) for group in groups):
        members = [group for group in groups if (group.model, group.mode) == cell]
        judge_bits(found, members, outcomes, options.replicas)
    found.remarks += [
        f"{group.shown}, {group.model} {group.mode} {group.order}: {outcome.failure}"
        for group, outcome in outcomes.items()
        if outcome.failure
    ]
    if refusal is not None:
        judge_refusal(found, *refusal.result())


def group_task(group: Group, options: GpuOptions) -> TrainingTask:
    """Return what the workers of a group train."""
    return replace(options, order=group.order).task(
        group.model,
        group.mode,
        group.side,
        num_workers=group.num_workers,
        replicas=options.replicas,
        seed=SEED,
        tamper=TAMPERED_STEP if group.tampered else 0,
    )


def train_group(group: Group, options: GpuOptions, pool: DevicePool, clock: Clock, found: Part) -> Outcome:
    """Train as soon as there is room, and return what the workers tell."""
    with pool.lend(process_bytes(group.model, options), group.num_workers, clock.left_s - 15) as got:
        if not got:
            return Outcome(failure=NO_TIME, is_late=True)
        with started({group.name: group_task(group, options)}, lambda what, fraction: None, clock) as contenders:
            found.device = found.device or device_of(contenders)
            workers, outcome = [*contenders.values()], Outcome()
            if group.mode == "priority":
                answers = ask_all(workers, {"do": "overlap", "iterations": OVERLAP_STEPS}, clock).get(group.name)
                outcome.overlapped = cast(int, answers[0]["overlapped"]) if answers else None
            answers = ask_all(workers, {"do": "digests", "iterations": options.num_steps}, clock).get(group.name)
            if answers is not None:
                outcome.digests, outcome.failure = merge_ranks(answers)
            else:
                outcome.failure = contenders[group.name].failure
                outcome.is_late = clock.is_over and contest.NO_ANSWER in outcome.failure
            return outcome


def merge_ranks(answers: Sequence[contest.Answer]) -> tuple[Digests, str]:
    """Return rank 0's digests, and a remark if the state of another rank differs from it in any step, or shows nothing."""
    states, buffers = (cast("list[str]", answers[0][key]) for key in ("states", "buffers"))
    for rank, answer in enumerate(answers):
        for step, (mine, theirs) in enumerate(zip(states, cast("list[str]", answer["states"]), strict=True), 1):
            if mine != theirs:
                return list(zip(states, buffers, strict=True)), f"rank {rank} differs from rank 0 after step {step}"
    return list(zip(states, buffers, strict=True)), why_no_evidence(answers[0])


def why_no_evidence(answer: contest.Answer) -> str:
    """Return why the digests in an answer show nothing; empty if they do."""
    losses = contest.floats(answer["losses"])
    if all(map(math.isfinite, losses)):
        return ""
    return "the training has diverged: all states of it that are not numbers are alike"


def first_difference(found: Sequence[object], expected: Sequence[object]) -> int | None:
    """Return the first step (from 1 on) whose digests differ, or that one of the two lacks; None if all are equal."""
    for step in range(max(len(found), len(expected))):
        if step >= min(len(found), len(expected)) or found[step] != expected[step]:
            return step + 1
    return None


def judge_bits(found: Part, groups: Sequence[Group], outcomes: Mapping[Group, Outcome], replicas: int) -> None:
    """Add the rows and the verdicts of one network in one mode: all its groups of one order have the same digests."""
    what = f"{groups[0].model} {groups[0].mode}"
    by_order = {
        order: [group for group in groups if group.order == order] for order in dict.fromkeys(g.order for g in groups)
    }
    references: dict[str, Digests] = {}
    for order, members in by_order.items():
        compared = [group for group in members if not group.tampered]
        references[order] = reference = _reference(compared, outcomes)
        judge_order(found, what, order, compared, outcomes, reference)
    complete = [reference for reference in references.values() if reference]
    if len(complete) > 1 and replicas > 2:  # two numbers have only one sum
        step = first_difference(complete[0], complete[1])  # in the first steps all updates may round to the same
        text = f"{what}, control: the orders {' and '.join(references)} have different digests from step {step} on"
        found.judge(step is not None, text if step is not None else f"{what}, control: the orders do not differ")
    for group in groups:
        if group.tampered:
            step = first_difference(outcomes[group].digests, references[group.order])
            text = f"{what}, control: a bit flipped after step {TAMPERED_STEP} shows "
            shown = "no difference" if step is None else f"from step {step} on"
            if outcomes[group].is_late or (not references[group.order] and any(outcomes[g].is_late for g in groups)):
                found.judge(None, f"{what}, control of a flipped bit: {NO_TIME}")
                continue
            found.judge(step == TAMPERED_STEP and bool(outcomes[group].digests), text + shown)


def _reference(groups: Sequence[Group], outcomes: Mapping[Group, Outcome]) -> Digests:
    """Return the digests of the first of our trainings that has some."""
    return next((outcomes[group].digests for group in groups if group.side == "pliant" and outcomes[group].digests), [])


def judge_order(
    found: Part,
    what: str,
    order: str,
    groups: Sequence[Group],
    outcomes: Mapping[Group, Outcome],
    reference: Digests,
) -> None:
    """Add the row and the verdicts of all groups of one order."""
    named = f"{what}, order {order}" if order else what
    late = {group for group in groups if outcomes[group].is_late}
    if not reference and late:  # nothing to compare with
        late = set(groups)
    differences = {
        group: None if group in late else first_difference(outcomes[group].digests, reference) if reference else 1
        for group in groups
    }
    columns = []
    for name, compared in (
        ("all placements", [group for group in groups if group.side == "pliant" and group.number == 0]),
        ("a second run", [group for group in groups if group.side == "pliant" and group.number == 1]),
        ("DDP", [group for group in groups if group.side == "ddp"]),
    ):
        if not compared:
            columns.append("")
            continue
        wrong = [f"{group.shown} from step {differences[group]} on" for group in compared if differences[group]]
        wrong += [
            f"{group.shown}: {outcomes[group].failure}"
            for group in compared
            if outcomes[group].failure and group not in late
        ]
        missing = [group for group in compared if group in late]
        columns.append("DIFFERENT" if wrong else "no time" if missing else "equal")
        if missing and not wrong:
            done = ", ".join(group.shown for group in compared if group not in late) or "none"
            lacking = ", ".join(group.shown for group in missing)
            found.judge(None, f"{named}, {name}: {NO_TIME} for {lacking}; equal: {done}")
            continue
        sizes = ", ".join(str(group.num_workers) for group in compared)
        text = f"{named}, {name} ({sizes}): equal digests after each of {len(reference)} steps"
        found.judge(not wrong, text if not wrong else f"{named}, {name}: {'; '.join(wrong)}")
    for group in groups:
        overlapped = outcomes[group].overlapped
        if group.side == "pliant" and group.mode == "priority":
            text = f"{named} on {group.num_workers}: {overlapped} of {OVERLAP_STEPS} steps were committed while updates were under way"
            holds = (overlapped or 0) >= OVERLAP_STEPS - 2
            found.judge(None if overlapped is None and outcomes[group].is_late else holds, text)
    found.rows.append((what, order or "default", *columns, reference[-1][0][:16] if reference else "-"))
    found.cells.append({
        "model": groups[0].model, "mode": groups[0].mode, "order": order,
        "groups": [
            {**asdict(group), "first_difference": differences[group], **asdict(outcomes[group])} for group in groups
        ],
    })  # fmt: skip


def nondeterministic() -> tuple[Any, Any]:
    """Return a network whose backward has no deterministic kernel on a GPU, and an input; a model of `make_subject`."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(4 * 3 * 3, 2))
    return layers.to(device), torch.randn(2, 3, 16, 16, device=device)


def refuse(options: GpuOptions, pool: DevicePool, clock: Clock) -> tuple[str, bool]:
    """Train the network that is to be refused; return what the worker said, and whether it had too little time."""
    task = replace(options.task("gpt2", "eager"), model=f"{__name__}:nondeterministic", optimizer="sgd", autocast=False)
    with pool.lend(process_bytes("", options), 1, clock.left_s - 15) as got:
        if not got:
            return NO_TIME, True
        with started({"refused": task}, lambda what, fraction: None, clock) as contenders:
            ask_all([contenders["refused"]], {"do": "run", "iterations": 1}, clock)
            said = contenders["refused"].failure
    return said, clock.is_over and contest.NO_ANSWER in said


def judge_refusal(found: Part, said: str, is_late: bool) -> None:
    """Add the verdict on a program with an operator that has no deterministic kernel: it is to be refused by name."""
    found.cells.append({"refusal": said})
    text = f"a program with {REFUSED} is refused: {NO_TIME if is_late else said[:300] or 'it was not'}"
    found.judge(None if is_late else REFUSED in said, text)
