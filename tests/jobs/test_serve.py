"""`pliant serve` from the command line: what it refuses, in one line, and what its state directory holds."""

from __future__ import annotations

import json
import socket
import stat
import sys
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn

from pliant.cli.main import main
from pliant.elastic import http_server
from pliant.errors import ConfigError
from pliant.jobs.api import JobServerConfig, serve
from pliant.jobs.backends import LocalBackend
from pliant.sched import policies as schedulers


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and what was said of it."""
    monkeypatch.setattr(sys, "argv", ["pliant", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert said.out == ""
    return int(ended.value.code or 0), said.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no devices to give"),
        (["--devices", "cpu"], 2, "--devices 'cpu'"),
        (["--devices", "cpu=-1"], 2, "cpu=-1"),
        (["--devices", "cpu=4", "--policy", "pollux"], 2, "'pollux' cannot be used live"),
        (["--devices", "cpu=4", "--on", "moon"], 2, "--on 'moon'"),
        (["--devices", "cpu=4", "--port", "x"], 2, "--port 'x'"),
        (["--devices", "cpu=4", "--port", "99999"], 2, "--port 99999"),
        (["--devices", "cpu=4", "--interval", "0"], 2, "--interval 0"),
        (["--devices", "cpu=4", "--interval", "soon"], 2, "soon"),
        (["--devices", "cpu=4", "--host", "no host"], 2, "no host"),
        (["--devices", "cpu=4", "--token-file", "/nowhere"], 2, "/nowhere"),
        (["--devices", "cpu=4", "--state", "/dev/null/x"], 2, "--state /dev/null/x"),
        (["--server", "http://127.0.0.1:1"], 2, "add --reserve"),
        (["--reserve", "cpu=1"], 1, "no server of yours"),
        (["--reserve", "cpu=1", "--server", "http://127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["--reserve", "cpu"], 2, "--reserve 'cpu'"),
    ],
)
def test_mistakes_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("PLIANT_SERVER", "PLIANT_TOKEN", "PLIANT_HOME"):
        monkeypatch.delenv(name, raising=False)
    ended, said = run(monkeypatch, capsys, *arguments)
    assert ended == code, said
    assert words in said
    assert said.count("\n") == 1
    assert said.startswith("pliant: ")


def test_what_it_writes_down_is_for_its_user_only_and_the_token_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    def look(server: uvicorn.Server, listener: socket.socket) -> None:
        """In the place of waiting for a signal."""
        thread = threading.Thread(target=server.run, args=([listener],), name="pliant-serve")
        thread.start()
        noted = json.loads((state / "server.json").read_text())
        health = httpx.get(f"{noted['url']}/healthz", trust_env=False)
        jobs = httpx.get(f"{noted['url']}/jobs", headers={"Authorization": f"Bearer {noted['token']}"}, trust_env=False)
        seen.append((noted, health.status_code, jobs.json()))
        seen_modes.update(stat.S_IMODE((state / name).stat().st_mode) for name in ("server.json", "token", "lock"))
        with pytest.raises(ConfigError, match=f"the server with pid {noted['pid']} uses it"):
            serve(config, lambda: backend, schedulers.make_policy("easyscale-heter"), said.append)
        server.should_exit = True
        thread.join()

    state = tmp_path / "state"
    config, backend = JobServerConfig(state=state, port=0), LocalBackend({"cpu": 1})
    seen: list[tuple[dict[str, str], int, object]] = []
    seen_modes: set[int] = set()
    said: list[str] = []
    monkeypatch.setattr(http_server, "serve_until_signalled", look)
    for _ in range(2):
        serve(config, lambda: backend, schedulers.make_policy("easyscale-heter"), said.append)
    (first, health, jobs), (second, _, _) = seen
    assert (health, jobs) == (200, {"jobs": []})
    assert first["token"] == second["token"]
    assert seen_modes == {0o600}
    assert not (state / "server.json").exists()
    assert said[0] == f"pliant serve at {first['url']}, state in {state}"
    assert "jobs run on" in said[1]
