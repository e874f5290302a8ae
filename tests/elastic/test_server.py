"""The config server on a loopback port: what a client sees, KungFu's routes, how it opens, and resource providers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest
from certificates import make_certificate
from full_disk import limited_files
from serving import A0, A2, ONE, TWO, serving

from pliant.cluster import View, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import (
    CapacityError,
    ClusterCleared,
    ConfigError,
    InvalidView,
    NotWanted,
    NoView,
    ServerUnavailable,
    StaleView,
)

# What a client sees


@pytest.mark.parametrize(
    "change",
    [
        lambda client, version: client.put(ONE, version),
        lambda client, version: client.resize(1, version),
        lambda client, version: client.add_worker(A2, version),
        lambda client, version: client.remove_worker(A0, version),
        lambda client, version: client.clear(version),
        lambda client, version: client.reset(version),
    ],
    ids=["put", "resize", "add", "remove", "clear", "reset"],
)
def test_every_change_is_compare_and_set(client: ConfigClient, change: Callable[[ConfigClient, int], object]) -> None:
    view = client.put(TWO)
    with pytest.raises(StaleView) as caught:
        change(client, view.number - 1)
    assert (caught.value.expected, caught.value.current) == (view.number - 1, view.number)
    assert client.get() == view
    change(client, view.number)
    assert client.wanted().version == view.number + 1


def test_refusals_are_pliants_errors(client: ConfigClient) -> None:
    with pytest.raises(NoView):
        client.resize(2)
    client.put(TWO)
    with pytest.raises(InvalidView, match="listed twice"):
        client.add_worker(A0)
    with pytest.raises(InvalidView, match="not in view"):
        client.remove_worker(A2)
    with pytest.raises(ConfigError, match="negative"):
        client.resize(-1)
    with pytest.raises(CapacityError):
        client.resize(99_999_999)
    with pytest.raises(NotWanted, match="it must end"):
        client.ready(A2)
    assert client.clear().workers == ()
    with pytest.raises(ClusterCleared, match="reset it"):
        client.put(TWO)


def test_nobody_there_is_said_clearly() -> None:
    with serving() as (server, _):
        url = server.url
    with ConfigClient(url, timeout_s=5) as client, pytest.raises(ServerUnavailable, match="is it running"):
        client.get()


def test_somebody_else_there_is_said_clearly(server: ConfigServer) -> None:
    with ConfigClient(server.url.replace("/config", "/nowhere")) as client, pytest.raises(ConfigError, match="404"):
        client.get()
    with (
        ConfigClient(server.url.replace("/config", "/health")) as client,
        pytest.raises(ConfigError, match="not a con"),
    ):
        client.get()


@pytest.mark.parametrize("url", ["", "127.0.0.1:9100", "ftp://a/b", "http://", "http://[::1", "http://a:x/"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="http://10.0.0.1:9100/config"):
        ConfigClient(url)


def test_proxies_of_the_environment_are_ignored(client: ConfigClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with ConfigClient(str(client.url)) as fresh:
        assert fresh.get() is None


# KungFu's routes


def test_kungfus_table(http: httpx.Client) -> None:
    unset = http.get("/config")
    assert (unset.status_code, unset.json()["error"]) == (404, "No Config Found.")
    cluster = {"Runners": [{"IPv4": 2130706433, "Port": 38080}], "Workers": [{"IPv4": 2130706433, "Port": 10000}]}
    put = http.put("/config", json=cluster)
    got = http.get("/config")
    assert put.status_code == got.status_code == 200
    assert got.json() == put.json() == {"Version": int(got.headers["etag"].strip('"')), **cluster}
    assert http.put("/config", json={**cluster, "Workers": []}).status_code == 200
    assert http.put("/config", json=cluster).status_code == 403
    assert http.request("DELETE", "/config").status_code == 200
    assert http.get("/config").status_code == 404
    assert http.put("/config", json=cluster).status_code == 200
    assert http.post("/config").status_code == 200
    assert http.get("/config").status_code == 404


def test_the_artifacts_routes(http: httpx.Client) -> None:
    assert http.put("/put", json=TWO.to_json()).status_code == 200
    assert len(http.get("/get").json()["Workers"]) == 2
    assert http.post("/addworker", json=A2.to_json()).json()["Workers"][-1] == A2.to_json()
    assert len(http.post("/removeworker", json=A2.to_json()).json()["Workers"]) == 2
    assert len(http.put("/resize", json={"size": 1}).json()["Workers"]) == 1
    assert http.post("/clear").json()["Workers"] == []
    assert http.put("/put", json=TWO.to_json()).status_code == 403
    assert http.get("/reset").status_code == 200, "as the artifact's curl does"
    assert http.get("/get").status_code == 404


def test_a_client_of_the_artifacts_url_may_change_what_it_reads() -> None:
    with serving() as (server, _), ConfigClient(server.url.replace("/config", "/get")) as client:
        view = client.put(TWO)
        assert client.get() == view
        assert client.resize(1).size == 1
        client.reset()
        assert client.get() is None


def test_health_and_metrics(http: httpx.Client, client: ConfigClient) -> None:
    version = client.put(TWO).number
    assert http.get("/health").json() == {"status": "ok"}
    http.get("/nowhere")
    text = http.get("/metrics").text
    assert f"\npliant_config_version {version}.0\n" in text
    assert "\npliant_config_workers 2.0\n" in text
    assert "\npliant_config_held_requests 0.0\n" in text
    assert '\npliant_config_requests_total{status="404"}' in text
    assert "# TYPE pliant_config_requests_total counter" in text


# Who may, and over what


def test_a_token_is_needed_where_there_is_one_also_to_read() -> None:
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
    with pytest.raises(ConfigError, match="printable ASCII"):
        ServerConfig(token="a b")
    with pytest.raises(ConfigError, match="has no token: set PLIANT_TOKEN, or use --open"):
        ServerConfig()
    with pytest.raises(ConfigError, match="has a token, and is open to all"):
        ServerConfig(token="s3cret", open=True)


def test_no_get_changes_anything_but_the_artifacts_reset_of_an_open_server(http: httpx.Client) -> None:
    with serving(token="s3cret", initial=TWO) as (server, client):
        for path in ("/reset", "/stop", "/clear", "/finish", "/put", "/resize", "/addworker", "/removeworker", "/lost"):
            url, headers = server.url.replace("/config", path), {"Authorization": "Bearer s3cret"}
            assert httpx.get(url, headers=headers, trust_env=False).status_code == 405, path
        assert client.wanted().version == 1
    assert http.get("/stop").status_code == 405
    assert http.get("/reset").status_code == 200


FOREIGN = [{"Host": host} for host in ("evil.example", "evil.example:9100", "", "10.1.2.3", "0.0.0.0")]
FOREIGN += [{"Origin": origin} for origin in ("http://evil.example", "null", "http://127.0.0.1:1")]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_is_refused_by_every_route(http: httpx.Client, headers: dict[str, str]) -> None:
    for method, path in [
        ("GET", "/config"),
        ("GET", "/health"),
        ("GET", "/nowhere"),
        ("POST", "/clear"),
        ("GET", "/reset"),
    ]:
        assert http.request(method, path, headers=headers).status_code == 403, path


def test_a_server_is_called_by_its_own_names(http: httpx.Client) -> None:
    port = http.base_url.port
    for name in ("127.0.0.1", "localhost", "[::1]", socket.gethostname()):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        assert http.get("/health", headers=own).status_code == 200, name
    with serving(names=("jobs.example",)) as (server, _):
        url = server.url.replace("/config", "/health")
        assert httpx.get(url, headers={"Host": "jobs.example"}, trust_env=False).status_code == 200


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = make_certificate(tmp_path, "server")
    config = ServerConfig(port=0, open=True, tls_cert=cert, tls_key=key, initial=TWO)
    with ConfigServer(config).running() as server:
        assert server.url.startswith("https://127.0.0.1:")
        with ConfigClient(server.url) as stranger, pytest.raises(ServerUnavailable, match="(?i)certificate"):
            stranger.get()
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        with ConfigClient(server.url) as client:
            assert client.resize(1).number == 2
        with ConfigClient(server.url.replace("https", "http")) as plain, pytest.raises(ServerUnavailable):
            plain.get()
    with (
        pytest.raises(ConfigError, match="belong together"),
        ConfigServer(ServerConfig(port=0, open=True, tls_cert=cert, tls_key=cert)).running(),
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


def test_a_full_disk_stops_no_change_and_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pliant.elastic.store.RETRY_PERIOD_S", 0.0)
    path = tmp_path / "state"
    with serving(initial=TWO, state=str(path)) as (_, client):
        with limited_files(0):
            assert client.put(ONE).number == 2
            assert client.wanted().version == 2
        client.snapshot()  # any worker that asks for the state has it written
    assert "disk" in caplog.text
    assert "can be written again" in caplog.text
    with serving(state=str(path)) as (server, _):
        assert server.wanted.view is not None
        assert server.wanted.view.workers == ONE.workers


def test_a_taken_port_is_said_clearly(shared: ConfigServer) -> None:
    again = ConfigServer(ServerConfig(port=shared.port, open=True))
    with pytest.raises(ConfigError, match=f"port {shared.port}: .*in use; give a free port"), again.running():
        pass


class Notes:
    """A provider that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def resize(self, size: int) -> None:
        if size > 4:
            raise CapacityError(f"size {size}: there is room for 4")
        self.asked.append(size)

    def set_devices(self, devices: Mapping[str, int]) -> None:
        self.asked.append(dict(devices))

    def occupied_devices(self) -> dict[str, int]:
        return {"t4": 2}

    def drop_unwanted(self) -> None:
        self.asked.append("drop")


def test_a_size_goes_to_the_provider_and_the_view_stays() -> None:
    provider = Notes()
    with serving(provider=provider) as (_, client):
        with pytest.raises(NoView):
            client.resize(3)
        put = client.put(TWO)
        assert client.resize(3) == put == client.get()
        with pytest.raises(StaleView):
            client.resize(2, expected=put.number - 1)
        with pytest.raises(CapacityError, match="there is room for 4"):
            client.resize(5)
        assert client.resize(0).workers == ()
        with pytest.raises(ClusterCleared):
            client.resize(1)
        assert provider.asked == [3]


def test_devices_are_asked_for_told_and_cleared() -> None:
    provider = Notes()
    with serving(provider=provider, token="secret") as (_, client):
        client.set_devices({"t4": 1, "cpu": 2})
        assert client.occupied_devices() == {"t4": 2}
        client.drop_unwanted()
        assert provider.asked == [{"t4": 1, "cpu": 2}, "drop"]
        with pytest.raises(ConfigError, match="names no devices"):
            client.set_devices({"t4": -1})


def test_without_a_provider_there_are_no_devices() -> None:
    with serving() as (_, client), pytest.raises(ConfigError):
        client.occupied_devices()
