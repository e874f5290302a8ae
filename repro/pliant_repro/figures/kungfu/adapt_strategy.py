"""Adaptive communication strategy, by the flags and in the lines of KungFu's artifact (section 4.2, figure 5).

    pliant run -q -np 8 -strategy STAR -H $HOSTS -nic eth0 python3 experimental/adapt_strategy/adapt_strategy.py --adapt --kf-optimizer=sync-sgd-monitor

Trains on random images, one replica per worker. With --adapt, workers vote when their collectives become slow; after a
majority the links are measured, and the topology that is best on them is taken. Rank 0 prints. With --paced, layers
wait for as long as a K80 would compute them and have KAPPA times fewer parameters, for machines without GPUs. The
program is the package's own, so that `pliant reproduce kungfu-fig5` finds it wherever it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pliant
from pliant.adapt.interference import Interference
from pliant.errors import ConfigError, NotLaunched
from pliant.identity import worker_spec
from pliant_repro import profiles, zoo
from pliant_repro.figures.kungfu import img_sec
from pliant_repro.paced import PacedNet
from pliant_repro.profiles import Profile

OPTIMIZERS = ("sync-sgd", "sync-sgd-monitor")
K80_PER_S = 50.0
"""Images of ResNet-50 per second, for --paced."""
BUCKET_MB = 25.0


def arguments() -> argparse.Namespace:
    parser = img_sec.parser(__doc__.splitlines()[0])
    parser.add_argument("--kf-optimizer", choices=OPTIMIZERS, default="sync-sgd-monitor")
    parser.add_argument("--adapt", action="store_true", help="take another topology when there is interference")
    parser.add_argument("--paced", type=float, default=0.0, metavar="KAPPA", help="wait where a K80 would compute")
    asked = parser.parse_args()
    if asked.adapt and asked.kf_optimizer != "sync-sgd-monitor":
        raise ConfigError(
            f"--adapt needs figures to vote by: use --kf-optimizer=sync-sgd-monitor, not {asked.kf_optimizer}"
        )
    if asked.paced < 0:
        raise ConfigError(f"--paced {asked.paced:g}: use a number above 0, such as 40 for a fortieth of the parameters")
    return asked


def place() -> tuple[int, int]:
    """This worker's rank, and how many workers its host has. The job itself knows its rank only when it trains."""
    try:
        spec = worker_spec()
    except NotLaunched:
        return 0, 1
    return spec.view.rank_of(spec.worker), spec.view.hosts.count(spec.worker.host)


def paced_profile(batch: int, kappa: float) -> Profile:
    """ResNet-50 as a K80 computes it, with `kappa` times fewer parameters."""
    full = dataclasses.replace(profiles.profile("resnet50", batch=batch), compute_s=batch / K80_PER_S)
    return profiles.scaled(full, kappa)


def subject(
    asked: argparse.Namespace, job: pliant.Job, rank: int, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The model, and what makes its loss on the one batch that this worker has."""
    if asked.paced:
        net = PacedNet(paced_profile(asked.batch_size, asked.paced), lambda: job.sync_stats().waited_until_s)
        samples = torch.randn(asked.batch_size, net.num_inputs, generator=torch.Generator().manual_seed(rank))
        return net, lambda model: model(samples)
    asked.model = zoo.model_name(asked.model)
    images, labels = img_sec.batch_of(asked, device, rank)
    return img_sec.build(asked, device), lambda model: F.cross_entropy(model(images), labels)


class Lines:
    """What rank 0 prints of each step."""

    def __init__(self, job: pliant.Job, where: str, batch: int, warmup: int) -> None:
        self._job, self._where, self._batch, self._left = job, where, batch, warmup
        self._began_s = time.perf_counter()
        self._voted = False
        self.rates: list[float] = []

    def say(self, text: str) -> None:
        """A line of the policy's; the vote's own are the runtime's, which marks them."""
        self._voted = True
        if self._job.rank == 0:
            img_sec.say_line(f"[I] {text}" if "::" in text else f"Cluster response\n{text}")

    def step_done(self) -> None:
        now_s = time.perf_counter()
        took_s, self._began_s = now_s - self._began_s, now_s
        if self._left:
            self._left -= 1
            return
        self.rates.append(self._batch / took_s)
        if self._job.rank == 0:
            response = "Cluster response " if self._voted else ""
            img_sec.say_line(f"{response}Iter #{len(self.rates) - 1}: {self.rates[-1]:.1f} img/sec per {self._where}")
        self._voted = False


def main() -> None:
    asked = arguments()
    amount = img_sec.amount_of(asked)
    device = torch.device("cpu") if asked.paced else img_sec.device_of(asked)
    policy = Interference()
    job = pliant.join(policies=[policy] if asked.adapt else [])
    rank, num_local = place()
    img_sec.share_cores(num_local)
    model, loss_of = subject(asked, job, rank, device)
    optimizer = img_sec.optimizer_of(model)
    turns = TensorDataset(torch.arange(amount.steps * amount.batch_size * job.replicas))
    capped = {"bucket_cap_mb": BUCKET_MB / asked.paced} if asked.paced else {}
    model, optimizer, loader = job.wrap(model, optimizer, turns, batch_size=amount.batch_size, **capped)
    lines = Lines(job, "/gpu:0" if device.type == "cuda" else "/cpu:0", amount.batch_size, amount.warmup)
    policy.report = lines.say
    settle = img_sec.settle_of(device)
    for _ in job.epochs(1):
        for number, _ in enumerate(loader):
            if number:
                lines.step_done()
            elif job.rank == 0:  # known from here on
                model_name = "paced ResNet50" if asked.paced else asked.model
                img_sec.say_line(f"Model: {model_name}\nBatch size: {amount.batch_size}")
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            settle()
    lines.step_done()
    if job.rank == 0:
        mean, spread = img_sec.summary(lines.rates)
        facts = {"framework": "pliant", "np": job.size, "bs": amount.batch_size, "kf-opt": asked.kf_optimizer}
        img_sec.say_line(img_sec.result_line(mean, spread, {**facts, "adapt": asked.adapt}))


if __name__ == "__main__":
    img_sec.run_program(main)
