"""How long changes of the number of workers take, with the flags and lines of KungFu's benchmark of the same name.

    pliant run -w -config-server http://10.0.0.19:9100/get -H 10.0.0.19:1,10.0.0.20:1 -nic eth0 -np 1 \
        python3 benchmarks/scaling/benchmark_kungfu_scaling.py --tf-method estimator --elastic \
        --resize-schedule 10:2,100:0 --train-steps 100 --epoch-size 10000

(or `--ssh -hostfile hosts.txt` instead of a command on each host). The first worker asks for the next size after the steps of the
schedule, and the workers that stay print `resize 1 -> 2 took ...`: the pause between two steps. As in KungFu, each worker trains on
a batch of its own, so the batch of all workers grows and shrinks with their number.
"""

from __future__ import annotations

import argparse
import sys

import torch
from pliant_repro import zoo
from pliant_repro.figures import program
from pliant_repro.figures.launch import Task
from pliant_repro.figures.workloads import launched_as

from pliant.errors import ConfigError
from pliant.identity import parse_schedule

UNUSED = {"--tf-method": "auto", "--kf-optimizer": "sync-sgd", "--epoch-size": 10000}
"""Flags that are about TensorFlow, or have no effect here, with their defaults."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet50", help=", ".join(zoo.VISION_MODELS))
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--image-size", type=int, default=0, help="side of the images; 0: the model's own")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument(
        "--resize-schedule", default="", metavar="STEP:N,...", help="after STEP steps, N workers; 0: end"
    )
    parser.add_argument("--train-steps", type=int, default=100, help="0: until the schedule ends it")
    for flag, default in UNUSED.items():
        parser.add_argument(flag, type=type(default), default=default, help="accepted, without effect")
    args = parser.parse_args()
    for flag, value in (("--batch-size", args.batch_size), ("--epoch-size", args.epoch_size)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: use 1 or more")
    return args


def main() -> None:
    args = arguments()
    spec = launched_as()
    is_elastic = spec is not None and spec.elastic
    resizes = dict(parse_schedule(args.resize_schedule))
    if resizes and not (args.elastic and is_elastic):
        raise ConfigError("--resize-schedule needs --elastic, and workers that may come and go: `pliant run -w`")
    if is_elastic and args.train_steps:
        resizes[args.train_steps] = 0
    given = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in UNUSED}
    unused = [f"{flag} {value}" for flag, value in given.items() if value != UNUSED[flag] and flag != "--epoch-size"]
    if unused and (spec is None or spec.view.rank_of(spec.worker) == 0):
        print(f"without effect here: {', '.join(unused)}", flush=True)
    program.train(
        Task(
            model=f"image:{zoo.model_name(args.model)}", batch=args.batch_size, image_size=args.image_size,
            device="cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu",
            steps=0 if is_elastic else args.train_steps, resizes=tuple(resizes.items()) or ((1 << 30, 0),),
        )
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"pliant: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
