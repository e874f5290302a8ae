"""How a config server opens: whom it lets in, over what, on which address, and what it remembers."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
from pathlib import Path

import httpx
import pytest
from serving import A0, ONE, TWO, serving

from pliant.cluster import View, Wanted, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import ElasticState
from pliant.elastic.server import ConfigServer, ServerConfig, StateStore
from pliant.errors import (
    ClusterCleared,
    ConfigError,
    InvalidView,
    ServerUnavailable,
)

# Who may, and over what


def test_a_token_is_needed_where_there_is_one() -> None:
    with serving(token="s3cret", initial=TWO) as (server, client):
        assert client.get() is not None
        for token in ("", "wrong", "s3cre", "s3cret2"):
            with ConfigClient(server.url, token) as stranger, pytest.raises(ConfigError, match="needs its token"):
                stranger.clear()
        base = server.url.removesuffix("/config")
        for path in ("/config", "/", "/metrics", "/stop", "/nowhere"):
            answer = httpx.get(base + path, headers={"Authorization": "Basic s3cret"}, trust_env=False)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(base + "/config", headers={b"Authorization": b"\xff"}, trust_env=False).status_code == 401
        assert httpx.get(base + "/health", trust_env=False).status_code == 200
        assert client.wanted().version == 1


def make_certificate(folder: Path) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl, to make certificates: apt install openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return str(cert), str(key)


def test_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    config = ServerConfig(port=0, tls_cert=cert, tls_key=key, initial=TWO)
    with ConfigServer(config).running() as server:
        assert server.url.startswith("https://127.0.0.1:")
        with ConfigClient(server.url, ca_file=cert) as client:
            assert client.resize(1).number == 2
        with ConfigClient(server.url) as stranger, pytest.raises(ServerUnavailable, match="(?i)certificate"):
            stranger.get()
        with ConfigClient(server.url.replace("https", "http")) as plain, pytest.raises(ServerUnavailable):
            plain.get()
    with (
        pytest.raises(ConfigError, match="belong together"),
        ConfigServer(ServerConfig(port=0, tls_cert=cert, tls_key=cert)).running(),
    ):
        pass


@pytest.mark.skipif(not socket.has_ipv6, reason="needs a Python and a kernel with IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_ipv6(host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs ::1: ip -6 address add ::1/128 dev lo")
    with serving(host=host) as (server, client):
        assert server.url.startswith("http://[::1]:")
        assert client.put(View(0, (Worker("::1", 10000),), (Worker("::1", 38080),))).number == 1
        assert client.resize(2).workers[1].host == "::1"


# Opening, and remembering


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with serving(state=state, initial=ONE) as (_, client):
        assert client.put(TWO).number == 2
    with serving(state=state, initial=ONE) as (_, client):
        assert client.get() == View(2, TWO.workers, TWO.runners)
        client.clear()
    with serving(state=state, initial=ONE) as (_, client), pytest.raises(ClusterCleared):
        client.put(TWO)
    with serving(state=state, initial=ONE) as (_, client):
        assert client.reset() == 4
    with serving(state=state, initial=ONE) as (_, client):
        assert client.wanted() == Wanted(4, None)
        assert client.put(TWO).number == 5


def test_a_state_file_serves_one_server(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with serving(state=state), pytest.raises(ConfigError, match="locked.*stop any other server"), serving(state=state):
        pass


@pytest.mark.parametrize("content", [b"not a database, but long enough to be read as one" * 20, None])
def test_a_state_file_of_something_else(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "state" if content else tmp_path / "nowhere" / "state"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"state file {path}"), serving(state=str(path)):
        pass


def test_what_cannot_be_saved_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(initial=TWO) as (server, client):

        def full(self: StateStore, state: ElasticState) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(StateStore, "save", full)
        with pytest.raises(ServerUnavailable, match="nothing has changed: database or disk is full"):
            client.put(ONE)
        assert client.wanted().version == server.wanted.version == 1


def test_one_server_can_run_again() -> None:
    server = ConfigServer(ServerConfig(port=0, initial=TWO))
    for _ in range(2):
        with server.running(), ConfigClient(server.url) as client:
            assert client.wanted().version == 1


def test_a_taken_port_is_said_clearly(shared: ConfigServer) -> None:
    again = ConfigServer(ServerConfig(port=shared.port))
    with pytest.raises(ConfigError, match=f"port {shared.port}: .*in use; give a free port"), again.running():
        pass


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host": "a b"}, "neither an IP address"),
        ({"port": 65536}, "-port 65536"),
        ({"port": -1}, "-port -1"),
        ({"endpoint": "config"}, "-endpoint 'config'"),
        ({"endpoint": "/{x}"}, "-endpoint"),
        ({"endpoint": "/stop"}, "-endpoint"),
        ({"token": "a b"}, "printable ASCII"),
        ({"tls_cert": "x"}, "--tls-key"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerConfig(**settings)  # type: ignore[arg-type]


def test_an_impossible_first_view_opens_nothing() -> None:
    with pytest.raises(InvalidView):
        ServerConfig(initial=View(0, (A0,), ()))
