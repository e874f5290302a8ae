"""Gradients on a CUDA device: how they leave it to be summed, and how their sum comes back.

Memory on the device is taken when a bucket is full, in a backward that has freed more of it by then, and given
back when the bucket has left: the peak, at the end of a forward, does not know of replicas. So the device holds one set of
buckets, however many replicas there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pliant.comm import order
from pliant.train.gradients.buckets import Bucket
from pliant.train.gradients.flat import cut

PIECE_BYTES = 2 << 20
"""What is brought back to the device at once when it folds."""


def collected(
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor | None],
    num_replicas: int,
    *,
    is_plain: bool = False,
) -> torch.Tensor:
    """These gradients as one flat tensor, scaled: few large operations in place of many small ones. None is zeros."""
    there = [
        torch.zeros_like(parameter) if found is None else found
        for parameter, found in zip(parameters, gradients, strict=True)
    ]
    if is_plain and len(there) > 1:
        flat: torch.Tensor = torch._utils._flatten_dense_tensors(there)  # type: ignore[no-untyped-call]
    else:
        length = sum(parameter.numel() for parameter in parameters)
        flat = torch.empty(length, dtype=parameters[0].dtype, device=parameters[0].device)
        torch._foreach_copy_(cut(flat, parameters), there)
    return flat.mul_(1.0 / num_replicas)


class Ferry:
    """Moves flat tensors on a stream of its own, while backward goes on."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def carry(self, flat: torch.Tensor, part: torch.Tensor) -> torch.cuda.Event:
        """Have `flat` leave the device; when it has."""
        return self._beside(flat, lambda: part.copy_(flat, non_blocking=True))

    def fold(self, flat: torch.Tensor, parts: Sequence[torch.Tensor], num_replicas: int) -> torch.cuda.Event:
        """Add the other replicas' gradients, which are on the host, to those of the last one, in place; when it is done."""
        return self._beside(flat, lambda: _fold(flat, parts, num_replicas))

    def _beside(self, flat: torch.Tensor, act: Callable[[], object]) -> torch.cuda.Event:
        present = torch.cuda.current_stream(flat.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            act()
            done: torch.cuda.Event = self._stream.record_event()
        flat.record_stream(self._stream)
        return done

    def wait(self) -> None:
        """Nothing is under way any more."""
        if self._stream is not None:
            self._stream.synchronize()


def _fold(flat: torch.Tensor, parts: Sequence[torch.Tensor], num_replicas: int) -> None:
    """Brought back piece by piece. The same additions in the same order as anywhere else."""
    last, itemsize = num_replicas - 1, flat.element_size()
    size = min(flat.numel(), PIECE_BYTES // itemsize)
    before, scratch = torch.empty_like(flat[:size]), torch.empty_like(flat[:size])
    length = order.chunk_length(flat.numel(), itemsize, num_replicas)
    for chunk_begin, chunk_end, chunk in order.chunks_between(0, flat.numel(), length):
        replicas = order.chain(chunk, num_replicas)
        turn = replicas.index(last)
        for begin in range(chunk_begin, chunk_end, size):
            end = min(begin + size, chunk_end)
            total = flat[begin:end]
            for place, replica in enumerate(replicas):
                if replica == last:
                    if place:
                        total.add_(before[: end - begin])
                    continue
                target = before if place == 0 else scratch
                operand = target[: end - begin]
                operand.copy_(parts[replica][begin:end], non_blocking=True)
                if place:
                    (total if place > turn else before[: end - begin]).add_(operand)


def brought_back(bucket: Bucket, was_folded: bool) -> torch.Tensor:
    """The bucket's sum on the device: it was folded there, or has come to the host."""
    if not was_folded:
        return bucket.total.to(bucket.device, non_blocking=True)
    assert bucket.flat is not None, "every bucket was folded"
    assert bucket.copied is not None
    torch.cuda.current_stream(bucket.device).wait_event(bucket.copied)
    flat, bucket.flat = bucket.flat, None
    return flat


def uncollected(flat: torch.Tensor, bucket: Bucket) -> Sequence[torch.Tensor]:
    """Each parameter's view of the bucket's sum."""
    if bucket.is_plain:
        views: Sequence[torch.Tensor] = torch._utils._unflatten_dense_tensors(flat, bucket.parameters)  # type: ignore[no-untyped-call]
        return views
    return cut(flat, bucket.parameters)
