"""Tenants: shares by quota, weight and priority, what is lent and taken back, and ten minutes of load."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.sched.cluster import Changes, Cluster, ScheduledJob, SteadyWork
from pliant.sched.decision import decide
from pliant.sched.planner import DeviceType
from pliant.sched.policies import make_policy
from pliant.sched.simulate import Charges, Simulation
from pliant.sched.tenants import TURN_S, Claim, Tenant, TenantShares, divide, fair_shares, turn_ends_s

CPU, GPU = DeviceType("cpu", 1.0), DeviceType("gpu", 4.0)


def job(name: str, tenant: str = "", **more: object) -> ScheduledJob:
    values: dict[str, object] = {"replicas": 4, "types": (CPU,), "work": SteadyWork(100.0), "submitted_s": 0.0, **more}
    return ScheduledJob(name=name, tenant=tenant, **values)  # type: ignore[arg-type]


# --- shares ---

CLAIMS = st.lists(
    st.builds(
        Claim,
        demand=st.integers(0, 12),
        weight=st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, 100.0]),
        quota=st.integers(0, 4),
        priority=st.integers(-1, 1),
        credit_s=st.floats(-30, 30),
        given=st.integers(0, 12),
    ),
    max_size=6,
)


@pytest.mark.parametrize(
    ("capacity", "claims", "shares"),
    [
        (4, [Claim(9), Claim(9, 3.0)], (1, 3)),
        (4, [Claim(9), Claim(9), Claim(9)], (4 / 3, 4 / 3, 4 / 3)),
        (4, [Claim(9, quota=2), Claim(9), Claim(9)], (2, 1, 1)),  # the quota comes first
        (4, [Claim(1, quota=2), Claim(9), Claim(0)], (1, 3, 0)),  # what its owner does not use is lent
        (4, [Claim(9, quota=1), Claim(9, quota=1, priority=1)], (1, 3)),  # beyond quotas, priority comes first
        (4, [Claim(9, quota=1), Claim(1, priority=1)], (3, 1)),
        (2, [Claim(9, quota=3), Claim(9, quota=1)], (1.5, 0.5)),  # where devices are gone, quotas shrink alike
        (2, [Claim(9, quota=3, priority=1), Claim(9, quota=1)], (2, 0)),
        (0, [Claim(9, quota=3)], (0,)),
        (4, [], ()),
    ],
)  # fmt: skip
def test_shares_by_quota_weight_and_priority(capacity: int, claims: list[Claim], shares: tuple[float, ...]) -> None:
    assert fair_shares(capacity, claims) == pytest.approx(shares)


@given(st.integers(0, 16), CLAIMS)
def test_nobody_gets_what_is_not_there_quotas_are_kept_and_nothing_is_idle_while_somebody_wants_it(
    capacity: int, claims: list[Claim]
) -> None:
    sizes = divide(capacity, claims)
    assert sum(sizes) == min(capacity, sum(claim.demand for claim in claims))
    assert all(0 <= size <= claim.demand for size, claim in zip(sizes, claims, strict=True))
    quotas = [min(claim.quota, claim.demand) for claim in claims]
    if sum(quotas) <= capacity:
        assert all(size >= quota for size, quota in zip(sizes, quotas, strict=True))
    fair = fair_shares(capacity, claims)
    assert all(math.floor(share + 1e-6) <= size < share + 1 for size, share in zip(sizes, fair, strict=True))
    for tier in {claim.priority for claim in claims}:
        mine = [(share, claim) for share, claim in zip(fair, claims, strict=True) if claim.priority == tier]
        # Whoever lacks something, and whoever has more than its quota, have equal shares for their weight.
        lacking = [share / claim.weight for share, claim in mine if share < claim.demand - 1e-6]
        beyond = [share / claim.weight for share, claim in mine if share > min(claim.quota, claim.demand) + 1e-6]
        if lacking and beyond and sum(quotas) <= capacity:
            assert max(beyond) <= min(lacking) + 1e-6


def test_the_fraction_of_a_device_goes_round_and_not_too_often() -> None:
    claims = [Claim(9), Claim(9), Claim(9)]
    assert divide(4, claims) == (2, 1, 1)
    claims = [Claim(9, given=2), Claim(9, given=1), Claim(9, given=1)]
    assert turn_ends_s(4, claims) == pytest.approx(TURN_S)
    for after_s, sizes in ((TURN_S - 0.1, (2, 1, 1)), (TURN_S + 0.1, (1, 2, 1))):
        owed = [replace(claim, credit_s=after_s * (4 / 3 - claim.given)) for claim in claims]
        assert divide(4, owed) == sizes
    assert turn_ends_s(3, [Claim(9, given=1)] * 3) == math.inf


# --- who gets what ---

THREE = (Tenant(name="a", weight=2.0, quota={"cpu": 2}), Tenant(name="b", quota={"cpu": 1}), Tenant(name="c", quota={"cpu": 1}))  # fmt: skip


def decided(
    jobs: list[ScheduledJob], cluster: Cluster, policy: str = "easyscale-homo", tenants: tuple[Tenant, ...] = THREE
) -> Changes:
    shares = TenantShares(make_policy(policy), tenants)
    return decide(shares, shares.jobs(jobs), cluster, 0.0)


def test_what_is_idle_is_borrowed_and_given_back_by_shrinking() -> None:
    borrower = job("b1", "b", held={"cpu": 2})
    assert decided([borrower], Cluster({"cpu": 4})) == {"b1": {"cpu": 4}}
    borrower = job("b1", "b", held={"cpu": 4})
    assert decided([borrower, job("a1", "a")], Cluster({"cpu": 4})) == {"a1": {"cpu": 1}, "b1": {"cpu": 3}}
    assert decided([borrower, job("a1", "a", min_devices=2)], Cluster({"cpu": 4})) == {
        "a1": {"cpu": 2},
        "b1": {"cpu": 2},
    }


def test_a_job_is_paused_only_if_it_cannot_shrink() -> None:
    two = [
        job("b1", "b", held={"cpu": 2}, min_devices=2),
        job("b2", "b", held={"cpu": 2}, min_devices=1, submitted_s=1.0),
    ]
    owner = job("a1", "a", min_devices=1)
    assert decided([*two, owner], Cluster({"cpu": 4})) == {"a1": {"cpu": 1}, "b2": {"cpu": 1}}
    assert decided([*two, replace(owner, min_devices=2)], Cluster({"cpu": 4})) == {"a1": {"cpu": 2}, "b2": {}}
    rigid = [job("b1", "b", held={"cpu": 4}, min_devices=4)]
    assert decided([*rigid, owner], Cluster({"cpu": 4})) == {"a1": {"cpu": 1}, "b1": {}}  # more when it runs


def test_a_job_is_paused_for_the_fraction_that_goes_round_only_if_much_is_owed() -> None:
    tenants = tuple(Tenant(name=name) for name in "abc")
    rigid = job("a1", "a", held={"cpu": 2}, min_devices=2, max_devices=2)
    others = [job(f"{name}1", name, held={"cpu": 1}) for name in "bc"]
    shares = TenantShares(make_policy("easyscale-homo"), tenants)
    jobs = shares.jobs([rigid, *others])
    assert [decide(shares, jobs, Cluster({"cpu": 4}), at) for at in (0.0, 20.0, 39.0)] == [{}, {}, {}]
    assert decide(shares, jobs, Cluster({"cpu": 4}), 41.0) == {"a1": {}, "b1": {"cpu": 2}, "c1": {"cpu": 2}}


def test_gangs_wait_for_their_share_and_borrow_what_is_idle() -> None:
    gang = job("b1", "b", replicas=4)
    assert decided([gang], Cluster({"cpu": 4}), "yarn-cs-gang") == {"b1": {"cpu": 4}}
    assert decided([gang, job("a1", "a", replicas=2)], Cluster({"cpu": 4}), "yarn-cs-gang") == {"a1": {"cpu": 2}}
    running = job("b1", "b", replicas=4, held={"cpu": 4})
    assert decided([running, job("a1", "a", replicas=2)], Cluster({"cpu": 4}), "yarn-cs-gang") == {
        "a1": {"cpu": 2},
        "b1": {},
    }


def test_jobs_of_nobody_in_the_file_have_a_share_of_the_others() -> None:
    stranger, mine = job("x", "somebody", held={"cpu": 4}), job("b1", "b")
    tenants = (Tenant(name="b"),)
    assert decided([stranger, mine], Cluster({"cpu": 4}), tenants=tenants) == {"b1": {"cpu": 1}, "x": {"cpu": 3}}


TENANTS = st.lists(
    st.builds(
        Tenant,
        name=st.sampled_from(["a", "b", "c"]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        quota=st.fixed_dictionaries({"cpu": st.integers(0, 1), "gpu": st.integers(0, 2)}),
        priority=st.integers(0, 1),
    ),
    unique_by=lambda tenant: tenant.name,
    max_size=3,
)
JOBS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", ""]), st.integers(1, 5), st.integers(0, 2), st.booleans(), st.integers(0, 4), st.booleans()
    ),
    max_size=7,
)  # fmt: skip
POLICIES = ("easyscale-homo", "easyscale-heter", "yarn-cs-gang", "srtf", "optimus", "pollux")


@settings(max_examples=150)
@given(TENANTS, JOBS, st.sampled_from(POLICIES), st.integers(0, 2))
def test_whatever_there_is_quotas_are_kept_and_nothing_is_idle_while_a_job_waits(
    tenants: list[Tenant], said: list[tuple[str, int, int, bool, int, bool]], policy: str, reserved: int
) -> None:
    cluster = Cluster({"cpu": 3, "gpu": 6}, reserved={"gpu": reserved})
    left, jobs = dict(cluster.counts), []
    for number, (tenant, replicas, least, on_gpu, has, mixed) in enumerate(said):
        kind = "gpu" if on_gpu else "cpu"
        held = min(has, replicas, left[kind])
        left[kind] -= held
        jobs.append(
            job(
                str(number), tenant, replicas=replicas, min_devices=min(least, replicas), types=(GPU, CPU), preferred=kind,
                mixed=mixed, held={kind: held} if held else {}, number=number,
            )
        )  # fmt: skip
    shares = TenantShares(make_policy(policy), tenants)
    index = shares.jobs(jobs)
    before = {each.name: dict(each.held) for each in jobs}
    changes = decide(shares, index, cluster, 0.0)  # refuses more than there is
    assert {each.name: each.held for each in jobs} == before, "a policy changes no job"
    after = {each.name: changes.get(each.name, each.held) for each in jobs}
    used: dict[str, Counter[str]] = {name: Counter() for name in shares.tenants}
    for each in jobs:
        used[index.tenant_of(each)].update(after[each.name])
    if not policy.startswith("easyscale"):
        return
    for kind in cluster.counts:
        free = cluster.available(kind) - sum(each[kind] for each in used.values())
        assert free >= 0
        for each in jobs:
            may_use = each.preferred == kind or (each.mixed and policy == "easyscale-heter" and not each.min_devices)
            assert after[each.name] or not may_use or free < max(1, each.min_devices), (
                f"{each.name} waits, {free} are idle"
            )
    for name, tenant in shares.tenants.items():
        mine = [each for each in jobs if index.tenant_of(each) == name]
        for each in mine:
            # Who has less than its quota lacks nothing that others have borrowed.
            room = tenant.quota.get(each.preferred, 0) - used[name][each.preferred]
            assert after[each.name] or each.mixed or room < max(1, each.min_devices) or reserved


# --- ten minutes of load ---


def shares_of_ten_minutes(policy: str, tenants: tuple[Tenant, ...], seed: int) -> dict[str, float]:
    """Parts that tenants, which always have jobs that wait, have of all device-seconds of ten minutes."""
    chance = random.Random(seed)
    jobs = [
        job(
            f"{tenant.name}-{number}",
            tenant.name,
            submitted_s=chance.uniform(0, 300) if number > 4 else 0.0,
            replicas=chance.randint(1, 4),
            work=SteadyWork(chance.uniform(5, 80)),
        )
        for tenant in tenants
        for number in range(40)
    ]
    outcome = Simulation(
        jobs,
        Cluster({"cpu": 4}),
        TenantShares(make_policy(policy), tenants),
        interval_s=1.0,
        charges=Charges(start_s=2.0, change_s=0.02),
        keep_history=True,
    ).run()
    parts: Counter[str] = Counter()
    for name, series in outcome.history.items():
        for (at, held), (until, _) in itertools.pairwise([*series, (math.inf, {})]):
            parts[name.partition("-")[0]] += sum(held.values()) * max(0.0, min(until, 600.0) - at)
    assert parts.total() > 0.99 * 4 * 600, "nothing is idle"
    return {tenant.name: parts[tenant.name] / parts.total() for tenant in tenants}


EQUAL = tuple(Tenant(name=name) for name in "abc")
UNEQUAL = (Tenant(name="a", weight=5.0), Tenant(name="b", weight=2.0), Tenant(name="c"))


@pytest.mark.parametrize("policy", ["easyscale-homo", "pollux"])
@pytest.mark.parametrize("tenants", [EQUAL, UNEQUAL, THREE])
@pytest.mark.parametrize("seed", range(2))
def test_over_ten_minutes_shares_are_as_the_weights(policy: str, tenants: tuple[Tenant, ...], seed: int) -> None:
    total = sum(tenant.weight for tenant in tenants)
    parts = shares_of_ten_minutes(policy, tenants, seed)
    assert parts == {tenant.name: pytest.approx(tenant.weight / total, rel=0.05) for tenant in tenants}
