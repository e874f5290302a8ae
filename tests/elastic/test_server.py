"""The config server on a loopback port: what a client sees, and KungFu's routes."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from serving import A0, A1, A2, ONE, RUN_A, TWO, serving

from pliant.cluster import Host, PortRange, View, Wanted
from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import Limits
from pliant.elastic.server import ConfigServer
from pliant.errors import (
    CapacityError,
    ClusterCleared,
    ConfigError,
    NoView,
    ServerUnavailable,
    StaleView,
)

# What a client sees


def test_put_then_get(client: ConfigClient) -> None:
    assert client.get() is None
    before = client.wanted().version
    put = client.put(TWO)
    assert put == View(before + 1, TWO.workers, TWO.runners) == client.get()


def test_the_version_never_goes_back(client: ConfigClient) -> None:
    first = client.put(TWO).number
    assert client.reset() == first + 1
    assert client.wanted() == Wanted(first + 1, None)
    assert client.put(TWO).number == first + 2


def test_workers_come_and_go(client: ConfigClient) -> None:
    assert client.add_worker(A0).workers == (A0,)
    assert client.add_worker(A1).workers == (A0, A1)
    *known, newcomer = client.resize(3).workers
    assert known == [A0, A1]
    view = client.remove_worker(A0)
    assert (view.workers, view.runners) == ((A1, newcomer), (RUN_A,))
    assert client.resize(1).workers == (A1,)


def test_a_cleared_cluster_refuses_until_the_reset(client: ConfigClient) -> None:
    client.put(TWO)
    assert client.clear().workers == ()
    changes: list[Callable[[], View]] = [
        lambda: client.put(TWO),
        lambda: client.resize(1),
        lambda: client.add_worker(A0),
    ]
    for change in changes:
        with pytest.raises(ClusterCleared, match="reset it"):
            change()
    client.reset()
    assert client.put(TWO).size == 2


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
    with pytest.raises(ConfigError, match="listed twice"):
        client.add_worker(A0)
    with pytest.raises(ConfigError, match="not in view"):
        client.remove_worker(A2)
    with pytest.raises(ConfigError, match="negative"):
        client.resize(-1)


def test_a_resize_keeps_to_the_limits_it_was_given() -> None:
    limits = Limits(hosts=(Host("127.0.0.1", 3),), ports=PortRange(10000, 10009))
    with serving(limits=limits, initial=ONE) as (_, client):
        assert client.resize(3).size == 3
        with pytest.raises(CapacityError, match="hold 3 workers"):
            client.resize(4)


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
    assert "/removeworker" in http.get("/").json()["routes"]
    assert http.put("/put", json=TWO.to_json()).status_code == 200
    assert len(http.get("/get").json()["Workers"]) == 2
    assert http.post("/addworker", json=A2.to_json()).json()["Workers"][-1] == A2.to_json()
    assert len(http.post("/removeworker", json=A2.to_json()).json()["Workers"]) == 2
    assert len(http.post("/resize?size=4").json()["Workers"]) == 4
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


def test_stop_stops_it() -> None:
    with serving() as (server, client):
        assert httpx.get(server.url.replace("/config", "/stop"), trust_env=False).json() == {"stopping": True}
        assert server.wait(10)
        with pytest.raises(ServerUnavailable):
            client.get()


def test_another_endpoint() -> None:
    with serving(endpoint="/job/7") as (server, client):
        assert server.url.endswith("/job/7")
        assert client.put(TWO).number == 1
        assert client.resize(1).number == 2


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
