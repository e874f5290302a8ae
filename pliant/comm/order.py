"""The exact summation order: what meets in which order, so that every topology has the bits of torch's all_reduce on gloo.

gloo cuts a tensor into N chunks and passes each round a ring; the sum of chunk c is taken as
x_c + (... (x_{c-3} + (x_{c-2} + x_{c-1}))), indices modulo N, rounded at each hop. Addition of
floats is not associative, so a partial sum may be formed on the way only if it is the beginning
of that chain; all other operands must travel un-summed. This module says where the chunks lie
and what may be folded where. It knows neither tensors nor sockets.
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
"""The replicas whose values are folded into one operand, in the order in which they were folded."""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def chunk_length(num_elements: int, item_bytes: int, num_replicas: int) -> int:
    """How many elements the chunks have into which gloo's ring cuts a tensor (the last ones may be shorter).

    The segments only pipeline the ring; but chunk borders fall on segment borders, so their rounding matters.
    """
    total = num_elements * item_bytes
    largest = item_bytes * max(1, GLOO_SEGMENT_BYTES // item_bytes)
    segments = _ceil(max(_ceil(total, largest), 2 * num_replicas), num_replicas) * num_replicas
    elements = _ceil(_ceil(total, segments), item_bytes)
    return max(1, segments // num_replicas * elements)


def chain(chunk: int, num_replicas: int) -> Term:
    """The order in which the replicas' values of this chunk are folded: first c-1, last c."""
    return tuple((chunk - k) % num_replicas for k in range(1, num_replicas + 1))


def chunks_between(begin: int, end: int, length: int) -> list[tuple[int, int, int]]:
    """The pieces (begin, end, chunk) of a range of elements, split at the borders of chunks."""
    pieces = []
    while begin < end:
        chunk = begin // length
        border = min(end, (chunk + 1) * length)
        pieces.append((begin, border, chunk))
        begin = border
    return pieces


@dataclass(frozen=True, slots=True)
class Fold:
    """What one rank does with its operands on the way up.

    Operands are numbered: this rank's own first, then those of each child in the order of ranks.
    """

    operands: tuple[Term, ...]
    """What each operand consists of."""
    folded: tuple[int, ...]
    """Folded from left to right into one (acc = b + acc); empty, or two and more."""
    passed_on: tuple[int, ...]
    """Forwarded as they are, behind the folded one."""

    @property
    def result(self) -> tuple[Term, ...]:
        """What this rank hands on."""
        merged = tuple(replica for index in self.folded for replica in self.operands[index])
        return ((merged,) if merged else ()) + tuple(self.operands[index] for index in self.passed_on)


@lru_cache(maxsize=4096)
def exact_fold(topology: Topology, blocks: tuple[Term, ...], raw: frozenset[int], rank: int, chunk: int) -> Fold:
    """What `rank` may fold when the sum must be gloo's; `blocks[r]` lists the replicas that rank r hosts.

    The ranks in `raw` fold nothing: their fathers read their memory in place.
    """
    order = chain(chunk, sum(map(len, blocks)))
    operands = _operands(topology, blocks, rank, lambda child: exact_fold(topology, blocks, raw, child, chunk))
    where = {term[0]: index for index, term in enumerate(operands)}
    folded: list[int] = []
    done = 0
    # The chain's beginning may sit in a partial sum; what follows must be at hand one by one.
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
    """Nothing is folded on the way: for slices that span several chunks, whose orders differ."""
    operands = _operands(topology, blocks, rank, lambda child: carrying_fold(topology, blocks, child))
    return Fold(operands, (), tuple(range(len(operands))))


@lru_cache(maxsize=4096)
def fast_fold(topology: Topology, blocks: tuple[Term, ...], raw: frozenset[int], rank: int) -> Fold:
    """Fold all there is: own replicas first, then the children by rank. Fixed, but the topology's own order."""
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
    """For single-replica operands: their indices in the order of the chunk's chain."""
    where = {term[0]: index for index, term in enumerate(operands)}
    return tuple(where[replica] for replica in chain(chunk, num_replicas))


def even_partition(num_elements: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges that cover all elements; the first ones are longer by one where it does not divide."""
    size, longer = divmod(num_elements, parts)
    ranges, begin = [], 0
    for part in range(parts):
        end = begin + size + (part < longer)
        ranges.append((begin, end))
        begin = end
    return ranges
