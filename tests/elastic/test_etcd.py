"""The membership in a real etcd: every client applies the rules itself, and nothing but a majority of etcd is needed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from certificates import make_certificate
from etcd_cluster import EtcdCluster, etcd_cluster, needs_etcd
from patience import until
from serving import A0, A1, A2, ONE, RUN_A, TWO

from pliant.cluster import ClusterSnapshot, Host, PortRange, View, Worker
from pliant.elastic.client import ConfigFollower, ConfigSender, MembershipClient, open_client
from pliant.elastic.etcd import EtcdClient, JobValue
from pliant.elastic.etcd_gateway import EtcdAddress
from pliant.elastic.membership import Limits
from pliant.elastic.server import ConfigServer
from pliant.errors import (
    CapacityError,
    ClusterCleared,
    ConfigError,
    InvalidView,
    NotWanted,
    NoView,
    OtherJob,
    ServerUnavailable,
    StaleView,
)
from pliant.ui.jobs import DashboardState
from pliant.ui.sources import open_sources

pytestmark = [needs_etcd, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def url(etcd: EtcdCluster, request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test."""
    return f"{etcd.url}/{request.node.name}"


@pytest.fixture
def client(url: str) -> Iterator[EtcdClient]:
    with EtcdClient(url, environ={}) as client:
        yield client


def test_the_rules_are_those_of_a_config_server(client: EtcdClient) -> None:
    assert client.snapshot() == ClusterSnapshot()
    with pytest.raises(NoView):
        client.resize(2)
    view = client.put(TWO, expected=0)
    assert (view.number, view.workers) == (1, TWO.workers)
    with pytest.raises(StaleView):
        client.put(ONE, expected=0)
    with pytest.raises(NotWanted):
        client.ready(A2)
    assert client.ready(A0).members == ()
    assert client.ready(A1).members == (A0, A1)
    client.settled(A0, 4)
    client.settled(A1, 4, 1)
    with pytest.raises(InvalidView, match="listed twice"):
        client.add_worker(A1)
    lost = client.lost(A1, "gone", by=A0)
    assert (lost.members, lost.urgent) == ((A0,), 2)
    assert client.snapshot().wanted.workers == (A0,)
    assert client.finish(A0).over
    with pytest.raises(ClusterCleared):
        client.resize(3)
    assert client.reset() == 3
    assert client.snapshot().wanted.view is None


def test_a_resize_keeps_to_the_limits_of_the_runner_that_began(client: EtcdClient, url: str) -> None:
    client.put(ONE, limits=Limits(hosts=(Host("127.0.0.1", 3),), ports=PortRange(20000, 20009)))
    with open_client(url) as another:
        assert [worker.port // 10 for worker in another.resize(3).workers[1:]] == [2000, 2000]
        with pytest.raises(CapacityError, match="hold 3 workers"):
            another.resize(4)


def test_clients_that_change_at_once_lose_no_change(client: EtcdClient, url: str) -> None:
    workers = tuple(Worker("127.0.0.1", 10000 + number) for number in range(16))
    client.put(View(0, workers, (RUN_A,)))

    def report(worker: Worker) -> None:
        with open_client(url) as own:
            own.ready(worker)
            while worker not in own.snapshot().membership.members:
                own.wait_for_change(own.snapshot(), 1.0)
            own.settled(worker, 16)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(report, workers))
    assert client.snapshot().membership.members == workers
    kept = JobValue.from_bytes(client._key.read().value).state
    assert kept.settled == frozenset(workers)


def test_a_change_whose_answer_was_lost_is_not_made_twice(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put(ONE)
    send = client._key._send_to
    lost: list[str] = []

    def losing(endpoint: str, path: str, *rest: object, **more: object) -> object:
        answer = send(endpoint, path, *rest, **more)  # type: ignore[arg-type]
        if path.endswith("txn") and not lost:
            lost.append(path)
            raise ServerUnavailable("the cable was cut")
        return answer

    monkeypatch.setattr(client._key, "_send_to", losing)
    assert client.add_worker(A1).workers == (A0, A1)
    assert lost
    assert client.snapshot().wanted.version == 2


def test_a_follower_hands_over_every_change_at_once(url: str, client: EtcdClient) -> None:
    seen: list[ClusterSnapshot] = []
    follower = ConfigFollower(url, "", seen.append)
    follower.start(client.snapshot())
    sender = ConfigSender(url, "")
    try:
        for number in range(1, 6):
            sender.ask(lambda own, number=number: own.put(ONE if number % 2 else TWO), 10)
            begun_s = time.monotonic()
            until(lambda number=number: seen and seen[-1].wanted.version == number, f"version {number}", 10)
            assert time.monotonic() - begun_s < 0.9, "the watch tells of it, not the check once a second"
    finally:
        follower.stop()
        sender.close()
        client.reset()  # ends the watch


def test_a_process_with_thousands_of_open_files_follows_too(url: str, client: EtcdClient) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"this test needs 1200 descriptors, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    seen: list[ClusterSnapshot] = []
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        stack.callback(client.reset)  # ends the watch
        while (descriptor := os.open(os.devnull, os.O_RDONLY)) < 1100:
            stack.callback(os.close, descriptor)
        stack.callback(os.close, descriptor)
        follower = ConfigFollower(url, "", seen.append)
        stack.callback(follower.stop)
        follower.start(ClusterSnapshot())
        client.put(ONE)
        until(lambda: seen and seen[-1].wanted.version == 1, "the first change", 10)
        client.put(TWO)
        until(lambda: seen[-1].wanted.version == 2, "the second change", 10)


def test_a_key_that_was_deleted_is_written_again_by_whoever_follows_it(url: str, client: EtcdClient) -> None:
    """As an etcd that was set up anew: the job goes on with what its workers and runners know."""
    client.put(TWO)
    client.ready(A0)
    members = client.ready(A1)
    seen: list[ClusterSnapshot] = []
    follower = ConfigFollower(url, "", seen.append)
    follower.start(known := client.snapshot())
    client.job = known.id
    try:
        client._key._ask("/v3/kv/deleterange", {"key": client._key._key})
        until(lambda: seen and seen[-1].restored == 1, "the state", 10)
        assert (seen[-1].id, seen[-1].membership) == (known.id, members)
        assert client.lost(A1, "gone").members == (A0, A1), "who has the state of the job is not known yet"
        assert client.ready(A0).members == (A0,), "as a worker reports again"
        client.job = "another"
        with pytest.raises(OtherJob):
            client.lost(A0, "gone")
    finally:
        follower.stop()
        client.job = ""
        client.finish(A0)  # ends the watch


def test_nothing_is_returned_before_there_is_a_change(client: EtcdClient) -> None:
    client.put(TWO)
    known = client.snapshot()
    assert client.wait_for_change(known, 0.0) == known
    client.ready(A0)  # changes the state, but nobody is told of it
    assert client.wait_for_change(known, 0.3) == known


def test_a_restart_of_etcd_is_waited_for_and_forgets_nothing(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as cluster, open_client(cluster.url) as client:
        client.put(TWO)
        known = client.snapshot()
        changed: list[ClusterSnapshot] = []
        waiting = threading.Thread(target=lambda: changed.append(client.wait_for_change(known, 30)))
        waiting.start()
        cluster.kill(0)
        with (
            open_client(cluster.url, timeout_s=0.3) as hasty,
            pytest.raises(ServerUnavailable, match="majority of etcd"),
        ):
            hasty.snapshot()
        cluster.start(0)
        assert client.resize(1).workers == (A0,)
        waiting.join(30)
        assert changed[0].wanted.workers == (A0,)


def test_one_of_three_members_is_killed_and_changes_go_on(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path, hosts=("127.0.0.1",) * 3) as cluster:
        url = f"{cluster.url}/job"
        with open_client(url) as client:
            client.put(TWO)
            seen: list[ClusterSnapshot] = []
            follower = ConfigFollower(url, "", seen.append)
            follower.start(client.snapshot())
            try:
                victim = cluster.leader()
                cluster.kill(victim)
                begun_s = time.monotonic()
                assert client.resize(1).workers == (A0,)
                until(lambda: seen and seen[-1].wanted.workers == (A0,), "the change", 10)
                assert time.monotonic() - begun_s < 8, "an election takes a second or two"
                others = [member for member in range(3) if member != victim]
                cluster.kill(others[0])
                with open_client(url, timeout_s=1.0) as hasty, pytest.raises(ServerUnavailable):
                    hasty.snapshot()  # what the last one knows may be old: it does not answer
                cluster.start(others[0])
                assert client.finish(A0).over
            finally:
                follower.stop()


def test_with_users_only_those_who_may_come_in(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as cluster:
        url = f"{cluster.url}/team/job"
        with EtcdClient(url, environ={"ETCDCTL_USER": "ann:secret"}) as early:
            early.put(ONE)  # no users yet, so the name does not matter
            keys = {"key": "L3RlYW0v", "range_end": "L3RlYW0w"}  # those that begin with /team/
            for command, body in (
                ("user/add", {"name": "root", "password": "top"}), ("user/add", {"name": "ann", "password": "secret"}),
                ("user/add", {"name": "bob", "password": "other"}), ("role/add", {"name": "root"}),
                ("role/add", {"name": "team"}), ("role/grant", {"name": "team", "perm": {"permType": "READWRITE", **keys}}),
                ("user/grant", {"user": "root", "role": "root"}), ("user/grant", {"user": "ann", "role": "team"}),
                ("enable", {}),
            ):  # fmt: skip
                httpx.post(
                    f"http://{cluster.clients[0]}/v3/auth/{command}", json=body, trust_env=False
                ).raise_for_status()
            assert early.put(TWO).number == 2
        for environ, words in (
            ({}, "set ETCDCTL_USER=name:password"),
            ({"ETCDCTL_USER": "ann:wrong"}, "refuses the user ann"),
            ({"ETCDCTL_USER": "bob", "ETCDCTL_PASSWORD": "other"}, "read and write the keys under /team/job/"),
        ):
            with EtcdClient(url, environ=environ) as stranger, pytest.raises(ConfigError, match=words):
                stranger.snapshot()
        with EtcdClient(url, environ={"ETCDCTL_USER": "ann", "ETCDCTL_PASSWORD": "secret"}) as client:
            known = client.snapshot()
            cluster.kill(0)
            cluster.start(0)  # it knows no token any more
            assert client.resize(1).number == 3
            assert client.wait_for_change(known, 10).wanted.version == 3


def test_tls_and_certificates_of_clients(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "etcd")
    trusting = {"ETCDCTL_CACERT": certificate}
    with etcd_cluster(tmp_path, tls=(certificate, key, certificate)) as cluster:
        with EtcdClient(cluster.url, environ={**trusting, "ETCDCTL_CERT": certificate, "ETCDCTL_KEY": key}) as client:
            client.put(ONE)
            known = client.snapshot()
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(client.wait_for_change, known, 30.0)
                client.put(TWO)
                assert waiting.result(30).wanted.workers == (A0, A1)
        with EtcdClient(cluster.url, environ={}) as client, pytest.raises(ConfigError, match="ETCDCTL_CACERT"):
            client.snapshot()
        with EtcdClient(cluster.url, environ=trusting) as client, pytest.raises(ConfigError, match="ETCDCTL_CERT"):
            client.snapshot()
        plain = cluster.url.replace("etcds:", "etcd:")
        with EtcdClient(plain, environ={}, timeout_s=0.3) as client, pytest.raises(ServerUnavailable, match="etcds://"):
            client.snapshot()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("etcd://", "host ''"),
        ("etcd:///job", "host ''"),
        ("etcd://h1:2379,,h3", "host ''"),
        ("etcd://h1:70000", "70000"),
        ("etcd://ann:secret@h1:2379", "ETCDCTL_USER"),
        ("etcd://h1:2379/job?x=1", "not understood"),
    ],
)
def test_a_wrong_address_is_told_with_a_right_one(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match="such as etcd://10.0.0.1:2379,") as error:
        open_client(url)
    assert words in str(error.value)


def test_an_address_names_endpoints_and_a_prefix() -> None:
    address = EtcdAddress.parse("etcds://10.9.9.9,127.0.0.1:2000,[::1]:5/team/job/")
    assert address.endpoints[0] == "https://127.0.0.1:2000", "those of this machine come first"
    assert {"https://10.9.9.9:2379", "https://[::1]:5"} < set(address.endpoints)
    assert address.prefix == "/team/job"
    assert EtcdAddress.parse("etcd://h1").prefix == "/pliant"
    with pytest.raises(ConfigError, match="ETCDCTL_CACERT=/no/such"):
        EtcdClient("etcds://h1", environ={"ETCDCTL_CACERT": "/no/such"})


def test_a_key_of_somebody_else_is_told(client: EtcdClient) -> None:
    client._key.replace(json.dumps({"mine": 1}).encode(), 0)
    with pytest.raises(ConfigError, match="prefix of its own"):
        client.snapshot()


def test_a_config_server_is_not_taken_for_etcd(server: ConfigServer) -> None:
    with (
        open_client(server.url.replace("http://", "etcd://").replace("/config", "")) as client,
        pytest.raises(ConfigError, match="client URLs of etcd"),
    ):
        client.snapshot()


def test_top_and_the_page_show_a_job_by_its_url(client: EtcdClient, url: str) -> None:
    client.put(TWO)
    client.ready(A0)
    client.ready(A1)
    known = DashboardState()
    (source, *_) = open_sources([url], {})
    source.poll(known)
    (job,) = known.jobs.values()
    assert (job.members, job.reported_state) == (("127.0.0.1:10000", "127.0.0.1:10001"), "running")


def test_etcds_client_is_a_membership_client(client: EtcdClient) -> None:
    same: MembershipClient = client
    assert same.snapshot() == ClusterSnapshot()
