"""Runs the programs of this folder: under stock DDP, on fixed workers, and on workers that come, go and are killed.

A program is run as a script in a process of its own, forked from a server that has imported torch. It prints the SHA-256
of what it has trained. Nothing of the tests is in the programs: their jobs are watched through `pliant.join`.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch
from gang import SECRET, Gang, free_port, gang, torchrun
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pliant
from pliant.cluster import DEFAULT_RUNNER_PORT, View, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.identity import WorkerSpec

FOLDER = Path(__file__).parent
HOST = "127.0.0.1"
DEADLINE_S = 60.0
KEPT: list[dict[str, Any]] = []
"""What programs leave, until their process ends: dropping a DDP model right after a step may hang."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A worker kills itself, once in the job."""

    phase: str
    """forward, backward, outer (before an optimizer's step), evaluation"""
    rank: int
    step: int = 5
    """Not before this step, counted from the job's first: the newcomers have the state then."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to an elastic job, by the number of steps that it has committed."""

    first: int = 0
    """The number of the job's first step."""
    sizes: dict[int, int] = field(default_factory=lambda: {1: 1, 3: 3, 7: 3})
    """After so many steps, let the job have so many workers; the last is after the fault."""
    fault: Fault | None = None

    @classmethod
    def with_fault(cls, first: int, most: int, fault: Fault) -> Plan:
        """Go from `most` workers to one and back, and lose one."""
        return cls(first, {1: 1, 3: most, 7: most}, replace(fault, rank=min(fault.rank, most - 1)))

    @property
    def most(self) -> int:
        """The workers that the job begins with."""
        return max(self.sizes.values())

    @property
    def num_ended(self) -> int:
        """The workers that have ended when the last change is due: those of the first one, and one that was killed."""
        return self.most - (self.fault is None)


@dataclass(frozen=True, slots=True)
class Script:
    """A program, and where and how it is run."""

    path: Path
    arguments: tuple[str, ...]
    folder: Path
    environ: dict[str, str]
    plan: Plan | None = None


# --- in a worker ---


def run_script(rank: int, script: Script) -> str:
    """Run the program; return what it has printed."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)  # as in any script: loader processes are forked
    for name in [name for name in os.environ if name.startswith("PLIANT_")]:
        del os.environ[name]
    os.environ.update(script.environ)
    os.chdir(script.folder)
    sys.path.insert(0, str(FOLDER))
    sys.argv = [str(script.path), *script.arguments]
    jobs: list[Any] = []
    join = pliant.join

    def watched_join(*args: Any, **kwargs: Any) -> Any:
        jobs.append(join(*args, **kwargs))
        if script.plan is not None:
            _follow(jobs[0], script.plan)
        return jobs[0]

    pliant.join = watched_join
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        KEPT.append(runpy.run_path(str(script.path), run_name="__main__"))
    for job in jobs:
        job.close()  # a process of a gang ends without `atexit`
    return printed.getvalue()


def _follow(job: Any, plan: Plan) -> None:
    """Hold the job where its workers shall change, and let a fault happen."""

    def wait(reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < deadline_s, f"nothing came at step {job.step} in view {job.view}"
            time.sleep(0.002)  # pacing a poll with a deadline

    def committed(event: Any) -> None:
        done = event.step - plan.first
        with open(f"steps.{os.getpid()}", "a") as file:
            file.write(f"{event.step} {event.num_workers}\n")
        if done in plan.sizes:
            ask = Path(f"want.{done}")
            with contextlib.suppress(FileExistsError):
                ask.symlink_to("here")
            granted = Path(f"granted.{done}")
            wait(lambda: granted.is_symlink() and job.prepared_view >= int(granted.readlink().name))

    def strike() -> None:
        fault = plan.fault
        if fault is not None and job.rank == fault.rank and job.step - plan.first >= fault.step:
            with contextlib.suppress(FileExistsError):
                os.symlink("once", "killed")
                os.kill(os.getpid(), signal.SIGKILL)

    def before_forward(*_: Any) -> None:
        if (job.replica is None) == (phase == "evaluation"):
            strike()

    def after_forward(_: Any, __: Any, output: Any) -> None:
        if job.replica is not None and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: strike())

    job.on_commit(committed)
    phase = plan.fault.phase if plan.fault is not None else ""
    if phase in ("forward", "evaluation"):
        torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    elif phase == "backward":
        torch.nn.modules.module.register_module_forward_hook(after_forward)
    elif phase == "outer":
        register_optimizer_step_pre_hook(lambda *_: strike())


# --- in the test ---


def bits(printed: str) -> str:
    """Return the hash that the program has printed; empty if it has not come to its end."""
    found = re.search(r"^bits (\w{64})$", printed, re.MULTILINE)
    return found[1] if found else ""


def _run(scripts: Sequence[Script]) -> list[str]:
    with gang(run_script, [(script,) for script in scripts]) as started:
        return started.results(DEADLINE_S)


def run_ddp(path: Path, arguments: Sequence[str], replicas: int, folder: Path) -> str:
    """Run the program on `replicas` ranks of stock DDP; return the hash of rank 0."""
    with torchrun(replicas) as environs:
        return bits(_run([Script(path, tuple(arguments), folder, environ) for environ in environs])[0])


def run_fixed(path: Path, arguments: Sequence[str], replicas: int, size: int, folder: Path) -> set[str]:
    """Run the program on `size` workers that stay; return the hashes of all."""
    environ = {"REPLICAS": str(replicas)}
    if size == 1:
        return {bits(each) for each in _run([Script(path, tuple(arguments), folder, environ)])}
    view = _view_of(_new_workers(size))
    specs = [WorkerSpec(worker=worker, view=view, secret=SECRET).to_environ() for worker in view.workers]
    return {bits(each) for each in _run([Script(path, tuple(arguments), folder, environ | spec) for spec in specs])}


def _new_workers(count: int) -> list[Worker]:
    workers: list[Worker] = []
    for _ in range(count):
        workers.append(Worker(HOST, free_port(HOST, [worker.port for worker in workers])))
    return workers


def _view_of(workers: Sequence[Worker]) -> View:
    return View(0, tuple(workers), (Worker(HOST, DEFAULT_RUNNER_PORT),))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an elastic job."""

    hashes: set[str]
    """Those of all workers that came to the end of the program."""
    sizes: set[int]
    """With how many workers steps were committed."""
    killed: int
    started: int
    repeated: list[int]
    """Steps that were committed by different numbers of workers: the job has begun again."""


def run_elastic(path: Path, arguments: Sequence[str], replicas: int, plan: Plan, folder: Path) -> Outcome:
    """Run the program on workers that change according to the plan. This plays the part of the runner."""
    environ = {"REPLICAS": str(replicas)}
    workers: dict[Worker, Gang] = {}
    ended: dict[Worker, str | None] = {}
    asked: set[int] = set()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ConfigServer(ServerConfig(port=0, open=True)).running())
        client = stack.enter_context(ConfigClient(server.url))
        stack.callback(lambda: [started.close() for started in workers.values()])
        client.put(_view_of(_new_workers(plan.most)))
        deadline_s = time.monotonic() + DEADLINE_S
        while len(ended) < len(workers) or not workers:
            assert time.monotonic() < deadline_s, f"{path.name}: {len(ended)} of {len(workers)} ended, {_steps(folder)}"
            view, membership = client.get(), client.membership()
            assert view is not None, "a view was put"
            for worker in view.workers:
                if worker not in workers and not membership.over:
                    spec = WorkerSpec(worker=worker, view=view, secret=SECRET, elastic=True, config_server=server.url)
                    script = Script(path, tuple(arguments), folder, environ | spec.to_environ(), plan)
                    workers[worker] = Gang(run_script, [(script,)])
            for worker in _ended(workers, ended):
                ended[worker] = _outcome(workers[worker])
                if ended[worker] is None:
                    client.lost(worker, "killed")
                    client.add_worker(_new_workers(1)[0])
            for at, size in plan.sizes.items():
                if not (folder / f"want.{at}").is_symlink() or (at == max(plan.sizes) and len(ended) < plan.num_ended):
                    continue  # a killed worker must be seen to have ended first
                view = client.get() or view
                own = [worker for worker in view.workers if worker not in ended][:size]
                if at not in asked:
                    asked.add(at)
                    client.put(_view_of(own + _new_workers(size - len(own))))
                elif set(membership.members) == set(own) and len(own) == size:
                    with contextlib.suppress(FileExistsError):
                        (folder / f"granted.{at}").symlink_to(str(membership.number))
    hashes = {bits(printed) for printed in ended.values() if printed is not None} - {""}
    steps = set(_steps(folder))
    repeated = [
        number for number in {number for number, _ in steps} if len([1 for each, _ in steps if each == number]) > 1
    ]
    return Outcome(hashes, {size for _, size in steps}, list(ended.values()).count(None), len(workers), repeated)


def _ended(workers: dict[Worker, Gang], ended: dict[Worker, str | None]) -> list[Worker]:
    """Return the workers that have ended since; wait for one for a moment."""
    running = {started.processes[0].sentinel: worker for worker, started in workers.items() if worker not in ended}
    return [running[sentinel] for sentinel in wait_for_any(list(running), 0.02)]  # type: ignore[index]


def _outcome(started: Gang) -> str | None:
    """Return what the program has printed; None if its process was killed. Raises what it has raised."""
    started.processes[0].join(10)
    return None if started.processes[0].exitcode == -signal.SIGKILL else str(started.hear(0, 1))


def _steps(folder: Path) -> list[tuple[int, int]]:
    """Return the number and the workers of each step that was committed, for each worker."""
    lines = [line for file in folder.glob("steps.*") for line in file.read_text().splitlines()]
    return sorted((int(number), int(size)) for number, size in map(str.split, lines))


def copy_folder(source: Path, target: Path) -> Path:
    """Return a copy of what an earlier run has left."""
    shutil.copytree(source, target, symlinks=True)
    return target
