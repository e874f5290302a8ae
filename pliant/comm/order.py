"""The exact order of summation, which gives every topology the bits of torch's all_reduce on gloo.

gloo cuts a tensor into N chunks and passes each round a ring. It computes the sum of chunk c as
x_c + (... (x_{c-3} + (x_{c-2} + x_{c-1}))), indices modulo N, rounded at each hop. Addition of floats is not
associative, so a rank may form a partial sum on the way only if it is the beginning of that chain; it must forward all
other operands un-summed. This module says where the chunks lie and what may be folded where. It is pure: it knows
neither tensors nor sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pliant.comm.topology import Topology

GLOO_SEGMENT_BYTES = 1 << 20

Term = tuple[int, ...]
"""The replicas whose values were folded into one operand, in the order of folding."""


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


# --- folds ---


@dataclass(frozen=True, slots=True)
class Fold:
    """How one rank treats its operands on the way up.

    Operands are numbered: the rank's own come first, then those of each child in the order of ranks.
    """

    operands: tuple[Term, ...]
    """The replicas in each operand."""
    folded: tuple[int, ...]
    """The operands that are folded from left to right into one (acc = b + acc): none, or at least two."""
    passed_on: tuple[int, ...]
    """The operands that are forwarded as they are, after the folded one."""

    @property
    def result(self) -> tuple[Term, ...]:
        """The operands that this rank hands to its parent."""
        merged = tuple(replica for index in self.folded for replica in self.operands[index])
        return ((merged,) if merged else ()) + tuple(self.operands[index] for index in self.passed_on)


@lru_cache(maxsize=4096)
def exact_fold(topology: Topology, blocks: tuple[Term, ...], raw: frozenset[int], rank: int, chunk: int) -> Fold:
    """Return what `rank` may fold if the sum must have gloo's order; `blocks[r]` lists the replicas of rank r.

    The ranks in `raw` fold nothing, because their parents read their memory in place.
    """
    order = chain(chunk, sum(map(len, blocks)))
    operands = _operands(topology, blocks, rank, lambda child: exact_fold(topology, blocks, raw, child, chunk))
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
    return Fold(operands, tuple(folded), tuple(i for i in range(len(operands)) if i not in folded))


@lru_cache(maxsize=4096)
def carrying_fold(topology: Topology, blocks: tuple[Term, ...], rank: int) -> Fold:
    """Return a fold that forwards everything, for slices that span several chunks with different orders."""
    operands = _operands(topology, blocks, rank, lambda child: carrying_fold(topology, blocks, child))
    return Fold(operands, (), tuple(range(len(operands))))


@lru_cache(maxsize=4096)
def fast_fold(topology: Topology, blocks: tuple[Term, ...], raw: frozenset[int], rank: int) -> Fold:
    """Return a fold of everything: own replicas first, then the children by rank. The order depends on the topology."""
    operands = _operands(topology, blocks, rank, lambda child: fast_fold(topology, blocks, raw, child))
    everything = tuple(range(len(operands)))
    return Fold(operands, (), everything) if rank in raw or len(operands) == 1 else Fold(operands, everything, ())


def _operands(
    topology: Topology, blocks: tuple[Term, ...], rank: int, fold_of: Callable[[int], Fold]
) -> tuple[Term, ...]:
    own: list[Term] = [(replica,) for replica in blocks[rank]]
    for child in topology.children(rank):
        own.extend(fold_of(child).result)
    return tuple(own)


def fold_order(operands: Sequence[Term], chunk: int, num_replicas: int) -> tuple[int, ...]:
    """Return the indices of single-replica operands in the order of the chunk's chain."""
    where = {term[0]: index for index, term in enumerate(operands)}
    return tuple(where[replica] for replica in chain(chunk, num_replicas))
