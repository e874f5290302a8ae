"""Adaptive communication strategy, with the flags and lines of KungFu's artifact (section 4.2, figure 5).

    pliant run -q -np 8 -strategy STAR -H $HOSTS -nic eth0 python3 experimental/adapt_strategy/adapt_strategy.py --adapt --kf-optimizer=sync-sgd-monitor

On every host, or once with --ssh. Trains on random images, one replica per worker. With --adapt, workers vote when their
collectives become slow; after a majority the links are measured, and the best topology for them is used. Rank 0 prints. With
--paced, layers sleep for as long as a K80 would compute and have KAPPA times fewer parameters, for machines without GPUs.
"""

import argparse
import sys

import torch
from pliant_repro import zoo
from pliant_repro.figures import program
from pliant_repro.figures.launch import Task

from pliant.errors import ConfigError

UNUSED = ("--xla", "--eager", "--fp16-allreduce", "--use-adasum", "--no-cuda-mps")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet50", help=", ".join(zoo.VISION_MODELS))
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--image-size", type=int, default=0, help="side of the images; 0: the model's own")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true", help="compute on the CPU")
    parser.add_argument("--kf-optimizer", choices=("sync-sgd", "sync-sgd-monitor"), default="sync-sgd-monitor")
    parser.add_argument("--adapt", action="store_true", help="change the topology when there is interference")
    parser.add_argument("--paced", type=float, default=0.0, metavar="KAPPA", help="sleep where a K80 would compute")
    for flag in UNUSED:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.adapt and args.kf_optimizer != "sync-sgd-monitor":
        raise ConfigError(f"--adapt needs numbers to vote by: use --kf-optimizer=sync-sgd-monitor, not {args.kf_optimizer}")
    if args.paced < 0:
        raise ConfigError(f"--paced {args.paced:g}: use a number above 0, such as 40 for a fortieth of the parameters")
    return args


def main() -> None:
    args = arguments()
    is_cuda = torch.cuda.is_available() and not (args.no_cuda or args.paced)
    program.train(
        Task(
            model="paced-resnet50" if args.paced else f"image:{zoo.model_name(args.model)}", kappa=args.paced,
            batch=args.batch_size, image_size=args.image_size, device="cuda" if is_cuda else "cpu", lines=True,
            steps=args.num_warmup_batches + args.num_batches_per_iter * args.num_iters, warmup=args.num_warmup_batches,
            adapt=args.adapt,
        )
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"pliant: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
