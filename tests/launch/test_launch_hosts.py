"""Jobs of two hosts (two loopback addresses, a runner each), and of a config server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_cluster import etcd_cluster, needs_etcd
from launching import MAIN, Ended, Launcher, Runner, client_of
from test_launch_jobs import STEPS, up

from pliant.cli.resize import resize
from pliant.cluster import View, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import ENDED_EXIT, CapacityError
from pliant.tokens import find_token

pytestmark = pytest.mark.processes

HOSTS = "127.0.0.1:2,127.0.0.2:2"


class Pair:
    """A runner on each of the two hosts."""

    def __init__(self, launcher: Launcher, port: int) -> None:
        self._launcher, self._port = launcher, port

    def start(self, host: str, *arguments: object, **environ: str) -> Runner:
        return self._launcher.start("-q", "-H", HOSTS, "-self", host, "-port", self._port, *arguments, **environ)

    def run(self, *arguments: object) -> tuple[Ended, Ended]:
        runners = [self.start(host, *arguments) for host in ("127.0.0.1", "127.0.0.2")]
        return self._launcher.end(runners[0]), self._launcher.end(runners[1])


@pytest.fixture
def pair(launcher: Launcher, free_port: int) -> Pair:
    return Pair(launcher, free_port)


def test_each_runner_starts_its_own_and_all_know_all(launcher: Launcher, pair: Pair) -> None:
    launcher.script(
        "spec.py",
        """
        from pliant.identity import worker_spec
        spec = worker_spec()
        print(spec.view.rank_of(spec.worker), *spec.view.workers, spec.secret.hex()[:8])
        """,
    )
    ended = pair.run("-np", 3, "spec.py")
    assert [one.code for one in ended] == [0, 0], ended
    assert "all 2/2 local workers finished" in ended[0].last_line
    assert "all 1/1 local workers finished" in ended[1].last_line
    seen = re.findall(r"^\[.*::stdout\] (\d) (.*)$", ended[0].stdout + ended[1].stdout, re.M)
    assert sorted(rank for rank, _ in seen) == ["0", "1", "2"]
    assert len({rest for _, rest in seen}) == 1
    cookie = launcher.directory / ".config/pliant/secret"
    assert cookie.stat().st_mode & 0o777 == 0o600
    assert not any(cookie.read_text().strip() in one.stdout + one.stderr for one in ended)


def test_a_failure_on_one_host_ends_the_job_on_both(launcher: Launcher, pair: Pair) -> None:
    launcher.script("steps.py", STEPS)
    both = "if [ $PLIANT_LOCAL_RANK$HOST_FAILS = 11 ]; then exit 9; fi; exec python3 steps.py"
    good = pair.start("127.0.0.1", "-np", 4, "sh", "-c", both)
    bad = pair.start("127.0.0.2", "-np", 4, "sh", "-c", both, HOST_FAILS="1")
    ended_good, ended_bad = launcher.end(good), launcher.end(bad)
    assert ended_good.code == ended_bad.code == 9
    assert re.search(r"ends on every host: worker 127.0.0.2:\d+ failed: exit code 9", ended_good.stderr)
    assert re.search(r"worker 127.0.0.2:\d+ \(rank 3\) failed first", ended_bad.stderr)


@pytest.mark.parametrize("victim", ["127.0.0.1", "127.0.0.2"])
def test_a_runner_that_is_killed_ends_the_job_on_the_other_host(launcher: Launcher, pair: Pair, victim: str) -> None:
    launcher.script("steps.py", STEPS)
    runners = {host: pair.start(host, "-np", 4, "steps.py") for host in ("127.0.0.1", "127.0.0.2")}
    up(launcher, 4)
    runners.pop(victim).send_signal(signal.SIGKILL)
    (survivor,) = runners.values()
    ended = launcher.end(survivor)
    assert ended.code == 1
    assert re.search(rf"the runner (on|at) {victim}\S* is gone", ended.stderr)


def test_a_signal_to_one_runner_ends_the_job_on_both(launcher: Launcher, pair: Pair) -> None:
    launcher.script("steps.py", STEPS)
    runners = [pair.start(host, "-np", 4, "steps.py") for host in ("127.0.0.1", "127.0.0.2")]
    up(launcher, 4)
    runners[1].terminate()
    assert [launcher.end(runner).code for runner in runners] == [143, 143]
    assert len(launcher.files("step-done-*")) == 4


def test_a_missing_runner_and_a_wrong_secret_are_told(launcher: Launcher, pair: Pair) -> None:
    (launcher.directory / "one").write_text("1" * 32)
    (launcher.directory / "two").write_text("2" * 32)
    head = pair.start("127.0.0.1", "-np", 4, "--secret-file", "one", "--rendezvous-timeout", "1s", "true")
    ended = launcher.end(pair.start("127.0.0.2", "-np", 4, "--secret-file", "two", "true"))
    assert ended.code == 2
    assert "does not know this job's secret" in ended.stderr
    assert "--secret-file" in ended.stderr
    ended = launcher.end(head)
    assert ended.code == 1
    assert "no runner came from 127.0.0.2 within 1 s" in ended.stderr


def test_the_jobs_timeout_also_ends_the_wait_for_other_hosts(launcher: Launcher, pair: Pair) -> None:
    ended = launcher.end(pair.start("127.0.0.2", "-np", 4, "-timeout", "300ms", "true"))
    assert ended.code == 124
    assert "-timeout: no runner answers at 127.0.0.1:" in ended.stderr


def test_a_taken_control_port_matters_to_several_hosts_only(launcher: Launcher, pair: Pair, free_port: int) -> None:
    taken = ConfigServer(ServerConfig(port=free_port, open=True))
    with taken.running():
        ended = launcher.end(pair.start("127.0.0.1", "-np", 4, "true"))
        assert ended.code == 2
        assert "give another one with -port" in ended.stderr
        assert launcher.run("-q", "-port", free_port, "true").code == 0


# Watch mode.


def test_a_watching_runner_grows_shrinks_and_stops(launcher: Launcher, alive: Callable[[int], bool]) -> None:
    launcher.script("steps.py", STEPS)
    runner = launcher.start(
        "-w", "-np", 1, "-H", "127.0.0.1:4", "-logdir", "logs", "sh", "-c", "echo up; exec python3 steps.py"
    )
    with client_of(launcher, runner) as client:
        (first,) = up(launcher, 1)
        client.resize(3)
        up(launcher, 3)
        client.resize(1)
        launcher.until(lambda: len(launcher.files("step-done-*")) == 2, "end of two workers")
        assert alive(first)
        client.clear()
    ended = launcher.end(runner)
    assert ended.code == ENDED_EXIT
    assert "arrived at v2, new np=3, local: +2/-0, global: +2/-0" in ended.stderr
    assert "arrived at v3, new np=1, local: +0/-2, global: +0/-2" in ended.stderr
    assert len(launcher.files("step-done-*")) == 3
    assert "the job was ended before its last step: POST /clear from 127.0.0.1\n" in ended.stderr
    assert len(launcher.files("logs/127.0.0.1.*@1.stdout.log")) == 1
    assert len(launcher.files("logs/127.0.0.1.*@2.stdout.log")) == 2


def test_the_builtin_server_listens_where_asked_and_workers_know_it(launcher: Launcher, free_port: int) -> None:
    ended = launcher.run("-w", "-builtin-config-port", free_port, "-np", 2, "sh", "-c", "echo $PLIANT_CONFIG_SERVER")
    assert ended.code == 0
    assert ended.stdout.count(f"] http://127.0.0.1:{free_port}/config\n") == 2
    assert "all 2/2 local workers finished" in ended.last_line


@pytest.fixture
def server() -> Iterator[ConfigServer]:
    with ConfigServer(ServerConfig(port=0, open=True)).running() as running:
        yield running


def test_a_runner_waits_to_be_added_and_leaves_when_removed(launcher: Launcher, server: ConfigServer) -> None:
    launcher.script("steps.py", STEPS)
    runner = launcher.start(
        "-w", "--no-warm", "-self", "127.0.0.2", "-config-server", server.url, "-init-version", "-1", "steps.py"
    )
    assert any(b"waiting to be added" in line for line in runner.stderr)
    here, other = Worker("127.0.0.2", 10500), Worker("127.0.0.1", 10500)
    runners = (Worker("127.0.0.1", 38080), Worker("127.0.0.2", 38080))
    with ConfigClient(server.url) as client:
        client.put(View(0, (other,), runners[:1]))
        client.put(View(0, (other, here), runners))
        (pid,) = up(launcher, 1)
        assert f"PLIANT_WORKER={here}" in Path(f"/proc/{pid}/environ").read_text()
        client.put(View(0, (other,), runners[:1]))
    ended = launcher.end(runner)
    assert ended.code == 0
    assert "arrived at v2, new np=2, local: +1/-0" in ended.stderr
    assert len(launcher.files("step-done-*")) == 1


def test_two_watching_hosts_share_the_heads_server(launcher: Launcher, pair: Pair) -> None:
    launcher.script("steps.py", STEPS)
    head = pair.start("127.0.0.1", "-w", "--no-warm", "-np", 2, "steps.py")
    other = pair.start("127.0.0.2", "-w", "--no-warm", "-np", 2, "steps.py")
    with client_of(launcher, head) as client:
        up(launcher, 2)
        client.resize(4)
        up(launcher, 4)
        client.clear()
    assert [launcher.end(runner).code for runner in (head, other)] == [ENDED_EXIT] * 2
    assert len(launcher.files("step-done-*")) == 4


@needs_etcd
def test_two_hosts_of_etcd_are_resized_and_a_finished_job_stands_in_the_way_of_the_next(
    launcher: Launcher, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.script("steps.py", STEPS)
    (etcd_folder := tmp_path / "etcd").mkdir()
    with etcd_cluster(etcd_folder) as etcd:
        url = f"{etcd.url}/job"
        options = ("-w", "--no-warm", "-config-server", url, "-np", 2, "steps.py")
        runners = [pair.start(host, *options) for host in ("127.0.0.1", "127.0.0.2")]
        up(launcher, 2)
        resize("3", config_server=url, wait=False)
        up(launcher, 3)
        with pytest.raises(CapacityError, match="hold 4 workers"):
            resize("5", config_server=url, wait=False)
        resize("0", config_server=url)
        assert "resize 2 -> 3 (version 2)" in capsys.readouterr().out
        assert [launcher.end(runner).code for runner in runners] == [ENDED_EXIT] * 2
        ended = launcher.run("-q", "-w", "-config-server", url, "true")
        assert ended.code == 2
        assert (
            f"give another prefix, or forget that job: `etcdctl --endpoints http://{etcd.clients[0]} del /job/job`"
            in ended.stderr
        )
        assert launcher.run("-q", "-w", "-config-server", f"{etcd.url}/another", "true").code == 0


def test_a_runner_finds_the_token_of_its_users_config_server_and_says_if_there_is_none(launcher: Launcher) -> None:
    command = [sys.executable, "-c", MAIN, "config-server", "-port", "0"]
    with subprocess.Popen(command, env=launcher.environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[3].rstrip(",")
            assert "token in" in process.stdout.readline()
            words = ("-q", "-w", "--no-warm", "-config-server", url, "true")
            owner, stranger = (
                launcher.start(*words),
                launcher.start(*words, PLIANT_HOME=str(launcher.directory / "other")),
            )
            assert launcher.end(owner).code == 0
            refused = launcher.end(stranger)
        finally:
            process.kill()
    assert refused.code == 2
    assert "this server needs its token" in refused.stderr
    assert "PLIANT_TOKEN" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_cleared_server_is_told_at_once(launcher: Launcher, server: ConfigServer) -> None:
    with ConfigClient(server.url) as client:
        client.clear()
    ended = launcher.run("-q", "-w", "-config-server", server.url, "true")
    assert ended.code == 2
    assert "reset it first" in ended.stderr


def test_kungfus_two_flags_mean_one_server(launcher: Launcher, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/config"
    ended = launcher.run("-w", "-builtin-config-port", free_port, "-config-server", url, "-np", 1, "true")
    assert ended.code == 0
    assert "arrived at v1, new np=1" in ended.stderr


def test_a_builtin_server_without_watching_shows_the_view(launcher: Launcher, free_port: int) -> None:
    launcher.script("steps.py", STEPS)
    runner = launcher.start("-q", "-builtin-config-port", free_port, "-np", 2, "steps.py")
    up(launcher, 2)
    url = f"http://127.0.0.1:{free_port}"
    with ConfigClient(url, find_token(url, launcher.environ)) as client:
        view = client.get()
    assert view is not None
    assert view.size == 2
    runner.terminate()
    assert launcher.end(runner).code == 143


def test_keep_stays_after_the_workers_have_finished(launcher: Launcher, server: ConfigServer) -> None:
    launcher.script("once.py", "import os, pathlib; pathlib.Path(f'up-{os.getpid()}').touch()")
    runner = launcher.start("-q", "-w", "--no-warm", "-k", "-config-server", server.url, "once.py")
    up(launcher, 1)
    with ConfigClient(server.url) as client:
        client.resize(2)
        up(launcher, 2)
    runner.terminate()
    assert launcher.end(runner).code == 143
