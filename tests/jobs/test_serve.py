"""`pliant serve`: what its state directory holds, and for whom."""

from __future__ import annotations

import json
import socket
import stat
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn

from pliant.elastic import http_server
from pliant.errors import ConfigError
from pliant.jobs.api import JobServerConfig, serve
from pliant.jobs.backends import LocalBackend
from pliant.sched import policies as schedulers


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
