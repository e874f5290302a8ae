"""Replicas on one GPU: the bits of DDP, and throughput beside packed DDP.

    OUT=. python benchmarks/h200_training.py            # on a machine with one CUDA GPU, from the repository's root
    OUT=. python benchmarks/h200_training.py --tiny     # small networks on the CPU, to test this program itself

It needs torch and numpy only, ends by itself within nine minutes, writes $OUT/h200_training.json and prints a summary. Each part
runs in a process of its own with a time limit, so that none can end the others. `pliant reproduce easyscale-fig10
easyscale-fig11 --device cuda` measures memory and the cost of switching between replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "repro")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

LIMIT_S = 535.0
PARTS = {"bits": 190.0, "throughput": 210.0}
"""The parts, and how many seconds each may take."""
REPLICAS = 4
STEPS = 8
SEED = 1234
RATIO = 1.3
"""Least ratio of images per second to packed DDP."""

Json = dict[str, Any]


# --- bits: each rank is a process of its own, `--rank R --bits TASK.json` ---


def bits(tiny: bool) -> Json:
    """Compare stock DDP on gloo with 4 processes and pliant on 1, 2 and 4, by a digest after every step."""
    device = "cpu" if tiny else "cuda"
    cells = []
    for variant in ("float32", "autocast"):
        # Start all at once: they spend most of the time starting.
        oracle, *gangs = [
            Gang(side, size, device, variant, sync)
            for side, size, sync in (
                ("ddp", REPLICAS, ""),
                ("pliant", 1, "fifo"),
                ("pliant", 2, "fifo"),
                ("pliant", 4, "fifo"),
                ("pliant", 2, "priority"),
                ("pliant", 4, "priority"),
            )
        ]
        expected = oracle.digests()
        for gang in gangs:
            found = gang.digests()
            same = [ours == theirs for ours, theirs in zip(found, expected, strict=False)]
            cells.append(
                {
                    "variant": variant,
                    "workers": gang.size,
                    "sync": gang.sync,
                    "equal": all(same) and len(found) == len(expected) == STEPS,
                    "first_difference_at_step": same.index(False) if False in same else None,
                    "digest": found[-1:],
                    "ddp_digest": expected[-1:],
                    "failure": gang.failure or oracle.failure,
                }
            )
    return {"ok": all(cell["equal"] for cell in cells), "replicas": REPLICAS, "steps": STEPS, "cells": cells}


class Gang:
    """The processes of one side, all started at once."""

    def __init__(self, side: str, size: int, device: str, variant: str, sync: str) -> None:
        from pliant_repro.contest import Placement

        self.size, self.sync, self.failure = size, sync, ""
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = folder = Path(self._temporary.name)
        environs, sockets = Placement(num_workers=size, folder=folder).identities()
        task = {"side": side, "workers": size, "device": device, "variant": variant, "sync": sync}
        task["store"] = f"{folder}/store"
        self._name = f"{side} on {size} processes ({variant} {sync})"
        self._processes = []
        for rank in range(size):
            ours = {} if side == "ddp" or size == 1 else environs[rank]
            argv = [
                sys.executable,
                __file__,
                "--bits",
                json.dumps(task),
                "--rank",
                str(rank),
                "--json",
                f"{folder}/{rank}",
            ]
            process = subprocess.Popen(argv, env={**os.environ, **ours}, pass_fds=[sockets[rank].fileno()])
            self._processes.append(process)
        for sock in sockets:
            sock.close()

    def digests(self) -> list[str]:
        """Return the digests of rank 0 after every step; none if a process failed."""
        codes = [process.wait() for process in self._processes]
        with self._temporary:
            if any(codes):
                self.failure = f"{self._name}: exit codes {codes}"
                print(self.failure, file=sys.stderr, flush=True)
                return []
            found: list[str] = json.loads((self._folder / "0").read_text())
            return found


def bits_rank(task: Json, rank: int) -> list[str]:
    """Train a small network with convolutions, BatchNorm and dropout, and return a digest after every step."""
    from pliant_repro.zoo import Samples, build, make_optimizer

    from pliant.train import determinism

    torch.set_num_threads(1)
    device = torch.device(task["device"])
    determinism.pin("D1", device)
    model = build("small", device)
    optimizer = make_optimizer("adam", model)
    dataset: Any = Samples("images", 16, STEPS * REPLICAS * 8, device)
    scaler = torch.amp.GradScaler(device.type) if task["variant"] == "autocast" else None
    train = _ddp if task["side"] == "ddp" else _ours
    return train(task, rank, model, optimizer, dataset, scaler)


def _ddp(task: Json, rank: int, model: Any, optimizer: Any, dataset: Any, scaler: Any) -> list[str]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size, limit = task["workers"], timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=size, timeout=limit)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(SEED + rank)
    digests = []
    sampler: DistributedSampler[int] = DistributedSampler(dataset, size, rank)
    for batch in DataLoader(dataset, batch_size=8, sampler=sampler):
        _backward(wrapped, batch, scaler)
        _update(optimizer, scaler)
        digests.append(digest(model, optimizer, model.buffers(), scaler))
    dist.destroy_process_group()
    return digests


def _ours(task: Json, rank: int, model: Any, optimizer: Any, dataset: Any, scaler: Any) -> list[str]:
    import pliant

    digests: list[str] = []
    buffers: list[torch.Tensor] = []
    overlapped: list[bool] = []
    with pliant.join(replicas=REPLICAS, seed=SEED, sync=task["sync"], slice_bytes=16 << 10) as job:
        model, optimizer = job.wrap(model, optimizer)
        loader = job.loader(dataset, batch_size=8)
        if scaler is not None:
            job.track("scaler", scaler)
        job.on_commit(lambda _: overlapped.append(job.has_pending_updates))

        def note_last_step() -> None:
            # Called between forward and backward: forward has used all parameters, so the last step's updates have arrived.
            if job.step > len(digests):
                digests.append(digest(model, optimizer, buffers, scaler))

        for _epoch in job.epochs(1):
            for step in loader:
                for batch in step:
                    _backward(model, batch, scaler, note_last_step)
                _update(optimizer, scaler)
                buffers[:] = [buffer.clone() for buffer in model.buffers()]  # those of replica 0
        note_last_step()
    if task["sync"] == "priority" and scaler is None and sum(overlapped) < STEPS - 2:
        raise RuntimeError(f"steps were to overlap, but only {sum(overlapped)} of {STEPS} did")
    return digests


def _backward(model: Any, batch: Any, scaler: Any, before_backward: Callable[[], None] = lambda: None) -> None:
    from pliant_repro.zoo import compute_loss

    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=scaler is not None):
        loss = compute_loss(model, *batch)
    before_backward()
    (loss if scaler is None else scaler.scale(loss)).backward()


def _update(optimizer: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def digest(model: Any, optimizer: Any, buffers: Iterable[torch.Tensor], scaler: Any) -> str:
    """Return the SHA-256 of parameters, optimizer state, buffers and the scaler's state."""
    digested = hashlib.sha256()
    tensors = [*model.parameters(), *buffers]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        digested.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    if scaler is not None:
        digested.update(repr(sorted(scaler.state_dict().items())).encode())
    return digested.hexdigest()


# --- throughput ---


def throughput(tiny: bool) -> Json:
    """Measure 4 replicas in one worker beside 4 packed DDP processes, and beside a bare loop of four batches as the bound."""
    from pliant_repro import contest
    from pliant_repro.bench.train import TrainOptions, hold, per_step
    from pliant_repro.contest import Rules

    rules = Rules(rounds=3 if tiny else 7, iterations=2 if tiny else 6, warmup=2 if tiny else 6, timeout_s=90.0)
    options = TrainOptions(
        num_workers=(1,),
        model="small" if tiny else "resnet50",
        batch=4 if tiny else 32,
        device="cpu" if tiny else "cuda",
        rules=rules,
        start_timeout_s=100.0,
    )
    results = hold(options, 1, ["ddp_gloo", "pytorch"], _say, replicas=REPLICAS)
    ours, peer, bare = results["pliant"], results["ddp_gloo"], results["pytorch"]
    images = REPLICAS * options.batch

    def with_images(values: Json) -> Json:
        return {**values, "images_per_s": images * values["steps_per_s"] if values["steps_per_s"] else None}

    beside = with_images(per_step(contest.beside(peer, ours)))
    bound = with_images(per_step(contest.beside(bare, ours)))
    speedup = beside["speedup"]
    return {
        "ok": isinstance(speedup, float) and speedup >= RATIO,
        "ours": with_images(per_step(contest.measured(ours))),
        "peers": {"ddp_gloo": beside},
        "bound": {**bound, "name": "plain PyTorch, a loop of four batches and one step", "fraction": bound["speedup"]},
        "target_speedup": RATIO,
        "remarks": contest.failures(results),
    }


def _say(what: str, fraction: float) -> None:
    print(f"  {fraction:4.0%} {what}", file=sys.stderr, flush=True)


ACTS: dict[str, Callable[[bool], Json]] = {"bits": bits, "throughput": throughput}


# --- all parts, one after the other ---


def run_parts(names: Sequence[str], tiny: bool, folder: Path) -> dict[str, Json]:
    """Run the parts and return their results; one that fails or takes too long has `ok: false` and says why."""
    deadline_s = time.monotonic() + LIMIT_S
    found: dict[str, Json] = {}
    for name in names:
        begun_s = time.monotonic()
        limit_s = PARTS[name] * 4 if tiny else min(PARTS[name], deadline_s - begun_s)  # tiny: machines may be slow
        print(f"{name} (at most {limit_s:.0f} s)", file=sys.stderr, flush=True)
        found[name] = _run_part(name, tiny, folder, limit_s) if limit_s > 5 else {"ok": False, "why": "no time left"}
        found[name]["took_s"] = round(time.monotonic() - begun_s, 1)
        print(f"  {name}: {json.dumps(found[name])[:300]}", file=sys.stderr, flush=True)
    return found


def _run_part(name: str, tiny: bool, folder: Path, limit_s: float) -> Json:
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    argv = [sys.executable, __file__, "--part", name, "--json", str(out), *(["--tiny"] if tiny else [])]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=_environ(folder), start_new_session=True)
        why = ""
        try:
            code = process.wait(limit_s)
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"not done within {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a part that failed may have left workers
            process.wait()
    if why or not out.exists():
        return {"ok": False, "why": why, "said": log.read_text(errors="replace")[-1500:]}
    result: Json = json.loads(out.read_text())
    return result


def _environ(folder: Path) -> dict[str, str]:
    """Return the children's environment: this tree on the path, and a stand-in for httpx if it is missing, because jobs of a
    fixed view have no config server to talk to."""
    paths = [str(ROOT), str(ROOT / "repro"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if importlib.util.find_spec("httpx") is None:
        stand_in = folder / "stand_in"
        stand_in.mkdir(exist_ok=True)
        (stand_in / "httpx.py").write_text("class URL: ...\nclass Response: ...\nclass Client: ...\n")
        paths.append(str(stand_in))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def summary(parts: dict[str, Json]) -> list[str]:
    """Return a line for each part."""
    lines = []
    for name, found in parts.items():
        said = found.get("why", "")
        if name == "bits" and "cells" in found:
            equal = sum(cell["equal"] for cell in found["cells"])
            said = f"{equal} of {len(found['cells'])} placements have DDP's bits after each of {found['steps']} steps"
        elif name == "throughput" and "peers" in found:
            peer, ours = found["peers"]["ddp_gloo"], found["ours"]
            said = (
                f"ours {ours.get('images_per_s')} images/s, packed DDP {peer.get('images_per_s')}, {peer['speedup']}x"
            )
            said += f"; {found['bound']['fraction']} of a bare loop"
        lines.append(f"{name:<10} {'ok' if found['ok'] else 'NOT OK':<6} {found['took_s']:>6} s  {said}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small networks on the CPU")
    parser.add_argument("--part", choices=list(PARTS), help="only this one, in this process")
    parser.add_argument("--parts", default="", help="only these, such as bits")
    parser.add_argument("--bits", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to write the result; default: $OUT/h200_training.json")
    args = parser.parse_args()
    if args.bits:
        args.json.write_text(json.dumps(bits_rank(json.loads(args.bits), args.rank)))
        return 0
    if not args.tiny and not torch.cuda.is_available():
        print("skipped: no CUDA; use --tiny to try the program on the CPU")
        return 0
    if args.part:
        args.json.write_text(json.dumps(ACTS[args.part](args.tiny)))
        return 0
    names = args.parts.split(",") if args.parts else list(PARTS)
    from pliant.machine import machine

    with tempfile.TemporaryDirectory() as folder:
        parts = run_parts(names, args.tiny, Path(folder))
    throughput_part = parts.get("throughput", {})
    result = {
        "bench": "h200_training",
        "args": {"tiny": args.tiny, "parts": names},
        "ours": throughput_part.get("ours", {}),
        "peers": throughput_part.get("peers", {}),
        "bound": throughput_part.get("bound", {}),
        "parts": parts,
        "machine": {**machine(), "device": "cpu" if args.tiny else torch.cuda.get_device_name(0)},
        "ok": all(found["ok"] for found in parts.values()),
        "remarks": [f"{name}: {found['why']}" for name, found in parts.items() if "why" in found],
    }
    path = args.json or Path(os.environ.get("OUT", ".")) / "h200_training.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(summary(parts)))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
