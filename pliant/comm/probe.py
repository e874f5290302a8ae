"""Measurements of the network between the workers: round-trip times, and the bandwidth of every link.

The bandwidth is measured in a tournament in which every two hosts exchange some bytes. In each round every host sends
to one other and receives from one other, so no link is measured while its ends are busy with another. All ranks call
`measure` at the same point of their program, and all get the same rates. A rate is taken from the times at which
pieces arrive. On a busy machine, where processes have to wait for their turn, it is taken from the sender's kernel:
how much was acknowledged in the time in which bytes were on their way.
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
from pliant.comm.topology import host_leaders
from pliant.errors import CollectiveTimeout, ConfigError

if TYPE_CHECKING:
    from pliant.comm.engine import Engine
    from pliant.comm.handle import Handle

RateMatrix = tuple[tuple[float, ...], ...]
"""Bytes per second from rank i to rank j; 0 on the diagonal."""

SAME_HOST_RATE = 1e10
"""Rate between workers of one host, through its memory: higher than any link, so not worth measuring."""
PIECES = 16
"""A payload is requested in this many pieces; the time between their arrivals is what is measured."""
MAX_AT_ONCE = 8
"""Pieces that are on their way at once."""
ROUND_S = 0.025
"""No further piece is requested after this long: a slow link is known to be slow by then."""
MAX_ROUNDS = 32
"""With many hosts only this many rounds are played; the other links are estimated from those measured."""
LEAST_S = 1e-6
CREDIT = 2.0
"""The kernel counts its time in ticks of some milliseconds, and counts what passes a shaper on credit: its rate may be
twice too high."""

Pair = tuple[int, int]


# --- latency ---


def latencies(engine: Engine, timeout_s: float = 10.0) -> list[float]:
    """Return the round-trip seconds to every rank: 0 to itself, infinite to lost ranks. One rank may call this alone.

    Raises:
        CollectiveTimeout: a worker did not answer in time; says which.
    """
    found = [0.0] * engine.size
    done = threading.Semaphore(0)

    def on_pong(rank: int, seconds: float) -> None:
        found[rank] = seconds
        done.release()

    engine.ping(on_pong)
    deadline_s = time.monotonic() + timeout_s
    for _ in range(engine.size - 1):
        if not done.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise CollectiveTimeout("latencies", timeout_s, engine.unanswered_pings())
    return found


# --- bandwidth ---


def rounds(size: int, most: int = MAX_ROUNDS) -> list[list[Pair]]:
    """Return at most `most` rounds of a tournament of all against all; in each, everybody meets at most one other.

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


def rate_of(arrivals_s: Sequence[float], requested_s: float, piece_bytes: int) -> float:
    """Return bytes per second, from the times at which the pieces have arrived.

    It is the rate of the second half, because what comes first may have passed a shaper on credit; but not more than
    the rate of all pieces since the request, because pieces that arrived one after the other may be noticed together.
    """
    since = (len(arrivals_s) - 1) // 2
    late_s, all_s = arrivals_s[-1] - arrivals_s[since], arrivals_s[-1] - requested_s
    rate = len(arrivals_s) * piece_bytes / max(LEAST_S, all_s)
    if len(arrivals_s) > 2:
        rate = min(rate, (len(arrivals_s) - 1 - since) * piece_bytes / max(LEAST_S, late_s))
    return rate


def complete_rates(known: Sequence[Sequence[float]]) -> list[list[float]]:
    """Fill gaps of the matrix with estimates: the sender's best rate or the receiver's best rate, whichever is less."""
    size = len(known)
    sent = [max(row, default=0.0) for row in known]
    received = [max((known[i][j] for i in range(size)), default=0.0) for j in range(size)]
    return [[known[i][j] or (0.0 if i == j else min(sent[i], received[j])) for j in range(size)] for i in range(size)]


def measure(engine: Engine, num_bytes: int = 1 << 18, timeout_s: float = 3600.0) -> RateMatrix:
    """Measure the rates between all workers. Every rank must call this, and must not wait for other collectives.

    It sends at most `num_bytes` from each host to each other, and takes about 25 ms for each other host.

    Raises:
        CommError: a worker was lost, or did not answer in time.
    """
    if num_bytes < PIECES:
        raise ConfigError(f"probe of {num_bytes} bytes: use {PIECES} or more, such as 262144")
    hosts = engine.view.hosts
    leaders = host_leaders(hosts)
    place = {hosts[leader]: index for index, leader in enumerate(leaders)}
    row = torch.zeros(len(leaders), dtype=torch.float64)
    if engine.rank in leaders and len(leaders) > 1:
        for index, rate in _play(engine, leaders, num_bytes, time.monotonic() + timeout_s):
            row[index] = rate
    rows = engine.all_gather(f"{INTERNAL}probe:rates", row).wait(timeout_s)
    assert rows is not None, "an all_gather has a result on every rank"
    between = complete_rates([rows[leader].tolist() for leader in leaders])
    engine.throughput()  # reset it: what was carried here says nothing about training

    def rate_between(source: int, target: int) -> float:
        here, there = hosts[source], hosts[target]
        if source == target:
            return 0.0
        return SAME_HOST_RATE if here == there else between[place[here]][place[there]]

    return tuple(tuple(rate_between(i, j) for j in range(engine.size)) for i in range(engine.size))


def _play(engine: Engine, leaders: Sequence[int], num_bytes: int, deadline_s: float) -> Iterator[tuple[int, float]]:
    """Play this host's rounds; yield each other host with the rate at which this host sent to it."""
    name = f"{INTERNAL}probe"
    engine.save(name, torch.zeros(num_bytes // PIECES, dtype=torch.uint8))
    me = leaders.index(engine.rank)
    for pairs in rounds(len(leaders)):
        meeting = next((pair for pair in pairs if me in pair), None)
        if meeting is None:
            continue
        place = meeting[1] if meeting[0] == me else meeting[0]
        other = leaders[place]
        _exchange(engine, other, 0.0, deadline_s)
        before = engine.acknowledged(other)
        received = _receive(engine, other, name, num_bytes // PIECES, deadline_s)
        # Until the other host has all of its pieces, this host still sends. The other host sends us its rate now.
        as_received = _exchange(engine, other, received, deadline_s)
        after = engine.acknowledged(other)
        as_acknowledged = after.rate_since(before) if after is not None and before is not None else 0.0
        yield place, max(as_received, as_acknowledged / CREDIT)


def _exchange(engine: Engine, other: int, value: float, deadline_s: float) -> float:
    """Send `value` to `other` and return the value that it sent; a barrier of the two."""
    row = torch.tensor([value], dtype=torch.float64)
    left_s = max(0.001, deadline_s - time.monotonic())
    rows = engine.all_gather(f"{INTERNAL}probe:meet", row, ranks=(engine.rank, other)).wait(left_s)
    assert rows is not None, "an all_gather has a result on every rank"
    return float(rows[0 if other < engine.rank else 1][0])


def _receive(engine: Engine, other: int, name: str, piece_bytes: int, deadline_s: float) -> float:
    """Fetch pieces from `other`, more at once the faster they come; return the rate."""
    arrived = queue.SimpleQueue[float]()
    arrivals_s: list[float] = []
    pieces: list[Handle] = []
    at_once = 1
    began_s = time.monotonic()
    while True:
        while _wants_more(len(pieces), len(arrivals_s), at_once, time.monotonic() - began_s):
            piece = engine.request(other, name, torch.empty(piece_bytes, dtype=torch.uint8))
            # Timed on the engine's thread, when it has arrived, and not when this thread gets round to it.
            piece.add_done_callback(lambda: arrived.put(time.monotonic()))
            pieces.append(piece)
        if len(arrivals_s) == len(pieces):
            return rate_of(arrivals_s, began_s, piece_bytes)
        engine.wake()
        first = pieces[len(arrivals_s)]
        with contextlib.suppress(queue.Empty):
            arrivals_s.append(arrived.get(timeout=max(0.001, deadline_s - time.monotonic())))
        first.wait(0.0)  # raises if it has not come in time, or has failed
        if arrivals_s[-1] - began_s < ROUND_S / 4:
            at_once = min(MAX_AT_ONCE, at_once * 2)


def _wants_more(requested: int, arrived: int, at_once: int, elapsed_s: float) -> bool:
    """Return whether to request one more piece now; the first one in any case."""
    return requested == 0 or (requested < PIECES and requested - arrived < at_once and elapsed_s < ROUND_S)
