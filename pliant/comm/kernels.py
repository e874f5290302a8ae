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
Operand = torch.Tensor | np.ndarray
Reducer = Callable[..., object]
"""out = a (op) b, written as reducer(a, b, out=out)."""
BLOCK_BYTES = 1 << 20
"""Folded at once. Operands and results of a block stay in the cache while it is worked on."""
_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}
_NUMPY: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
# Torch's kernels for these two are much faster (or the only ones); for all others NumPy gives the same
# bits at less than half the cost per call, and it has arithmetic for the unsigned types.
_BY_TORCH = {torch.float16, torch.bfloat16}
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
    """The function for one operation, on what `operand` makes of tensors; raises ConfigError where there is none."""
    if op not in OPS:
        raise ConfigError(f"op={op!r} is unknown: use one of {', '.join(OPS)}")
    if dtype.is_complex and op in ("min", "max"):
        raise ConfigError(f"op={op!r} is not defined for {dtype}: complex numbers have no order")
    return _TORCH[op] if dtype in _BY_TORCH else _NUMPY[op]


def operand(tensor: torch.Tensor) -> Operand:
    """The same memory, in the form that is reduced."""
    return tensor if tensor.dtype in _BY_TORCH else tensor.numpy()


def _copy(target: Operand, source: Operand) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    elif isinstance(source, torch.Tensor):
        target.copy_(source)


class Recipe:
    """The calls that carry out one step's folds, with all their views made: run it as often as you like.

    A training job folds the same memory at every step, and making a view costs as much as adding a bias.
    """

    __slots__ = ("_blocks", "_reduce")

    def __init__(
        self,
        reduce: Reducer,
        operands: Sequence[torch.Tensor],
        folds: Sequence[tuple[int, int, tuple[int, ...]]],
        scratch: torch.Tensor,
        out: torch.Tensor,
        copies: Sequence[torch.Tensor] = (),
    ) -> None:
        """Fold `operands` into `out`, and write the result to `copies` as well.

        `out` and `copies` may be operands: a block is written only after all its operands were read.
        """
        self._reduce = reduce
        self._blocks: list[tuple[list[_Call], Operand, list[Operand]]] = []
        inputs, result, targets = [operand(x) for x in operands], operand(out), [operand(copy) for copy in copies]
        spare = operand(scratch)
        block = BLOCK_BYTES // out.dtype.itemsize
        if len(out) <= block:
            calls = [call for low, high, order in folds for call in _calls(inputs, order, spare, result, low, high)]
            self._blocks.append((calls, result, targets))
            return
        for low, high, order in folds:
            for begin in range(low, high, block):
                end = min(begin + block, high)
                calls = _calls(inputs, order, spare, result, begin, end)
                self._blocks.append((calls, result[begin:end], [target[begin:end] for target in targets]))

    def run(self) -> None:
        reduce = self._reduce
        for calls, result, targets in self._blocks:
            for a, b, out in calls:
                reduce(a, b, out=out)
            for target in targets:
                _copy(target, result)


_Call = tuple[Operand, Operand, Operand]


def _calls(
    operands: Sequence[Operand], order: Sequence[int], scratch: Operand, out: Operand, begin: int, end: int
) -> list[_Call]:
    """acc = first; acc = next + acc; ...; the last one into `out`, all others into scratch."""
    views = [operands[index][begin:end] for index in order]
    partial, result = scratch[: end - begin], out[begin:end]
    calls: list[_Call] = []
    accumulated = views[0]
    for view in views[1:-1]:
        calls.append((view, accumulated, partial))
        accumulated = partial
    calls.append((views[-1], accumulated, result))
    return calls


class Scratch:
    """A block of each type for partial sums. One thread only."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, torch.Tensor] = {}

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._blocks:
            self._blocks[dtype] = torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)
        return self._blocks[dtype]
