"""Arithmetic on slices: executes the folds of a plan on tensors.

Every fold is elementwise and rounds to the tensor's own type at each operand, as gloo does. Only the order given by
the plan decides the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from pliant.comm.order import Expression
from pliant.errors import ConfigError

OPS = ("sum", "min", "max", "prod")
Operand = torch.Tensor | np.ndarray
Reducer = Callable[..., object]
"""Computes out = a (op) b when called as reducer(a, b, out=out)."""
BLOCK_BYTES = 1 << 18
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
        ranges: Sequence[tuple[int, int, Expression]],
        scratch: Scratch,
        out: torch.Tensor,
        copies: Sequence[torch.Tensor] = (),
    ) -> None:
        """Prepare to add `operands`, as `ranges` says, into `out` and to write the result to `copies` as well.

        `out` and `copies` may be operands: a block is written only after all its operands were read.
        """
        self._reduce = reduce
        self._blocks: list[tuple[list[_Call], Operand, list[Operand]]] = []
        inputs, result, targets = [operand(x) for x in operands], operand(out), [operand(copy) for copy in copies]
        programs = [(low, high, _additions(expression)) for low, high, expression in ranges]
        spare = scratch.of(out.dtype, max(num_partial for _, _, (num_partial, _) in programs))
        block = BLOCK_BYTES // out.dtype.itemsize
        if len(out) <= block:
            calls = [
                call
                for low, high, (_, additions) in programs
                for call in _calls(inputs, additions, spare, result, low, high)
            ]
            self._blocks.append((calls, result, targets))
            return
        for low, high, (_, additions) in programs:
            for begin in range(low, high, block):
                end = min(begin + block, high)
                calls = _calls(inputs, additions, spare, result, begin, end)
                self._blocks.append((calls, result[begin:end], [target[begin:end] for target in targets]))

    def run(self) -> None:
        reduce = self._reduce
        for calls, result, targets in self._blocks:
            for a, b, out in calls:
                reduce(a, b, out=out)
            for target in targets:
                _copy(target, result)


_Call = tuple[Operand, Operand, Operand]


_Addition = tuple[int, int, int]
"""Two operands and where their sum goes. Numbers below 0 are partial sums: -1 is the first one."""


@lru_cache(maxsize=1024)
def _additions(expression: Expression) -> tuple[int, tuple[_Addition, ...]]:
    """Return how many partial sums are kept at a time while `expression` is computed, and the additions."""
    found: list[_Addition] = []
    num_partial = 1

    def add(part: Expression, kept: int) -> int:
        """Append the additions of `part` while `kept` partial sums are in use; return where its sum is."""
        nonlocal num_partial
        if isinstance(part, int):
            return part
        num_partial = max(num_partial, kept + 1)
        accumulated = add(part[0], kept)
        for other in part[1:]:
            found.append((add(other, kept + 1), accumulated, -1 - kept))
            accumulated = -1 - kept
        return accumulated

    add(expression, 0)
    return num_partial, tuple(found)


def _calls(
    operands: Sequence[Operand],
    additions: Sequence[_Addition],
    partial: Sequence[Operand],
    out: Operand,
    begin: int,
    end: int,
) -> list[_Call]:
    """Return the calls that carry out the additions; the last one writes to `out`."""
    length = end - begin
    calls = [
        (
            operands[a][begin:end] if a >= 0 else partial[-1 - a][:length],
            operands[b][begin:end] if b >= 0 else partial[-1 - b][:length],
            partial[-1 - target][:length],
        )
        for a, b, target in additions[:-1]
    ]
    a, b, _ = additions[-1]
    calls.append(
        (
            operands[a][begin:end] if a >= 0 else partial[-1 - a][:length],
            operands[b][begin:end] if b >= 0 else partial[-1 - b][:length],
            out[begin:end],
        )
    )
    return calls


class Scratch:
    """Blocks for partial sums, in the form that `reducer` takes. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, list[Operand]] = {}

    def of(self, dtype: torch.dtype, count: int) -> list[Operand]:
        """Return at least `count` blocks."""
        blocks = self._blocks.setdefault(dtype, [])
        while len(blocks) < count:
            blocks.append(operand(torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)))
        return blocks
