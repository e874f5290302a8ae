"""Which view is wanted: requests in, the next state or a refusal out.

Pure values and functions: no I/O, no clock. `Wanted` is what the config server keeps and
`Wanted.after` is its only rule; `elastic.server` stores the result and answers. At the end,
what a runner needs to follow a view: whom to start, whom to stop, and how to say so.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass

from pliant.cluster import DEFAULT_RUNNER_PORT, Host, PortRange, View, Worker
from pliant.errors import CapacityError, ClusterCleared, ConfigError, NoView, StaleView

_ALL_PORTS = PortRange(10000, 65535)
PORT_STRIDE = 16
MAX_WORKERS = 10_000
"""More workers than this are a slip of the keyboard, and would cost the server its memory."""


@dataclass(frozen=True, slots=True)
class Put:
    """Want the workers and runners of `view`, in its order.

    `view.number` is the version that it was made from, 0 where that is not known: an older
    one than the server's is stale, unless `expected` says what to compare instead.
    """

    view: View
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """Want nothing in particular: running workers keep the view they have."""

    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    """Want no workers: all must stop, and nothing but a reset is accepted afterwards."""

    expected: int | None = None


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Want one worker more, as the last rank; its host gets a runner if it has none."""

    worker: Worker
    expected: int | None = None
    runner_port: int = DEFAULT_RUNNER_PORT


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Want this worker gone, and its host's runner too if it was the last one there."""

    worker: Worker
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Resize:
    """Want `size` workers on the hosts there are."""

    size: int
    expected: int | None = None


Request = Put | Reset | Clear | AddWorker | RemoveWorker | Resize


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a resize may use when it adds workers."""

    hosts: tuple[Host, ...] = ()
    """Hosts whose slots are known; any other host takes as many workers as it has ports."""
    ports: PortRange = _ALL_PORTS
    """Where new workers may listen."""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted view and its version, which counts accepted changes and never goes back.

    `view` None means unset: nobody has said yet, or somebody has reset it.
    """

    version: int = 0
    view: View | None = None

    @property
    def cleared(self) -> bool:
        """Whether all workers must stop."""
        return self.view is not None and not self.view.workers

    def after(self, request: Request, limits: Limits = NO_LIMITS) -> Wanted:
        """The state that `request` leads to: this one if all is as asked already, else version + 1.

        Raises (and nothing has changed):
            StaleView: another version was expected.
            ClusterCleared: the workers were told to stop.
            NoView: there is no view to remove from, or to resize.
            InvalidView, CapacityError, ConfigError: with the reason.
        """
        if request.expected is not None and request.expected != self.version:
            raise StaleView(request.expected, self.version)
        match request:
            case Reset():
                return self if self.view is None else Wanted(self.version + 1, None)
            case Clear():
                return self if self.cleared else self._next((), ())
            case Put(view, expected):
                self._refuse_if_cleared()
                if expected is None and 0 < view.number < self.version:
                    raise StaleView(view.number, self.version)
                return self._next(view.workers, view.runners)
            case AddWorker(worker, _, runner_port):
                self._refuse_if_cleared()
                return self._with(worker, runner_port)
            case RemoveWorker(worker):
                return self._without(worker)
            case Resize(size):
                view = self._open_view()
                return self if size == view.size else self._next(resized(view, size, limits), view.runners)

    def _next(self, workers: tuple[Worker, ...], runners: tuple[Worker, ...]) -> Wanted:
        _check_size(len(workers))
        return Wanted(self.version + 1, View(self.version + 1, workers, runners))

    def _with(self, worker: Worker, runner_port: int) -> Wanted:
        workers, runners = (self.view.workers, self.view.runners) if self.view else ((), ())
        if all(runner.host != worker.host for runner in runners):
            runners = (*runners, Worker(worker.host, runner_port))
        return self._next((*workers, worker), runners)

    def _without(self, worker: Worker) -> Wanted:
        view = self._open_view()
        rank = view.rank_of(worker)
        workers = view.workers[:rank] + view.workers[rank + 1 :]
        if all(other.host != worker.host for other in workers):
            return self._next(workers, tuple(runner for runner in view.runners if runner.host != worker.host))
        return self._next(workers, view.runners)

    def _open_view(self) -> View:
        """The view, where there is one that may still change."""
        self._refuse_if_cleared()
        if self.view is None:
            raise NoView("no view is set, so there is nothing to change: PUT one first")
        return self.view

    def _refuse_if_cleared(self) -> None:
        if self.cleared:
            raise ClusterCleared(
                f"the cluster was cleared in version {self.version}, its workers must stop: reset it before the next job"
            )


def _check_size(size: int) -> None:
    if size < 0:
        raise ConfigError(f"size {size} is negative: use 0 (stop all workers) or more")
    if size > MAX_WORKERS:
        raise CapacityError(f"{size} workers are more than a view holds: use {MAX_WORKERS} or fewer")


def resized(view: View, size: int, limits: Limits = NO_LIMITS) -> tuple[Worker, ...]:
    """The workers of `view`, cut at the tail or grown to `size`.

    Rank 0 therefore survives every shrink to 1 or more. Each newcomer goes to the host with the
    fewest workers (the first of equals), at a port that was not used lately: a worker that has just left may still
    hold its own, and late words about it must not be taken for words about the newcomer.

    Raises:
        CapacityError: the hosts of the view do not hold `size` workers.
    """
    _check_size(size)
    workers = list(view.workers[:size])
    workers.extend(_newcomers(view, size - len(workers), limits))
    return tuple(workers)


def _newcomers(view: View, num_new: int, limits: Limits) -> Iterator[Worker]:
    slots = {host.address: host.slots for host in limits.hosts}
    taken = {(member.host, member.port) for member in (*view.workers, *view.runners)}
    free = {runner.host: _free_places(runner.host, limits.ports, taken, view.number) for runner in view.runners}
    crowd = Counter(view.hosts)
    queue = [(crowd[host], order, host) for order, host in enumerate(free)]
    heapq.heapify(queue)
    for missing in range(num_new, 0, -1):
        while queue:
            num_here, order, host = heapq.heappop(queue)
            place = next(free[host], None) if num_here < slots.get(host, MAX_WORKERS) else None
            if place is not None:
                heapq.heappush(queue, (num_here + 1, order, host))
                yield place
                break
        else:
            raise CapacityError(_no_room(view, num_new, missing, limits))


def _free_places(host: str, ports: PortRange, taken: Set[tuple[str, int]], version: int) -> Iterator[Worker]:
    """The free ports of a host, beginning further on with every version."""
    begin = version * PORT_STRIDE
    rotated = (ports.begin + (begin + step) % len(ports) for step in range(len(ports)))
    return (Worker(host, port) for port in rotated if (host, port) not in taken)


def _no_room(view: View, num_new: int, missing: int, limits: Limits) -> str:
    wanted, most = view.size + num_new, view.size + num_new - missing
    return (
        f"size {wanted}: the {len(view.runners)} hosts of the view hold {most} workers (ports {limits.ports}); "
        "ask for fewer, add a runner, or raise the slots or the port range"
    )


@dataclass(frozen=True, slots=True)
class Delta:
    """Who comes and who goes between two views."""

    started: tuple[Worker, ...]
    stopped: tuple[Worker, ...]

    def __str__(self) -> str:
        return f"+{len(self.started)}/-{len(self.stopped)}"

    def on(self, host: str) -> Delta:
        """The part that the runner of `host` has to do."""
        return Delta(
            tuple(worker for worker in self.started if worker.host == host),
            tuple(worker for worker in self.stopped if worker.host == host),
        )


def delta(old: View | None, new: View) -> Delta:
    """Whom to start and whom to stop to go from `old` to `new`; None is the time before the first view."""
    before = old.workers if old else ()
    now, then = set(new.workers), set(before)
    return Delta(
        tuple(worker for worker in new.workers if worker not in then),
        tuple(worker for worker in before if worker not in now),
    )


def arrival(old: View | None, new: View, host: str) -> str:
    """KungFu's log line for the runner of `host`: `arrived at v3, new np=4, local: +1/-0, global: +2/-0`."""
    change = delta(old, new)
    return f"arrived at v{new.number}, new np={new.size}, local: {change.on(host)}, global: {change}"
