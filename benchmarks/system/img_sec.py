"""Flags, data, timed loop and output lines that the programs of KungFu's synthetic benchmarks share.

    Warmup Step #0: 6.7 img/sec per /gpu:0, took 4.743s
    Iter #0: 44.4 img/sec per /gpu:0
    Img/sec per /gpu:0: 43.4 +-1.2
    RESULT: 43.429020 +-1.212320 {"framework":"pliant","np":32,...}

Each program passes a function that does one step. +- is 1.96 standard deviations, as in KungFu.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pliant_repro import zoo
from torch import Tensor, nn

from pliant.errors import ConfigError

CLASSES = 1000
SEED = 1234
UNUSED = ("--xla", "--eager", "--fp16-allreduce", "--use-adasum", "--no-cuda-mps")
"""Switches of KungFu's programs about TensorFlow and Horovod: accepted, without effect."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Batch size, and numbers of warm-up steps, steps per iteration and iterations."""

    batch_size: int
    warmup: int
    per_iter: int
    iters: int

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--batch-size", self.batch_size, 1),
            ("--num-warmup-batches", self.warmup, 0),
            ("--num-batches-per-iter", self.per_iter, 1),
            ("--num-iters", self.iters, 1),
        ):
            if value < least:
                raise ConfigError(f"{flag} {value}: use {least} or more")

    @property
    def steps(self) -> int:
        return self.warmup + self.per_iter * self.iters


def parser(about: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that all of these programs have."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--model", default="ResNet50", help=", ".join(zoo.VISION_MODELS))
    made.add_argument("--batch-size", type=int, default=32, help="of each worker")
    made.add_argument("--image-size", type=int, default=0, help="side of the images; 0: the model's own")
    made.add_argument("--num-warmup-batches", type=int, default=10)
    made.add_argument("--num-batches-per-iter", type=int, default=10)
    made.add_argument("--num-iters", type=int, default=10)
    made.add_argument("--no-cuda", action="store_true", help="compute on the CPU, whatever there is")
    for flag in UNUSED:
        made.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return made


def amount_of(args: argparse.Namespace) -> Amount:
    return Amount(args.batch_size, args.num_warmup_batches, args.num_batches_per_iter, args.num_iters)


def say_unused(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Print one line about given flags that have no effect."""
    given = [flag for flag in UNUSED if getattr(args, flag[2:].replace("-", "_"))]
    if given:
        say(f"without effect here: {', '.join(given)}")


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device; of several visible GPUs (`pliant run -allow-nvlink`), that of this worker's slot."""
    if args.no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    if sees_all_gpus():
        torch.cuda.set_device(int(os.environ["PLIANT_LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda")


def sees_all_gpus() -> bool:
    own = os.environ.get("PLIANT_CUDA_VISIBLE_DEVICES")
    return own is not None and own != os.environ.get("CUDA_VISIBLE_DEVICES") and "PLIANT_LOCAL_RANK" in os.environ


def share_cores(num_local: int) -> None:
    """Give each of a host's workers its share of the cores, unless the user has decided."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // max(1, num_local)))


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the model, the same on all workers."""
    torch.manual_seed(SEED)
    return zoo.vision_model(args.model, CLASSES).to(device)


def batch_of(args: argparse.Namespace, device: torch.device, rank: int) -> tuple[Tensor, Tensor]:
    """Return the one batch that a worker computes on in every step."""
    side = args.image_size or zoo.image_size(args.model)
    random = torch.Generator().manual_seed(SEED + 1 + rank)
    images = torch.rand(args.batch_size, 3, side, side, generator=random)
    labels = torch.randint(0, CLASSES, (args.batch_size,), generator=random)
    return images.to(device), labels.to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def measure(
    step: Callable[[], object],
    amount: Amount,
    where: str,
    say: Callable[[str], None],
    settle: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Do all steps; returns images per second of this worker, and 1.96 standard deviations of its iterations.

    `where` is the device's name in the lines; `settle` waits until launched work is done.
    """
    if amount.warmup:
        say("Running warmup...")
    for number in range(amount.warmup):
        took_s = timed(step, 1, settle)
        say(f"Warmup Step #{number}: {amount.batch_size / took_s:.1f} img/sec per {where}, took {took_s:.3f}s")
    say("Running benchmark...")
    rates = []
    for number in range(amount.iters):
        rates.append(amount.batch_size * amount.per_iter / timed(step, amount.per_iter, settle))
        say(f"Iter #{number}: {rates[-1]:.1f} img/sec per {where}")
    mean, interval = summary(rates)
    say(f"Img/sec per {where}: {mean:.1f} +-{interval:.1f}")
    return mean, interval


def timed(step: Callable[[], object], times: int, settle: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    for _ in range(times):
        step()
    settle()
    return time.perf_counter() - begin_s


def summary(rates: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the half width that follows +-."""
    return statistics.fmean(rates), 1.96 * statistics.pstdev(rates)


def result_line(mean: float, interval: float, facts: Mapping[str, object]) -> str:
    return f"RESULT: {mean:f} +-{interval:f} {json.dumps(facts, separators=(',', ':'))}"


def settle_of(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def say_line(text: str) -> None:
    print(text, flush=True)


def run_program(main: Callable[[], None]) -> None:
    """Run the program; a user's mistake is one line and exit code 2, as with the `pliant` command."""
    try:
        main()
    except ConfigError as error:
        print(f"pliant: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
