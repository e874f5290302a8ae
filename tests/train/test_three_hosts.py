"""Three hosts, each with a runner, a worker and a member of etcd: any of them is cut off, or killed as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from etcd_cluster import EtcdCluster, etcd_cluster, needs_etcd
from forked import Program
from gang import FULL
from golden import golden
from patience import open_gate, until
from pliant_repro.lab.hosts import Lab, missing_for_lab
from pliant_repro.lab.namespaces import in_namespace
from subject import compare, history

from pliant.cluster import Worker
from pliant.elastic.client import open_client

pytestmark = [pytest.mark.processes, pytest.mark.root, pytest.mark.timeout(180), needs_etcd]

TESTS = Path(__file__).parents[1]
HEARTBEAT_S = 1.0
ELECTION_MS = 1000 if FULL else 500
WITHIN_S = 3.0
"""From the cut to the next step of the survivors."""
BEFORE, AFTER = 5, 10
"""How many steps are done before the fault, and by the others before the host comes back."""
WORKER = f"""
import os, sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "train")!r}]
from pliant.elastic import member
from subject import Task, train
member.SERVER_AWAY_S = float(sys.argv[1])
environ = {{name: value for name, value in os.environ.items() if name.startswith("PLIANT_")}}
journal = f"journal-{{environ['PLIANT_WORKER']}}"
sys.exit(train(0, Task(program="conv", replicas=4, epochs=4, journal=journal, gate="gate", environ=environ)))
"""
RUNNER = """
import sys
from pliant.cli.main import main
from pliant.launch import supervisor
supervisor.STRANDED_S = float(sys.argv.pop(1))
main()
"""


class ThreeHosts:
    """The hosts and what runs on them."""

    def __init__(self, lab: Lab, etcd: EtcdCluster, folder: Path) -> None:
        self.lab, self.etcd, self.folder = lab, etcd, folder
        self.url = f"{etcd.url}/job"
        self.runners: list[Program] = []

    def start(self, patience_s: float = 60.0) -> None:
        """Start the runners. Workers wait so long for etcd if they need it, and runners without workers as long again."""
        (self.folder / "worker.py").write_text(WORKER)
        hosts = ",".join(f"{address}:1" for address in self.lab.addresses)
        options = ("-w", "-np", 3, "-H", hosts, "-config-server", self.url)
        environ = {
            **os.environ,
            "PLIANT_SECRET": "of-a-test-with-three-hosts",
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        for address, namespace in zip(self.lab.addresses, self.lab.namespaces, strict=True):
            program = ("worker.py", patience_s)
            words = ["run", *options, "--heartbeat-timeout", f"{HEARTBEAT_S}s", "-self", address, *program]
            words = [sys.executable, "-c", RUNNER, patience_s, *words]
            log = self.folder / f"runner-{address}.log"
            self.runners.append(Program(words, cwd=self.folder, env=environ, stderr=log, namespace=namespace))

    def open_gate(self, steps: int) -> None:
        open_gate(self.folder / "gate", steps)

    @property
    def journals(self) -> list[Path]:
        return sorted(self.folder.glob("journal-*"))

    def commits(self) -> list[dict[str, Any]]:
        return history(self.journals).commits

    def num_that_did(self, steps: int) -> int:
        """How many workers have done so many steps."""
        return sum(each["step"] == steps - 1 for each in self.commits())

    def members(self) -> tuple[Worker, ...]:
        """The membership, as the second host reads it."""

        def ask() -> tuple[Worker, ...]:
            with open_client(self.url) as client:
                return client.snapshot().membership.members

        return in_namespace(self.lab.namespaces[1], ask)

    def lead(self, host: int) -> None:
        """Let that host's etcd be the leader."""
        found = [self._call(each, "status") for each in range(3)]
        wanted = found[host]["header"]["member_id"]
        for _ in range(3):  # on a busy machine a transfer may take etcd longer than it allows itself
            now = next(each for each, said in enumerate(found) if said["leader"] == said["header"]["member_id"])
            if now == host:
                return
            with contextlib.suppress(httpx.HTTPError):
                self._call(now, "transfer-leadership", targetID=wanted)
            found = [self._call(each, "status") for each in range(3)]
        assert found[host]["leader"] == wanted, "etcd's leader is where the test wants it"

    def _call(self, host: int, name: str, **body: object) -> Any:
        def ask() -> Any:
            url = f"http://{self.etcd.clients[host]}/v3/maintenance/{name}"
            return httpx.post(url, json=body, trust_env=False, timeout=5).raise_for_status().json()

        return in_namespace(self.lab.namespaces[host], ask)

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.lab.namespaces[host]], capture_output=True, text=True, check=True, timeout=10
        )
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log(self, host: int) -> str:
        return (self.folder / f"runner-{self.lab.addresses[host]}.log").read_text()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[ThreeHosts]:
    if missing := missing_for_lab():
        pytest.skip("; ".join(missing))
    with Lab(num_hosts=3).up() as lab:

        def spawn(member: int, argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return lab.popen(member, argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

        with etcd_cluster(tmp_path, hosts=lab.addresses, spawn=spawn, election_ms=ELECTION_MS) as etcd:
            found = ThreeHosts(lab, etcd, tmp_path)
            try:
                yield found
            finally:
                for runner in found.runners:
                    runner.kill()
                    runner.close()


@pytest.mark.parametrize("fault", ["cut", "killed"])
@pytest.mark.parametrize("victim", [0, 1, 2] if FULL else [0])
def test_any_host_may_be_lost_and_the_others_train_on(hosts: ThreeHosts, victim: int, fault: str) -> None:
    """Also the one that leads etcd and whose runner was the head. A host that was cut off comes back and trains again."""
    oracle = golden("conv", 4, 4)
    hosts.open_gate(BEFORE)
    hosts.start()
    until(lambda: hosts.num_that_did(BEFORE) == 3, "steps on three hosts")
    hosts.lead(victim)
    begun_s = time.monotonic()
    (hosts.lab.cut if fault == "cut" else hosts.kill)(victim)
    hosts.open_gate(AFTER)
    until(lambda: hosts.num_that_did(AFTER) == 2, "steps on two hosts")
    took_s = min(each["at_s"] for each in hosts.commits() if each["step"] == BEFORE) - begun_s
    print(f"host {victim} {fault}: the others did the next step after {took_s:.2f} s")
    assert took_s < WITHIN_S
    if fault == "cut":
        hosts.lab.mend(victim)
        until(lambda: len(hosts.members()) == 3, "a new worker on the host that came back")
    hosts.open_gate(len(oracle))
    left = [host for host in range(3) if fault == "cut" or host != victim]
    assert [hosts.runners[host].wait(60) for host in left] == [0] * len(left), hosts.log(left[0])
    assert {each["size"] for each in hosts.commits() if each["step"] >= AFTER} == ({2, 3} if fault == "cut" else {2})
    compare(history(hosts.journals), oracle)


@pytest.mark.skipif(not FULL, reason="half a minute, until the kernel gives a host up: PLIANT_FULL=1")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_stays_cut_off_does_no_step_and_ends_by_itself(hosts: ThreeHosts, victim: int) -> None:
    oracle = golden("conv", 4, 4)
    hosts.open_gate(BEFORE)
    hosts.start(patience_s=5.0)
    until(lambda: hosts.num_that_did(BEFORE) == 3, "steps on three hosts")
    begun_s = time.monotonic()
    hosts.lab.cut(victim)
    hosts.open_gate(len(oracle))
    for host, runner in enumerate(hosts.runners):
        if host != victim:
            assert runner.wait(60) == 0, hosts.log(host)
    print(f"the others ended after {time.monotonic() - begun_s:.1f} s")
    assert hosts.runners[victim].wait(120) == 1, hosts.log(victim)
    print(f"host {victim}, cut off, ended after {time.monotonic() - begun_s:.1f} s: {hosts.log(victim)}")
    assert "no worker is left on" in hosts.log(victim)
    compare(history(hosts.journals), oracle)
