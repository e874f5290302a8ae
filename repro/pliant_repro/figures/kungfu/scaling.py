"""The program of KungFu's figure 7: an elastic job that asks for other numbers of workers by a schedule.

benchmarks/scaling/benchmark_kungfu_scaling.py is this, for the command line; `fig7` runs it on several hosts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

import pliant
from pliant.errors import ConfigError, NotLaunched
from pliant.identity import parse_schedule, worker_spec
from pliant_repro import zoo
from pliant_repro.figures.kungfu import img_sec

UNUSED = {"--tf-method": "auto", "--kf-optimizer": "sync-sgd"}
"""Options of KungFu's program that are about TensorFlow, or have one value here; with their defaults."""
MAX_EPOCHS = 1_000_000


def main() -> None:
    args = arguments()
    listed = dict(parse_schedule(args.resize_schedule))
    is_elastic = watched()
    if listed and not (args.elastic and is_elastic):
        raise ConfigError("--resize-schedule needs --elastic, and workers that may come and go: `pliant run -w`")
    if is_elastic and args.train_steps:
        listed[args.train_steps] = 0
    schedule = Schedule(listed)
    begin_s = time.perf_counter()
    device = img_sec.device_of(args)
    with pliant.join() as job:
        model = img_sec.build(args, device)
        batch = img_sec.batch_of(args, device, 0)
        # The loader only counts: the images stay where they are.
        samples = args.epoch_size if is_elastic else args.train_steps * args.batch_size * job.replicas
        counted = torch.utils.data.TensorDataset(torch.zeros(samples))
        model, optimizer, loader = job.wrap(model, img_sec.optimizer_of(model), counted, batch_size=args.batch_size)
        is_first = True
        for _ in job.epochs(MAX_EPOCHS if is_elastic else 1):
            for _ in loader:
                step = job.step
                if is_first and step == 0 and job.rank == 0:
                    say_unused(args)
                    img_sec.say_line(f"init took {time.perf_counter() - begin_s:.3f}s")
                is_first = False
                optimizer.zero_grad()
                F.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                size = schedule.due(step + 1, job.size, say=img_sec.say_line if job.rank == 0 else _unheard)
                if size is not None:
                    job.resize(size)  # 0 ends the job, and with it this loop


class Schedule:
    """When to ask for how many workers. KungFu stands still until newcomers are there; here training goes on, so the next
    change, if its step has come before the last one has taken place, is put off until then."""

    def __init__(self, listed: Mapping[int, int]) -> None:
        self._left = sorted(listed.items(), reverse=True)
        self._asked: int | None = None
        self._asked_s = 0.0
        self._is_told = True

    def due(self, steps: int, size: int, say: Callable[[str], None]) -> int | None:
        """What to ask for now that `steps` are done by `size` workers; None: nothing."""
        if self._asked == size and not self._is_told:
            self._is_told = True
            say(f"request to first step with {size} workers: {time.monotonic() - self._asked_s:.3f}s")
        if not self._left or steps < self._left[-1][0] or self._asked not in (None, size):
            return None
        self._asked, self._asked_s, self._is_told = self._left.pop()[1], time.monotonic(), False
        return self._asked


def _unheard(text: str) -> None: ...


def watched() -> bool:
    try:
        return worker_spec().elastic
    except NotLaunched:
        return False


def say_unused(args: argparse.Namespace) -> None:
    if args.given:
        given = [f"{flag} {getattr(args, flag[2:].replace('-', '_'))}" for flag in args.given]
        img_sec.say_line(f"without effect here: {', '.join(given)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How long changes of the number of workers take.")
    parser.add_argument("--model", default="ResNet50", help=", ".join(zoo.VISION_MODELS))
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--image-size", type=int, default=0, help="side of the images; 0: the model's own")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument(
        "--resize-schedule", default="", metavar="STEP:N,...", help="after STEP steps, N workers; 0: end"
    )
    parser.add_argument("--train-steps", type=int, default=100, help="0: until the schedule ends it")
    parser.add_argument("--epoch-size", type=int, default=10000, help="samples")
    for flag, default in UNUSED.items():
        parser.add_argument(flag, default=default, help="accepted, without effect")
    args = parser.parse_args()
    args.given = [flag for flag, default in UNUSED.items() if getattr(args, flag[2:].replace("-", "_")) != default]
    args.model = zoo.model_name(args.model)
    for flag, value in (("--batch-size", args.batch_size), ("--epoch-size", args.epoch_size)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: use 1 or more")
    return args


if __name__ == "__main__":
    img_sec.run_program(main)
