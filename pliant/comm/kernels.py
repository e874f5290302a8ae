"""Arithmetic on slices: executes the folds of a plan on tensors.

Every fold is elementwise and rounds to the tensor's own type at each operand, as gloo does. Only the order given by
the plan decides the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pliant.errors import ConfigError

OPS = ("sum", "min", "max", "prod")
Operand = torch.Tensor | np.ndarray
Reducer = Callable[..., object]
"""Computes out = a (op) b when called as reducer(a, b, out=out)."""
BLOCK_BYTES = 1 << 20
"""Size of the blocks that are folded at a time, so that operands and results of a block stay in the cache."""
_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}
_NUMPY: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
# For these two types torch's kernels are much faster (or the only ones). For all others NumPy gives the same bits at
# less than half the cost per call, and it has arithmetic for the unsigned types.
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
    """Return the name of `dtype` in a spec.

    Raises:
        ConfigError: the type cannot be reduced.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ConfigError(f"{dtype} cannot be reduced: convert it to one of {', '.join(_DTYPES)}") from None


def dtype_of(name: str) -> torch.dtype:
    return _DTYPES[name]


def reducer(op: str, dtype: torch.dtype) -> Reducer:
    """Return the function that computes `op` on what `operand` returns for tensors.

    Raises:
        ConfigError: the operation is unknown or not defined for the type.
    """
    if op not in OPS:
        raise ConfigError(f"op={op!r} is unknown: use one of {', '.join(OPS)}")
    if dtype.is_complex and op in ("min", "max"):
        raise ConfigError(f"op={op!r} is not defined for {dtype}: complex numbers have no order")
    return _TORCH[op] if dtype in _BY_TORCH else _NUMPY[op]


def operand(tensor: torch.Tensor) -> Operand:
    """Return the memory of `tensor` in the form that `reducer` takes: a NumPy array for most types."""
    return tensor if tensor.dtype in _BY_TORCH else tensor.numpy()


def _copy(target: Operand, source: Operand) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    elif isinstance(source, torch.Tensor):
        target.copy_(source)


class PreparedFold:
    """The calls that execute the folds of one step, with all views made, ready to run any number of times.

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
        """Prepare to fold `operands` into `out` and to write the result to `copies` as well.

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
    """Return the calls acc = first; acc = next + acc; ...: the last one writes to `out`, all others to scratch."""
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
    """One block per type for partial sums. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, torch.Tensor] = {}

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._blocks:
            self._blocks[dtype] = torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)
        return self._blocks[dtype]
