"""`pliant resize` against a real config server: how it finds the job, what it says, what it waits for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import A0, A1, TWO, serving, until_held

from pliant.cli.main import main
from pliant.cluster import Host
from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import Limits
from pliant.elastic.server import ConfigServer
from pliant.jobs.store import registered

Said = tuple[int, str, str]
"""Exit code, stdout, stderr."""


@pytest.fixture
def resize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """Runs the command in this process; no job of this user but the test's own is seen."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PLIANT_HOME", str(tmp_path / "home"))
    for name in ("PLIANT_CONFIG_SERVER", "PLIANT_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setattr("pliant.cli.main.COMMANDS", ("resize",))  # to make all of them takes 0.1 s each time

    def resize(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["pliant", "resize", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return resize


@pytest.fixture
def job(client: ConfigClient) -> ConfigClient:
    """A job of two workers that train."""
    client.put(TWO)
    client.ready(A0)
    client.ready(A1)
    return client


def test_a_shrink_is_told_and_timed(job: ConfigClient, resize: Callable[..., Said]) -> None:
    version = job.wanted().version
    code, out, err = resize("1", "--config-server", str(job.url))
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"resize 2 -> 1 \(version {version + 1}\)\nthe job runs on 1 worker after 0\.\d\ds\n", out)
    assert job.membership().members == (A0,)


@pytest.fixture
def resize_while(server: ConfigServer, job: ConfigClient, resize: Callable[..., Said]) -> Callable[..., Said]:
    """Resizes, and does something else as soon as the command waits."""

    def resize_while(size: int, act: Callable[[], object]) -> Said:
        with ThreadPoolExecutor(1) as pool:
            acted = pool.submit(lambda: (until_held(server, 1), act()))
            said = resize(str(size), "--config-server", str(job.url), "--timeout", "50s")
            acted.result(30)
        return said

    return resize_while


def test_a_growth_waits_for_the_newcomers(job: ConfigClient, resize_while: Callable[..., Said]) -> None:
    code, out, _ = resize_while(4, lambda: [job.ready(worker) for worker in job.wanted().workers[2:]])
    assert code == 0
    assert "resize 2 -> 4 (version" in out
    assert "the job runs on 4 workers after" in out


def test_who_is_late_is_named(job: ConfigClient, resize: Callable[..., Said]) -> None:
    code, out, err = resize("3", "--config-server", str(job.url), "--timeout=50ms")
    assert (code, out.count("\n")) == (1, 1)
    assert re.search(r"still waiting after 0\.\ds: 127\.0\.0\.1:\d+ not ready; the request \(version \d+\) stands", err)
    code, out, err = resize("4", "--config-server", str(job.url), "--no-wait")
    assert (code, err, out.count("\n")) == (0, "", 1)


def test_a_program_that_never_joins_is_named(client: ConfigClient, resize: Callable[..., Said]) -> None:
    with serving(initial=TWO) as (server, _):
        code, _, err = resize("2", "--config-server", server.url, "--timeout", "0")
    assert code == 1
    assert "does the program call pliant.join()?" in err


def test_zero_ends_the_job(job: ConfigClient, resize: Callable[..., Said]) -> None:
    code, out, _ = resize("0", "--config-server", str(job.url))
    assert code == 0
    assert re.search(r"resize 2 -> 0 .*\nthe job has ended after 0\.\d\ds\n", out)
    code, _, err = resize("2", "--config-server", str(job.url))
    assert code == 2
    assert "the cluster was cleared" in err


def test_a_job_that_ends_meanwhile_is_no_success(job: ConfigClient, resize_while: Callable[..., Said]) -> None:
    code, _, err = resize_while(3, lambda: job.finish(A0))
    assert code == 1
    assert "the job ended before it ran on 3 workers" in err


def test_the_job_is_found_by_itself(
    job: ConfigClient, resize: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    with registered(str(job.url), ["train.py"], host="127.0.0.1") as listed:
        assert resize("1")[0] == 0
        assert resize("1", "--job", listed.name)[0] == 0
        assert resize("1", "--job", "other")[0] == 2
        assert resize("1", "--job", listed.name, "--config-server", str(job.url))[0] == 2
        monkeypatch.setenv("PLIANT_CONFIG_SERVER", "http://127.0.0.1:1/config")
        assert "127.0.0.1:1" in resize("1")[2], "the variable goes before the list"
    monkeypatch.setenv("PLIANT_CONFIG_SERVER", str(job.url))
    assert resize("1")[0] == 0


def test_the_token_comes_with_the_job(
    resize: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    with serving(token="s3cret", initial=TWO) as (server, _):
        with registered(server.url, ["train.py"], host="127.0.0.1", token="s3cret"):
            assert resize("1", "--no-wait")[0] == 0
        code, _, err = resize("2", "--no-wait", "--config-server", server.url)
        assert (code, "needs its token" in err) == (2, True)
        monkeypatch.setenv("PLIANT_TOKEN", "s3cret")
        assert resize("2", "--no-wait", "--config-server", server.url)[0] == 0


@pytest.mark.parametrize("size", ["-1", "x", "1.5", "", "\u0664", "9" * 12])
def test_what_is_no_number_is_refused_before_anything_is_asked(size: str, resize: Callable[..., Said]) -> None:
    code, out, err = resize(size)
    assert (code, out) == (2, "")
    assert (
        err == f"pliant: {size!r} is not a number of workers: use 0 (ends the job) or more, as in `pliant resize 2`\n"
    )


def test_refusals_are_one_line_and_exit_2(client: ConfigClient, resize: Callable[..., Said]) -> None:
    reasons = {
        "no job of yours": resize("2"),
        "is not a URL": resize("2", "--config-server", "127.0.0.1:9100"),
        "no workers were ever wanted there": resize("2", "--config-server", str(client.url)),
        "--timeout 'soon'": resize("2", "--config-server", str(client.url), "--timeout", "soon"),
    }
    with serving(initial=TWO, limits=Limits(hosts=(Host("127.0.0.1", 3),))) as (server, limited):
        reasons["hold 3 workers"] = resize("4", "--config-server", server.url)
        assert limited.wanted().version == 1
    for reason, (code, out, err) in reasons.items():
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert reason in err


def test_a_server_that_cannot_be_reached_is_a_failure_and_no_mistake(resize: Callable[..., Said]) -> None:
    code, out, err = resize("2", "--config-server", "http://127.0.0.1:1/config")
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert "config server http://127.0.0.1:1/config: [Errno 111] Connection refused; is it running" in err
