"""Proof that the torch at hand sums as `comm.order` says.

The summation order of gloo is no promise of torch's: a release had another one for a month. So before a job claims
the bits of DistributedDataParallel, a few tensors are reduced by torch itself, with N ranks as threads of this
process on loopback sockets, and by the formula, and compared bit by bit.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import distributed as dist

from pliant.comm import kernels, order

MAX_RANKS = 8
"""More ranks cost time by their square and show nothing new: the ring is the same."""
TIMEOUT = datetime.timedelta(seconds=10)
SIZES = (
    (torch.float32, 1),
    (torch.float32, 10),
    (torch.float32, 30_011),
    (torch.float64, 1023),
    (torch.bfloat16, 4099),
)
FACTORS = (1.0, -0.7310585, 1.3591409, 0.5772157, -1.6180340, 0.9159656, -1.2020569, 0.6931472)
"""What makes the ranks' values differ: of both signs and no two alike, so that the order of the sum shows."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    ok: bool
    """Replicas on any number of workers have the bits of DistributedDataParallel; otherwise only D0 holds."""
    detail: str


def self_check(num_replicas: int, *, thorough: bool = False) -> SelfCheck:
    """Compare torch's all-reduce with the formula. Touches no random generator, and leaves nothing open.

    The thorough one also sums tensors that are cut into more than two segments for each rank (megabytes).
    """
    if num_replicas < 2:
        return SelfCheck(True, "one replica: nothing is summed")
    began_s = time.perf_counter()
    num_ranks = min(num_replicas, MAX_RANKS)
    cases = [_inputs(dtype, size, num_ranks, seed) for seed, (dtype, size) in enumerate(_sizes(num_ranks, thorough))]
    try:
        results = _reduce_by_torch(cases, num_ranks)
    except (RuntimeError, AttributeError) as error:
        why = str(error).splitlines()[0]
        return SelfCheck(False, f"gloo of torch {torch.__version__} could not be asked ({why}): only D0 holds")
    total = wrong = 0
    for inputs, outputs in zip(cases, results, strict=True):
        expected = fold(inputs)
        total += expected.numel()
        wrong += max(int((expected != output).sum()) for output in outputs)
    took = f"{num_ranks} ranks, {total} sums, {(time.perf_counter() - began_s) * 1000:.0f} ms"
    if wrong:
        return SelfCheck(
            False,
            f"torch {torch.__version__} sums in another order than gloo's ring: {wrong} sums differ ({took}); only D0 holds: "
            "use a torch whose self-check passes (2.11 and 2.13 do)",
        )
    return SelfCheck(True, f"torch {torch.__version__} sums as gloo's ring does ({took})")


def fold(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the replicas' tensors by the formula."""
    num_replicas, first = len(inputs), inputs[0]
    out, scratch = torch.empty_like(first), torch.empty_like(first)
    length = order.chunk_length(first.numel(), first.itemsize, num_replicas)
    pieces = order.chunks_between(0, first.numel(), length)
    for begin, end, chunk in pieces:
        views = [tensor[begin:end] for tensor in inputs]
        folds = [(0, end - begin, order.chain(chunk, num_replicas))]
        kernels.Recipe(kernels.reducer("sum", first.dtype), views, folds, scratch[begin:end], out[begin:end]).run()
    return out


def _sizes(num_ranks: int, thorough: bool) -> tuple[tuple[torch.dtype, int], ...]:
    # From 2 N segments of 1 MiB on, the chunks' length follows another branch of the formula.
    return (*SIZES, (torch.float32, 2 * num_ranks * order.GLOO_SEGMENT_BYTES // 4 + 5)) if thorough else SIZES


def _inputs(dtype: torch.dtype, size: int, num_ranks: int, seed: int) -> list[torch.Tensor]:
    """Values whose sums round differently in different orders."""
    base = torch.rand(size, generator=torch.Generator().manual_seed(seed)).sub_(0.5)
    return [(base * FACTORS[rank]).to(dtype) for rank in range(num_ranks)]


def _reduce_by_torch(cases: list[list[torch.Tensor]], num_ranks: int) -> list[list[torch.Tensor]]:
    """For each case what each rank has in the end."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank_of_gloo(rank: int) -> list[torch.Tensor]:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = TIMEOUT
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, num_ranks, options)
        outputs = []
        for inputs in cases:
            output = inputs[rank].clone()
            group.allreduce([output]).wait()  # type: ignore[attr-defined]
            outputs.append(output)
        return outputs

    with ThreadPoolExecutor(num_ranks, thread_name_prefix="pliant-fold") as ranks:
        by_rank = list(ranks.map(rank_of_gloo, range(num_ranks)))
    return [[outputs[case] for outputs in by_rank] for case in range(len(cases))]
