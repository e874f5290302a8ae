"""The scheduler's thread, its store and its API, with runs on paper: no processes, and all of it in milliseconds."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from paper_backend import PaperBackend, train_job
from patience import until
from starlette.testclient import TestClient

from pliant.errors import ConfigError, NameTaken
from pliant.fed.config import FedConfig
from pliant.fed.jobfile import FederatedJob, FedPlacement
from pliant.jobs.api import JobsApi, openapi
from pliant.jobs.rules import DropWorkers
from pliant.jobs.scheduler import TAIL_BYTES, RecordTail, Scheduler
from pliant.jobs.schema import JobSpec, job_from_json
from pliant.jobs.status import JobDetail, JobStatus
from pliant.jobs.store import JobStore
from pliant.sched import policies as schedulers
from pliant.sched.cluster import Changes, Cluster, ClusterJobs, SchedulingPolicy
from pliant.sched.throughput import MIN_STEPS, SKIPPED_STEPS, Throughput

TOKEN = {"Authorization": "Bearer t"}


def spec(name: str, **more: Any) -> JobSpec:
    return job_from_json(train_job(name, **more))


@contextlib.contextmanager
def scheduling(
    backend: PaperBackend, folder: Path, interval_s: float = 0.05, policy: SchedulingPolicy | None = None
) -> Iterator[Scheduler]:
    policy = policy or schedulers.make_policy("easyscale-heter")
    with JobStore(folder) as book:
        scheduler = Scheduler(backend, policy, book, interval_s=interval_s)
        with scheduler.running():
            yield scheduler


@pytest.fixture
def backend() -> PaperBackend:
    return PaperBackend(cpu=4)


def state_of(scheduler: Scheduler, name: str) -> str:
    return str(scheduler.detail(name).state)


# --- the thread ---


def test_a_job_runs_grows_by_its_record_and_ends(backend: PaperBackend, tmp_path: Path, no_leaks: None) -> None:
    with scheduling(backend, tmp_path) as scheduler:
        assert scheduler.submit(spec("a")).state == "starting"
        run = backend.runs["a"]
        run.step(1, 10, 0.4)
        until(lambda: run.wanted == {"cpu": 2})
        assert scheduler.detail("a").step == 10
        run.step(11, 10, 0.2)
        until(lambda: run.wanted == {"cpu": 4})
        run.step(21, 10, 0.1)
        until(lambda: scheduler.statuses()[0].steps_per_s == pytest.approx(10))
        run.write({"kind": "end", "step": 30})
        run.finish(0)
        until(lambda: state_of(scheduler, "a") == "finished")
        told = [event.what for event in scheduler.detail("a").events]
        assert told == ["submitted", "decision", "starting", "running", "decision", "decision", "finished"]


def test_a_reservation_is_answered_when_the_devices_are_free(backend: PaperBackend, tmp_path: Path) -> None:
    with scheduling(backend, tmp_path) as scheduler:
        scheduler.submit(spec("a", min=4))
        answer = scheduler.reserve({"cpu": 1})
        assert answer["reserved"] == {"cpu": 1}
        assert answer["took_s"] < 0.5
        assert backend.runs["a"].told[-1] == "resize {'cpu': 3}"
        assert scheduler.cluster()["free"] == {"cpu": 0}


@pytest.mark.parametrize("wanted", [1, 4])
def test_who_does_not_leave_is_killed_within_the_second(backend: PaperBackend, tmp_path: Path, wanted: int) -> None:
    with scheduling(backend, tmp_path) as scheduler:
        scheduler.submit(spec("a", min=4))
        backend.runs["a"].is_slow = True
        assert 0.3 < scheduler.reserve({"cpu": wanted})["took_s"] < 1.0
        assert backend.runs["a"].told[-1] == ("drop" if wanted == 1 else "kill")


def test_a_runner_that_is_not_up_is_told_again(backend: PaperBackend, tmp_path: Path) -> None:
    with scheduling(backend, tmp_path) as scheduler:
        scheduler.submit(spec("a"))
        run = backend.runs["a"]
        run.is_up = False
        scheduler.stop("a")
        assert run.told == []
        run.is_up = True
        until(lambda: state_of(scheduler, "a") == "stopped")
        assert run.told == ["end"]


def test_a_job_that_cannot_be_started_has_failed(backend: PaperBackend, tmp_path: Path) -> None:
    backend.refuses = "no such program"
    with scheduling(backend, tmp_path) as scheduler:
        scheduler.submit(spec("a"))
        assert state_of(scheduler, "a") == "failed"
        assert "no such program" in scheduler.detail("a").why


def test_a_directory_of_a_forgotten_job_is_not_taken_for_a_new_ones(backend: PaperBackend, tmp_path: Path) -> None:
    (tmp_path / "jobs" / "a" / "checkpoints").mkdir(parents=True)
    with scheduling(backend, tmp_path) as scheduler, pytest.raises(NameTaken, match="remove it"):
        scheduler.submit(spec("a"))


def test_devices_that_come_are_used(backend: PaperBackend, tmp_path: Path) -> None:
    backend.counts = {"cpu": 1}
    with scheduling(backend, tmp_path) as scheduler:
        scheduler.submit(spec("a"))
        scheduler.submit(spec("b"))
        assert state_of(scheduler, "b") == "waiting"
        backend.counts = {"cpu": 2}
        until(lambda: state_of(scheduler, "b") == "starting")


class Moody(SchedulingPolicy):
    """Gives one device to each job, unless it is in a bad mood."""

    mood: ClassVar = ""

    def allocate(self, jobs: ClusterJobs, cluster: Cluster, now: float) -> Changes:
        if self.mood == "raises":
            raise RuntimeError("not today")
        size = 9 if self.mood == "greedy" else 1
        return {job.name: {job.preferred: size} for job in jobs.waiting()}


def test_a_policy_that_fails_leaves_what_was_decided_and_says_why(
    backend: PaperBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scheduling(backend, tmp_path, policy=Moody()) as scheduler:
        scheduler.submit(spec("a"))
        for mood, why in (
            ("raises", "RuntimeError: not today (test_scheduler.py:"),
            ("greedy", "b was given 9 devices"),
        ):
            monkeypatch.setattr(Moody, "mood", mood)
            name = "b" if mood == "raises" else "c"
            assert scheduler.submit(spec(name)).state == "waiting"
            assert why in scheduler.cluster()["policy_error"]
            assert why in str(caplog.text) or until(lambda why=why: why in caplog.text)
        assert (scheduler.cluster()["policy"], scheduler.cluster()["jobs"]) == ("Moody", {"a": {"cpu": 1}})
        monkeypatch.setattr(Moody, "mood", "")
        until(lambda: state_of(scheduler, "c") == "starting")
        assert scheduler.cluster()["policy_error"] == ""


def test_a_federated_job_is_scheduled_stopped_resumed_and_forgotten_like_any_other(
    backend: PaperBackend, tmp_path: Path
) -> None:
    placement = FedPlacement(workers=("3",), log_path=str(tmp_path))
    job = FederatedJob(config=FedConfig(name="fed", rounds=9), placement=placement, directory="/")
    with scheduling(backend, tmp_path / "state") as scheduler:
        assert scheduler.submit(job).devices == {"cpu": 3}
        with pytest.raises(NameTaken, match="taken by a job that is starting"):
            scheduler.submit(job)
        run = backend.runs["fed"]
        assert run.run.folder.parent == tmp_path / "logs" / "fed"
        run.write({"kind": "round", "step": 1, "round": 1, "clock_s": 7.5}, {"kind": "end", "step": 1})
        until(lambda: state_of(scheduler, "fed") == "running")
        scheduler.stop("fed")
        until(lambda: state_of(scheduler, "fed") == "stopped")  # the record's `end` does not mean that it has finished
        status = scheduler.resume("fed")
        assert (status.state, status.step) == ("starting", 1)
        backend.runs["fed"].finish(0)
        until(lambda: state_of(scheduler, "fed") == "finished")
        assert scheduler.submit(job).state == "starting", "an ended federated job gives its name to the next one"
        assert backend.runs["fed"].run.folder != run.run.folder
        with pytest.raises(ConfigError, match="fed is starting: `pliant stop fed` ends it first"):
            scheduler.forget("fed")
        scheduler.stop("fed", kill=True)
        until(lambda: state_of(scheduler, "fed") == "stopped")
        scheduler.forget("fed")
        assert scheduler.statuses() == []


def test_a_scheduler_without_jobs_says_that_it_is_idle(backend: PaperBackend, tmp_path: Path) -> None:
    now_s = [0.0]
    said_so: list[bool] = []
    with JobStore(tmp_path) as store:
        scheduler = Scheduler(backend, schedulers.make_policy("easyscale-heter"), store, clock=lambda: now_s[0])
        scheduler.when_idle(60.0, lambda: said_so.append(True))
        scheduler.submit(spec("a"))
        for now_s[0], is_idle in ((100.0, False), (150.0, False), (211.0, True)):
            scheduler._look()
            assert bool(said_so) is is_idle
            if now_s[0] == 100.0:
                backend.runs["a"].finish(0)


# --- starting again ---


def test_a_new_scheduler_takes_up_runs_and_sees_what_it_missed(backend: PaperBackend, tmp_path: Path) -> None:
    with scheduling(backend, tmp_path) as first:
        for name in ("goes-on", "ended", "failed", "lost"):
            first.submit(spec(name, max=1))
        backend.runs["goes-on"].step(1, 3)
        until(lambda: state_of(first, "goes-on") == "running")
    backend.runs["ended"].write({"kind": "end", "step": 9})
    backend.runs["ended"].finish(0)
    backend.runs["failed"].finish(3)
    lost = backend.runs.pop("lost")
    with scheduling(backend, tmp_path) as second:
        assert state_of(second, "goes-on") == "running"
        until(
            lambda: {"resize {'cpu': 1}"} == set(backend.runs["goes-on"].told)
        )  # said again: it may not have been heard
        until(lambda: state_of(second, "ended") == "finished")
        until(lambda: second.detail("failed").exit_code == 3)
        assert backend.runs["lost"].run.number > lost.run.number, "its run was lost, and another one started"
        backend.runs["goes-on"].step(4, 8)
        until(lambda: second.detail("goes-on").step == 11)
        second.reserve({"cpu": 1})
    with scheduling(backend, tmp_path) as third:
        assert third.cluster()["reserved"] == {"cpu": 1}


def test_a_damaged_job_does_not_hide_the_others(backend: PaperBackend, tmp_path: Path) -> None:
    with scheduling(backend, tmp_path) as scheduler:
        scheduler.submit(spec("good", max=1))
    with JobStore(tmp_path) as store:
        store.save([("bad", 9, {"spec": {"kind": "train", "replicas": "x"}, "state": "waiting"})], at_s=0.0)
    with scheduling(backend, tmp_path) as scheduler:
        assert [status.name for status in scheduler.statuses()] == ["good"]


def test_a_job_that_was_told_to_end_is_told_again(backend: PaperBackend, tmp_path: Path) -> None:
    with scheduling(backend, tmp_path) as first:
        first.submit(spec("a"))
        run = backend.runs["a"]
        run.is_slow = True
        first.stop("a")
    run.is_slow = False
    with scheduling(backend, tmp_path) as second:
        until(lambda: state_of(second, "a") == "stopped")
    assert run.told == ["end", "end"]


def test_what_cannot_be_written_down_is_not_done_before_it_can(
    backend: PaperBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduling(backend, tmp_path) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(
                JobStore, "save", lambda *_, **__: (_ for _ in ()).throw(sqlite3.OperationalError("disk full"))
            )
            with pytest.raises(sqlite3.OperationalError):
                scheduler.submit(spec("a"))
            assert backend.runs == {}
        until(lambda: "a" in backend.runs)


def test_a_disk_that_stays_full_is_one_line_in_the_log(
    backend: PaperBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_tries: list[int] = []

    def refuse(*_: object, **__: object) -> None:
        num_tries.append(len(num_tries))
        raise sqlite3.OperationalError("database or disk is full")

    logging.getLogger("pliant").propagate = True
    with scheduling(backend, tmp_path) as scheduler, caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(JobStore, "save", refuse)
            with pytest.raises(sqlite3.OperationalError):
                scheduler.submit(spec("a"))
            until(lambda: len(num_tries) > 4)
        until(lambda: "a" in backend.runs)
        until(lambda: len(caplog.messages) > 1)
    assert caplog.messages == [
        "the scheduler's turn failed: database or disk is full; trying again", "the scheduler works again"
    ]  # fmt: skip
    assert "Traceback" not in caplog.text


def test_workers_that_end_before_a_full_disk_has_room_need_not_be_killed(
    backend: PaperBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    save = JobStore.save

    def save_if_there_is_room(*given: Any, **more: Any) -> None:
        if full.is_set():
            raise sqlite3.OperationalError("database or disk is full")
        save(*given, **more)

    monkeypatch.setattr(JobStore, "save", save_if_there_is_room)
    with scheduling(backend, tmp_path) as scheduler:
        scheduler.submit(spec("a", min=4))
        run = backend.runs["a"]
        run.is_slow = True
        with ThreadPoolExecutor(1) as pool:
            reserved = pool.submit(scheduler.reserve, {"cpu": 1})
            until(lambda: run.wanted == {"cpu": 3})
            full.set()
            until(lambda: any(isinstance(action, DropWorkers) for action in scheduler._unsaved))
            run.finish(0)
            with pytest.raises(sqlite3.OperationalError):
                scheduler.reserve({"cpu": 1})  # it sees that the run has ended
            full.clear()
            scheduler.submit(spec("b"))
            assert reserved.result(20)["reserved"] == {"cpu": 1}
        assert "b" in backend.runs
        assert "drop" not in run.told


# --- the API ---


@pytest.fixture
def api(backend: PaperBackend, tmp_path: Path) -> Iterator[TestClient]:
    with scheduling(backend, tmp_path) as scheduler:
        yield TestClient(JobsApi(scheduler, "t").app, headers=TOKEN)


def test_jobs_over_http(api: TestClient, backend: PaperBackend) -> None:
    made = api.post("/jobs", json=train_job("a"))
    assert made.status_code == 201
    JobStatus.model_validate(made.json())
    assert api.post("/jobs", json=train_job("a")).status_code == 409
    assert [job["name"] for job in api.get("/jobs").json()["jobs"]] == ["a"]
    detail = JobDetail.model_validate(api.get("/jobs/a").json())
    assert detail.events[0].what == "submitted"
    assert api.delete("/jobs/a").status_code == 202
    until(lambda: api.get("/jobs/a").json()["state"] == "stopped")
    assert api.delete("/jobs/a").status_code == 202
    assert api.get("/cluster").json() == {
        "devices": {"cpu": 4}, "reserved": {}, "free": {"cpu": 4}, "jobs": {}, "policy": "easyscale-heter", "policy_error": "",
        "tenants": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("POST", "/jobs", train_job("a", replicas=0), 422, "replicas"),
        ("POST", "/jobs", {**train_job("a"), "colour": 1}, 422, "colour"),
        ("POST", "/jobs", train_job("a", devices=["v100"]), 422, "v100"),
        ("POST", "/jobs", [1], 422, "object"),
        ("POST", "/jobs", b"{", 422, "JSON"),
        ("POST", "/jobs", b"x" * (1 << 21), 413, "larger"),
        ("GET", "/jobs/none", None, 404, "none"),
        ("DELETE", "/jobs/none", None, 404, "none"),
        ("DELETE", "/jobs/none?kill=perhaps", None, 422, "perhaps"),
        ("GET", "/jobs/none/logs", None, 404, "none"),
        ("GET", "/jobs/none/logs?begin=-1", None, 422, "begin"),
        ("PUT", "/reserve", {"cpu": 9}, 422, "cpu=9"),
        ("PUT", "/reserve", {"gpu": 1}, 422, "gpu=1"),
        ("PUT", "/reserve", {"cpu": "two"}, 422, "two"),
        ("PUT", "/reserve", {"cpu": True}, 422, "True"),
        ("POST", "/cluster", None, 405, "Method"),
        ("GET", "/nowhere", None, 404, "Not Found"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    api: TestClient, method: str, path: str, body: Any, status: int, word: str
) -> None:
    answer = api.request(method, path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
    assert answer.status_code == status
    assert word in answer.json()["error"]


def test_only_who_knows_the_token_is_let_in(api: TestClient) -> None:
    assert api.get("/jobs", headers={"Authorization": "Bearer x"}).status_code == 401
    assert api.get("/healthz", headers={"Authorization": ""}).json() == {"status": "ok"}


def test_logs_come_by_bytes_and_never_in_half_a_character(api: TestClient, backend: PaperBackend) -> None:
    api.post("/jobs", json=train_job("a"))
    run = backend.runs["a"]
    assert api.get("/jobs/a/logs").json() == {"text": "", "end": 0, "over": False}
    text = "Schritt 1: für alle\n".encode()
    run.run.log.write_bytes(text[: text.index(b"\xbc")])  # in the middle of the u with dots
    assert api.get("/jobs/a/logs?wait_s=5").json() == {"text": "Schritt 1: f", "end": 12, "over": False}
    run.run.log.write_bytes(text)
    assert api.get("/jobs/a/logs?begin=12&wait_s=5").json() == {"text": "ür alle\n", "end": len(text), "over": False}
    run.finish(0)
    until(lambda: bool(api.get(f"/jobs/a/logs?begin={len(text)}&wait_s=5").json()["over"]))


def test_the_description_names_every_route(api: TestClient) -> None:
    described = api.get("/openapi.json").json()
    assert described == openapi()
    routes = {(route.path, method) for route in _routes(api) for method in route.methods - {"HEAD"}}
    told = {(path, method.upper()) for path, methods in described["paths"].items() for method in methods}
    assert told == routes
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert set(_references(described)) <= known
    assert described["components"]["schemas"]["TrainJob"]["required"][:2] == ["name", "program"]


def _routes(api: TestClient) -> Any:
    return api.app._app.routes  # type: ignore[attr-defined]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (each for key, each in value.items() if key == "$ref")
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _references(each)


# --- speeds ---


def measured(replicas: int, devices: dict[str, int], step_s: float) -> Throughput:
    found = Throughput(replicas)
    found.place(devices)
    for _ in range(SKIPPED_STEPS + MIN_STEPS):
        found.add_step(sum(devices.values()), step_s)
    return found


def test_the_speed_of_a_type_is_what_makes_the_planners_step_as_long() -> None:
    found = measured(4, {"v100": 3}, 0.5)  # two replicas in turn on one of the three
    assert found.steps_per_s == pytest.approx(2)
    assert [(kind.name, kind.speed) for kind in found.types(["v100"], {})] == [("v100", pytest.approx(4))]


def test_what_was_not_measured_is_as_the_user_said_in_the_scale_of_what_was() -> None:
    found = measured(4, {"v100": 4}, 0.5)
    speeds = {kind.name: kind.speed for kind in found.types(["v100", "t4", "p100"], {"v100": 10, "t4": 5})}
    assert speeds == {"v100": pytest.approx(2), "t4": pytest.approx(1), "p100": pytest.approx(2)}


def test_a_slow_first_step_and_one_hiccup_do_not_count() -> None:
    found = Throughput(2)
    found.place({"cpu": 2})
    for step_s in (9.0, 9.0, 0.1, 0.1, 7.0, 0.1, 0.1):
        found.add_step(2, step_s)
    assert found.steps_per_s == pytest.approx(10)


def test_speeds_survive_as_json() -> None:
    found = measured(4, {"v100": 2}, 0.5)
    again = Throughput.from_json(4, found.to_json())
    assert again.known == found.known
    assert again.types(["v100"], {}) == found.types(["v100"], {})


# --- records ---


def test_a_record_is_read_as_it_grows_and_half_a_line_is_left(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    tail = RecordTail(path)
    assert tail.read() == []
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    assert [fact["step"] for fact in tail.read()] == [1]
    with path.open("a") as file:
        file.write('ep", "step": 2}\nnonsense\n[]\n{"kind": "end", "step": 3}\n')
    assert [fact["step"] for fact in tail.read()] == [2, 3]
    assert tail.read() == []


def test_a_line_that_is_longer_than_what_is_read_at_once_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    tail = RecordTail(path)
    path.write_text(
        '{"kind": "step", "step": 1, "padding": "' + "x" * (2 * TAIL_BYTES) + '"}\n{"kind": "end", "step": 2}\n'
    )
    found = [fact for _ in range(4) for fact in tail.read()]
    assert [fact["step"] for fact in found] == [2]
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 3}\n')
    assert [fact["step"] for fact in tail.read()] == [3]


def test_of_a_long_record_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text("".join(f'{{"kind": "step", "step": {step:07d}1}}\n' for step in range(2)))
    line = '{"kind": "step", "step": 5, "padding": "' + "x" * 1000 + '"}\n'
    path.write_text(line * (2 * TAIL_BYTES // len(line)))
    found = RecordTail(path).read()
    assert 0 < len(found) <= TAIL_BYTES // len(line)
    assert RecordTail(path, path.stat().st_size).read() == []
