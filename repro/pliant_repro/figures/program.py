"""The training program that the figures are measured with: one loop, under stock DDP, under pliant, or plain.

Started as a script, by `trials`. Every worker writes a journal, a line of JSON for each turn of a replica (for each
step of a rank, under DDP) and for each step committed; the figures are made from these lines and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pliant.train.job import Job, StepCommitted
    from pliant_repro.zoo import Workload

UNLIKE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""What stands for a machine of another kind: kernels for another set of vector instructions."""
KEPT: list[Any] = []
"""DDP models, until the process ends (see `digits.KEPT`)."""
HOLD_S = 120.0
"""How long a step may wait for newcomers to be ready."""


def main() -> None:
    args = _arguments()
    if args.unlike and _is_newcomer():
        _become_unlike()
    if args.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if args.mode == "ddp":
        _fork_ddp(args)
    elif args.mode == "plain":
        _train_plain(args, 0, None)
    else:
        _train_pliant(args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("ddp", "plain", "pliant"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--journal", required=True, help="a directory")
    parser.add_argument("--digest", action="store_true", help="note the SHA-256 of the state after each step")
    parser.add_argument("--memory", action="store_true", help="note the memory in use after each turn")
    parser.add_argument("--one-core", action="store_true", help="stay on one core, which then is the device")
    parser.add_argument("--turns", action="store_true", help="wait for the device after each turn, not each step")
    parser.add_argument("--alternate", action="store_true", help="switch no contexts in every second step")
    parser.add_argument("--hold", default="", help="STEP:N,... wait in that step until N workers are listed")
    parser.add_argument("--determinism", default=None, help="where no runner says it")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--unlike", action="store_true", help="newcomers are machines of another kind")
    return parser.parse_args()


# --- under pliant ---


def _train_pliant(args: argparse.Namespace) -> None:
    import torch

    import pliant
    from pliant_repro import zoo

    device = torch.device(args.device)
    work = zoo.workload(args.model, args.scale, args.steps * args.replicas, device, args.batch)
    with (
        pliant.join(replicas=args.replicas, determinism=args.determinism, seed=zoo.SEED) as job,
        _journal(args) as note,
    ):
        model, optimizer, loader = job.wrap(
            work.model, work.optimizer, work.dataset, batch_size=work.batch_size, bucket_cap_mb=work.bucket_cap_mb
        )
        if args.digest:
            _note_commits(job, work, note)
        try:
            _loop(args, job, work, (model, optimizer, loader), note)
        finally:  # a worker that is told to leave does so from within the loop
            for change in job.changes:
                note({"kind": "change", "step": change.step, "old": change.old_size, "new": change.new_size,
                      "pause_s": change.pause_s, "lost": change.lost})  # fmt: skip


def _loop(args: argparse.Namespace, job: Job, work: Workload, wrapped: tuple[Any, Any, Any], note: Any) -> None:
    model, optimizer, loader = wrapped
    switch = _Switch(job) if args.alternate else None
    holds = dict(_pairs(args.hold))
    held_at = -1
    for _ in job.epochs(1):
        for inputs, targets in loader:
            begin_s = time.monotonic()
            step, replica = job.step, job.replica
            if step in holds and held_at != step:
                held_at = step
                _hold(job, holds[step])
            optimizer.zero_grad()
            loss = work.loss(model(inputs.to(args.device)), targets.to(args.device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            is_last = replica == job.hosted[-1]
            if is_last:
                time.sleep(max(0.0, begin_s + args.pace - time.monotonic()))
            _note_turn(args, note, step, replica, loss, job.size, is_last, switch)
            if switch is not None and is_last:
                switch.on = not switch.on


def _note_commits(job: Job, work: Workload, note: Any) -> None:
    """After each committed step: what parameters, optimizer and replica 0's buffers, those that DDP keeps, hash to."""

    def committed(event: StepCommitted) -> None:
        if event.rank == 0:
            note(
                {
                    "kind": "commit",
                    "step": event.step - 1,
                    "size": event.num_workers,
                    "digest": digest(work, job.committed_buffers),
                }
            )

    job.on_commit(committed)


class _Switch:
    """Lets the switch of contexts be left out, for the time that it takes. The result is then worth nothing."""

    def __init__(self, job: Job) -> None:
        self.on = True
        self.spent_s = 0.0
        """On what is left out in every second step."""
        self._kept: dict[str, Any] = {}
        switch = job.replica_switch
        for name in ("restore", "capture_random", "capture_buffers"):
            setattr(switch, name, self._gated(name, getattr(switch, name)))

    def _gated(self, name: str, original: Any) -> Any:
        def gated(*args: Any) -> Any:
            begin_s = time.perf_counter()
            if self.on or name not in self._kept:
                self._kept[name] = original(*args)
            self.spent_s += time.perf_counter() - begin_s
            return self._kept[name]

        return gated


def _hold(job: Job, num_workers: int) -> None:
    """Wait until a roll with so many workers can be entered, so that the next step is the first of the new view."""
    from pliant.elastic.client import ConfigClient
    from pliant.identity import worker_spec

    deadline_s = time.monotonic() + HOLD_S
    with ConfigClient(worker_spec().config_server) as client:
        roll = client.membership()
        while len(roll.members) != num_workers and not (roll.over or time.monotonic() > deadline_s):
            roll = client.wait_for_membership(roll.number, 5.0)
    while job.prepared_view < roll.number and not (roll.over or time.monotonic() > deadline_s):
        time.sleep(0.002)  # its threads are connecting to the newcomers


def _is_newcomer() -> bool:
    from pliant.identity import worker_spec

    return worker_spec().view.number > 1  # 0 or 1 is the one that the job began with


def _become_unlike() -> None:
    """Start again as a machine of another kind would; what `pliant run` has pinned stays pinned there, too."""
    missing = {name: value for name, value in UNLIKE.items() if name not in os.environ}
    if missing:
        descriptor = os.environ.get("PLIANT_LISTEN_FD")
        if descriptor:
            os.set_inheritable(int(descriptor), True)
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})


# --- under stock DDP, and plain ---


def _fork_ddp(args: argparse.Namespace) -> None:
    """As many ranks as replicas, forked from here, so that torch is imported once."""
    import multiprocessing

    import torch._dynamo  # noqa: F401 - every optimizer needs it, and it takes as long as torch itself

    fork = multiprocessing.get_context("fork") if args.device == "cpu" else multiprocessing.get_context("spawn")
    store = str(Path(args.journal) / "store")
    ranks = [fork.Process(target=_train_ddp, args=(args, rank, store), daemon=True) for rank in range(args.replicas)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _train_ddp(args: argparse.Namespace, rank: int, store: str) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.replicas)
    try:
        _train_plain(args, rank, args.replicas)
    finally:
        dist.destroy_process_group()


def _train_plain(args: argparse.Namespace, rank: int, num_ranks: int | None) -> None:
    """A loop as any user of PyTorch has it; with DDP where there is a number of ranks."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    from pliant_repro import zoo

    device = torch.device(args.device)
    work = zoo.workload(args.model, args.scale, args.steps * (num_ranks or 1), device, args.batch)
    model = work.model
    sampler: DistributedSampler[Any] | None = None
    if num_ranks is not None:
        sampler = DistributedSampler(work.dataset, num_ranks, rank)
        model = DistributedDataParallel(model, bucket_cap_mb=work.bucket_cap_mb)
    loader = DataLoader(work.dataset, work.batch_size, sampler=sampler)
    torch.manual_seed(zoo.SEED + rank)  # as replica `rank` is
    with _journal(args) as note:
        for step, (inputs, targets) in enumerate(loader):
            work.optimizer.zero_grad()
            loss = work.loss(model(inputs.to(device)), targets.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            work.optimizer.step()
            _note_turn(args, note, step, rank, loss, num_ranks or 1, True)
            if args.digest and rank == 0:
                note({"kind": "commit", "step": step, "size": num_ranks, "digest": digest(work, work.model.buffers())})


# --- what is noted ---


@contextlib.contextmanager
def _journal(args: argparse.Namespace) -> Iterator[Any]:
    """A function that adds a line; nobody else writes to this file."""
    with (Path(args.journal) / f"{os.getpid()}-{time.monotonic_ns()}.jsonl").open("w", buffering=1) as file:
        yield lambda facts: file.write(json.dumps(facts) + "\n")


def _note_turn(
    args: argparse.Namespace,
    note: Any,
    step: int,
    replica: int | None,
    loss: torch.Tensor,
    size: int,
    is_last: bool,
    switch: _Switch | None = None,
) -> None:
    value = loss.item() if args.digest else None  # where times count, nobody waits for a loss
    if args.device != "cpu" and (is_last or args.turns):
        import torch

        torch.cuda.synchronize()
    facts: dict[str, Any] = {"kind": "turn", "step": step, "replica": replica, "loss": value, "size": size}
    facts["switched"] = switch is None or switch.on
    if switch is not None:
        facts["switch_s"], switch.spent_s = switch.spent_s, 0.0
    if args.memory and is_last:
        facts["memory_bytes"] = memory_bytes(args.device)
    note({**facts, "end_s": time.monotonic()})


def memory_bytes(device: str) -> int:
    """What this process holds: of the host's memory now, or of the device's at its peak."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_reserved()
    # Libraries, which are files, are left out: the machine has them once, whoever uses them.
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def digest(work: Workload, buffers: Iterable[torch.Tensor]) -> str:
    """SHA-256 of parameters, optimizer state and these buffers."""
    import torch

    digested = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        digested.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())

    for parameter in work.model.parameters():
        add(parameter)
        for _, value in sorted(work.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                add(value)
    for buffer in buffers:
        add(buffer)
    return digested.hexdigest()


def _pairs(text: str) -> list[tuple[int, int]]:
    from pliant.identity import parse_schedule

    return list(parse_schedule(text)) if text else []


if __name__ == "__main__":
    main()
