"""Arithmetic on slices: the folds of a plan, carried out on tensors.

Every fold is elementwise and rounds to the tensor's own type at each operand, as gloo does, so the
order given by the plan decides the bits and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pliant.errors import ConfigError

OPS = ("sum", "min", "max", "prod")

Reducer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""out = a (op) b."""

BLOCK_BYTES = 1 << 20
"""Folded at once. Operands and results of a block stay in the cache while it is worked on."""

_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}
_NUMPY: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
_BY_NUMPY = {torch.uint16, torch.uint32, torch.uint64}  # torch has no arithmetic for these
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Raises ConfigError for a type that cannot be reduced."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ConfigError(f"{dtype} cannot be reduced: convert it to one of {', '.join(_DTYPES)}") from None


def dtype_of(name: str) -> torch.dtype:
    return _DTYPES[name]


def reducer(op: str, dtype: torch.dtype) -> Reducer:
    """The function for one operation; raises ConfigError where there is none."""
    if op not in OPS:
        raise ConfigError(f"op={op!r} is unknown: use one of {', '.join(OPS)}")
    if dtype.is_complex and op in ("min", "max"):
        raise ConfigError(f"op={op!r} is not defined for {dtype}: complex numbers have no order")
    if dtype in _BY_NUMPY:
        by_numpy = _NUMPY[op]

        def reduce_by_numpy(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            by_numpy(a.numpy(), b.numpy(), out=out.numpy())

        return reduce_by_numpy
    by_torch = _TORCH[op]

    def reduce_by_torch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        by_torch(a, b, out=out)

    return reduce_by_torch


class Folder:
    """Carries out folds, with a scratch block of its own. One thread only."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def fold(
        self,
        reduce: Reducer,
        operands: Sequence[torch.Tensor],
        folds: Sequence[tuple[int, int, tuple[int, ...]]],
        out: torch.Tensor,
        copies: Sequence[torch.Tensor] = (),
    ) -> None:
        """Fold `operands` into `out`, and write the result to `copies` as well.

        `out` and `copies` may be operands: a block is written only after all its operands were read.
        """
        block = BLOCK_BYTES // out.dtype.itemsize
        scratch = self._scratch_of(out.dtype)
        for low, high, indices in folds:
            if high - low <= block and low == 0 and high == len(out):
                _fold_block(reduce, [operands[i] for i in indices], scratch, out, copies)
                continue
            for begin in range(low, high, block):
                part = slice(begin, min(begin + block, high))
                copied = [copy[part] for copy in copies]
                _fold_block(reduce, [operands[i][part] for i in indices], scratch, out[part], copied)

    def _scratch_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)
        return self._scratch[dtype]


def _fold_block(
    reduce: Reducer,
    operands: Sequence[torch.Tensor],
    scratch: torch.Tensor,
    out: torch.Tensor,
    copies: Sequence[torch.Tensor],
) -> None:
    accumulated = operands[0]
    if len(operands) > 2:
        partial = scratch[: len(out)]
        for operand in operands[1:-1]:
            reduce(operand, accumulated, partial)
            accumulated = partial
    reduce(operands[-1], accumulated, out)
    for copy in copies:
        copy.copy_(out)
