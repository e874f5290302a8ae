"""Another user of the machine, and a page of another site, can neither read nor change anything."""

from __future__ import annotations

import http.client
import json
import os
import re
import stat
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from gang import free_port
from pages import Home, said
from patience import until

from pliant.elastic.client import ConfigClient
from pliant.elastic.server import _TAKEN as CONFIG_PATHS
from pliant.jobs.api import _PATHS as JOB_PATHS
from pliant.jobs.store import running_jobs
from pliant.tokens import find_token

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

NOBODY = 65534
PROGRAM = Path(__file__).with_name("job_program.py")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
PATHS: Mapping[str, set[str]] = {
    "run": {*CONFIG_PATHS, "/config"},
    "debug": {"/"},
    "metrics": {"/metrics"},
    "config-server": {*CONFIG_PATHS, "/config"},
    "serve": {path.replace("{name}", "x") for path in JOB_PATHS},
    "dash": {"/", "/job/x", "/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/enter", "/docs", "/openapi.json"},
}
OPEN = ("/health", "/healthz")


@pytest.fixture
def ports(home: Home, tmp_path: Path) -> dict[str, int]:
    """The ports of one of each server, beside a job that trains."""
    url = r"http://127\.0\.0\.1:(\d+)"
    words = ("-w", "--no-v", "-np", "1", "-H", "127.0.0.1:2", "--metrics", "--record", "run.jsonl", str(PROGRAM))
    debug = free_port("127.0.0.1")
    with (tmp_path / "runner.err").open("w") as errors:
        home.start("run", "-debug-port", str(debug), *words, stderr=errors)
    others = {
        "config-server": home.start("config-server", "-port", "0"),
        "serve": home.start("serve", "--devices", "cpu=1", "--port", "0"),
        "dash": home.start("dash", "--port", "0"),
    }
    until(lambda: "step" in _text(tmp_path / "run.jsonl"), "the job to train")
    own = int(re.findall(rf"config server at {url}", _text(tmp_path / "runner.err"))[0])
    (worker,) = _client(home).membership().members
    found = {"run": own, "debug": debug, "metrics": worker.port + 10000}
    return found | {name: int(said(process, url)) for name, process in others.items()}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _client(home: Home) -> ConfigClient:
    (job,) = running_jobs(home.environ)
    return ConfigClient(job.config_server, job.token)


def as_nobody(look: Callable[[], Any]) -> Any:
    """What `look` returns in a process of another user, as JSON."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(write, json.dumps(look()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def statuses(ports: Mapping[str, int], headers: Mapping[str, str]) -> dict[str, int]:
    """How each server answers each method at each path."""
    found = {}
    for name, port in ports.items():
        for path in sorted(PATHS[name]):
            for method in METHODS:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request(
                    method, path, body=None if method in ("GET", "HEAD") else b'{"size": 0}', headers=headers
                )
                found[f"{method} {name} {path}"] = connection.getresponse().status
                connection.close()
    return found


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_401_everywhere_and_nothing_changes(
    home: Home, ports: dict[str, int], tmp_path: Path
) -> None:
    with _client(home) as client:
        before = client.snapshot()
        found = as_nobody(lambda: statuses(ports, {}))
        assert len(found) > 300
        assert {request for request, status in found.items() if status != 401 and not request.endswith(OPEN)} == set()
        guessed = as_nobody(lambda: statuses(ports, {"Authorization": "Bearer guess", "Cookie": "pliant_dash=guess"}))
        assert guessed == found

        # A page of another site, in the browser of the owner, who has all tokens and cookies.
        (job,) = running_jobs(home.environ)
        for foreign in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            for name, port in ports.items():
                token = job.token if name in ("run", "debug", "metrics") else _token(home, port)
                answers = statuses({name: port}, {"Authorization": f"Bearer {token}", **foreign})
                assert set(answers.values()) == {403}, name
        assert client.snapshot() == before, "nobody has changed the job"

    # Nor can another user read a token, or a process that knows one.
    state = tmp_path / "state" / "pliant"
    kept = [path for path in (state, *state.rglob("*")) if not path.is_socket()]
    assert {path.name for path in kept} >= {"jobs.sqlite", "tokens", "token", "server.json"}
    for path in kept:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode in (0o700, 0o600) or path.is_dir() or not _holds_secret(path), f"{path} has mode {mode:o}"
    pids = [process.pid for process in home.started]
    pids += [int(child) for pid in pids for child in _children(pid)]
    assert len(pids) > 6

    def look() -> list[str]:
        seen = []
        for pid in pids:
            try:
                seen.append(Path(f"/proc/{pid}/environ").read_text())
            except OSError:
                continue
        return seen + [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]

    visible = "\n".join(as_nobody(look))
    assert "job_program.py" in visible
    secret = [job.token, *(path.read_text() for path in kept if path.parent.name == "tokens" or path.name == "token")]
    assert not any(each in visible for each in secret)


def _token(home: Home, port: int) -> str:
    return find_token(f"http://127.0.0.1:{port}", home.environ)


def _children(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _holds_secret(path: Path) -> bool:
    return path.suffix in (".sqlite", ".json") or "token" in str(path)


def test_serve_and_its_page_are_encrypted_and_clients_verify(home: Home, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    words = ("--devices", "cpu=1", "--port", "0", "--dash", "0", "--tls-cert", cert, "--tls-key", key)
    server = home.start("serve", *words)
    url = said(server, r"pliant serve at (https://\S+),")
    assert said(server, r"the page is at (\S+)").startswith("https://127.0.0.1:")
    trusting = home.start("list", env={**home.environ, "SSL_CERT_FILE": cert})
    assert trusting.wait(timeout=60) == 0
    doubting = home.start("list", "--server", url, stderr=subprocess.PIPE)
    _, told = doubting.communicate(timeout=60)
    assert doubting.returncode != 0
    assert "certificate" in told.lower()
    assert told.count("\n") == 1
