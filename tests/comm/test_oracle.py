"""Every strategy against torch's own all_reduce on gloo, in bits, and against NumPy.

Each rank is a process, on two loopback hosts, so shared memory and TCP both take part. Inputs span
many magnitudes: the order of summation shows in the bits, and a control proves that it does.
The whole matrix takes minutes and runs with PLIANT_FULL=1; the default is a part of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gang import FULL, addresses, gang, joined, run, specs

from pliant.comm.kernels import dtype_of
from pliant.comm.order import Order
from pliant.comm.topology import STRATEGIES
from pliant.identity import WorkerSpec

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_server", "no_leaks"), pytest.mark.timeout(1800)]

MIB = 1 << 20
SIZES = (0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB + 7)
HOSTS = {1: "A", 2: "AB", 3: "AAB", 4: "ABBA", 5: "AABAB", 8: "AAABBBAB"}
GLOO = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
"""The types that torch's gloo reduces as we do. (It accepts bool, too, but sums it as bytes.)"""
OURS = (*GLOO, "bool", "int16", "uint16", "uint32", "uint64", "complex64", "complex128")


@dataclass(frozen=True)
class Cell:
    """One all_reduce of the matrix."""

    dtype: str
    size: int
    op: str = "sum"

    def __str__(self) -> str:
        return f"{self.dtype}/{self.op}/{self.size}"


FLOAT32 = [Cell("float32", size) for size in SIZES]
FEW = FLOAT32 if FULL else [cell for cell in FLOAT32 if cell.size in (0, 1, MIB + 1)]


def operand(cell: Cell, rank: int) -> torch.Tensor:
    """Return the operand of `rank`: any value of an integer type, many magnitudes of a floating type."""
    dtype = dtype_of(cell.dtype)
    rng = np.random.default_rng([cell.size, rank, *cell.dtype.encode(), *cell.op.encode()])
    if not (dtype.is_floating_point or dtype.is_complex):
        raw = rng.integers(0, 256, cell.size * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw % 2 == 1 if dtype == torch.bool else raw.view(cell.dtype))
    numbers = 2 * cell.size if dtype.is_complex else cell.size
    values = floats(rng.integers(0, 1 << 32, numbers, dtype=np.uint32), *exponents(dtype, cell.op))
    if dtype.is_complex:
        pairs = torch.from_numpy(values).view(-1, 2).to(torch.float64 if dtype.itemsize == 16 else torch.float32)
        return torch.view_as_complex(pairs)
    return torch.from_numpy(values).to(dtype)


def exponents(dtype: torch.dtype, op: str) -> tuple[int, int]:
    """Return the lowest exponent and a mask for what is added to it: as many magnitudes as the type can hold."""
    if op == "prod":  # near 1, so that no partial product leaves the range of float16
        return -1, 1
    return (-4, 7) if dtype == torch.float16 else (-16, 31)


def floats(bits: np.ndarray, lowest: int, mask: int) -> np.ndarray:
    """Return float32 of random sign and mantissa between 2**lowest and 2**(lowest + mask)."""
    exponent = ((bits >> 23) & mask) + (127 + lowest)
    return ((bits & 0x807FFFFF) | (exponent << 23).astype(np.uint32)).view(np.float32)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"").hexdigest()[:16]


# --- in the workers ---


def torchs(rank: int, size: int, store: str, cells: Sequence[Cell]) -> dict[Cell, str]:
    """Reduce each cell with stock torch; return the digests."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    found = {}
    for cell in cells:
        tensor = operand(cell, rank)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(cell.op, cell.op.upper())))
        found[cell] = digest(tensor)
    dist.destroy_process_group()
    return found


def ours(
    rank: int, spec: WorkerSpec, strategies: Sequence[str], exact: Sequence[Cell], fast: Sequence[Cell]
) -> tuple[dict[tuple[Order, str, Cell], str], list[str]]:
    """Return digests by (order, strategy, cell), and a message for each result that differs from NumPy's."""
    found, wrong = {}, []
    with joined(spec) as engine:
        for cell in dict.fromkeys([*exact, *fast]):
            mine = operand(cell, rank)
            orders: dict[Order, Sequence[Cell]] = {"ddp": exact, "fast": fast}
            for strategy in strategies:
                engine.set_strategy(strategy)
                for order in (order for order, some in orders.items() if cell in some):
                    tensor = mine.clone()
                    engine.all_reduce(str(cell), tensor, op=cell.op, order=order).wait()
                    bits = found[order, strategy, cell] = digest(tensor)
                    if rank == 0 and not within_rounding(cell, engine.size, bits, tensor):
                        wrong.append(f"{order} {strategy} {cell} is not NumPy's")
    return found, wrong


@lru_cache(maxsize=1)
def numpys(cell: Cell, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return NumPy's result in a wide type, and the error bound of a result that is rounded at every operand; None if exact."""
    operands = [operand(cell, rank) for rank in range(size)]
    dtype = operands[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        arrays = [part.numpy() for part in operands]
        ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[cell.op]
        return ufunc.reduce(arrays, axis=0, dtype=arrays[0].dtype), None
    if dtype.is_complex:
        wide = np.stack([part.to(torch.complex128).numpy() for part in operands])
    else:
        wide = np.stack([part.to(torch.float64).numpy() for part in operands])
    epsilon = 2 * size * torch.finfo(dtype).eps
    if cell.op == "sum":
        return wide.sum(axis=0), epsilon * np.abs(wide).sum(axis=0)
    if cell.op == "prod":
        product = wide.prod(axis=0)
        return product, 4 * epsilon * np.abs(product) + torch.finfo(dtype).tiny
    return (wide.min if cell.op == "min" else wide.max)(axis=0), None


_right: set[tuple[Cell, str]] = set()


def within_rounding(cell: Cell, size: int, bits: str, found: torch.Tensor) -> bool:
    """Return whether `found` is NumPy's result; the same bits are compared only once."""
    if (cell, bits) in _right:
        return True
    wanted, error = numpys(cell, size)
    values = found.double().numpy() if found.dtype == torch.bfloat16 else found.numpy()
    right = bool((np.abs(values - wanted) <= error).all()) if error is not None else np.array_equal(values, wanted)
    if right:
        _right.add((cell, bits))
    return right


# --- in the test ---


def torchs_digests(size: int, store: Path, cells: Sequence[Cell]) -> dict[Cell, str]:
    everybody = run(torchs, size, size, str(store), cells, timeout_s=600)
    assert all(one == everybody[0] for one in everybody), "gloo gives different bits on different ranks"
    return everybody[0]


def our_digests(
    hosts: Sequence[str], exact: Sequence[Cell], fast: Sequence[Cell], strategies: Sequence[str] = STRATEGIES
) -> dict[tuple[str, str, Cell], str]:
    """Return the digests of rank 0 after checking that all ranks, and NumPy, agree."""
    with gang(ours, [(spec, strategies, exact, fast) for spec in specs(hosts)]) as started:
        everybody: list[tuple[dict[Any, str], list[str]]] = started.results(1200)
    digests = everybody[0][0]
    differ = [
        f"{key} on rank {rank}" for rank, (one, _) in enumerate(everybody) for key in one if one[key] != digests[key]
    ]
    assert not differ, f"other bits than on rank 0: {differ}"
    assert not everybody[0][1], everybody[0][1]
    return digests


def differences(digests: dict[tuple[str, str, Cell], str], oracle: dict[Cell, str]) -> Iterator[str]:
    for (order, strategy, cell), one in digests.items():
        if order == "ddp" and cell in oracle and one != oracle[cell]:
            yield f"{strategy} {cell}: {one}, but gloo gives {oracle[cell]}"


def left_to_right(cell: Cell, size: int) -> str:
    total = operand(cell, 0)
    for rank in range(1, size):
        total += operand(cell, rank)
    return digest(total)


def check_against_torch(
    size: int,
    store: Path,
    exact: Sequence[Cell],
    fast: Sequence[Cell],
    hosts: str,
    strategies: Sequence[str] = STRATEGIES,
) -> None:
    oracle = torchs_digests(size, store, [cell for cell in exact if cell.dtype in GLOO])
    digests = our_digests(addresses(hosts), exact, fast, strategies)
    assert list(differences(digests, oracle)) == []
    if size > 2:
        blind = [str(cell) for cell in telling(exact) if left_to_right(cell, size) == oracle[cell]]
        assert blind == [], "a plain sum has gloo's bits too, so this would prove nothing"


def telling(cells: Sequence[Cell]) -> list[Cell]:
    """Return for each floating type the shortest tensor whose bits depend on the order of summation."""
    sums = [c for c in cells if c.op == "sum" and c.size > 1000 and c.dtype in GLOO]
    floats = {c.dtype for c in sums if dtype_of(c.dtype).is_floating_point}
    return [min((c for c in sums if c.dtype == dtype), key=lambda c: c.size) for dtype in floats]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8] if FULL else [2, 3, 8])
def test_every_strategy_has_the_bits_of_torchs_all_reduce(size: int, tmp_path: Path) -> None:
    fast = [Cell("float32", 1), Cell("float32", 70_001 if size > 4 else MIB + 1)]
    check_against_torch(size, tmp_path / "store", FLOAT32 if size == 3 else FEW, fast, HOSTS[size])


def test_two_workers_of_one_host_have_the_bits_of_torchs_all_reduce(tmp_path: Path) -> None:
    check_against_torch(2, tmp_path / "store", FLOAT32, FLOAT32[:4], "AA")


def test_a_single_worker_keeps_its_tensors() -> None:
    digests = our_digests(["127.0.0.1"], FLOAT32, FLOAT32)
    assert {cell: one for (_, _, cell), one in digests.items()} == {cell: digest(operand(cell, 0)) for cell in FLOAT32}


def test_every_type_and_operation_of_three_workers(tmp_path: Path) -> None:
    cells = [Cell(dtype, size) for dtype in OURS for size in (0, 1, 300_007)]
    cells += [Cell(dtype, 10_007, op) for dtype in OURS for op in ("prod", "min", "max") if defined(dtype, op)]
    # How elements are added does not depend on who sends them to whom, which float32 has shown for all strategies.
    strategies = STRATEGIES if FULL else ("CLIQUE", "RING", "BINARY_TREE_STAR")
    check_against_torch(3, tmp_path / "store", cells, cells[::3], HOSTS[3], strategies)


def defined(dtype: str, op: str) -> bool:
    return op in ("sum", "prod") or not dtype.startswith("complex")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("dtype", OURS)
def test_the_whole_matrix(dtype: str, tmp_path: Path) -> None:
    sums = [Cell(dtype, length) for length in SIZES]
    others = [Cell(dtype, length, op) for length in (1, MIB + 1) for op in ("prod", "min", "max") if defined(dtype, op)]
    for size, hosts in HOSTS.items():
        if dtype in GLOO and size > 1:
            check_against_torch(size, tmp_path / f"store{size}", sums + others, sums, hosts)
        else:
            our_digests(addresses(hosts), sums + others, sums)
