"""Tenants who share live devices: the rules by values, the API over runs on paper, and real jobs that keep their bits."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from gang import run
from paper_backend import PaperBackend, train_job
from patience import open_gate, until
from rules_world import World
from serving_process import Serving, serving
from starlette.testclient import TestClient

from pliant.errors import NotAllowed
from pliant.fed.config import FedConfig
from pliant.fed.jobfile import FederatedJob, FedPlacement
from pliant.jobs.api import JobsApi
from pliant.jobs.rules import (
    END_GRACE_S,
    GIVE_BACK_GRACE_S,
    DropWorkers,
    EndRun,
    ManagedJob,
    ResizeRun,
    SchedulerState,
    StartRun,
)
from pliant.jobs.scheduler import POLICY_FAILED, Scheduler
from pliant.jobs.shares import tenant_statuses, why_waits
from pliant.jobs.store import JobStore
from pliant.sched import policies as schedulers
from pliant.sched.cluster import Changes, Cluster, ClusterJobs, SchedulingPolicy
from pliant.sched.tenants import Tenant
from pliant.tokens import token_hash

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import train_program

THREE = (
    Tenant(name="a", weight=2.0, quota={"cpu": 2}), Tenant(name="b", quota={"cpu": 1}), Tenant(name="c", quota={"cpu": 1}),
)  # fmt: skip


def why(world: World, name: str) -> str:
    return why_waits(world.state, world.job(name), tenant_statuses(world.state))


# --- rules ---


def test_what_is_idle_is_borrowed_and_given_back_when_its_owner_submits() -> None:
    world = World(tenants=THREE)
    assert world.submit("b1", "b") == [StartRun("b1", {"cpu": 1})]
    world.grown("b1")
    assert world.job("b1").asked == {"cpu": 4}
    assert world.submit("a1", "a") == [ResizeRun("b1", {"cpu": 3})]
    assert why(world, "a1") == "waits for b to leave 1 cpu"
    world.settle("b1")
    assert world.look() == [StartRun("a1", {"cpu": 1})]
    assert why(world, "a1") == ""
    world.grown("a1")  # once it is measured, a has its two
    world.settle()
    world.look()
    assert (world.job("a1").asked, world.job("b1").asked) == ({"cpu": 2}, {"cpu": 2})
    shares = tenant_statuses(world.state)
    assert {name: each.share for name, each in shares.items()} == {"a": {"cpu": 2}, "b": {"cpu": 1}, "c": {"cpu": 1}}
    assert {name: each.borrowed for name, each in shares.items()} == {"a": {}, "b": {"cpu": 1}, "c": {}}
    assert [(each.running, each.waiting) for each in shares.values()] == [(1, 0), (1, 0), (0, 0)]


def test_a_job_that_waits_says_who_has_what() -> None:
    world = World(tenants=THREE)
    world.submit("a1", "a", min=2, max=2)
    world.submit("b1", "b", min=1, max=1)
    world.settle()
    assert world.submit("a2", "a", min=2) == []
    assert why(world, "a2") == "waits: tenant a has its 2 cpu, b has borrowed none"
    world.submit("b2", "b", max=1)
    world.settle()
    assert world.job("b2").asked == {"cpu": 1}
    assert why(world, "a2") == "waits: tenant a has its 2 cpu, b has borrowed 1"
    world.submit("c1", "c", min=3)
    assert why(world, "c1").startswith("waits: it needs 3 cpu at once, and tenant c has a share of 1")
    world.submit("x", "")  # of the server's owner
    assert "tenant others has" in why(world, "x")


def test_a_job_that_cannot_shrink_is_put_off_and_says_why() -> None:
    world = World(tenants=THREE)
    world.submit("b1", "b", min=4)
    world.settle()
    assert world.submit("a1", "a", min=2, max=2) == [EndRun("b1")]
    assert world.look(GIVE_BACK_GRACE_S + 0.1) == [], "it ends after its step, with a checkpoint"
    assert world.end("b1", 0) == [StartRun("a1", {"cpu": 2})]
    assert world.job("b1").state == "put-off"
    assert "it needs 4 cpu at once, and tenant b has a share of 1, a has borrowed none" in why(world, "b1")


def test_workers_that_do_not_leave_what_another_tenant_waits_for_are_killed() -> None:
    world = World(tenants=THREE)
    world.submit("b1", "b")
    world.grown("b1")
    world.submit("a1", "a")
    assert world.look(GIVE_BACK_GRACE_S - 0.01) == []
    assert world.look(0.02) == [DropWorkers("b1")]
    assert world.look(END_GRACE_S - 1) == [], "they are killed once"
    world.settle("b1")
    assert world.look() == [StartRun("a1", {"cpu": 1})]


def test_a_server_that_begins_anew_knows_by_when_borrowers_must_leave() -> None:
    world = World(tenants=THREE)
    world.submit("b1", "b")
    world.grown("b1")
    world.submit("a1", "a")
    jobs = [
        ManagedJob.from_json(job.demand, json.loads(json.dumps(job.to_json()))) for job in world.state.jobs.values()
    ]
    occupied = dict(world.job("b1").occupied)
    world.state = SchedulerState(world.state.policy, {"cpu": 4}, jobs, tenants=THREE)
    world.state.set_told("b1")
    world.state.set_occupied("b1", occupied)
    world.allocate()
    assert world.look(GIVE_BACK_GRACE_S + 0.01) == [DropWorkers("b1")]


def test_nobody_is_killed_for_a_job_of_its_own_tenant() -> None:
    world = World(tenants=THREE)
    world.submit("b1", "b")
    world.grown("b1")
    world.submit("b2", "b")
    assert world.job("b1").asked == {"cpu": 3}
    assert world.look(GIVE_BACK_GRACE_S + 1) == []


def test_a_quota_of_a_lent_type_is_asked_for_back_though_another_type_comes_first() -> None:
    world = World(tenants=(Tenant(name="a", quota={"t4": 1}), Tenant(name="b")), v100=1, t4=1)
    world.submit("b1", "b", devices=["v100"], max=1)
    world.submit("b2", "b", devices=["t4"], max=1, min=0)
    world.settle()
    assert world.submit("a1", "a", devices=["v100", "t4"], max=1) == [EndRun("b2")]


def test_a_scheduler_that_begins_anew_knows_whose_a_job_is() -> None:
    world = World(tenants=THREE)
    world.submit("a1", "a")
    saved = json.loads(json.dumps(world.job("a1").to_json()))
    assert ManagedJob.from_json(world.job("a1").demand, saved).tenant == "a"
    del saved["tenant"]  # as written before there were tenants
    assert ManagedJob.from_json(world.job("a1").demand, saved).tenant == ""


# --- the API ---

TOKENS = {name: f"the-token-of-{name}-alone" for name in "abc"}
WITH_TOKENS = tuple(
    Tenant(name=name, quota={"cpu": 1}, token_sha256=token_hash(token)) for name, token in TOKENS.items()
)


class Apis:
    """One server, seen by its owner and by each tenant."""

    def __init__(self, scheduler: Scheduler) -> None:
        app = JobsApi(scheduler, "t", WITH_TOKENS).app
        self.owner, self.a, self.b = (
            TestClient(app, headers={"Authorization": f"Bearer {token}"}) for token in ("t", TOKENS["a"], TOKENS["b"])
        )
        self.stranger = TestClient(app)


@contextlib.contextmanager
def served(backend: PaperBackend, folder: Path, policy: str = "easyscale-heter") -> Iterator[Apis]:
    with JobStore(folder) as store:
        scheduler = Scheduler(backend, schedulers.make_policy(policy), store, interval_s=0.05, tenants=WITH_TOKENS)
        with scheduler.running():
            yield Apis(scheduler)


@pytest.fixture
def backend() -> PaperBackend:
    return PaperBackend(cpu=4)


def test_a_tenant_submits_as_itself_and_touches_its_own_jobs_only(backend: PaperBackend, tmp_path: Path) -> None:
    with served(backend, tmp_path) as apis:
        assert apis.a.post("/jobs", json=train_job("mine")).json()["tenant"] == "a"
        assert apis.b.post("/jobs", json=train_job("theirs")).status_code == 201
        assert apis.owner.post("/jobs", json=train_job("owners")).json()["tenant"] == "others"
        assert apis.a.post("/jobs", json=train_job("theirs")).status_code == 409
        assert [job["name"] for job in apis.a.get("/jobs").json()["jobs"]] == ["mine"]
        assert len(apis.owner.get("/jobs").json()["jobs"]) == 3
        calls = (("GET", ""), ("GET", "/logs"), ("DELETE", ""), ("POST", "/resume"), ("POST", "/forget"))
        for method, path in calls:
            for other in ("theirs", "owners"):
                refused = apis.a.request(method, f"/jobs/{other}{path}")
                assert refused.status_code == 403
                assert f"job '{other}' is not of tenant a" in refused.json()["error"]
            assert apis.stranger.request(method, f"/jobs/mine{path}").status_code == 401
            assert apis.a.request(method, f"/jobs/nobodys{path}").status_code == 404
        assert apis.a.put("/reserve", json={"cpu": 1}).status_code == 403
        assert apis.stranger.post("/jobs", json=train_job("x")).status_code == 401
        for token in ("", "wrong", TOKENS["a"] + "x", token_hash(TOKENS["a"])):
            assert apis.stranger.get("/jobs", headers={"Authorization": f"Bearer {token}"}).status_code == 401
        backend.runs["mine"].run.log.write_text("of mine\n")
        assert apis.a.get("/jobs/mine/logs").json()["text"] == "of mine\n"
        assert apis.a.get("/jobs/mine").json()["events"][0]["what"] == "submitted"

        cluster = apis.a.get("/cluster").json()
        assert set(cluster["jobs"]) == {"mine"}, "names of others' jobs are theirs"
        assert [each["name"] for each in cluster["tenants"]] == ["a", "b", "c", "others"]
        assert cluster["tenants"][0]["has"] == {"cpu": 1}
        assert set(apis.owner.get("/cluster").json()["jobs"]) == {"mine", "theirs", "owners"}
        assert not any(
            token in apis.owner.get(path).text for path in ("/cluster", "/jobs") for token in TOKENS.values()
        )

        assert apis.a.delete("/jobs/mine").status_code == 202
        assert apis.owner.delete("/jobs/theirs").status_code == 202
        until(lambda: apis.a.get("/jobs/mine").json()["state"] == "stopped")
        assert apis.a.post("/jobs/mine/resume").status_code == 202
        apis.a.delete("/jobs/mine?kill=true")
        until(lambda: apis.a.get("/jobs/mine").json()["state"] == "stopped")
        assert apis.a.post("/jobs/mine/forget").json()["name"] == "mine"


def test_a_tenant_is_not_told_the_names_of_others_jobs_by_a_policy_that_fails(
    backend: PaperBackend, tmp_path: Path
) -> None:
    with served(backend, tmp_path, f"{__file__}:Greedy") as apis:
        apis.b.post("/jobs", json=train_job("secret"))
        assert "job secret was given 99 devices" in apis.owner.get("/cluster").json()["policy_error"]
        assert apis.a.get("/cluster").json()["policy_error"] == POLICY_FAILED
        assert "secret" not in apis.a.get("/cluster").text


def test_a_job_that_ran_in_the_foreground_is_still_its_tenants_when_the_server_resumes_it(
    backend: PaperBackend, tmp_path: Path
) -> None:
    job = FederatedJob(config=FedConfig(name="fed"), placement=FedPlacement(log_path=str(tmp_path)), directory="/")
    with JobStore(tmp_path) as store:
        row = {
            "spec": job.model_dump(mode="json"), "number": 1, "submitted_s": 1.0, "state": "stopped",
            "why": "", "folder": str(tmp_path), "started_s": 1.0, "ended_s": 2.0, "exit_code": 0, "tenant": "a",
        }  # fmt: skip
        store.save([("fed", 1, row)], at_s=1.0, scheduled=False)
    with served(backend, tmp_path) as apis:
        assert apis.b.post("/jobs/fed/resume").status_code == 403
        assert apis.a.post("/jobs/fed/resume").json()["tenant"] == "a"
        assert apis.a.get("/jobs/fed").status_code == 200


def test_a_server_that_begins_anew_knows_whose_jobs_there_are(backend: PaperBackend, tmp_path: Path) -> None:
    with served(backend, tmp_path) as apis:
        apis.a.post("/jobs", json=train_job("mine"))
    with served(backend, tmp_path) as apis:
        assert apis.a.get("/jobs/mine").status_code == 200
        assert apis.b.get("/jobs/mine").status_code == 403


class Greedy(SchedulingPolicy):
    """A policy of one's own that gives more than there is."""

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        return {job.name: {job.preferred: 99} for job in jobs.waiting()}


class OneEach(SchedulingPolicy):
    """A policy of one's own that knows nothing of tenants."""

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        free, changes = cluster.free(jobs), {}
        for job in jobs.waiting():
            if free[job.preferred] > 0:
                free[job.preferred] -= 1
                changes[job.name] = {job.preferred: 1}
        return changes


def test_a_policy_of_ones_own_decides_within_shares() -> None:
    world = World(OneEach(), THREE)
    for number in range(4):
        world.submit(f"b{number}", "b")
    world.settle()
    assert all(world.job(f"b{number}").asked == {"cpu": 1} for number in range(4)), "what is idle is lent"
    assert world.submit("a0", "a") == [EndRun("b3")], "it is taken back, the last job first"
    assert world.end("b3", 0) == [StartRun("a0", {"cpu": 1})]
    assert world.state.policy_error == ""


def test_an_elastic_policy_of_ones_own_shrinks_what_is_borrowed() -> None:
    world = World(f"{Path(__file__).parents[2]}/examples/equal_shares.py:EqualShares", THREE)
    assert world.submit("b1", "b") == [StartRun("b1", {"cpu": 4})]
    world.settle()
    assert world.submit("a1", "a", max=2) == [ResizeRun("b1", {"cpu": 2})]
    world.settle()
    assert world.look() == [StartRun("a1", {"cpu": 2})]


# --- processes ---

EPOCHS = {"conv": 30, "adamw": 5, "nesterov": 5}
WITHIN_S = 5.0
"""Until borrowed devices are given back; a second on a machine that does nothing else."""


def _hashes_alone(rank: int) -> dict[str, str]:
    """In a forked process: the hashes that the programs print without a cluster."""
    found = {}
    for name, epochs in EPOCHS.items():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train_program.main(name, "4", str(epochs))
        found[name] = printed.getvalue().split()[1]
    return found


def given_back_s(server: Serving, name: str) -> float:
    """Seconds from the submission of a job to its start, by its history."""
    at = {event.what: event.at for event in reversed(server.client.job(name).events)}
    return at["starting"] - at["submitted"]


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_three_tenants_borrow_and_give_back_four_slots_and_their_jobs_keep_their_bits(tmp_path: Path) -> None:
    for name, token in TOKENS.items():
        (tmp_path / f"{name}.token").write_text(token + "\n")
    quotas = {"a": 2, "b": 1, "c": 1}
    entries = [f"{name}: {{quota: {{cpu: {quota}}}, token_file: {name}.token}}\n" for name, quota in quotas.items()]
    (tmp_path / "tenants.yml").write_text("".join(entries))
    gates = {name: tmp_path / f"{name}.gate" for name in EPOCHS}
    for name, gate in gates.items():
        open_gate(gate, 140 if name == "conv" else 20)  # nobody finishes before everything has happened
    args = {name: [name, "4", str(EPOCHS[name]), "turn_s=0.05", f"gate={gates[name]}"] for name in EPOCHS}
    flags = ("--devices", "cpu=4", "--interval", "300ms", "--tenants", str(tmp_path / "tenants.yml"))
    with serving(tmp_path / "state", *flags) as server, contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(server.client_of(token)) for name, token in TOKENS.items()}

        # What the others leave idle, b borrows.
        server.submit("conv", args["conv"], client=clients["b"])
        until(lambda: len(server.workers("conv")) == 4 and server.members("conv") == 4, "b to borrow all slots")
        borrowed = {each.name: each.borrowed for each in clients["b"].cluster().tenants}
        assert borrowed == {"a": {}, "b": {"cpu": 3}, "c": {}}

        # The others get theirs as soon as they submit, while b's job trains on.
        server.submit("adamw", args["adamw"], client=clients["a"], min=2, max=2)
        until(lambda: server.events("adamw").count("starting"), "a's job to start")
        assert len(server.workers("conv")) <= 2
        server.submit("nesterov", args["nesterov"], client=clients["c"], max=1)
        until(lambda: server.events("nesterov").count("starting"), "c's job to start")
        assert len(server.workers("conv")) == 1
        assert max(given_back_s(server, name) for name in ("adamw", "nesterov")) < WITHIN_S

        # A further job of b's waits, and says why; the others see nothing of it.
        server.submit("more", args["conv"], client=clients["b"])
        assert clients["b"].job("more").why == "waits: tenant b has its 1 cpu, a has borrowed none, c has borrowed none"
        with pytest.raises(NotAllowed, match="job 'more' is not of tenant a"):
            clients["a"].stop("more")
        assert [job.name for job in clients["c"].jobs()] == ["nesterov"]
        listed = forked.run([forked.PLIANT, "list", "--state", str(server.state)], cwd=Path.cwd(), timeout=60).stdout
        assert [line.split("\t")[7] for line in listed.splitlines()] == ["b", "a", "c", "b"]
        clients["b"].stop("more")

        for gate in gates.values():
            open_gate(gate, 1000)
        for name in EPOCHS:
            server.finished(name)
        hashes = {name: server.hash(name) for name in EPOCHS}
        assert not any(token in server.log for token in TOKENS.values())
    assert hashes == run(_hashes_alone, 1)[0]
