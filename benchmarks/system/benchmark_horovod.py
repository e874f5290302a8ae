"""The artifact's baseline: Horovod's torch optimizer on the same model and images, where Horovod is installed.

    mpirun -np 2 -H 10.0.0.19:1,10.0.0.20:1 python3 benchmarks/system/benchmark_horovod.py --model=ResNet50 --batch-size=32

It is not a dependency of pliant: it must be compiled against the torch that is there. Without it, this says so, and that
benchmark_ddp.py measures torch's own DistributedDataParallel in the same way.
"""

from __future__ import annotations

import os
import time

import img_sec
import torch
import torch.nn.functional as F
from pliant_repro import zoo

from pliant.errors import ConfigError


def main() -> None:
    parser = img_sec.parser(__doc__.splitlines()[0])
    args = parser.parse_args()
    args.model = zoo.model_name(args.model)
    try:
        import horovod
        import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(
            f"Horovod cannot be imported ({error}): install it with `HOROVOD_WITH_PYTORCH=1 pip install horovod[pytorch]` "
            "(needs cmake, a C++ compiler and Open MPI), or run benchmarks/system/benchmark_ddp.py, which measures torch's "
            "DistributedDataParallel with the same flags and lines"
        ) from None
    hvd.init()
    device = img_sec.device_of(args)
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    if "OMP_NUM_THREADS" not in os.environ:
        img_sec.share_cores(hvd.local_size())
    say = img_sec.say_line if hvd.rank() == 0 else lambda text: None
    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    img_sec.say_unused(args, say)
    begin_s = time.perf_counter()
    model = img_sec.build(args, device)
    optimizer = hvd.DistributedOptimizer(img_sec.optimizer_of(model), named_parameters=model.named_parameters())
    images, labels = img_sec.batch_of(args, device, hvd.rank())
    say(f"init took {time.perf_counter() - begin_s:.3f}s")
    begin_s = time.perf_counter()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    say(f"bcast_op took {time.perf_counter() - begin_s:.3f}s")

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    where, size = "GPU" if device.type == "cuda" else "CPU", hvd.size()
    mean, interval = img_sec.measure(step, img_sec.amount_of(args), where, say, img_sec.settle_of(device))
    say(f"Total img/sec on {size} {where}(s): {size * mean:.1f} +-{size * interval:.1f}")
    facts = {"framework": "horovod", "version": horovod.__version__, "np": size, "bs": args.batch_size}
    say(img_sec.result_line(mean, interval, {**facts, "model": args.model}))


if __name__ == "__main__":
    img_sec.run_program(main)
