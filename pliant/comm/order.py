"""Orders of summation: how the values of N replicas are added, which decides the bits of a sum.

`ddp` gives every topology the bits of torch's all_reduce on gloo. gloo cuts a tensor into N chunks and passes each round
a ring. It computes the sum of chunk c as x_c + (... (x_{c-3} + (x_{c-2} + x_{c-1}))), indices modulo N, rounded at each
hop. Addition of floats is not associative, so a rank may form a partial sum on the way only if it is the beginning of
that chain; it must forward all other operands un-summed.

`tree` adds along a balanced binary tree over the replicas, the same for every element: a node is left + right. Whoever
holds both children of a node may add them, so a rank that hosts a block of replicas has few operands, usually one.

`fast` adds in the order of the topology.

This module says where the chunks lie and what may be added where. It is pure: it knows neither tensors nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pliant.comm.topology import Topology

Order = Literal["ddp", "tree", "fast"]
ORDERS: tuple[Order, ...] = ("ddp", "tree", "fast")
EXACT_ORDERS: tuple[Order, ...] = ("ddp", "tree")
"""The orders in which the bits of a sum do not depend on who adds: those that a job can have."""

GLOO_SEGMENT_BYTES = 1 << 20

Term = tuple[int, ...]
"""The replicas whose values were added into one operand, in the order of addition."""
Terms = tuple[Term, ...]
Expression = int | tuple["Expression", ...]
"""The number of an operand, or (a, b, c, ...) for acc = a; acc = b + acc; acc = c + acc; ..."""


def even_partition(num_elements: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` ranges that cover all elements; the first ones are longer by one if it does not divide."""
    size, longer = divmod(num_elements, parts)
    ranges, begin = [], 0
    for part in range(parts):
        end = begin + size + (part < longer)
        ranges.append((begin, end))
        begin = end
    return ranges


# --- chunks ---


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def chunk_length(num_elements: int, item_bytes: int, num_replicas: int) -> int:
    """Return the length in elements of the chunks into which gloo's ring cuts a tensor; the last may be shorter.

    gloo's segments only pipeline the ring, but the borders of chunks fall on borders of segments, so the rounding of
    segments matters.
    """
    total = num_elements * item_bytes
    largest = item_bytes * max(1, GLOO_SEGMENT_BYTES // item_bytes)
    segments = _ceil(max(_ceil(total, largest), 2 * num_replicas), num_replicas) * num_replicas
    elements = _ceil(_ceil(total, segments), item_bytes)
    return max(1, segments // num_replicas * elements)


def chain(chunk: int, num_replicas: int) -> Term:
    """Return the order in which the replicas' values of chunk c are folded: first replica c-1, last replica c."""
    return tuple((chunk - k) % num_replicas for k in range(1, num_replicas + 1))


def chunks_between(begin: int, end: int, length: int) -> list[tuple[int, int, int]]:
    """Split a range of elements at the borders of chunks; return the pieces as (begin, end, chunk)."""
    pieces = []
    while begin < end:
        chunk = begin // length
        border = min(end, (chunk + 1) * length)
        pieces.append((begin, border, chunk))
        begin = border
    return pieces


# --- the tree ---


def tree_split(count: int) -> int:
    """Return the size of the left subtree of a tree over `count` replicas: the largest power of two below it."""
    return 1 << (count - 1).bit_length() - 1


def subtrees(begin: int, end: int, num_replicas: int) -> list[range]:
    """Return the largest subtrees of the tree over all replicas that lie within the block [begin, end), in order."""
    found: list[range] = []

    def visit(low: int, high: int) -> None:
        if begin <= low and high <= end:
            found.append(range(low, high))
        elif low < end and begin < high:
            middle = low + tree_split(high - low)
            visit(low, middle)
            visit(middle, high)

    visit(0, num_replicas)
    return found


def operands_of_ranks(parts: Sequence[int], order: str) -> tuple[Terms, ...]:
    """Return the operands of each rank if rank r hosts `parts[r]` replicas: in the tree the largest subtrees of its block,
    else its replicas one by one."""
    return _operands_of_ranks(tuple(parts), order == "tree")


@lru_cache(maxsize=256)
def _operands_of_ranks(parts: tuple[int, ...], as_subtrees: bool) -> tuple[Terms, ...]:
    found: list[Terms] = []
    begin, count = 0, sum(parts)
    for hosted in parts:
        block = range(begin, begin + hosted)
        terms = subtrees(block.start, block.stop, count) if as_subtrees else [range(each, each + 1) for each in block]
        found.append(tuple(map(tuple, terms)))
        begin += hosted
    return tuple(found)


# --- folds ---


@dataclass(frozen=True, slots=True)
class Fold:
    """How one rank treats its operands on the way up.

    Operands are numbered: the rank's own come first, then those of each child in the order of ranks.
    """

    operands: Terms
    """The replicas in each operand."""
    sums: tuple[Expression, ...]
    """The sums that this rank forms, each of at least two operands."""
    passed_on: tuple[int, ...]
    """The operands that are forwarded as they are, after the sums."""

    @property
    def result(self) -> Terms:
        """The operands that this rank hands to its parent."""
        added = tuple(self._replicas(each) for each in self.sums)
        return added + tuple(self.operands[index] for index in self.passed_on)

    def _replicas(self, expression: Expression) -> Term:
        if isinstance(expression, int):
            return self.operands[expression]
        return tuple(replica for part in expression for replica in self._replicas(part))


@lru_cache(maxsize=4096)
def ddp_fold(topology: Topology, own: tuple[Terms, ...], raw: frozenset[int], rank: int, chunk: int) -> Fold:
    """Return what `rank` may add if the sum must have gloo's order; `own[r]` lists the replicas of rank r.

    The ranks in `raw` add nothing, because their parents read their memory in place.
    """
    order = chain(chunk, sum(map(len, own)))
    operands = _operands(topology, own, rank, lambda child: ddp_fold(topology, own, raw, child, chunk))
    where = {term[0]: index for index, term in enumerate(operands)}
    folded: list[int] = []
    done = 0
    # The beginning of the chain may be a partial sum; what follows must be available one by one.
    while rank not in raw and done < len(order) and order[done] in where:
        index = where[order[done]]
        if operands[index] != order[done : done + len(operands[index])]:
            break
        folded.append(index)
        done += len(operands[index])
    if len(folded) < 2:
        folded = []
    passed_on = tuple(index for index in range(len(operands)) if index not in folded)
    return Fold(operands, (tuple(folded),) if folded else (), passed_on)


@lru_cache(maxsize=4096)
def carrying_fold(topology: Topology, own: tuple[Terms, ...], rank: int) -> Fold:
    """Return a fold that forwards everything, for slices that span several chunks with different orders."""
    operands = _operands(topology, own, rank, lambda child: carrying_fold(topology, own, child))
    return Fold(operands, (), tuple(range(len(operands))))


@lru_cache(maxsize=4096)
def tree_fold(topology: Topology, own: tuple[Terms, ...], rank: int) -> Fold:
    """Return a fold that forms every node of the tree whose operands `rank` holds, and forwards the rest.

    A leaf of the topology forms none: of two siblings in its block it would have had the sum in the first place. So its
    parent may read its memory in place.
    """
    operands = _operands(topology, own, rank, lambda child: tree_fold(topology, own, child))
    where = {(min(term), max(term) + 1): index for index, term in enumerate(operands)}
    sums: list[Expression] = []
    passed_on: list[int] = []

    def visit(begin: int, end: int) -> Expression | None:
        """Return the sum of a node, if it can be formed; else note what can be formed below it."""
        if (begin, end) in where:
            return where[begin, end]
        if end - begin == 1:
            return None
        middle = begin + tree_split(end - begin)
        left, right = visit(begin, middle), visit(middle, end)
        if left is not None and right is not None:
            return (right, left)
        for found in (left, right):
            if isinstance(found, int):
                passed_on.append(found)
            elif found is not None:
                sums.append(found)
        return None

    whole = visit(0, sum(len(term) for terms in own for term in terms))
    if whole is not None:
        return Fold(operands, (), (whole,)) if isinstance(whole, int) else Fold(operands, (whole,), ())
    return Fold(operands, tuple(sums), tuple(sorted(passed_on)))


@lru_cache(maxsize=4096)
def fast_fold(topology: Topology, own: tuple[Terms, ...], raw: frozenset[int], rank: int) -> Fold:
    """Return a fold of everything: own replicas first, then the children by rank. The order depends on the topology."""
    operands = _operands(topology, own, rank, lambda child: fast_fold(topology, own, raw, child))
    everything = tuple(range(len(operands)))
    return Fold(operands, (), everything) if rank in raw or len(operands) == 1 else Fold(operands, (everything,), ())


def _operands(topology: Topology, own: tuple[Terms, ...], rank: int, fold_of: Callable[[int], Fold]) -> Terms:
    found = list(own[rank])
    for child in topology.children(rank):
        found.extend(fold_of(child).result)
    return tuple(found)


def fold_order(operands: Sequence[Term], chunk: int, num_replicas: int) -> tuple[int, ...]:
    """Return the indices of single-replica operands in the order of the chunk's chain."""
    where = {term[0]: index for index, term in enumerate(operands)}
    return tuple(where[replica] for replica in chain(chunk, num_replicas))
