"""Scheduling policies of one's own: the example, and what is wrong with those that are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.errors import ConfigError, PolicyFailed
from pliant.sched.cluster import Changes, Cluster, ClusterJobs, ScheduledJob, SchedulingPolicy, SteadyWork
from pliant.sched.decision import decide
from pliant.sched.planner import DeviceType
from pliant.sched.policies import make_policy, policy_class
from pliant.sched.simulate import Simulation

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'equal_shares.py'}:EqualShares"
CPU, GPU = DeviceType("cpu", 1.0), DeviceType("gpu", 4.0)


def job(name: str, **more: object) -> ScheduledJob:
    values: dict[str, object] = {"replicas": 4, "types": (CPU,), "work": SteadyWork(100.0), "submitted_s": 0.0, **more}
    return ScheduledJob(name=name, **values)  # type: ignore[arg-type]


class Says(SchedulingPolicy):
    """Answers what it was told to."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[return-value]


def refusal(answer: object, *jobs: ScheduledJob, **counts: int) -> str:
    policy = Says(answer)
    with pytest.raises(PolicyFailed) as refused:
        decide(policy, policy.jobs(jobs or (job("a"),)), Cluster(counts or {"cpu": 4}), 0.0)
    return str(refused.value)


def test_the_example_shares_equally_and_gives_back() -> None:
    policy = make_policy(EXAMPLE)
    alone = job("a", held={"cpu": 4})
    assert decide(policy, policy.jobs([alone, job("b")]), Cluster({"cpu": 4}), 0.0) == {
        "a": {"cpu": 2},
        "b": {"cpu": 2},
    }
    assert decide(policy, policy.jobs([alone, job("b", min_devices=4)]), Cluster({"cpu": 4}), 0.0) == {}
    outcome = Simulation([job("a"), job("b")], Cluster({"cpu": 4}), policy).run()
    assert [each.device_s for each in outcome.jobs] == [2 * (30 + 200)] * 2


COUNTS = st.integers(0, 9)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=6), COUNTS)
def test_the_examples_answer_can_always_be_carried_out(sizes: list[tuple[int, int]], reserved: int) -> None:
    jobs = [job(str(n), number=n, replicas=most, min_devices=min(least, most)) for n, (most, least) in enumerate(sizes)]
    policy = make_policy(EXAMPLE)
    cluster = Cluster({"cpu": 8}, reserved={"cpu": reserved})
    changes = decide(policy, policy.jobs(jobs), cluster, 0.0)
    assert sum(given.get("cpu", 0) for given in changes.values()) <= cluster.available("cpu")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "policy Says: it returned None: return a dict"),
        ({"b": {"cpu": 1}}, "'b' is no job that runs or waits"),
        ({7: {"cpu": 1}}, "7 is no job"),
        ({"a": 2}, "job a was given 2: give a dict of types and numbers"),
        ({"a": {"cpu": -1}}, "cpu=-1: use a whole number of devices, 0 or more"),
        ({"a": {"cpu": 1.5}}, "cpu=1.5: use a whole number"),
        ({"a": {"cpu": True}}, "cpu=True: use a whole number"),
        ({"a": {"t4": 1}}, "job a was given t4=1: the cluster has cpu, gpu"),
        ({"a": {"gpu": 1}}, "job a was given gpu=1: it can use cpu"),
        ({"both": {"cpu": 1, "gpu": 1}}, "job both was given several types of devices"),
        ({"a": {"cpu": 5}}, "job a was given 5 devices: it can use 4, its max_devices"),
        ({"a": {"cpu": 3}, "both": {"cpu": 3}}, "it gave 6 devices of type cpu, of which there are 5: give no more"),
        (ZeroDivisionError("division by zero"), r"policy Says failed: ZeroDivisionError: division by zero (test_own_policy.py:"),
        (SystemExit(3), "policy Says failed: SystemExit: 3"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_carried_out_is_refused(answer: object, told: str) -> None:
    assert told in refusal(answer, job("a"), job("both", types=(CPU, GPU), mixed=False), cpu=5, gpu=2)


def test_devices_that_were_reserved_meanwhile_may_be_kept_and_not_added_to() -> None:
    kept, waits, cluster = job("a", held={"cpu": 3}), job("b"), Cluster({"cpu": 4}, reserved={"cpu": 3})
    policy = Says({})
    assert decide(policy, policy.jobs([kept, waits]), cluster, 0.0) == {}
    policy.answer = {"b": {"cpu": 1}}
    with pytest.raises(PolicyFailed, match="it gave 4 devices of type cpu, of which there are 1"):
        decide(policy, policy.jobs([kept, waits]), cluster, 0.0)


def test_a_simulation_says_when_the_policy_failed() -> None:
    with pytest.raises(PolicyFailed, match=r"^at 60 s: policy Says: job a was given 9 devices"):
        Simulation([job("a")], Cluster({"cpu": 9}), Says({"a": {"cpu": 9}})).run()


WRONG = {
    "class": "cannot be imported: SyntaxError",
    "raise OSError('no disk')": "cannot be imported: OSError: no disk (wrong.py:2)",
    "import absent": "cannot import wrong.py: No module named 'absent'",
    "class Fair: pass": "wrong.py has no policy 'Fair': derive it from pliant.sched.cluster.SchedulingPolicy",
    "class Fairs(SchedulingPolicy): pass": "did you mean Fairs?",
    "class Fair(SchedulingPolicy): pass": "it does not say who gets what: write `def allocate(self, jobs, cluster, now)`",
    "class Fair(SchedulingPolicy):\n def allocate(self, jobs): return {}": "its allocate takes (self, jobs): write `def",
    "class Fair(SchedulingPolicy):\n def __init__(self, n): pass\n def allocate(self, jobs, cluster, now): return {}": "it cannot be made without arguments: TypeError: ",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_class_that_is_no_policy_is_told(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.py").write_text(f"from pliant.sched.cluster import SchedulingPolicy\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        make_policy("wrong.py:Fair")
    assert str(refused.value).startswith("--policy wrong.py:Fair: ")
    assert WRONG[text] in str(refused.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fair", "--policy 'fair' is unknown: use yarn-cs, "),
        ("absent:Fair", "cannot import absent: No module named 'absent'"),
        ("absent.py:Fair", "there is no file absent.py"),
        ("a:b:c", "cannot import a:b"),
        ("a:", "--policy 'a:' is unknown"),
    ],
)
def test_a_policy_that_is_nowhere_is_told(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        policy_class(name)
