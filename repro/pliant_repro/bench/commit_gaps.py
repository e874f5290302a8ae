"""How a change of workers is felt: the gaps between the commits of a job, around each change and beside its median steps.

What the job reports of a change is how long its survivors waited. A user feels more: a first step that is slow because a new
worker is cold, or steps that are slow because it warms up beside them. So everything here is arithmetic over the moments at
which all workers had committed a step. `bench resize`, `bench recover` and `bench gpu live` share it, and its limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.machine import Json
from pliant_repro.bench.elastic import StepBegun, summarise
from pliant_repro.contest import quantile

FACTOR = 1.5
"""A gap, or a step after a change, may be this many times the median step."""
EXTRA_S = {"cpu": 0.02, "cuda": 0.15}
"""How much longer the longest gap around a change may be, by device."""
KILL_S = 1.0
"""kill -9 to the end of the next step: at most this, and one median step."""
AFTER = 20
"""Steps after a change that are judged."""

Commits = Mapping[int, float]
"""When each step was done by all workers, by the number of the step, in seconds of the monotonic clock."""


def commit_times(reports: Iterable[StepBegun]) -> dict[int, float]:
    """Return when each step was done by all workers, by its number.

    A worker reports the end of a step with the beginning of the next one, so the last step is missing. If a worker was killed
    after a step, and the others had to do that step again, they are later.
    """
    found: dict[int, float] = {}
    for each in reports:
        if each.ended_s and each.step:
            found[each.step - 1] = max(each.ended_s, found.get(each.step - 1, 0.0))
    return found


def gaps(commits: Commits, first: int, last: int) -> list[float]:
    """Return the seconds from each commit to the next, for the steps from `first` to `last` that are known."""
    pairs = ((commits.get(step - 1), commits.get(step)) for step in range(first, last + 1))
    return [after - before for before, after in pairs if before is not None and after is not None]


def undisturbed_steps(reports: Sequence[StepBegun], commits: Commits) -> dict[int, list[float]]:
    """Return the times of steps for each number of workers, without the first step after each change."""
    sizes: dict[int, int] = {}
    disturbed: set[int] = set()
    for each in reports:
        sizes[each.step] = each.size
        if each.change is not None:
            disturbed.add(each.step)
    samples: dict[int, list[float]] = {}
    for step, size in sizes.items():
        if step not in disturbed and sizes.get(step - 1) == size:
            samples.setdefault(size, []).extend(gaps(commits, step, step))
    return {size: times for size, times in samples.items() if times}


def median_steps(reports: Sequence[StepBegun], commits: Commits) -> dict[int, float]:
    """Return the median time of a step for each number of workers; the first step after a change does not count."""
    return {size: quantile(times, 0.5) for size, times in undisturbed_steps(reports, commits).items()}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done to the job."""

    kind: str
    """shrink, grow, kill or replacement."""
    at_s: float
    until_s: float = float("inf")
    """When the next thing was done."""
    pid: int = 0
    """The process that was killed."""


@dataclass(frozen=True, slots=True)
class FeltChange:
    """How one change was felt. All times are in seconds."""

    before_s: float
    """Median step with as many workers as before the change."""
    after_s: float
    """Median step with as many workers as after it."""
    gap_s: float
    """The longest gap between two commits, from the request until AFTER steps after the change."""
    gap_limit_s: float
    switch_s: float
    """The gap in which the workers changed: from the last commit before it to the first one after it."""
    slowest_s: float
    """The longest of the steps that follow the first one after the change."""
    slowest_limit_s: float
    num_slow: int
    """How many of these steps are longer than FACTOR times their median."""
    num_steps: int
    """How many of these steps were seen, at most AFTER."""
    next_s: float | None = None
    """From kill -9 to the end of the next step; None if nothing was killed."""
    next_limit_s: float | None = None


def feel_change(
    commits: Commits,
    medians: Mapping[int, float],
    *,
    begin_s: float,
    step: int,
    sizes: tuple[int, int],
    extra_s: float,
    before: int | None = None,
    killed_s: float | None = None,
    after: int = AFTER,
) -> FeltChange:
    """Return how a change was felt.

    Args:
        commits: when each step was done.
        medians: median step for each number of workers.
        begin_s: when the change was asked for.
        step: number of the first step after the change.
        sizes: numbers of workers before and after.
        extra_s: how much longer than FACTOR times the slower median step the longest gap may be.
        before: the first step that belongs to the next change, if there is one.
        killed_s: when a worker was killed, if this change is the loss of that worker.
        after: how many steps after the change are judged.
    """
    before_s, after_s = (medians.get(size, 0.0) for size in sizes)
    first = min((number for number, at_s in commits.items() if at_s > begin_s), default=step)
    last = step + after if before is None else min(step + after, before - 1)
    following = gaps(commits, step + 1, last)
    slow_s = FACTOR * after_s
    end_s = commits.get(step)
    return FeltChange(
        before_s=before_s,
        after_s=after_s,
        gap_s=max(gaps(commits, min(first, step), last), default=0.0),
        gap_limit_s=FACTOR * max(before_s, after_s) + extra_s,
        switch_s=max(gaps(commits, step, step), default=0.0),
        slowest_s=max(following, default=0.0),
        slowest_limit_s=slow_s,
        num_slow=sum(each > slow_s for each in following),
        num_steps=len(following),
        next_s=end_s - killed_s if killed_s is not None and end_s is not None else None,
        next_limit_s=KILL_S + after_s if killed_s is not None else None,
    )


def measure_changes(
    reports: Sequence[StepBegun], events: Sequence[Event], extra_s: float, after: int = AFTER
) -> dict[str, list[FeltChange]]:
    """Return how each kind of change was felt: shrink, grow, kill, and the replacement after a kill."""
    commits = commit_times(reports)
    medians = median_steps(reports, commits)
    found: dict[str, list[FeltChange]] = {}

    def add(kind: str, begin_s: float, change: StepBegun, before: int | None, killed_s: float | None = None) -> None:
        assert change.change is not None, "it follows a change"
        found.setdefault(kind, []).append(
            feel_change(
                commits,
                medians,
                begin_s=begin_s,
                step=change.step,
                sizes=change.change[:2],
                extra_s=extra_s,
                before=before,
                killed_s=killed_s,
                after=after,
            )
        )

    for event in events:
        changes = [
            each
            for each in reports
            if each.change is not None and event.at_s < each.at_s < event.until_s and each.pid != event.pid
        ]
        by_step = {each.step: each for each in changes}  # each survivor reports a change
        ordered = [by_step[step] for step in sorted(by_step)]
        if not ordered:
            continue
        killed_s = event.at_s if event.kind == "kill" else None
        add(event.kind, event.at_s, ordered[0], ordered[1].step if len(ordered) > 1 else None, killed_s)
        if event.kind == "kill" and len(ordered) > 1:
            add("replacement", commits.get(ordered[0].step, event.at_s), ordered[-1], None)
    return found


# --- what it says about the limits ---


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, and the change that is furthest above it, or the least below it."""

    title: str
    values_s: Sequence[float]
    limits_s: Sequence[float]
    judged: bool = True

    @property
    def worst(self) -> int:
        return max(range(len(self.values_s)), key=lambda at: self.values_s[at] - self.limits_s[at])

    @property
    def holds(self) -> bool:
        return self.values_s[self.worst] <= self.limits_s[self.worst]

    @property
    def shown(self) -> tuple[str, str]:
        """Median with the worst in brackets, and the limit of the worst, in milliseconds."""
        return (
            f"{quantile(self.values_s, 0.5) * 1e3:.0f} ({self.values_s[self.worst] * 1e3:.0f})",
            f"{self.limits_s[self.worst] * 1e3:.0f}",
        )


def limits_of(kind: str, felt: Sequence[FeltChange]) -> list[Limit | None]:
    """Return the limits for one kind of change: the longest gap, the steps after it, kill -9 to the next step.

    A loss is judged by the time to the next step, not by the gap. None stands for a limit that this kind does not have.
    """
    kills = [each for each in felt if each.next_s is not None]
    return [
        Limit(
            "the longest gap between two commits",
            [each.gap_s for each in felt],
            [each.gap_limit_s for each in felt],
            judged=kind != "kill",
        ),
        Limit(
            f"the longest of the {AFTER} steps after it",
            [each.slowest_s for each in felt],
            [each.slowest_limit_s for each in felt],
        ),
        Limit(
            "kill -9 to the end of the next step",
            [each.next_s or 0.0 for each in kills],
            [each.next_limit_s or 0.0 for each in kills],
        )
        if kills
        else None,
    ]


COLUMNS = (
    "change", "times", "step ms before", "after", "gap ms", "limit", "after ms", "limit", "slow", "kill ms", "limit",
)  # fmt: skip
REMARK = (
    f"medians, and in brackets the worst; gap: the longest between two commits from the request until {AFTER} steps after the "
    f"change; slow: steps of these {AFTER} that are longer than {FACTOR} times their median"
)


@dataclass(slots=True)
class Feelings:
    """Table and verdicts of how the changes of one job were felt."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    verdicts: list[tuple[bool | None, str]] = field(default_factory=list)
    """Whether it holds, None if there was no time to find out, and what was measured."""
    numbers: Json = field(default_factory=dict)


def judge(
    found: Mapping[str, Sequence[FeltChange]], kinds: Sequence[str], name: str = "", *, is_late: bool = False
) -> Feelings:
    """Return rows, verdicts and numbers for the kinds of change that were to be measured; `name` begins each verdict.

    With `is_late`, a kind that is missing is one for which no time was left, not a failure.
    """
    told = Feelings()
    begin = f"{name}, " if name else ""
    for kind in kinds:
        felt = found.get(kind, ())
        if not felt:
            text = f"{begin}{kind}: no time was left" if is_late else f"{begin}{kind}: not measured"
            told.verdicts.append((None if is_late else False, text))
            continue
        steps_ms = [
            f"{quantile([getattr(each, key) for each in felt], 0.5) * 1e3:.0f}" for key in ("before_s", "after_s")
        ]
        cells = [str(len(felt)), *steps_ms]
        for number, limit in enumerate(limits_of(kind, felt)):
            cells += limit.shown if limit is not None else ("", "")
            if number == 1:
                cells.append(f"{sum(each.num_slow for each in felt)}/{sum(each.num_steps for each in felt)}")
            if limit is not None and limit.judged:
                text = f"{begin}{kind}: {limit.title} {limit.shown[0]} ms, at most {limit.shown[1]} ms"
                told.verdicts.append((limit.holds, text))
        told.rows.append((kind, *cells))
        told.numbers[kind] = numbers_of(felt)
    return told


def numbers_of(felt: Sequence[FeltChange]) -> Json:
    """Return all numbers of one kind of change for a result file; lists have one value for each change."""
    kills = [each for each in felt if each.next_s is not None]
    return {
        "gap": summarise([each.gap_s for each in felt]), "gap_limits_s": [each.gap_limit_s for each in felt],
        "switch": summarise([each.switch_s for each in felt]),
        "median_step_before_s": [each.before_s for each in felt], "median_step_after_s": [each.after_s for each in felt],
        "after": summarise([each.slowest_s for each in felt]), "after_limits_s": [each.slowest_limit_s for each in felt],
        "slow_steps": [each.num_slow for each in felt], "steps_after": [each.num_steps for each in felt],
        "next": summarise([each.next_s or 0.0 for each in kills]), "next_limits_s": [each.next_limit_s for each in kills],
    }  # fmt: skip


def slow_share(reports: Sequence[StepBegun]) -> Json:
    """Return, for each number of workers, the share of all undisturbed steps that are longer than FACTOR times their median.

    This is the noise of the host: what the count of slow steps after a change has to be compared with.
    """
    commits = commit_times(reports)
    found: Json = {}
    for size, times in undisturbed_steps(reports, commits).items():
        median_s = quantile(times, 0.5)
        found[str(size)] = sum(each > FACTOR * median_s for each in times) / len(times)
    return found
