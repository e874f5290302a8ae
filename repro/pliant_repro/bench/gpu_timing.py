"""The parts of `pliant bench gpu` that measure the time of a step: `step` on one worker, `packed` on several processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.bench.gpu_parts import (
    DEVICE_BYTES,
    TURN_S,
    Clock,
    GpuOptions,
    Part,
    ask_all,
    device_of,
    process_bytes,
    started,
    weights_of,
)
from pliant_repro.contest import Contender, Progress, Rules, Timings, paired_ratios, quantile

LEAST_ROUNDS = {"step": 10, "packed": 5}
"""Rounds that are held even if the time of a cell is over."""
STEP_LIMITS = {"one": 1.02, "several": 1.03}
"""Most time of a step: of N = 1 over plain PyTorch, and of several replicas over bare accumulation."""
ALONE_CORES = 4
"""Cores on which the contenders of `step` take their turns, all on the same ones, if there are at least twice as many. They
start, compile and warm up on all cores, at the same time."""


# --- step ---


def run_step(options: GpuOptions, progress: Progress, found: Part) -> None:
    """Measure the time of a step on one worker.

    Rounds are short, so that many of them are held: what disturbs the host lasts longer than a round, and hits both sides of
    a ratio. Every second round has the reverse order. All contenders run on the same cores; those that wait for their turn
    are blocked, and keep their memory. `plain_again` is plain PyTorch once more: its ratio is the noise of the others.
    """
    several = options.replicas
    found.columns = ("network", "side", "ms (p10-p90)", "over plain", "limit")
    clock = Clock(options.limit_s, weights_of(options.cells))
    cores = cores_of_contenders(os.sched_getaffinity(0))
    for model, mode in options.cells:
        end_s, begun_s = clock.next_cell(), time.monotonic()
        tasks = {
            "plain_free": options.task(model, mode, "plain", strict=False),
            "plain": options.task(model, mode, "plain"),
            "pliant": options.task(model, mode),
            "plain_again": options.task(model, mode, "plain"),
            f"plain_x{several}": options.task(model, mode, "plain", replicas=several, lead=1),
            f"pliant_x{several}": options.task(model, mode, replicas=several, lead=1),
        }
        if clock.is_over:
            judge_step(found, model, mode, several, {name: Timings() for name in tasks}, is_late=True)
            continue
        with started(tasks, _named(progress, f"{model} {mode}"), clock) as contenders:
            found.device = found.device or device_of(contenders)
            started_s = time.monotonic()
            command = {"keep_memory": process_bytes(model, options) * len(tasks) <= DEVICE_BYTES}
            first = [contenders[name] for name in ("plain_free", "plain")]
            if mode == "compiled":  # the others find what these two have compiled in torch's cache, which all share
                ask_all(first, {"do": "run", "iterations": 1, **command}, clock)
            ask_all([*contenders.values()], {"do": "run", "iterations": 2, **command}, clock)
            if cores:
                ask_all([*contenders.values()], {"do": "cores", "cores": cores}, clock)
            warm_s = time.monotonic()
            steps = {name: max(2, options.num_steps // task.replicas) for name, task in tasks.items()}
            rules = replace(_rules(options, clock, end_s), alternate=True)
            progress_of = _named(progress, f"{model} {mode}")
            results = hold(contenders, rules, clock, iterations=steps, command=command, progress=progress_of)
            settings, measured_s = settings_of(contenders), time.monotonic()
        judge_step(found, model, mode, several, results, is_late=clock.is_over)
        if settings:
            judge_settings(found, f"{model} {mode}", settings)
        found.cells[-1] |= {"cores": cores, "steps_of_a_turn": steps, "settings": settings}
        found.cells[-1]["took_s"] = _parts_of(
            start=(begun_s, started_s), warm_up=(started_s, warm_s), rounds=(warm_s, measured_s)
        )
        found.keep()


def judge_step(
    found: Part, model: str, mode: str, several: int, results: Mapping[str, Timings], *, is_late: bool = False
) -> None:
    """Add the rows and verdicts of one network; `is_late` says that the time of the part is over."""
    one, many = (
        judge_ratio(
            found,
            f"{model} {mode}: {text}",
            STEP_LIMITS[name],
            results[f"pliant{suffix}"],
            results[f"plain{suffix}"],
            is_late=is_late,
        )
        for name, suffix, text in (
            ("one", "", "N = 1 over plain PyTorch"),
            ("several", f"_x{several}", f"N = {several} over bare accumulation"),
        )
    )
    price = time_over(results["plain"], results["plain_free"])
    noise = time_over(results["plain_again"], results["plain"])
    for side, values, most in (
        ("plain_free", None, ""),
        ("plain", price, "(over free)"),
        ("plain_again", noise, "(the noise)"),
        ("pliant", one, f"{STEP_LIMITS['one']}"),
        (f"plain_x{several}", None, ""),
        (f"pliant_x{several}", many, f"{STEP_LIMITS['several']}"),
    ):
        shown = show_ratio(values) if values is not None else ""
        found.rows.append((f"{model} {mode}", side, show_ms(results[side]), shown, most))
    found.cells.append(
        {
            "model": model, "mode": mode, "replicas": several, "sides": _numbers(results),
            "one": one, "several": many, "price_of_determinism": price, "noise": noise,
        }
    )  # fmt: skip
    found.remarks += contest.failures(results)


def judge_settings(found: Part, name: str, settings: Mapping[str, Mapping[str, str]]) -> None:
    """Add the verdict on whether all contenders have the same kernels pinned; the free one is to differ."""
    pinned = {side: values for side, values in settings.items() if side != "plain_free"}
    expected = pinned.get("plain", {})
    wrong = [
        f"{side} has {key}={values.get(key)} where plain has {expected.get(key)}"
        for side, values in pinned.items()
        for key in sorted({*values, *expected})
        if values.get(key) != expected.get(key)
    ]
    text = f"{name}: the same settings in {', '.join(pinned)}"
    found.judge(bool(expected) and not wrong, text if not wrong else f"{name}: {'; '.join(wrong)}")


def cores_of_contenders(available: Iterable[int]) -> list[int]:
    """Return the cores on which contenders that take turns run, all on the same ones; none if there are too few to choose."""
    cores = sorted(available)
    return cores[-ALONE_CORES:] if len(cores) >= 2 * ALONE_CORES else []


def settings_of(contenders: Mapping[str, Contender]) -> dict[str, Mapping[str, str]]:
    """Return the settings of torch that choose kernels, of each contender that has told them."""
    return {
        name: cast("Mapping[str, str]", each.ready_answers[0]["settings"])
        for name, each in contenders.items()
        if each.ready_answers and "settings" in each.ready_answers[0]
    }


# --- packed ---


def run_packed(options: GpuOptions, progress: Progress, found: Part) -> None:
    """Measure several processes on the device: ours, DDP on gloo, and version 0.1."""
    found.columns = ("network", "processes", "side", "ms (p10-p90)", "ours over it")
    sizes = [count for count in (2, 4) if options.replicas % count == 0]
    clock = Clock(options.limit_s, [weight for weight in weights_of(options.cells) for _ in sizes])
    for model, mode in options.cells:
        for count in sizes:
            end_s, begun_s = clock.next_cell(), time.monotonic()
            sides = ["pliant", "ddp", *(["version01"] if options.old is not None else [])]
            tasks = {
                side: options.task(model, mode, side, num_workers=count, replicas=options.replicas) for side in sides
            }
            if options.old is None:
                found.judge(None, f"{model} {mode} on {count} processes: ours over version01: it needs --old DIR")
            if clock.is_over:
                judge_packed(found, model, mode, count, {side: Timings() for side in sides}, is_late=True)
                continue
            with started(tasks, _named(progress, f"{model} {count}"), clock, options.old) as contenders:
                found.device = found.device or device_of(contenders)
                started_s = time.monotonic()
                room = process_bytes(model, options) * count * len(tasks)
                ask_all([*contenders.values()], {"do": "run", "iterations": 1}, clock)  # warms up all at once
                warm_s = time.monotonic()
                rules = replace(_rules(options, clock, end_s), alternate=True)
                results = hold(
                    contenders,
                    rules,
                    clock,
                    command={"keep_memory": room <= DEVICE_BYTES},
                    progress=_named(progress, f"{model} {count}"),
                )
                measured_s = time.monotonic()
            judge_packed(found, model, mode, count, results, is_late=clock.is_over)
            found.cells[-1]["took_s"] = _parts_of(
                start=(begun_s, started_s), warm_up=(started_s, warm_s), rounds=(warm_s, measured_s)
            )
            found.keep()


def judge_packed(
    found: Part, model: str, mode: str, count: int, results: Mapping[str, Timings], *, is_late: bool = False
) -> None:
    """Add the rows and verdicts of one network on `count` processes."""
    ratios: Json = {}
    for side, timings in results.items():
        shown = ""
        if side != "pliant":
            text = f"{model} {mode} on {count} processes: ours over {side}"
            ratios[side] = values = judge_ratio(found, text, 1.0, results["pliant"], timings, is_late=is_late)
            shown = show_ratio(values)
        found.rows.append((f"{model} {mode}", str(count), side, show_ms(timings), shown))
    found.cells.append({
        "model": model, "mode": mode, "processes": count, "sides": _numbers(results), "ours_over": ratios,
    })  # fmt: skip
    found.remarks += contest.failures(results)


# --- rounds and ratios ---


def hold(contenders: Mapping[str, Contender], rules: Rules, clock: Clock, **how: Any) -> dict[str, Timings]:
    """Return what `contest.hold` measures. If the time of the part is over, only tell which contenders have failed by now."""
    if clock.is_over:
        return {name: Timings(failure=each.failure) for name, each in contenders.items()}
    return contest.hold(contenders.values(), rules, **how)


def _rules(options: GpuOptions, clock: Clock, end_s: float) -> Rules:
    """Return the rules of a cell that is to end at `end_s`."""
    return Rules(
        rounds=options.num_rounds,
        iterations=options.num_steps,
        warmup=1,
        timeout_s=clock.bound(TURN_S),
        limit_s=max(1.0, end_s - time.monotonic() - 5),
        least_rounds=min(options.num_rounds, LEAST_ROUNDS.get(options.part, 2)),
    )


def _parts_of(**spans: tuple[float, float]) -> Json:
    return {name: round(end_s - begun_s, 2) for name, (begun_s, end_s) in spans.items()}


def _named(progress: Progress, name: str) -> Progress:
    return lambda what, fraction: progress(f"{name}: {what}", fraction)


def time_over(ours: Timings, other: Timings) -> Json:
    """Return our time over the other's, round by round: median and spread; null if one of them failed."""
    ratios = paired_ratios(ours.rounds, other.rounds)
    if ours.median_s is None or other.median_s is None or not ratios:
        return {"median": None, "p10": None, "p90": None, "rounds": 0}
    return {
        "median": quantile(ratios, 0.5), "p10": quantile(ratios, 0.1), "p90": quantile(ratios, 0.9), "rounds": len(ratios),
    }  # fmt: skip


def judge_ratio(found: Part, text: str, most: float, ours: Timings, other: Timings, *, is_late: bool = False) -> Json:
    """Add the verdict on our time over the other's, and return the ratio.

    If a side has failed, the verdict says why. It is None if the side only lacked time, which it did if `is_late`.
    """
    values = time_over(ours, other)
    if values["median"] is not None:
        found.judge(is_within(values, most), f"{text} {show_ratio(values)}, at most {most:g}")
        return values
    why = ours.failure or other.failure
    no_time = is_late and (not why or contest.NO_ANSWER in why)
    found.judge(None if no_time else False, f"{text}: {'no time was left' if no_time else why or 'no round was held'}")
    return values


def _numbers(results: Mapping[str, Timings]) -> Json:
    return {
        name: {
            **{key: value for key, value in contest.measured(each).items() if key != "tensor_bytes_per_s"},
            "rounds_s": each.rounds,
        }
        for name, each in results.items()
    }


def show_ms(timings: Timings) -> str:
    """Format median and spread in milliseconds."""
    if timings.median_s is None:
        return "failed" if timings.failure else "-"
    low, high = (quantile(timings.seconds, fraction) * 1e3 for fraction in (0.1, 0.9))
    return f"{timings.median_s * 1e3:.2f} ({low:.2f}-{high:.2f})"


def show_ratio(values: Json) -> str:
    if values["median"] is None:
        return "-"
    return f"{values['median']:.3f} ({values['p10']:.3f}-{values['p90']:.3f})"


def is_within(values: Json, most: float) -> bool:
    median = values["median"]
    return isinstance(median, float) and median <= most
