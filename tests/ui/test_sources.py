"""Where jobs are found: folders, running jobs with a real config server, a real job server over runs on paper."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import records
import uvicorn
from command import command
from pages import Home
from patience import until
from rich.console import Console

from pliant import record
from pliant.cli import keys
from pliant.cluster import View, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.http_server import uvicorn_config
from pliant.elastic.membership import Limits
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import ConfigError
from pliant.fed.report import read_curve
from pliant.jobs.api import JobsApi
from pliant.jobs.client import JobsClient, ServerAddress
from pliant.jobs.scheduler import Scheduler
from pliant.jobs.schema import job_from_json
from pliant.jobs.store import JobStore, registered
from pliant.record import Recorder
from pliant.sched.policies import make_policy
from pliant.sched.tenants import Tenant
from pliant.tokens import token_hash
from pliant.ui import widgets
from pliant.ui.cluster_chart import tenant_in_words
from pliant.ui.jobs import Watcher
from pliant.ui.sources import (
    SCAN_EVERY,
    ForegroundSource,
    RecordSource,
    StoreSource,
    config_server_control,
    open_sources,
)
from pliant.ui.terminal import neighbour, screen
from pliant.ui.widgets import job_row

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))

from paper_backend import PaperBackend

WORKERS = tuple(Worker("127.0.0.1", 10000 + number) for number in range(2))


def test_a_folder_of_records(tmp_path: Path) -> None:
    records.write(tmp_path / "a" / "record.jsonl", records.training(20))
    records.write(tmp_path / "b" / "aggregator" / "record.jsonl", records.federated(10))
    (tmp_path / "a" / "log").write_text("hello\n")
    (tmp_path / "b" / "worker").mkdir()
    (tmp_path / "b" / "worker" / "log").write_text("hello\n")
    watcher = Watcher([RecordSource(tmp_path)])
    watcher.poll()
    named = {job.name: job for job in watcher.known.jobs.values()}
    assert sorted(named) == ["a", "b/aggregator"]
    assert (named["a"].timeline.step, named["b/aggregator"].timeline.step) == (20, 10)
    assert [list(job.logs) for job in named.values()] == [["log"], ["log"]]
    assert named["a"].state(time.time()) == "silent"
    assert named["b/aggregator"].state(time.time()) == "finished"


def test_only_a_jobs_own_logs_are_shown(tmp_path: Path) -> None:
    """Others' files beside a record, links that lead out, and names that only look like a worker's are not."""
    folder, secret = tmp_path / "runs", tmp_path / "secret"
    own = {"127.0.0.1.10000@1.stdout.log", "127.0.0.1.10000@3.stderr.log", "::1.10001.stdout.log"}
    names = ["127.0.0.1:10000", "[::1]:10001", "127.0.0.1:10002", "../x:1", 7]
    records.write(folder / "run.jsonl", iter([{"kind": "workers", "step": 1, "time_s": 1.0, "workers": names}]))
    secret.write_text("not for you\n")
    for name in (*own, "127.0.0.1.10009@1.stdout.log", "notes.stdout.log", "other.log", "log"):
        (folder / name).write_text("hello\n")
    (folder / "127.0.0.1.10002@1.stdout.log").symlink_to(secret)
    os.mkfifo(folder / "127.0.0.1.10002@1.stderr.log")
    watcher = Watcher([RecordSource(folder / "run.jsonl")])
    for _ in range(SCAN_EVERY + 1):
        watcher.poll()
    (job,) = watcher.known.jobs.values()
    assert set(job.logs) == own
    # One that is replaced by a link later is not followed either.
    log = job.logs["127.0.0.1.10000@1.stdout.log"]
    log.poll()
    assert list(log.text) == ["hello"]
    (folder / "127.0.0.1.10000@1.stdout.log").unlink()
    (folder / "127.0.0.1.10000@1.stdout.log").symlink_to(secret)
    log.poll()
    assert list(log.text) == ["hello"]


def test_a_huge_or_deep_line_of_a_record_is_skipped_and_the_rest_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    deep = '{"kind": "step", "step": 1, "time_s": 1.0, "x": ' + "[" * 900 + "]" * 900 + "}\n"
    huge = '{"kind": "step", "step": 1, "time_s": 1.0, "x": "' + "y" * (5 << 20) + '"}\n'
    file.write_text(deep + huge + "[" * 100_000 + "\n")
    with file.open("a") as later:
        for fact in records.training(20):
            later.write(json.dumps(fact) + "\n")
    watcher = Watcher([RecordSource(file)])
    for _ in range(5):
        watcher.poll()
    (job,) = watcher.known.jobs.values()
    assert job.timeline.step == 20
    for text, told in ((deep, "line 2: it is nested deeper than 100 levels"), (huge, "line 2 has more than")):
        file.write_text('{"kind": "start", "step": 0, "time_s": 1.0}\n' + text)
        with pytest.raises(ConfigError, match=told):
            record.read(file)


def test_a_running_job_is_found_with_its_record_and_resized(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    record = tmp_path / "run.jsonl"
    config = ServerConfig(port=0, limits=Limits(), token="t")
    with ConfigServer(config).running() as server, closing(ConfigClient(server.url, "t")) as client:
        client.put(View(0, WORKERS, (Worker("127.0.0.1", 9999),)))
        for worker in WORKERS:
            client.ready(worker)
        with registered(
            server.url, ["train.py"], host="127.0.0.1", token="t", record=str(record), environ=environ
        ) as listed:
            watcher = Watcher([ForegroundSource(environ)])
            with Recorder(record) as recorder:
                recorder.write("step", 7, workers=2)
            watcher.poll()
            jobs = [job for job in watcher.known.jobs.values() if job.name == listed.name]
            (job,) = jobs
            assert (job.state(0), job.num_workers, job.timeline.step) == ("running", 2, 7)
            assert job.control is not None
            assert job.control.resize is not None
            assert "1 worker " in job.control.resize(1)
            view = client.get()
            assert view is not None
            assert view.size == 1
            with pytest.raises(ConfigError, match="use 1 or more"):
                job.control.resize(0)
            with pytest.raises(ConfigError, match="token"):
                config_server_control(server.url, "wrong").stop()
        watcher.poll()
        assert (job.state(0), job.control) == ("ended", None)


def _text(watcher: Watcher, wanted: str = "", height: int = 0) -> str:
    console = Console(width=140)
    with console.capture() as shown:
        console.print(screen(watcher.known, time.time(), 140, wanted, height))
    return shown.get()


def test_a_terminal_shows_what_the_page_does(tmp_path: Path) -> None:
    records.write(tmp_path / "grows" / "record.jsonl", records.training())
    records.write(tmp_path / "speech" / "record.jsonl", records.federated(30))
    (tmp_path / "grows" / "log").write_text("\x1b[31mstep 1200\x1b[0m: loss 0.2\n")
    watcher = Watcher([RecordSource(tmp_path)])
    watcher.poll()
    text = _text(watcher, "grows")
    for told in ("loss", "samples/s", "global batch", "512", "noise scale", "8 replicas on 10.0.0.1 ■■", "(AUTO)"):
        assert told in text, told
    assert "slowest 92.8 Mbit/s (10.0.0.2 → 10.0.0.3), fastest 960 Mbit/s (10.0.0.1 → 10.0.0.3)" in text
    assert "a worker was lost: 6 → 5" in text
    assert "gns: noise scale" in text, "a decision with its reason"
    assert "step 1200: loss 0.2" in text, "the newest lines of its log, without what a terminal would obey"
    text = _text(watcher, "speech")
    for told in ("accuracy in %", "round in s", "clients picked ", "fairness (Jain)", "round 30: 10 aggregated, "):
        assert told in text, told
    assert "no job is called ghost" in _text(watcher, "ghost")
    known = {job.name: job.key for job in watcher.known.jobs.values()}
    below = neighbour(watcher.known, time.time(), "", 1)
    assert {below, neighbour(watcher.known, time.time(), below, -1)} == set(known.values())
    assert neighbour(watcher.known, time.time(), below, 1) == below, "there is an end"
    for number in range(30):
        watcher.known.job(f"more {number}", f"more {number}")
    assert "and 23 more" in _text(watcher, "more 29", height=27)
    assert "more 29" in _text(watcher, "more 29", height=27), "what is chosen stays in sight"


def test_clients_have_the_same_figures_in_the_report_on_the_page_and_in_top(tmp_path: Path) -> None:
    path = records.write(tmp_path / "speech" / "record.jsonl", records.federated(30))
    watcher = Watcher([RecordSource(tmp_path)])
    watcher.poll()
    (job,) = watcher.known.jobs.values()
    assert job.timeline.federated is not None
    figures = read_curve(path).clients
    assert figures is not None
    assert job.timeline.federated.clients.figures() == figures
    in_terminal, on_page = _text(watcher, "speech"), widgets.figure_table(figures.facts())
    report = command("report", str(path), "--json", str(tmp_path / "report.json"))
    top = command("top", str(tmp_path), "--json")
    for name, told in figures.facts():
        for shown in (in_terminal, on_page, report.stdout):
            assert told in shown, name
    assert f"{figures.picked.clients} of 300; {figures.picked.never} never" in in_terminal
    (reported,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert json.loads(top.stdout)["jobs"][0]["clients"] == reported["clients"]
    # The control: another round, and all of them say something else.
    facts = list(records.federated(31))
    records.write(path, iter(facts[:-1]))
    assert read_curve(path).clients != figures


def test_keys_are_taken_as_they_are_pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with keys.pressed() as key:
            os.write(ours, b"\x1b[B")
            assert key(10, lambda: False) == keys.DOWN
            assert key(0.01, lambda: False) == ""
            assert key(10, lambda: True) == "", "a signal has come"
            os.write(ours, b"q")
            assert key(10, lambda: False) == "q"
    os.close(ours)


@contextmanager
def job_server(folder: Path, backend: PaperBackend, tenants: Sequence[Tenant] = ()) -> Iterator[ServerAddress]:
    """A job server in this process."""
    with JobStore(folder) as store:
        scheduler = Scheduler(backend, make_policy("easyscale-heter"), store, interval_s=0.05, tenants=tenants)
        with scheduler.running():
            api = JobsApi(scheduler, "t", tenants)
            server = uvicorn.Server(uvicorn_config(api.app))
            config = server.config
            config.host, config.port = "127.0.0.1", 0
            thread = threading.Thread(target=server.run, name="pliant-test-serve", daemon=True)
            thread.start()
            until(lambda: server.started, "the server")
            port = server.servers[0].sockets[0].getsockname()[1]
            yield ServerAddress(url=f"http://127.0.0.1:{port}", token="t")
            api.close()
            server.should_exit = True
            thread.join()


def source(server: ServerAddress) -> StoreSource:
    return StoreSource(server.url, lambda: JobsClient(server, timeout_s=5), is_local=False)


def test_a_server_tells_whose_jobs_there_are_and_who_has_what(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    backend, token = PaperBackend(cpu=4), "the-token-of-vision"
    tenants = (Tenant(name="vision", quota={"cpu": 3}, token_sha256=token_hash(token)), Tenant(name="speech"))
    with job_server(tmp_path, backend, tenants) as server:
        with JobsClient(server.model_copy(update={"token": token})) as client:
            client.submit(job_from_json({"name": "one", "program": "/train.py", "directory": "/", "replicas": 2}))
        watcher = Watcher([source(server)])
        watcher.poll()
        (job,) = watcher.known.jobs.values()
        assert job.tenant == "vision"
        assert "vision: 1 of 3 cpu; speech: 0 of 1 cpu" in _text(watcher)
        status = next(iter(watcher.known.clusters.values())).status
        assert status is not None
        vision = status.tenants[0].model_copy(update={"has": {"cpu": 4}, "borrowed": {"cpu": 1}})
        assert tenant_in_words(vision) == "vision: 4 of 3 cpu, 1 borrowed"
        assert "vision: " in job_row(job, 0.0)


def test_a_server_tells_which_job_had_which_devices(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    backend = PaperBackend(cpu=4)
    with job_server(tmp_path, backend) as server, JobsClient(server) as client:
        client.submit(job_from_json({"name": "one", "program": "/train.py", "directory": "/", "replicas": 2}))
        until(lambda: "one" in backend.runs, "its start")
        backend.runs["one"].step(1, 3)
        until(lambda: client.job("one").state == "running", "its first step")
        watcher = Watcher([source(server)])
        watcher.poll()
        (job,) = watcher.known.jobs.values()
        assert (job.name, job.state(0)) == ("one", "running")
        assert job.devices.startswith("cpu=")
        assert {"submitted", "decision", "starting", "running"} <= {each.what for each in job.cluster_events}
        assert any(each.devices.get("cpu") for each in job.cluster_events)
        (found,) = watcher.known.clusters.values()
        assert found.status is not None
        assert found.status.devices == {"cpu": 4}
        text = _text(watcher)
        assert "one" in text
        assert "of 4 free" in text
        assert job.control is not None
        assert job.control.resize is None, "the policy decides on its devices"
        watcher.known.problems.clear()
        watcher._sources = [source(server.model_copy(update={"token": "wrong"}))]
        watcher._sources[0]._keys = [job.key]
        watcher.poll()
        assert "token" in next(iter(watcher.known.problems.values()))
        assert (job.control, watcher.known.clusters) == (None, {}), "without an answer the page cannot act"
        watcher._sources = [source(server)]
        watcher.poll()
        assert job.control is not None
        job.control.stop()
        until(lambda: client.job("one").is_over, "its end")
        watcher.poll()
        assert job.control is None
        assert open_sources([server.url], {"PLIANT_TOKEN": "t"}), "an address is asked what it is"
        with pytest.raises(ConfigError, match="the token we gave is not its own: set PLIANT_TOKEN"):
            open_sources([server.url], {"PLIANT_TOKEN": "wrong"})
    watcher.poll()
    assert "no server answers" in next(iter(watcher.known.problems.values()))
    stored = Watcher(open_sources([str(tmp_path)], {}))
    stored.poll()
    assert [(each.name, each.state(0)) for each in stored.known.jobs.values()] == [("one", "stopped")], "from the store"


@pytest.mark.processes
def test_top_follows_a_record_in_a_terminal(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with Recorder(path) as recorder:
        recorder.write("start", 0, replicas=2, workers=2, batch_size=8)
        recorder.write("step", 41, workers=2, samples_per_s=123.0, values={"loss": 0.5})
        ours, theirs = pty.openpty()
        process = home.start("top", str(path), "--interval", "100ms", stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = ""

        def sees(what: str) -> bool:
            nonlocal shown
            if select.select([ours], [], [], 0.05)[0]:
                shown += os.read(ours, 65536).decode(errors="replace")
            return what in shown

        until(lambda: sees("0.5"), "the first graph")
        assert "41" in shown
        recorder.write("step", 4242, workers=2, samples_per_s=123.0, values={"loss": 0.25})
        until(lambda: sees("4242"), "the next step")
        process.send_signal(signal.SIGINT)
        until(lambda: sees("\x1b[?1049l"), "the terminal as it was")
        assert process.wait(timeout=20) == 0
        os.close(ours)
    piped = home.start("top", str(path))
    said, _ = piped.communicate(timeout=30)
    assert piped.returncode == 0
    assert "4242" in said
    assert "\x1b" not in said
