"""How long a word takes to each worker and back, and the tree that follows from it.

How fast the links between the workers are now: a small tournament in which every two hosts exchange some bytes.

In each round every host sends to one other and receives from one other, so no link is measured while its ends are busy
with another. Who meets whom follows from the ranks alone. All ranks call `measure` at the same point of their program,
and everybody ends with the same rates. They are taken from the times at which pieces arrive; on a busy machine, where
processes have to wait for their turn, from what the sender's kernel says: how much was acknowledged in the time that
something was on its way.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pliant.comm.plan import INTERNAL
from pliant.comm.topology import Forest, forest_of_edges, masters, minimum_spanning_tree
from pliant.errors import CollectiveTimeout, ConfigError

if TYPE_CHECKING:
    from pliant.comm.engine import Engine
    from pliant.comm.handle import Handle


def latencies(engine: Engine, timeout_s: float = 10.0) -> list[float]:
    """Round-trip seconds to every rank; 0 to itself, infinite to the lost. One rank may call this alone.

    Raises:
        CollectiveTimeout: somebody did not answer in time; says who.
    """
    found = [0.0] * engine.size
    done = threading.Semaphore(0)

    def answered(rank: int, seconds: float) -> None:
        found[rank] = seconds
        done.release()

    engine.ping(answered)
    deadline_s = time.monotonic() + timeout_s
    for _ in range(engine.size - 1):
        if not done.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise CollectiveTimeout("latencies", timeout_s, engine.unanswered())
    return found


def latency_tree(engine: Engine, timeout_s: float = 30.0) -> Forest:
    """The lightest tree over the measured latencies, as a forest array; the same on every rank, which all call."""
    row = torch.tensor(latencies(engine, timeout_s), dtype=torch.float64)
    rows = engine.all_gather(f"{INTERNAL}latencies", row).wait(timeout_s)
    assert rows is not None, "an all_gather has a result on every rank"
    return forest_of_edges(minimum_spanning_tree(rows.tolist()), engine.size)


Rates = tuple[tuple[float, ...], ...]
"""Bytes per second from rank i to rank j; 0 on the diagonal."""
SAME_HOST_RATE = 1e10
"""Between workers of one host, through its memory: more than any link, so not worth measuring."""
PIECES = 16
"""A payload is asked for in so many pieces: the time between their arrivals is what is measured."""
MOST_WAITING = 8
"""Pieces that are on their way at once."""
ROUND_S = 0.025
"""No further piece is asked for after this long: a slow link is known to be slow by then."""
MOST_ROUNDS = 32
"""With many hosts only so many of the rounds are played; the other links are estimated from those measured."""
LEAST_S = 1e-6
CREDIT = 2.0
"""The kernel counts its time in ticks of some milliseconds, and all that passes a shaper on credit: it may say twice too much."""
Pair = tuple[int, int]


def rounds(size: int, most: int = MOST_ROUNDS) -> list[list[Pair]]:
    """The rounds of a tournament of all against all, of which at most `most` are played; in each, everybody meets at most one.

    The circle method: the last one stays, the others move on by one place in each round.
    """
    even = size + size % 2
    played = []
    for turn in range(even - 1):
        seats = [(turn + place) % (even - 1) for place in range(even - 1)] + [even - 1]
        pairs = [(seats[place], seats[even - 1 - place]) for place in range(even // 2)]
        # Nobody has the seat beyond the last: whoever meets it has a break.
        played.append([(min(pair), max(pair)) for pair in pairs if max(pair) < size])
    every = max(1, -(-len(played) // most))
    return played[::every]


def rate_of(arrivals_s: Sequence[float], asked_s: float, piece_bytes: int) -> float:
    """Bytes per second, from the times at which the pieces have arrived.

    The second half alone, as what comes first may have passed a shaper on credit; but not more than all of them since the
    request, as pieces that have arrived one after the other may be noticed together.
    """
    since = (len(arrivals_s) - 1) // 2
    late_s, all_s = arrivals_s[-1] - arrivals_s[since], arrivals_s[-1] - asked_s
    rate = len(arrivals_s) * piece_bytes / max(LEAST_S, all_s)
    if len(arrivals_s) > 2:
        rate = min(rate, (len(arrivals_s) - 1 - since) * piece_bytes / max(LEAST_S, late_s))
    return rate


def completed(known: Sequence[Sequence[float]]) -> list[list[float]]:
    """The matrix with estimates where it has no rate: what the sender has sent to others, and the receiver received."""
    size = len(known)
    sent = [max(row, default=0.0) for row in known]
    received = [max((known[i][j] for i in range(size)), default=0.0) for j in range(size)]
    return [[known[i][j] or (0.0 if i == j else min(sent[i], received[j])) for j in range(size)] for i in range(size)]


def measure(engine: Engine, num_bytes: int = 1 << 18, timeout_s: float = 3600.0) -> Rates:
    """The rates between all workers; every rank calls this, none has other collectives to wait for meanwhile.

    It sends at most `num_bytes` from each host to each other, and takes some 25 ms for each other host.

    Raises:
        CommError: a worker was lost, or did not answer in time.
    """
    if num_bytes < PIECES:
        raise ConfigError(f"probe of {num_bytes} bytes: use {PIECES} or more, such as 262144")
    hosts = engine.view.hosts
    heads = masters(hosts)
    place = {hosts[head]: index for index, head in enumerate(heads)}
    row = torch.zeros(len(heads), dtype=torch.float64)
    if engine.rank in heads and len(heads) > 1:
        for index, rate in _play(engine, heads, num_bytes, time.monotonic() + timeout_s):
            row[index] = rate
    rows = engine.all_gather(f"{INTERNAL}probe:rates", row).wait(timeout_s)
    assert rows is not None, "an all_gather has a result on every rank"
    between = completed([rows[head].tolist() for head in heads])
    engine.throughput()  # what was carried here says nothing about training
    return tuple(
        tuple(_rate(i, j, hosts, between[place[hosts[i]]][place[hosts[j]]]) for j in range(engine.size))
        for i in range(engine.size)
    )


def _rate(source: int, target: int, hosts: Sequence[str], between: float) -> float:
    if source == target:
        return 0.0
    return SAME_HOST_RATE if hosts[source] == hosts[target] else between


def _play(engine: Engine, heads: Sequence[int], num_bytes: int, deadline_s: float) -> Iterator[tuple[int, float]]:
    """How fast this rank's host sent to each host that it has met."""
    name = f"{INTERNAL}probe"
    engine.save(name, torch.zeros(num_bytes // PIECES, dtype=torch.uint8))
    me = heads.index(engine.rank)
    for pairs in rounds(len(heads)):
        meeting = next((pair for pair in pairs if me in pair), None)
        if meeting is None:
            continue
        place = meeting[1] if meeting[0] == me else meeting[0]
        other = heads[place]
        _meet(engine, other, 0.0, deadline_s)
        before = engine.delivered(other)
        received = _receive(engine, other, name, num_bytes // PIECES, deadline_s)
        # Until the other has all of its pieces, this host still sends. How fast they came it tells us now.
        as_received = _meet(engine, other, received, deadline_s)
        after = engine.delivered(other)
        as_delivered = after.rate_since(before) if after is not None and before is not None else 0.0
        yield place, max(as_received, as_delivered / CREDIT)


def _meet(engine: Engine, other: int, told: float, deadline_s: float) -> float:
    """Return when `other` is here, too; with what it tells."""
    row = torch.tensor([told], dtype=torch.float64)
    left_s = max(0.001, deadline_s - time.monotonic())
    rows = engine.all_gather(f"{INTERNAL}probe:meet", row, ranks=(engine.rank, other)).wait(left_s)
    assert rows is not None, "an all_gather has a result on every rank"
    return float(rows[0 if other < engine.rank else 1][0])


def _receive(engine: Engine, other: int, name: str, piece_bytes: int, deadline_s: float) -> float:
    """Fetch pieces from `other`: more at once the faster they come, none beyond the time of a round."""
    arrived = queue.SimpleQueue[float]()
    arrivals_s: list[float] = []
    pieces: list[Handle] = []
    at_once = 1
    began_s = time.monotonic()
    while True:
        while _wanted(len(pieces), len(arrivals_s), at_once, time.monotonic() - began_s):
            piece = engine.request(other, name, torch.empty(piece_bytes, dtype=torch.uint8))
            # On the engine's thread, when it has arrived, and not when this thread gets round to it.
            piece.then(lambda: arrived.put(time.monotonic()))
            pieces.append(piece)
        if len(arrivals_s) == len(pieces):
            return rate_of(arrivals_s, began_s, piece_bytes)
        engine.hurry()
        first = pieces[len(arrivals_s)]
        with contextlib.suppress(queue.Empty):
            arrivals_s.append(arrived.get(timeout=max(0.001, deadline_s - time.monotonic())))
        first.wait(0.0)  # raises that it has not come in time, or what else has gone wrong
        if arrivals_s[-1] - began_s < ROUND_S / 4:
            at_once = min(MOST_WAITING, at_once * 2)


def _wanted(asked: int, arrived: int, at_once: int, elapsed_s: float) -> bool:
    """Whether to ask for one more piece now: for the first one in any case."""
    return asked == 0 or (asked < PIECES and asked - arrived < at_once and elapsed_s < ROUND_S)
