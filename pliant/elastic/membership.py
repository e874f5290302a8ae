"""The rules of elasticity: how the wanted view and the membership follow from what users, runners and workers say.

The wanted view says who shall train. The membership says who does. A request becomes the membership when all its workers
are ready, so that nobody who trains ever waits for a process that starts; a loss changes the membership at once.
Workers that are to leave stay members as long as the others depend on them for the job's state.

A worker without the state can only begin at a step's boundary. So nobody new takes part in a membership that workers may
enter in the middle of a step: not after a loss, not before a step was done in the present membership, and not together
with a change that removes somebody who may be lost meanwhile. New members are put off until then.

Pure values and functions: no I/O, no clock. `ElasticState` is all that the config server keeps, and `ElasticState.after`
is its only rule.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace

from pliant.cluster import (
    BY_PROGRAM,
    DEFAULT_RUNNER_PORT,
    ClusterSnapshot,
    Host,
    Membership,
    PortRange,
    View,
    Wanted,
    Worker,
)
from pliant.errors import CapacityError, ClusterCleared, ConfigError, NotWanted, NoView, OtherJob, StaleView

PORT_STRIDE = 16
MAX_WORKERS = 10_000
"""A larger view is taken for a mistake: it would cost the server its memory."""
SKIPPED_NUMBERS = 16
"""Numbers left out after the first restore, and so many more after each one: what follows must not have a number that somebody
has seen before. It may be so many changes older, if all reach the server between two losses of its state."""
KEPT_HOLDERS = 2
"""As long as new members do not have the state, so many of those who have it stay."""


# --- requests: who shall train ---


@dataclass(frozen=True, slots=True)
class PutView:
    """Want the workers and runners of `view`, in its order.

    `view.number` is the version that the view was made from, 0 where that is not known. An older version than the
    server's is stale, unless `expected` says what to compare instead.
    """

    view: View
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class ResetView:
    """Want nothing in particular: running workers keep the view they have."""

    expected: int | None = None


@dataclass(frozen=True, slots=True)
class ClearView:
    """Want no workers: all must stop, and nothing but a reset is accepted afterwards."""

    expected: int | None = None


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Want one worker more, as the last rank; its host gets a runner if it has none."""

    worker: Worker
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Want this worker gone, and its host's runner too if it was the last one there."""

    worker: Worker
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class ResizeView:
    """Want `size` workers on the hosts that the view has."""

    size: int
    expected: int | None = None


ViewRequest = PutView | ResetView | ClearView | AddWorker | RemoveWorker | ResizeView


# --- notices: what happened to workers ---


@dataclass(frozen=True, slots=True)
class ReadyNotice:
    """`worker` can train as soon as it is a member. Refused where nobody wants it any more."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class SettledNotice:
    """`worker` has the state of the job.

    If there are more members than `replicas`, only so many take part; 0 means all.
    """

    worker: Worker
    replicas: int = 0
    membership: int = 0
    """The number of the membership in which the worker has done a step; 0 if it has the state but has done no step."""


@dataclass(frozen=True, slots=True)
class LossNotice:
    """`worker` died or fell silent: it is no longer wanted, and the others drop the step that they shared with it.

    Its host keeps its runner, which may start another worker there.
    """

    worker: Worker
    reason: str = ""
    by: Worker | None = None
    """The worker that reports the loss, or None for a runner. The report of a worker that is no member is ignored."""


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """`worker` leaves, as after a preemption notice: it is no longer wanted, but its last step counts."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class FinishNotice:
    """The program has run to its end, as `worker` says: all workers stop."""

    worker: Worker | None = None
    """None if nobody says that the last step was done: whoever asked has ended the job."""


@dataclass(frozen=True, slots=True)
class RestoreNotice:
    """The server has lost its state, or the newest part of it; a worker or runner last knew `snapshot`.

    Accepted by a server that knows of no job, and by one that has an older state of the same job.
    """

    snapshot: ClusterSnapshot


WorkerNotice = ReadyNotice | SettledNotice | LossNotice | LeaveNotice | FinishNotice | RestoreNotice


# --- the wanted view ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a resize may use when it adds workers."""

    hosts: tuple[Host, ...] = ()
    """Hosts whose slots are known; any other host takes as many workers as it has ports."""
    ports: PortRange = field(default_factory=lambda: PortRange(10000, 65535))
    """Where new workers may listen."""

    def to_json(self) -> dict[str, object]:
        return {"Hosts": [[host.address, host.slots] for host in self.hosts], "Ports": str(self.ports)}

    @classmethod
    def from_json(cls, value: object) -> Limits:
        """Return the limits that `value` describes; raise ConfigError if it describes none."""
        match value:
            case {"Hosts": list(hosts), "Ports": str(ports)}:
                return cls(hosts=tuple(Host(address, slots) for address, slots in hosts), ports=PortRange.parse(ports))
        raise ConfigError(f"{value!r:.200} are no limits of a job: is it of another version?")


NO_LIMITS = Limits()


def next_wanted(wanted: Wanted, request: ViewRequest, limits: Limits = NO_LIMITS) -> Wanted:
    """Return what is wanted after `request`: `wanted` itself if nothing changes, else the next version.

    Raises (and nothing has changed):
        StaleView: another version was expected.
        ClusterCleared: the workers were told to stop.
        NoView: there is no view to remove from, or to resize.
        InvalidView, CapacityError, ConfigError: with the reason.
    """
    if request.expected is not None and request.expected != wanted.version:
        raise StaleView(request.expected, wanted.version)
    match request:
        case ResetView():
            return wanted if wanted.view is None else Wanted(wanted.version + 1, None)
        case ClearView():
            return wanted if wanted.cleared else _next_version(wanted, (), ())
        case PutView(view, expected):
            _refuse_if_cleared(wanted)
            if expected is None and 0 < view.number < wanted.version:
                raise StaleView(view.number, wanted.version)
            return _next_version(wanted, view.workers, view.runners)
        case AddWorker(worker):
            _refuse_if_cleared(wanted)
            runners = wanted.view.runners if wanted.view else ()
            if all(runner.host != worker.host for runner in runners):
                runners = (*runners, Worker(worker.host, DEFAULT_RUNNER_PORT))
            return _next_version(wanted, (*wanted.workers, worker), runners)
        case RemoveWorker(worker):
            view = _open_view(wanted)
            rank = view.rank_of(worker)
            workers = view.workers[:rank] + view.workers[rank + 1 :]
            if any(other.host == worker.host for other in workers):
                return _next_version(wanted, workers, view.runners)
            return _next_version(
                wanted, workers, tuple(runner for runner in view.runners if runner.host != worker.host)
            )
        case ResizeView(size):
            view = _open_view(wanted)
            return wanted if size == view.size else _next_version(wanted, resized(view, size, limits), view.runners)


def _next_version(wanted: Wanted, workers: tuple[Worker, ...], runners: tuple[Worker, ...]) -> Wanted:
    _check_size(len(workers))
    return Wanted(wanted.version + 1, View(wanted.version + 1, workers, runners))


def _open_view(wanted: Wanted) -> View:
    """Return the view, if there is one that may still change."""
    _refuse_if_cleared(wanted)
    if wanted.view is None:
        raise NoView(
            "the config server has no list of workers yet, so there is nothing to change: start the job with `pliant run -w "
            "-config-server URL`, or PUT one first"
        )
    return wanted.view


def _refuse_if_cleared(wanted: Wanted) -> None:
    if wanted.cleared:
        raise ClusterCleared(
            f"the cluster was cleared in version {wanted.version}, its workers must stop: reset it before the next job"
        )


def _check_size(size: int) -> None:
    if size < 0:
        raise ConfigError(f"size {size} is negative: use 0 (stop all workers) or more")
    if size > MAX_WORKERS:
        raise CapacityError(f"{size} workers are more than a view holds: use {MAX_WORKERS} or fewer")


def resized(view: View, size: int, limits: Limits = NO_LIMITS) -> tuple[Worker, ...]:
    """Return the workers of `view`, cut at the tail or grown to `size`.

    Rank 0 therefore survives every shrink to 1 or more. Each new worker goes to the host with the fewest workers (the
    first of equals), at a port that was not used lately: a worker that has just left may still hold its own, and late
    messages about it must not be taken for messages about the new one.

    Raises:
        CapacityError: the hosts of the view do not hold `size` workers.
    """
    _check_size(size)
    workers = list(view.workers[:size])
    workers.extend(_new_workers(view, size - len(workers), limits))
    return tuple(workers)


def _new_workers(view: View, num_new: int, limits: Limits) -> Iterator[Worker]:
    slots = {host.address: host.slots for host in limits.hosts}
    taken = {(member.host, member.port) for member in (*view.workers, *view.runners)}
    free = {runner.host: _free_places(runner.host, limits.ports, taken, view.number) for runner in view.runners}
    num_on = Counter(view.hosts)
    queue = [(num_on[host], order, host) for order, host in enumerate(free)]
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
            wanted = view.size + num_new
            raise CapacityError(
                f"size {wanted}: the {len(view.runners)} hosts of the view hold {wanted - missing} workers "
                f"(ports {limits.ports}); ask for fewer, add a runner, or raise the slots or the port range"
            )


def _free_places(host: str, ports: PortRange, taken: Set[tuple[str, int]], version: int) -> Iterator[Worker]:
    """Return the free ports of a host, beginning further on with every version."""
    begin = version * PORT_STRIDE
    rotated = (ports.begin + (begin + step) % len(ports) for step in range(len(ports)))
    return (Worker(host, port) for port in rotated if (host, port) not in taken)


# --- the membership ---

_GROUPS = ("ready", "settled", "newcomers", "leaving", "unheard", "lost")
"""The fields of an ElasticState that are sets of workers."""


@dataclass(frozen=True, slots=True)
class ElasticState:
    """All that the config server keeps: who shall train, who does, and who could."""

    wanted: Wanted = field(default_factory=Wanted)
    membership: Membership = field(default_factory=Membership)
    ready: frozenset[Worker] = frozenset()
    """Workers that are up; each of them is wanted or a member."""
    settled: frozenset[Worker] = frozenset()
    """Members that have the state of the job."""
    replicas: int = 0
    """How many of the members take part; 0: all."""
    newcomers: frozenset[Worker] = frozenset()
    """Workers that became members of a running job and do not have its state yet, and those that were put off."""
    stepped: int = 0
    """The highest number of a membership in which a step was done."""
    leaving: frozenset[Worker] = frozenset()
    """Members that have asked to go, and that the others still depend on."""
    id: str = ""
    """Which job's state this is; made at random with the state, and taken over by a restore."""
    restored: int = 0
    """How often the state was restored. Workers then report again what the server had known beyond the snapshot."""
    unused: int = 0
    """Numbers of memberships and versions of the wanted view below this one may have been used before a restore."""
    unheard: frozenset[Worker] = frozenset()
    """Members that have not reported again since a restore. Until they have, nobody knows who has the state of the job, and
    the members stay as they are."""
    lost: frozenset[Worker] = frozenset()
    """Members that were lost meanwhile."""
    first: int = 0
    """The version of the wanted view before anybody asked for anything: 1 if the server was started with a view."""

    def to_json(self) -> dict[str, object]:
        """Return the snapshot's form with all else that is kept; no two versions of pliant share a running job."""
        return {
            **self.snapshot.to_json(),
            **{name.capitalize(): [worker.to_json() for worker in sorted(getattr(self, name))] for name in _GROUPS},
            "Replicas": self.replicas,
            "Stepped": self.stepped,
            "Unused": self.unused,
            "First": self.first,
        }

    @classmethod
    def from_json(cls, value: object) -> ElasticState:
        """Return the state that `value` describes; raise ConfigError if it describes none."""
        snapshot = ClusterSnapshot.from_json(value)
        match value:
            case {
                "Replicas": int(replicas),
                "Stepped": int(stepped),
                "Unused": int(unused),
                "First": int(first),
                **others,
            }:
                groups = {
                    name: frozenset(map(Worker.from_json, workers))
                    for name in _GROUPS
                    if isinstance(workers := others.get(name.capitalize()), list)
                }
                if len(groups) == len(_GROUPS):
                    return cls(
                        snapshot.wanted,
                        snapshot.membership,
                        replicas=replicas,
                        stepped=stepped,
                        id=snapshot.id,
                        restored=snapshot.restored,
                        unused=unused,
                        first=first,
                        **groups,
                    )
        raise ConfigError(f"{value!r:.200} is no state of a job: is it of another version?")

    @property
    def snapshot(self) -> ClusterSnapshot:
        """What workers and runners are told."""
        return ClusterSnapshot(self.wanted, self.membership, self.id, self.restored)

    @property
    def is_empty(self) -> bool:
        """Whether nobody has asked for anything yet."""
        return self.wanted.version <= self.first and self.membership == Membership() and not self.ready

    def after(self, request: ViewRequest | WorkerNotice, limits: Limits = NO_LIMITS, *, by: str = "") -> ElasticState:
        """Return the state that `request` leads to: this one if nothing changes. `by` says in words who asks; the workers
        and runners are told if that ends the job before its last step.

        Raises (and nothing has changed):
            NotWanted: a worker is ready that is not in the wanted view.
            ClusterCleared: the job has ended; only a reset opens the next.
            OtherJob: a snapshot of another job than this one is to be restored.
            StaleView, NoView, InvalidView, CapacityError, ConfigError: as `next_wanted`.
        """
        state = self._after(request, limits)
        if not state.membership.over or self.membership.over:
            return state
        match request:
            case RestoreNotice():
                return state
            case FinishNotice(worker) if worker is not None:
                return state
            case ResizeView() if by == BY_PROGRAM:
                return state
            case LeaveNotice(worker):
                by = f"its last worker, {worker}, has left, as after Ctrl-C or a notice of preemption"
        return replace(state, membership=replace(state.membership, ended_by=by or "nobody knows by whom"))

    def _after(self, request: ViewRequest | WorkerNotice, limits: Limits) -> ElasticState:
        match request:
            case RestoreNotice(snapshot):
                return self._after_restore(snapshot)
            case ReadyNotice(worker):
                return self._after_ready(worker)
            case SettledNotice():
                return self._after_settled(request)
            case LossNotice(_, _, by) if by is not None and by not in self.membership.members:
                return self  # of two that have lost each other, the first to report it stays
            case LossNotice(worker):
                return self._after_loss(worker)
            case LeaveNotice(worker):
                return self._after_leave(worker)
            case FinishNotice():
                is_open = self.wanted.view is not None and not self.membership.over
                return self._moved(self.wanted, over=True) if is_open else self
            case ResetView():
                wanted = next_wanted(self.wanted, request)
                if wanted is self.wanted:
                    return self
                wanted = self._skip_used(wanted)
                membership = self._next_membership((), False, wanted)
                return ElasticState(
                    wanted, membership, id=self.id, restored=self.restored, unused=self.unused, first=self.first
                )
        if self.membership.over and not self.wanted.cleared and not isinstance(request, ClearView):
            raise ClusterCleared(
                f"the job has finished (version {self.wanted.version}), its view is closed: reset it before the next job"
            )
        wanted = next_wanted(self.wanted, request, limits)
        if wanted is self.wanted:
            return self
        if isinstance(request, ResizeView):
            self._refuse_idlers(request.size)
        return self._moved(wanted)

    def _refuse_idlers(self, size: int) -> None:
        """Refuse a size beyond the replicas, where these are known: such workers would have nothing to do.

        Workers that stand by are put or added one by one, on purpose.
        """
        if self.replicas and size > max(self.replicas, len(self.wanted.workers)):
            raise CapacityError(
                f"size {size}: the job has {self.replicas} replicas, and further workers would have nothing to do; ask for "
                f"{self.replicas} or fewer"
            )

    def recovered(self) -> ElasticState:
        """Return this state for a server that may have forgotten the newest: workers report again, and the numbers that
        forgotten changes may have had are left out."""
        newest = max(self.membership.number, self.wanted.version)
        restored = self.restored + 1
        return replace(self, restored=restored, unused=max(self.unused, newest + 1 + restored * SKIPPED_NUMBERS))

    def _after_restore(self, known: ClusterSnapshot) -> ElasticState:
        """Take up what is newer in `known`. Who has the state of the job, and who is ready, is reported again by all."""
        if known.id != self.id and not self.is_empty:
            raise OtherJob(
                f"this config server keeps the state of another job (version {self.wanted.version}, "
                f"{len(self.membership.members)} workers train): give each job a server of its own"
            )
        if known.id == self.id and self.snapshot.has_kept(known):
            return self
        is_lost = known.id != self.id
        wanted = known.wanted if is_lost or known.wanted.version > self.wanted.version else self.wanted
        newer = is_lost or known.membership.number > self.membership.number
        membership = known.membership if newer else self.membership
        ready = (self.ready | set(membership.members)).intersection({*membership.members, *wanted.workers})
        return ElasticState(
            wanted,
            membership,
            ready,
            unheard=frozenset(membership.members) - self.lost,
            lost=self.lost.intersection(membership.members),
            newcomers=ready.intersection(membership.members),  # as long as they do not say that they have the state
            replicas=self.replicas,
            stepped=max(self.stepped, int(membership.begun)),
            id=known.id,
            restored=max(self.restored, known.restored),
            unused=self.unused,
            first=self.first,
        ).recovered()

    def _with_all_heard(self) -> ElasticState:
        """Return this state with the changes that have waited for reports, once all have come."""
        if self.unheard:
            return self
        state = replace(self, lost=frozenset())
        for worker in sorted(self.lost):
            state = state._after_loss(worker)
        return state._moved(state.wanted)

    def _skip_used(self, wanted: Wanted) -> Wanted:
        """Return a changed `wanted` under a version that was not used before a restore."""
        if wanted.version == self.wanted.version or wanted.version >= self.unused:
            return wanted
        return Wanted(self.unused, None if wanted.view is None else replace(wanted.view, number=self.unused))

    def _after_ready(self, worker: Worker) -> ElasticState:
        if worker in self.unheard:
            return replace(self, unheard=self.unheard - {worker})._with_all_heard()
        if worker not in self.wanted.workers:
            why = "the job was told to stop" if self.wanted.cleared else "it was removed, or never added"
            raise NotWanted(
                f"worker {worker} is not in the wanted view (version {self.wanted.version}): {why}; it must end"
            )
        if self.membership.over or worker in self.ready:
            return self
        return self._moved(self.wanted, ready={*self.ready, worker})

    def _after_settled(self, notice: SettledNotice) -> ElasticState:
        if notice.worker not in self.membership.members:
            return self
        state = replace(
            self,
            settled=self.settled | {notice.worker},
            replicas=notice.replicas,
            newcomers=self.newcomers - {notice.worker},
            stepped=max(self.stepped, min(notice.membership, self.membership.number)),
        )
        return self if state == self else state._moved(self.wanted)

    def _after_loss(self, worker: Worker) -> ElasticState:
        is_wanted, is_member = worker in self.wanted.workers, worker in self.membership.members
        if self.membership.over or not (is_wanted or is_member):
            return self
        wanted = self.wanted
        # With nobody wanted the job would be over. The last worker stays listed, though not ready, until its runner asks
        # for another in its place and reports it lost again, or clears the view.
        if is_wanted and wanted.view is not None and wanted.workers != (worker,):
            removed = next_wanted(wanted, RemoveWorker(worker))
            assert removed.view is not None, "a worker was removed from a view with others in it"
            wanted = replace(removed, view=replace(removed.view, runners=wanted.view.runners))
        return self._moved(wanted, ready=self.ready - {worker}, lost=worker, urgent=is_member)

    def _after_leave(self, worker: Worker) -> ElasticState:
        is_wanted = worker in self.wanted.workers
        if self.membership.over or not (is_wanted or worker in self.membership.members):
            return self
        wanted = next_wanted(self.wanted, RemoveWorker(worker)) if is_wanted else self.wanted
        return replace(self, leaving=self.leaving | {worker})._moved(wanted)

    def _moved(
        self,
        wanted: Wanted,
        *,
        ready: Set[Worker] | None = None,
        lost: Worker | None = None,
        urgent: bool = False,
        over: bool = False,
    ) -> ElasticState:
        """Return this state with another `wanted` and `ready`, and the membership that follows from them."""
        wanted = self._skip_used(wanted)
        ready = self.ready if ready is None else ready
        over = over or wanted.cleared
        if self.unheard and not over:
            here = {*self.membership.members, *wanted.workers}
            missing = frozenset(member for member in self.membership.members if member == lost)
            state = replace(self, wanted=wanted, ready=frozenset(ready).intersection(here), lost=self.lost | missing)
            return replace(state, unheard=self.unheard - missing)._with_all_heard() if missing & self.unheard else state
        proposed = () if over else self._next_members(wanted, ready, lost)
        members = () if over else self._without_newcomers(proposed, urgent)
        settled = self.settled.intersection(members[: self.replicas or None])
        ready = frozenset(ready).intersection({*members, *wanted.workers})
        new = set(proposed).difference(self.membership.members if members == proposed else members)
        return replace(
            self,
            wanted=wanted,
            membership=self._next_membership(members, over, wanted, urgent),
            ready=ready,
            settled=settled,
            newcomers=ready.intersection(self.newcomers | new) if settled else frozenset(),
            leaving=self.leaving.intersection(members).difference(wanted.workers),
            unheard=self.unheard.intersection(members),
            lost=self.lost.intersection(members),
        )

    def _without_newcomers(self, proposed: tuple[Worker, ...], urgent: bool) -> tuple[Worker, ...]:
        """Return the proposed members without those that cannot take part yet; these are put off.

        If no member has the state, the job begins anew, and all can take part.
        """
        current = set(self.membership.members[: self.replicas or None])
        taking_part = set(proposed[: self.replicas or None])
        if not urgent and current & self.newcomers:
            return self.membership.members  # let them enter first
        in_step = current - self.newcomers
        if taking_part <= in_step:
            return proposed
        if not urgent and self.stepped >= self.membership.number and taking_part >= current:
            return proposed  # all members have entered this membership, and leave it for the next at the same step
        remaining = tuple(member for member in proposed[: self.replicas or None] if member in in_step)
        return proposed if self.settled.isdisjoint(remaining) else remaining

    def _next_members(self, wanted: Wanted, ready: Set[Worker], lost: Worker | None) -> tuple[Worker, ...]:
        """Return who trains from now on: the wanted workers once all of them are ready.

        If some of them are new, as many holders of the state stay as it takes for no single crash to lose it. The
        holders come first, because the end of a long list of members does not take part. Workers that were put off come
        back also if others are not ready.
        """
        current = tuple(member for member in self.membership.members if member != lost)
        leaving = self.leaving.difference(wanted.workers)
        if ready >= set(wanted.workers):
            members = wanted.workers
        else:
            put_off = self.newcomers.intersection(ready).difference(current)
            members = (
                *(member for member in current if member not in leaving),
                *(worker for worker in wanted.workers if worker in put_off),
            )
        if not members or self.settled.issuperset(members):
            return members
        holders = [member for member in current if member in self.settled]
        room = max(1, self.replicas - 1) if self.replicas else KEPT_HOLDERS
        num_missing = min(KEPT_HOLDERS, len(holders), room) - len(self.settled.intersection(members))
        keepers = sorted((holder for holder in holders if holder not in members), key=lambda holder: holder in leaving)
        return (*keepers[: max(0, num_missing)], *members)

    def _next_membership(
        self, members: tuple[Worker, ...], over: bool, wanted: Wanted, urgent: bool = False
    ) -> Membership:
        """Return the membership with these members: the same one if nothing is different about it."""
        now = self.membership
        if (members, over) == (now.members, now.over):
            return now
        number = now.number if members == now.members else max(now.number + 1, self.unused)
        begun = self.stepped > 0 and wanted.view is not None
        return Membership(number, members, number if urgent else now.urgent, over, wanted.version, begun)
