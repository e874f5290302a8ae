"""The part `profile` of `pliant bench gpu`: where the time of a step goes, on the device and on the host."""

from __future__ import annotations

from typing import cast

from pliant.machine import Json
from pliant_repro.bench.gpu_parts import Clock, GpuOptions, Part, ask_all, device_of, started
from pliant_repro.contest import Progress

PROFILED_STEPS = 4


def run_profile(options: GpuOptions, progress: Progress, found: Part) -> None:
    """Profile plain PyTorch, free and with deterministic kernels, and ours with one and with several replicas."""
    found.columns = (
        "network", "side", "step ms", "host ms", "busy ms", "idle ms", "kernels", "copies ms", "pliant's own ms",
    )  # fmt: skip
    clock = Clock(options.limit_s)
    for model, mode in options.cells:
        several = options.replicas
        tasks = {
            "plain_free": options.task(model, mode, "plain", strict=False),
            "plain": options.task(model, mode, "plain"),
            "pliant": options.task(model, mode),
            f"plain_x{several}": options.task(model, mode, "plain", replicas=several),
            f"pliant_x{several}": options.task(model, mode, replicas=several),
        }
        with started(tasks, progress, clock) as contenders:
            found.device = found.device or device_of(contenders)
            ask_all([*contenders.values()], {"do": "run", "iterations": 3}, clock)
            for number, (side, contender) in enumerate(contenders.items()):  # one at a time: the device is shared
                progress(f"{model} {mode}: {side}", number / len(contenders))
                save_as = str(options.traces / f"{model}_{mode}_{side}") if options.traces is not None else ""
                command = {"do": "profile", "iterations": min(options.num_steps, PROFILED_STEPS), "save_as": save_as}
                answer = ask_all([contender], command, clock).get(side)
                if answer is None:
                    found.remarks.append(contender.failure)
                    found.judge(False, contender.failure)
                    continue
                add_profile(found, model, mode, side, dict(answer[0]))
                found.keep()


def add_profile(found: Part, model: str, mode: str, side: str, answer: Json) -> None:
    """Add the row of one side, and the lists of what takes the most time."""
    light, python = (cast(Json, answer[key]) for key in ("light", "python"))

    def ms(values: Json, key: str) -> str:
        return f"{float(cast(float, values.get(key, 0.0))) * 1e3:.2f}"

    times = [ms(light, key) for key in ("step_s", "host_s", "device_busy_s", "device_idle_s")]
    kernels = f"{float(cast(float, light['kernels'])):.0f}"
    own = ms(python, "pliant_own_s")
    found.rows.append((f"{model} {mode}", side, *times, kernels, ms(light, "copies_s"), own))
    found.cells.append({"model": model, "mode": mode, "side": side, **answer})
    found.judge(True, f"{model} {mode}, {side}: profiled")
    for values, key, title in (
        (light, "top_kernels", "kernels"),
        (light, "top_waits", "what the device waited for"),
        (light, "top_host", "host, without what is inside"),
        (python, "top_pliant", "functions of pliant, without what is inside"),
        (python, "pliant_calls", "functions of pliant, with what is inside"),
    ):
        items = cast("list[Json]", values.get(key, []))[:10]
        lines = [
            f"    {float(cast(float, each['s'])) * 1e3:8.3f} ms {each['count']:7.1f} x  {each['name']}"
            for each in items
        ]
        if lines:
            found.remarks.append("\n".join([f"{model} {mode}, {side}: {title}, per step", *lines]))
