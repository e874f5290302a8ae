"""What monitoring costs, by the flags and in the lines of KungFu's artifact (section 3.1).

    pliant run -np 4 python3 benchmarks/monitoring/benchmark.py --kf-optimizer=noise-scale --model=ResNet50 \
        --batch-size=8 --interval=1

Trains on random images, one replica per worker, and prints each worker's images per second. `noise-scale` and `variance`
also print what they have found, on stderr; it is the same on all workers. A cuda device is used where there is one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from pliant_repro.zoo import image_size, model_name, num_classes, vision_model

import pliant
from pliant.errors import ConfigError

MONITORS = {"sync-sgd": "", "noise-scale": "noise_scale", "variance": "variance"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kf-optimizer", choices=MONITORS, default="sync-sgd", help="what to monitor")
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--interval", type=int, default=1, help="monitor every so many steps")
    parser.add_argument("--num-iters", type=int, default=10, help="how often the throughput is measured")
    parser.add_argument(
        "--num-batches-per-iter", type=int, default=0, help="steps of each; default: 10 on cuda, else 1"
    )
    parser.add_argument("--num-warmup-batches", type=int, default=0, help="steps before; default: 10 on cuda, else 2")
    parser.add_argument("--image-size", type=int, default=0, help="default: as the model was published")
    parser.add_argument("--no-cuda", action="store_true")
    asked = parser.parse_args()
    for name in ("batch_size", "interval", "num_iters"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(asked, name)}: use 1 or more")
    return asked


def main() -> None:
    asked = arguments()
    on_cuda = torch.cuda.is_available() and not asked.no_cuda
    device = torch.device("cuda" if on_cuda else "cpu")
    name = "/gpu:0" if on_cuda else "/cpu:0"
    per_iter = asked.num_batches_per_iter or (10 if on_cuda else 1)
    warmup = asked.num_warmup_batches or (10 if on_cuda else 2)
    steps = warmup + asked.num_iters * per_iter
    monitor = MONITORS[asked.kf_optimizer]
    job = pliant.join(monitor={monitor: asked.interval} if monitor else {})

    model = vision_model(model_name(asked.model)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = job.wrap(model, optimizer)
    size = asked.image_size or image_size(asked.model)
    images = torch.randn(asked.batch_size, 3, size, size, device=device)
    labels = torch.randint(num_classes(asked.model), (asked.batch_size,), device=device)

    rates: list[float] = []
    began_s = 0.0
    if job.is_first:
        print(f"Model: {model_name(asked.model)}\nBatch size: {asked.batch_size}\nRunning warmup...", flush=True)
    for step in job.steps(steps):
        for _replica in step:
            F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        say_found(job, monitor)
        done = step.number + 1 - warmup
        if done == 0:
            began_s = time.monotonic()
            if job.is_first:
                print("Running benchmark...", flush=True)
        elif done > 0 and done % per_iter == 0:
            began_s = measured(rates, asked.batch_size * per_iter, began_s, device, name)
    spread = 1.96 * statistics.pstdev(rates)
    print(f"Img/sec per {name}: {statistics.fmean(rates):.1f} +-{spread:.1f}", flush=True)


def measured(rates: list[float], images: int, began_s: float, device: torch.device, name: str) -> float:
    """Note the throughput since `began_s`; the time now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    now_s = time.monotonic()
    rates.append(images / (now_s - began_s))
    print(f"Iter #{len(rates) - 1}: {rates[-1]:.1f} img/sec per {name}", flush=True)
    return now_s


def say_found(job: pliant.Job, monitor: str) -> None:
    """What is known after the last step."""
    seen = job.observation
    if seen is None:
        return
    if monitor == "noise_scale" and seen.gradient_sqr and seen.gradient_var is not None:
        # With its sign: noise that hides the gradient makes it negative, as in the artifact's own output.
        print(f"Gradient Noise Scale: {seen.gradient_var / seen.gradient_sqr:.9g}", file=sys.stderr, flush=True)
    elif monitor == "variance" and seen.variance is not None:
        print(f"Variance: {seen.variance:.9g}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"benchmark.py: {error}")
