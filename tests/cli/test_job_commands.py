"""The commands that talk to the cluster's server: against a real one; its absence and its nonsense from a canned one."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from patience import until

from pliant.cli.connection import devices_text
from pliant.duration import span_text
from pliant.errors import ConfigError, ServerUnavailable
from pliant.jobs.client import JobsClient, ServerAddress, find_server
from pliant.tokens import state_directory

MAIN = "from pliant.cli.main import main; main()"
DEADLINE_S = 60.0
# In sh, so that nothing has to import torch.
PROGRAMS = {
    "fails": 'printf "%s\\n" bad "$@"; seq 20000; exit 3',
    "waits": "echo begun; while [ ! -e go ]; do sleep 0.05; done; echo gone on",
    "endless": "exec sleep 600",
}

Said = tuple[int, str, str]
"""Exit code, stdout, stderr."""


class Cluster:
    """A server with a state directory, which may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = state_directory({"XDG_STATE_HOME": str(folder / "state")}) / "server.json"

    def start(self) -> None:
        self.file.unlink(missing_ok=True)
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, "serve", "--devices", "cpu=3", "--port", "0"], stdout=log, stderr=log
            )
        until(self.file.exists, "the server is up")

    def close(self) -> None:
        with JobsClient(find_server(state=str(self.file.parent))) as client:
            names = [job.name for job in client.jobs() if not job.is_over]
            for name in names:
                client.stop(name, kill=True)
            until(lambda: all(client.job(name).is_over for name in names), "the jobs are gone")
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def cluster(pliant: Callable[..., Said], tmp_path: Path) -> Iterator[Cluster]:
    """A server with three devices; `pliant` finds it."""
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.sh").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / f"{name}.sh").chmod(0o755)
        (tmp_path / f"{name}.yml").write_text(f"program: {name}.sh\nargs: [a b, 010]\nreplicas: 1\nflags: [--plain]\n")
    running = Cluster(tmp_path)
    running.start()
    yield running
    running.close()


def on_terminal(*words: str, term: str = "dumb") -> str:
    """What a command says on a terminal."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": "100", "TERM": term}
    with subprocess.Popen([sys.executable, "-c", MAIN, *words], stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # EIO: the other side is closed
            while data := os.read(ours, 4096):
                said += data
        os.close(ours)
        assert process.wait(20) == 0, said.decode()
    return said.decode().replace("\r\n", "\n")


def assert_a_reader_may_go(*words: str) -> None:
    """As in `pliant ... | head -1`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", MAIN, *words], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(20) in (0, 128 + signal.SIGPIPE)  # by how much the pipe holds


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_day_at_the_cluster(cluster: Cluster, pliant: Callable[..., Said], tmp_path: Path) -> None:
    assert pliant("list") == (0, "", "")
    assert pliant("submit", "fails.yml", "waits.yml") == (0, "fails-1\nwaits-1\n", "")
    assert pliant("submit", "endless.yml", "--name", "other", "--json", "submitted.json") == (0, "other\n", "")
    assert [job["name"] for job in json.loads((tmp_path / "submitted.json").read_text())["jobs"]] == ["other"]
    (tmp_path / "large.yml").write_text("program: endless.sh\nreplicas: 5\nmin: 4\n")
    (tmp_path / "other.yml").write_text("program: endless.sh\nreplicas: 1\ndevices: [v100]\n")
    assert pliant("submit", "fails.yml", "large.yml", "other.yml") == (
        2,
        "",
        "pliant: large.yml:3: min 4: the cluster has 3 cpu; use 3 or less\n"
        "other.yml:3: devices v100: the cluster has 3 cpu; name one of these types\n",
    )
    (tmp_path / "named.yml").write_text("program: endless.sh\nreplicas: 1\nname: third\n")
    for words, taken in (("endless.yml --name other", "other"), ("named.yml fails.yml named.yml", "third")):
        code, out, err = pliant("submit", *words.split())
        assert (code, out) == (2, "")
        assert err.startswith(f"pliant: the name {taken} is taken: choose another with --name")
    assert pliant("list", "-q") == (0, "fails-1\nwaits-1\nother\n", "")

    # Who follows a log is not disturbed by the end of the server.
    following = subprocess.Popen([sys.executable, "-c", MAIN, "logs", "-f", "waits-1"], stdout=subprocess.PIPE)
    assert following.stdout is not None
    lines = iter(following.stdout.readline, b"")
    assert any(b"begun" in line for line in lines)
    cluster.process.kill()
    cluster.process.wait()
    code, out, err = pliant("list", "-q")
    assert (code, out) == (0, "fails-1\nwaits-1\nother\n"), "the store knows them without a server"
    assert f"(pid {cluster.process.pid}) has ended; its jobs run on: start `pliant serve` again" in err
    cluster.start()
    (tmp_path / "go").touch()
    assert any(b"gone on" in line for line in lines)
    following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0
    until(lambda: not pliant("list", "-q", "--only", "starting,running,waiting")[1].replace("other\n", ""), "two ended")

    rows = [line.split("\t") for line in pliant("list")[1].splitlines()]
    assert [row[:3] for row in rows] == [
        ["fails-1", "failed", "-"],
        ["waits-1", "finished", "-"],
        ["other", "starting", "cpu=1"],
    ]
    code, out, _ = pliant("list", "--json", "--only", "failed")
    answer = json.loads(out)
    assert [job["exit_code"] for job in answer["jobs"]] == [3]
    assert answer["cluster"]["devices"] == {"cpu": 3}
    code, out, _ = pliant("logs", "fails-1")
    assert code == 0
    for said in ("bad", "a b", "010", "20000"):
        assert f"::stdout] {said}\n" in out
    assert pliant("logs", "fails-1", "-n", "1") == (0, out.splitlines(keepends=True)[-1], "")
    assert pliant("logs", "-f", "-n", "0", "fails-1") == (0, "", "")
    assert_a_reader_may_go("logs", "fails-1")
    detail = json.loads(pliant("show", "fails-1", "--json")[1])
    assert (detail["state"], detail["exit_code"], detail["events"][0]["what"]) == ("failed", 3, "submitted")
    assert pliant("show", "fails-1", "--json", "shown.json")[1] == pliant("show", "fails-1")[1] != ""
    assert json.loads((tmp_path / "shown.json").read_text()) == detail

    table = on_terminal("list")
    assert table.splitlines()[0].split() == ["NAME", "STATE", "DEVICES", "REPLICAS", "STEP", "STEPS/S", "AGE", "WHY"]
    assert table.splitlines()[-1] == "cpu: 3 devices, 2 free"
    shown = on_terminal("show", "fails-1").split("\n\n")[0]
    assert "state failed (exit code 3)" in " ".join(shown.split())
    assert f"program{tmp_path}/fails.sh'ab'010" in "".join(shown.split())

    assert pliant("logs", "fail") == (2, "", "pliant: no job 'fail': did you mean fails-1?\n")
    assert pliant("show", "zzz") == (2, "", "pliant: no job 'zzz': `pliant list` shows the names\n")
    assert pliant("stop", "other", "../x")[0] == 2
    assert pliant("list", "-q", "--only", "stopped") == (0, "", "")
    assert pliant("stop", "other", "fails-1") == (0, "", "")
    assert pliant("list", "-q", "--only", "stopped") == (0, "other\n", "")
    assert on_terminal("stop", "other", term="xterm") == "other had already ended (stopped)\n"
    # A name that the file leaves open gets the next number, and the shell the job's code.
    assert pliant("submit", "--wait", "fails.yml") == (3, "fails-2\n", "")

    noted = json.loads(cluster.file.read_text())
    assert pliant("list", "-q", "--server", noted["url"] + "/")[0] == 0
    os.environ["PLIANT_TOKEN"] = "wrong"
    try:
        code, out, err = pliant("list")
    finally:
        del os.environ["PLIANT_TOKEN"]
    assert (code, out) == (2, "")
    assert (
        err
        == f"pliant: {noted['url']} refused us, the token we gave is not its own: set PLIANT_TOKEN to that of the server, or your tenant's\n"
    )
    assert noted["token"] not in err


@pytest.mark.parametrize("words", ["submit job.yml", "list", "serve --reserve cpu=1"])
def test_no_server_is_told_with_what_to_do(pliant: Callable[..., Said], tmp_path: Path, words: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yml").write_text("program: train.py\nreplicas: 1")
    code, out, err = pliant(*words.split(), "--state", str(tmp_path / "none"))
    assert (code, out) == (1, "")
    assert "start one with `pliant serve --devices cpu=4`, or name one with --server URL" in err
    code, out, err = pliant(*words.split(), "--server", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert err.startswith("pliant: no server answers at http://127.0.0.1:9 (")
    code, out, err = pliant(*words.split(), "--server", "localhost")
    assert (code, out, err) == (2, "", "pliant: --server 'localhost' is not a URL such as http://10.0.0.1:9200\n")


def test_without_a_server_and_jobs_there_is_nothing_to_list(pliant: Callable[..., Said]) -> None:
    assert pliant("list") == (0, "", "")
    assert pliant("list", "--json") == (0, '{\n "jobs": []\n}\n', "")
    assert pliant("show", "a")[0] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("submit", "no job file: give one or several"),
        ("submit none.yml", "none.yml: No such file or directory"),
        ("submit --name x a.yml b.yml", "--name x for 2 files: names are unique"),
        ("submit --name a/b good.yml", "good.yml:1: name 'a/b': use up to 64 letters"),
        ("submit conf.yml", "conf.yml:2: data_dir: data.path is empty: images data lie in a file or folder of yours"),
        ("submit ip.yml", "ip.yml:1: job_conf is missing: add a list of keys"),
        ("submit --resume a b.yml", "--resume goes on with what was submitted: leave the file"),
        ("submit --resume a", "no job 'a': there has been none yet"),
        ("show", "which job? give its name"),
        ("logs", "which job? give its name"),
        ("stop", "which job? give its name"),
        ("logs -n x a", "-n 'x' is not a number of lines"),
        ("list --only asleep", "--only asleep: no such state; use waiting, starting"),
        ("stop --timeout soon a", "--timeout"),
    ],
)
def test_mistakes_are_told_before_a_server_is_looked_for(
    pliant: Callable[..., Said], tmp_path: Path, words: str, told: str
) -> None:
    (tmp_path / "good.py").touch()
    (tmp_path / "good.yml").write_text("program: good.py\nreplicas: 1\n")
    (tmp_path / "conf.yml").write_text("# federated\njob_conf:\n  - job_name: femnist\n")
    (tmp_path / "ip.yml").write_text("ps_ip: 127.0.0.1\n")
    code, out, err = pliant(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"pliant: {told}")
    assert err.count("\n") == 1


def test_mistakes_of_all_files_are_told_together(pliant: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("replicas: x\n")
    (tmp_path / "b.yml").write_text("program: b.py\n")
    code, out, err = pliant("submit", "a.yml", "b.yml", "c.yml")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "pliant: a.yml:1: program is missing: add program: train.py",
        "a.yml:1: replicas 'x': use a whole number",
        f"b.yml:1: program b.py: no such file; it is looked for in {tmp_path}",
        "b.yml:1: replicas is missing: add replicas: 4",
        "c.yml: No such file or directory; give a YAML file",
    ]


@contextmanager
def canned(status: int, body: bytes) -> Iterator[str]:
    """A server that answers everything with the same; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "code", "told"),
    [
        (500, b"oops", 1, ": 500 Internal Server Error"),
        (503, b'{"error": "the disk is full"}', 1, ": 503 the disk is full"),
        (200, b"<html>", 2, " is no server of this version of pliant: it is not JSON in its answer to GET /jobs"),
        (200, b'{"jobs": [{"name": "a"}]}', 2, " is no server of this version of pliant: jobs.0.state is missing or wrong in its answer to GET /jobs"),
        (404, b"<html>", 2, "Not Found"),
        (401, b"", 2, " refused us, it wants a token: set PLIANT_TOKEN to that of the server, or your tenant's"),
    ],
)  # fmt: skip
def test_other_servers_are_recognised(
    pliant: Callable[..., Said], status: int, body: bytes, code: int, told: str
) -> None:
    with canned(status, body) as url:
        ended, out, err = pliant("list", "--server", url)
    assert (ended, out) == (code, "")
    assert told in err
    assert err.count("\n") == 1


def test_a_silent_server_is_not_waited_for_forever() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            JobsClient(ServerAddress(url=url), timeout_s=0.1) as client,
            pytest.raises(ServerUnavailable, match="in time"),
        ):
            client.jobs()


def test_which_server_is_meant(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    folder = state_directory(home)
    folder.mkdir(parents=True)
    (folder / "server.json").write_text(json.dumps({"url": "http://a:1", "token": "mine", "pid": 5, "new": 1}))
    assert find_server(environ=home).token == "mine"
    assert find_server("http://a:1/", environ=home).token == "mine"
    assert find_server("http://b:1", environ=home) == ServerAddress(url="http://b:1")
    assert find_server(environ={**home, "PLIANT_SERVER": "http://b:1", "PLIANT_TOKEN": "t"}).token == "t"
    assert find_server(state=str(folder), environ={"PLIANT_SERVER": "http://b:1"}).url == "http://a:1"
    assert "mine" not in repr(find_server(environ=home))
    assert state_directory({"HOME": "/h"}) == Path("/h/.local/state/pliant")
    with pytest.raises(ConfigError, match="--server 'http://'"):
        JobsClient(ServerAddress(url="http://"))


def test_times_and_devices_in_words() -> None:
    assert [span_text(seconds) for seconds in (-1, 0, 59.9, 60, 3700, 90000, 8 * 86400 + 5)] == [
        "0s", "0s", "59s", "1m0s", "1h1m", "1d1h", "8d0h",
    ]  # fmt: skip
    assert devices_text({"cpu": 2, "v100": 0, "t4": 1}) == "cpu=2,t4=1"
    assert devices_text({}) == "-"
