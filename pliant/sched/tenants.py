"""Tenants: who is entitled to how many devices of a cluster, and any scheduling policy within these shares. Pure.

Of each device type, a tenant that can use its quota has it. What is left goes to tenants of the highest priority that can use
it, in shares that are as close to their weights as quotas allow; what these cannot use goes to the next. So nothing is idle
while somebody can use it: devices beyond a quota are borrowed, and are taken back when their share shrinks.

Shares are rarely whole numbers. The fraction of a device goes round: who has had less than its share is next, once it is
`TURN_S` device-seconds behind who has the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from pliant.errors import PolicyFailed
from pliant.sched.cluster import Changes, Cluster, ClusterJobs, ScheduledJob, SchedulingPolicy
from pliant.sched.decision import decide

TURN_S = 10.0
"""Device-seconds by which a tenant must be behind another one to get the device that both share."""
PAUSE_S = 4 * TURN_S
"""The same if jobs of the other one cannot shrink, so that one of them has to be paused."""
MOST_CREDIT_S = 12 * TURN_S
"""A tenant is owed at most so many device-seconds: who could not use its share does not get it later."""
OTHERS = "others"
"""The tenant of all jobs that belong to none of those in the file."""
_TINY = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """Somebody who shares the cluster with others."""

    name: str
    weight: float = 1.0
    """Its part of what is shared, relative to the weights of others."""
    quota: Mapping[str, int] = field(default_factory=dict)
    """Devices by type that it has whenever it can use them."""
    priority: int = 0
    """Beyond quotas, tenants of higher priority come first."""
    token_sha256: str = field(default="", repr=False)
    """SHA-256 of the token with which it submits jobs, in hexadecimal digits."""


def with_others(tenants: Sequence[Tenant]) -> tuple[Tenant, ...]:
    """Return the tenants with `others`, which has no quota unless it is among them."""
    return (*tenants, *(() if any(each.name == OTHERS for each in tenants) else (Tenant(name=OTHERS),)))


# --- shares ---


@dataclass(frozen=True, slots=True)
class Claim:
    """What one tenant wants of the devices of one type."""

    demand: int
    """Devices that its jobs can use."""
    weight: float = 1.0
    quota: int = 0
    priority: int = 0
    credit_s: float = 0.0
    """Device-seconds that it is owed; below 0: that it has had too many."""
    given: int = 0
    """Devices that it has now."""


def fair_shares(capacity: int, claims: Sequence[Claim]) -> tuple[float, ...]:
    """Return each claim's share of the devices, in fractions of them; together as many as there are, or can be used."""
    # Credits and present devices do not matter here, and would spoil the cache.
    return _fair_shares(
        capacity, tuple((each.priority, each.weight, min(each.quota, each.demand), each.demand) for each in claims)
    )


@lru_cache(maxsize=1 << 12)
def _fair_shares(capacity: int, claims: tuple[tuple[int, float, int, int], ...]) -> tuple[float, ...]:
    if sum(floor for _, _, floor, _ in claims) > capacity:
        # Devices are reserved or gone: quotas shrink, those of the lowest priority first.
        claims = tuple((priority, float(floor), 0, floor) for priority, _, floor, _ in claims)
    shares = [0.0] * len(claims)
    left = float(capacity - sum(floor for _, _, floor, _ in claims))
    for level in sorted({priority for priority, *_ in claims}, reverse=True):
        tier = [place for place, claim in enumerate(claims) if claim[0] == level]
        amount = left + sum(claims[place][2] for place in tier)
        given = _fill(amount, [claims[place][1:] for place in tier])
        left = amount - math.fsum(given)
        for place, share in zip(tier, given, strict=True):
            shares[place] = share
    return tuple(shares)


def _fill(amount: float, wants: Sequence[tuple[float, int, int]]) -> list[float]:
    """Return shares in proportion to the weights, between the floor and the cap of each (weight, floor, cap)."""

    def shares(level: float) -> list[float]:
        return [max(float(floor), min(float(cap), level * weight)) for weight, floor, cap in wants]

    low = 0.0
    for level in sorted({bound / weight for weight, *bounds in wants for bound in bounds if weight}):
        if math.fsum(shares(level)) >= amount:
            rate = sum(
                weight for weight, floor, cap in wants if floor <= low * weight and cap >= level * weight - _TINY
            )
            return shares(low + (amount - math.fsum(shares(low))) / rate if rate else level)
        low = level
    return shares(low)


def full_shares(capacity: int, kind: str, tenants: Iterable[Tenant]) -> dict[str, float]:
    """Return each tenant's share of the devices of a type while all of them can use as many as there are."""
    listed = list(tenants)
    claims = [Claim(capacity, each.weight, each.quota.get(kind, 0), each.priority) for each in listed]
    return {each.name: share for each, share in zip(listed, fair_shares(capacity, claims), strict=True)}


def divide(capacity: int, claims: Sequence[Claim]) -> tuple[int, ...]:
    """Return how many devices each claim gets: its fair share, rounded up for those who are next and down for the others."""
    fair = fair_shares(capacity, claims)
    sizes = [math.floor(share + _TINY) for share in fair]
    left = round(math.fsum(fair)) - sum(sizes)
    ranked = sorted(
        (place for place, share in enumerate(fair) if share - sizes[place] > _TINY),
        key=lambda place: (-_claim_to_more(claims[place], sizes[place]), sizes[place] - fair[place], place),
    )
    for place in ranked[:left]:
        sizes[place] += 1
    return tuple(sizes)


def _claim_to_more(claim: Claim, least: int) -> float:
    return claim.credit_s + (TURN_S if claim.given > least else 0.0)


def turn_ends_s(capacity: int, claims: Sequence[Claim]) -> float:
    """Return in how many seconds a device goes to another tenant, if each keeps what it has; infinite if none does."""
    fair = fair_shares(capacity, claims)
    least = [math.floor(share + _TINY) for share in fair]
    partial = [place for place, share in enumerate(fair) if share - least[place] > _TINY]
    rates = {place: fair[place] - claims[place].given for place in partial}
    waits = [
        (claims[has].credit_s + TURN_S - claims[lacks].credit_s) / (rates[lacks] - rates[has])
        for has in partial
        for lacks in partial
        if claims[has].given > least[has] and claims[lacks].given <= least[lacks] and rates[lacks] > rates[has]
    ]
    return max(0.0, min(waits, default=math.inf))


# --- a policy within shares ---


class TenantJobs(ClusterJobs):
    """The jobs of a cluster, and of each tenant in the order of the policy that decides within its share."""

    def __init__(self, policy: SchedulingPolicy, tenants: Iterable[str], jobs: Sequence[ScheduledJob] = ()) -> None:
        self.of = {name: policy.jobs() for name in tenants}
        super().__init__(jobs, shape=policy.shape, order=policy.order)

    def tenant_of(self, job: ScheduledJob) -> str:
        return job.tenant if job.tenant in self.of else OTHERS

    def add(self, job: ScheduledJob) -> None:
        super().add(job)
        self.of[self.tenant_of(job)].add(job)

    def remove(self, job: ScheduledJob) -> None:
        super().remove(job)
        self.of[self.tenant_of(job)].remove(job)


class TenantShares(SchedulingPolicy):
    """Any policy, asked for each tenant on its own within the tenant's share of the devices."""

    def __init__(self, policy: SchedulingPolicy, tenants: Sequence[Tenant]) -> None:
        self.policy, self.tenants = policy, {each.name: each for each in with_others(tenants)}
        self.others_are_named = any(each.name == OTHERS for each in tenants)
        self.name, self.about = policy.name, policy.about
        self.rounds, self.elastic, self.adapts_batch = policy.rounds, policy.elastic, policy.adapts_batch
        self.allotted: dict[str, dict[str, int]] = {}
        """Devices of each type that each tenant may have, as last decided; others may have borrowed them."""
        self.owed: dict[str, dict[str, int]] = {}
        """Those of them for which jobs of others are paused: whole devices, and the fraction that goes round if much is owed."""
        self._claims: dict[str, tuple[int, dict[str, Claim]]] = {}
        """The last decision: capacity and claims by type, with what each tenant was given."""
        self._at_s = -math.inf

    def jobs(self, jobs: Sequence[ScheduledJob] = ()) -> TenantJobs:
        return TenantJobs(self.policy, self.tenants, jobs)

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        assert isinstance(jobs, TenantJobs), "made by self.jobs"
        claims = {kind: self._claims_of(kind, jobs, cluster, now) for kind in cluster.counts}
        for kind, wanted in claims.items():
            capacity = cluster.available(kind)
            sizes = divide(capacity, list(wanted.values()))
            self.allotted[kind] = dict(zip(wanted, sizes, strict=True))
            shares = fair_shares(capacity, list(wanted.values()))
            # Jobs of whoever has had too much may be paused for a tenant that is so far behind.
            behind_s = PAUSE_S + min(
                (wanted[name].credit_s for name, size in self.allotted[kind].items() if wanted[name].given > size),
                default=math.inf,
            )
            self.owed[kind] = {
                name: size if wanted[name].credit_s > behind_s else math.floor(share + _TINY)
                for name, size, share in zip(wanted, sizes, shares, strict=True)
            }
        decision = _Decision(self, jobs, cluster, now, self.allotted, self.owed)
        decision.use_shares()
        for kind in cluster.counts:
            decision.take_back(kind)
        decision.withdraw_excess()
        decision.lend_the_rest()
        self._at_s = now
        self._claims = {
            kind: (
                cluster.available(kind),
                {name: _with_given(claim, decision.used[name][kind]) for name, claim in wanted.items()},
            )
            for kind, wanted in claims.items()
        }
        return decision.changes

    def wakes_s(self, jobs: ClusterJobs, now: float) -> float:
        assert isinstance(jobs, TenantJobs), "made by self.jobs"
        return min([now + self.turn_ends_s(), *(self.policy.wakes_s(each, now) for each in jobs.of.values())])

    def turn_ends_s(self) -> float:
        """Return how many seconds after the last decision a device goes to another tenant if nothing happens."""
        return min(
            (turn_ends_s(capacity, list(claims.values())) for capacity, claims in self._claims.values()),
            default=math.inf,
        )

    def _claims_of(self, kind: str, jobs: TenantJobs, cluster: Cluster, now: float) -> dict[str, Claim]:
        capacity = cluster.available(kind)
        before, known = self._claims.get(kind, (0, {}))
        shares = dict(zip(known, fair_shares(before, list(known.values())), strict=True))
        found = {}
        for name, tenant in self.tenants.items():
            demand, credit_s = self._demand(kind, jobs.of[name], capacity), 0.0
            if demand and name in known:
                owed = (shares[name] - known[name].given) * max(0.0, now - self._at_s)
                credit_s = max(-MOST_CREDIT_S, min(MOST_CREDIT_S, known[name].credit_s + owed))
            given = jobs.of[name].used[kind]
            found[name] = Claim(demand, tenant.weight, tenant.quota.get(kind, 0), tenant.priority, credit_s, given)
        return found

    def _demand(self, kind: str, jobs: ClusterJobs, capacity: int) -> int:
        """Return how many devices of a type the jobs can use, as far as there are so many."""
        total = 0
        for job in jobs.running.values():
            most = max(job.max_devices, job.num_devices()) if self.elastic else job.num_devices()
            total += most if job.held.get(kind) or self._may_use(job, kind) else 0
        for job in jobs.waiting() if total < capacity else ():
            if total >= capacity:
                break
            most = min(job.max_devices, job.max_devices if self.elastic else job.replicas)
            total += most if self._may_use(job, kind) else 0
        return min(total, capacity)

    def _may_use(self, job: ScheduledJob, kind: str) -> bool:
        return job.preferred == kind or (job.mixed and any(each.name == kind for each in job.types))


def _with_given(claim: Claim, given: int) -> Claim:
    return Claim(claim.demand, claim.weight, claim.quota, claim.priority, claim.credit_s, given)


class _Decision:
    """One decision for all tenants, as it comes about."""

    def __init__(
        self,
        shares: TenantShares,
        jobs: TenantJobs,
        cluster: Cluster,
        now: float,
        allotted: Mapping[str, Mapping[str, int]],
        owed: Mapping[str, Mapping[str, int]],
    ) -> None:
        self._policy, self._tenants, self._jobs = shares.policy, shares.tenants, jobs
        self._cluster, self._now = cluster, now
        self._allotted, self._owed = allotted, owed
        self.changes: Changes = {}
        self.used = {name: Counter({**each.used}) for name, each in jobs.of.items()}
        """Devices by tenant and type with the changes so far."""
        self._before = {name: Counter(each) for name, each in self.used.items()}
        self._ranked = sorted(self._tenants, key=lambda name: -self._tenants[name].priority)

    def use_shares(self) -> None:
        """Let each tenant use its share, and what it has beyond that, as if nobody lacked it."""
        for name in self._ranked:
            self._ask(name, {kind: max(sizes[name], self.used[name][kind]) for kind, sizes in self._allotted.items()})

    def take_back(self, kind: str) -> None:
        """Take what is lacking from those who have more than their share: their jobs shrink, and are paused if they cannot."""
        if self._policy.elastic:
            for name in self._over(kind):
                self._shrink(name, kind, min(self._lacking(kind), self._excess(name, kind)))
        # A job is not paused for the fraction of a device that goes round, as long as little is owed.
        for name in self._over(kind):
            for job in self._latest(name, kind):
                if self._lacking_of_owed(kind) > 0 and self._excess(name, kind) > 0:
                    self._change(job, {})

    def withdraw_excess(self) -> None:
        """Withdraw changes for which there is no room, the last ones first, and none of what a tenant is owed if possible."""
        while lacking := [kind for kind in self._cluster.counts if self._lacking(kind) > 0]:
            grown = [name for name in reversed(self.changes) if self._grows(name, lacking)]
            if not grown:
                return  # it was so before: the policy takes nothing back
            job = self._found(next((name for name in grown if self._is_beyond(name, lacking)), grown[0]))
            self._change(job, job.held)
            del self.changes[job.name]

    def lend_the_rest(self) -> None:
        """Let tenants use what others leave idle, those who have the least for their weight first."""
        for _ in range(len(self._ranked)):  # who moves to a faster device leaves the slower one
            before = dict(self.changes)
            self._lend()
            if self.changes == before:
                return

    def _lend(self) -> None:
        ranked = sorted(
            self._ranked,
            key=lambda name: (-self._tenants[name].priority, self.used[name].total() / self._tenants[name].weight),
        )
        for name in ranked:
            idle = {kind: max(0, -self._lacking(kind)) for kind in self._cluster.counts}
            if not any(idle.values()):
                return
            self._ask(name, {kind: self.used[name][kind] + count for kind, count in idle.items()})

    # --- steps ---

    def _ask(self, tenant: str, caps: Mapping[str, int]) -> None:
        """Let the policy decide for the jobs of a tenant, which may have so many devices of each type."""
        jobs = self._jobs.of[tenant]
        if not len(jobs) or not any(caps.values()):
            return
        counts = self._cluster.counts
        cluster = Cluster(dict(counts), reserved={kind: count - caps.get(kind, 0) for kind, count in counts.items()})
        with self._as_if_changed(tenant):
            answer = decide(self._policy, jobs, cluster, self._now)
            too_few: list[ScheduledJob] = []
            while found := [job for name in answer if self._has_too_few(job := self._found(name), answer[name])]:
                for job in found:
                    jobs.remove(job)  # others can start with what it got
                too_few += found
                answer = decide(self._policy, jobs, cluster, self._now)
            for job in too_few:
                jobs.add(job)
        for name, devices in answer.items():
            self._change(self._found(name), devices)

    def _has_too_few(self, job: ScheduledJob, devices: Mapping[str, int]) -> bool:
        """Return whether the job would start with fewer devices than it needs because its tenant's share is small now."""
        return not job.held and sum(devices.values()) < min(job.min_devices, self._cluster.available(job.preferred))

    def _shrink(self, tenant: str, kind: str, count: int) -> None:
        for job in self._latest(tenant, kind):
            devices = self._devices(job)
            taken = min(count, devices[kind], sum(devices.values()) - max(1, job.min_devices))
            if taken > 0:
                self._change(job, {**devices, kind: devices[kind] - taken})
                count -= taken

    def _change(self, job: ScheduledJob, devices: Mapping[str, int]) -> None:
        used = self.used[self._jobs.tenant_of(job)]
        used.subtract(self._devices(job))
        used.update(devices)
        self.changes[job.name] = {kind: count for kind, count in devices.items() if count}

    @contextmanager
    def _as_if_changed(self, tenant: str) -> Iterator[None]:
        """Show the jobs of a tenant to its policy as if the changes so far had been carried out.

        A job that starts has all that it gets for now: policies give it more when it runs.
        """
        jobs = self._jobs.of[tenant]
        mine = [job for name in self.changes if self._jobs.tenant_of(job := self._found(name)) == tenant]
        before = [(job.held, job.max_devices) for job in mine]
        for job in mine:
            devices = self.changes[job.name]
            self._show(jobs, job, devices, job.max_devices if job.held or not devices else sum(devices.values()))
        try:
            yield
        finally:
            for job, (held, most) in zip(mine, before, strict=True):
                self._show(jobs, job, held, most)

    def _show(self, jobs: ClusterJobs, job: ScheduledJob, devices: dict[str, int], most: int) -> None:
        job.sync(self._now)
        jobs.remove(job)
        job.held, job.max_devices, job.memory = devices, most, {}
        jobs.add(job)

    # --- what is so far ---

    def _found(self, name: str) -> ScheduledJob:
        job = self._jobs.find(name)
        if job is None:
            raise PolicyFailed(f"{name!r} is no job")
        return job

    def _devices(self, job: ScheduledJob) -> dict[str, int]:
        return self.changes.get(job.name, job.held)

    def _grows(self, name: str, kinds: Sequence[str]) -> bool:
        held = self._found(name).held
        return any(self.changes[name].get(kind, 0) > held.get(kind, 0) for kind in kinds)

    def _is_beyond(self, name: str, kinds: Sequence[str]) -> bool:
        """Return whether the job's tenant has more than it is owed."""
        tenant = self._jobs.tenant_of(self._found(name))
        return any(self.used[tenant][kind] > self._owed[kind][tenant] for kind in kinds)

    def _lacking(self, kind: str) -> int:
        """Return how many devices were given beyond those that there are."""
        return sum(each[kind] for each in self.used.values()) - self._cluster.available(kind)

    def _lacking_of_owed(self, kind: str) -> int:
        """Return how many devices are lacking if tenants get only so many more that they have what they are owed."""
        total = 0
        for name, used in self.used.items():
            before, whole = self._before[name][kind], self._owed[kind][name]
            total += min(used[kind], max(before, whole))
        return total - self._cluster.available(kind)

    def _excess(self, tenant: str, kind: str) -> int:
        return self.used[tenant][kind] - self._allotted[kind][tenant]

    def _over(self, kind: str) -> list[str]:
        """Return the tenants with more than their share: the lowest priority first, then who has the most beyond it."""
        over = [name for name in self._tenants if self._excess(name, kind) > 0]
        return sorted(
            over,
            key=lambda name: (self._tenants[name].priority, -self._excess(name, kind) / self._tenants[name].weight),
        )

    def _latest(self, tenant: str, kind: str) -> list[ScheduledJob]:
        """Return the tenant's jobs with devices of a type, the last one first."""
        there = [job for job in self._all(tenant) if self._devices(job).get(kind)]
        return sorted(there, key=lambda job: (-job.submitted_s, -job.number))

    def _all(self, tenant: str) -> list[ScheduledJob]:
        names = {*self._jobs.of[tenant].running, *self.changes}
        return [job for name in names if self._jobs.tenant_of(job := self._found(name)) == tenant]
