"""Where jobs are found: folders, running jobs with a real config server, a real cluster server over runs on paper."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import records
import uvicorn
from pages import Home, until
from rich.console import Console

from pliant.cluster import View, Worker
from pliant.dashboard.clusters import AtCluster
from pliant.dashboard.jobs import ByCluster, ByConfigServer
from pliant.dashboard.records import Records
from pliant.dashboard.sources import Here, sources
from pliant.dashboard.terminal import screen
from pliant.dashboard.watch import Watch
from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import Limits
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.elastic.serving import settings
from pliant.errors import ConfigError
from pliant.launch.registry import registered
from pliant.record import Recorder
from pliant.sched.live.book import Book
from pliant.sched.live.client import LiveClient, Server
from pliant.sched.live.jobfile import JobSpec
from pliant.sched.live.scheduler import Scheduler
from pliant.sched.live.web import LiveWeb
from pliant.sched.schedulers import registry as schedulers

sys.path.insert(0, str(Path(__file__).parents[1] / "sched"))

from paper import PaperGround

WORKERS = tuple(Worker("127.0.0.1", 10000 + number) for number in range(2))


def test_a_folder_of_records(tmp_path: Path) -> None:
    records.write(tmp_path / "a" / "record.jsonl", records.training(20))
    records.write(tmp_path / "b" / "aggregator" / "record.jsonl", records.federated(10))
    (tmp_path / "a" / "log").write_text("hello\n")
    (tmp_path / "b" / "worker").mkdir()
    (tmp_path / "b" / "worker" / "log_1").write_text("hello\n")
    watch = Watch([Records(tmp_path)])
    watch.look()
    named = {job.name: job for job in watch.seen.jobs.values()}
    assert sorted(named) == ["a", "b/aggregator"]
    assert (named["a"].story.step, named["b/aggregator"].story.step) == (20, 10)
    assert [list(job.logs) for job in named.values()] == [["log"], ["log_1"]]
    assert named["a"].state(time.time()) == "silent"
    assert named["b/aggregator"].state(time.time()) == "finished"


def test_a_running_job_is_found_with_its_record_and_resized(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    record = tmp_path / "run.jsonl"
    config = ServerConfig(port=0, limits=Limits(), token="t")
    with ConfigServer(config).running() as server, closing(ConfigClient(server.url, "t")) as client:
        client.put(View(0, WORKERS, (Worker("127.0.0.1", 9999),)))
        for worker in WORKERS:
            client.ready(worker)
        with registered(
            server.url, ["train.py"], host="127.0.0.1", token="t", record=str(record), environ=environ
        ) as listed:
            watch = Watch([Here(environ)])
            with Recorder(record) as recorder:
                recorder.write("step", 7, workers=2)
            watch.look()
            jobs = [job for job in watch.seen.jobs.values() if job.name == listed.id]
            (job,) = jobs
            assert (job.state(0), job.num_workers, job.story.step) == ("running", 2, 7)
            assert isinstance(job.control, ByConfigServer)
            assert "1 worker " in job.control.resize(1)
            view = client.get()
            assert view is not None
            assert view.size == 1
            with pytest.raises(ConfigError, match="use 1 or more"):
                job.control.resize(0)
            with pytest.raises(ConfigError, match="token"):
                ByConfigServer(server.url, "wrong").resize(2)
        watch.look()
        assert (job.state(0), job.control) == ("ended", None)


def _text(watch: Watch) -> str:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(screen(watch.seen, time.time(), 100))
    return shown.get()


@contextmanager
def cluster(folder: Path, ground: PaperGround) -> Iterator[Server]:
    """A server of a cluster in this process."""
    with Book(folder) as book:
        scheduler = Scheduler(ground, schedulers.make("easyscale-heter"), book, folder, interval_s=0.05)
        with scheduler.running():
            web = LiveWeb(scheduler, "t")
            server = uvicorn.Server(settings(web.app))
            config = server.config
            config.host, config.port = "127.0.0.1", 0
            thread = threading.Thread(target=server.run, name="pliant-test-serve", daemon=True)
            thread.start()
            until(lambda: server.started, "the server")
            port = server.servers[0].sockets[0].getsockname()[1]
            yield Server(url=f"http://127.0.0.1:{port}", token="t")
            web.close()
            server.should_exit = True
            thread.join()


def test_a_cluster_tells_who_had_what(tmp_path: Path) -> None:
    ground = PaperGround(cpu=4)
    with cluster(tmp_path, ground) as server, LiveClient(server) as client:
        client.submit(JobSpec.from_json({"name": "one", "program": "/train.py", "directory": "/", "replicas": 2}))
        until(lambda: "one" in ground.runs, "its start")
        ground.runs["one"].step(1, 3)
        until(lambda: client.job("one").state == "running", "its first step")
        watch = Watch([AtCluster(server, None)])
        watch.look()
        (job,) = watch.seen.jobs.values()
        assert (job.name, job.state(0)) == ("one", "running")
        assert job.devices.startswith("cpu=")
        assert {"submitted", "decision", "starting", "running"} <= {each.what for each in job.happenings}
        assert any(each.devices.get("cpu") for each in job.happenings)
        (found,) = watch.seen.clusters.values()
        assert found.status is not None
        assert found.status.devices == {"cpu": 4}
        text = _text(watch)
        assert "one" in text
        assert "of 4 free" in text
        assert isinstance(job.control, ByCluster)
        watch.seen.problems.clear()
        AtCluster(server.model_copy(update={"token": "wrong"}), None).look(watch.seen)
        assert "token" in next(iter(watch.seen.problems.values()))
        assert (job.control, watch.seen.clusters) == (None, {}), "who cannot ask does not know, and cannot act"
        watch.look()
        assert isinstance(job.control, ByCluster)
        job.control.stop()
        until(lambda: client.job("one").is_over, "its end")
        watch.look()
        assert job.control is None
        assert sources([server.url], {"PLIANT_TOKEN": "t"}), "an address is asked what it is"
    watch.look()
    assert "no server answers" in next(iter(watch.seen.problems.values()))


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

        until(lambda: sees("0.5"), "the first picture")
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
