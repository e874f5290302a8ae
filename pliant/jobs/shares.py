"""Who has what of how much: tenants of a live cluster in numbers, and in a sentence why a job waits. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from pliant.jobs.rules import PUT_OFF, WAITING, ManagedJob, SchedulerState, devices_in_words
from pliant.jobs.status import TenantStatus
from pliant.sched.tenants import OTHERS, full_shares

MOST_NAMED = 3
"""Tenants that a sentence names though they have borrowed nothing."""
_TINY = 1e-6


def tenant_statuses(state: SchedulerState) -> list[TenantStatus]:
    """Return each tenant's share and what it has now; `others` only if it has jobs or is in the file of tenants."""
    if state.shares is None:
        return []
    counts = Counter((state.tenant_of(job), job.is_active) for job in state.jobs.values() if not job.is_over)
    used = {name: state.used_by(name) for name in state.shares.tenants}
    there = [
        tenant
        for name, tenant in state.shares.tenants.items()
        if name != OTHERS or state.shares.others_are_named or counts[name, True] or counts[name, False]
    ]
    shares = {
        kind: full_shares(max(0, count - state.reserved.get(kind, 0)), kind, there)
        for kind, count in state.devices.items()
    }
    return [
        TenantStatus(
            name=tenant.name,
            weight=tenant.weight,
            priority=tenant.priority,
            quota=dict(tenant.quota),
            share={kind: round(of[tenant.name], 4) for kind, of in shares.items()},
            has={kind: count for kind, count in used[tenant.name].items() if count},
            borrowed={
                kind: more
                for kind, of in shares.items()
                if (more := used[tenant.name][kind] - math.ceil(of[tenant.name] - _TINY)) > 0
            },
            running=counts[tenant.name, True],
            waiting=counts[tenant.name, False],
        )
        for tenant in there
    ]


def why_waits(state: SchedulerState, job: ManagedJob) -> str:
    """Return why a job waits, by what its tenant and the others have; empty if it does not wait, or for no tenant."""
    if state.shares is None or job.state not in (WAITING, PUT_OFF):
        return ""
    statuses = {each.name: each for each in tenant_statuses(state)}
    if job.target:
        leaving = sorted(
            state.tenant_of(each)
            for each in state.active
            if any(each.used(kind) > each.target.get(kind, 0) for kind in job.target)
        )
        who = f"{' and '.join(dict.fromkeys(leaving))} to leave" if leaving else "the room for"
        return _after(job, f"waits for {who} {devices_in_words(job.target)}")
    mine = statuses[state.tenant_of(job)]
    kinds = [kind for kind in job.demand.devices or state.devices if kind in state.devices]
    if not kinds:
        return ""
    kind = max(kinds, key=lambda each: mine.share.get(each, 0.0) - mine.has.get(each, 0))
    others = [each for each in statuses.values() if each is not mine]
    return _after(job, f"waits: {_own_share(job, mine, kind, state.devices)}{_borrowers(others, kind)}")


def _after(job: ManagedJob, reason: str) -> str:
    return f"{job.why}; {reason}" if job.state == PUT_OFF else reason


def _own_share(job: ManagedJob, mine: TenantStatus, kind: str, devices: Mapping[str, int]) -> str:
    share, has, borrowed = mine.share.get(kind, 0.0), mine.has.get(kind, 0), mine.borrowed.get(kind, 0)
    whole = math.floor(share + _TINY)
    least = job.rigid_size(kind, devices) if job.demand.rigid else max(1, job.demand.min)
    if has and has >= whole:
        more = f" and {borrowed} borrowed" if borrowed else ""
        return f"tenant {mine.name} has {f'its {has - borrowed} {kind}' if has > borrowed else f'no {kind} of its own'}{more}"
    if not share:
        return f"tenant {mine.name} has no {kind} of its own"
    if least > math.ceil(share - _TINY):
        return f"it needs {least} {kind} at once, and tenant {mine.name} has a share of {share:.3g}"
    return f"tenant {mine.name} has {has} of its {share:.3g} {kind}"


def _borrowers(others: list[TenantStatus], kind: str) -> str:
    borrowed = {each.name: each.borrowed.get(kind, 0) for each in others if each.has.get(kind)}
    named = [f"{name} has borrowed {count or 'none'}" for name, count in borrowed.items() if count]
    if len(borrowed) <= MOST_NAMED:
        named = [f"{name} has borrowed {count or 'none'}" for name, count in borrowed.items()]
    return "".join(f", {each}" for each in named) if named or not borrowed else ", nobody has borrowed any"
