"""Tenants at the command line: a wrong file is refused as a whole, and a real server is used with a tenant's token."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import until
from test_job_commands import MAIN, on_terminal

from pliant.jobs.client import JobsClient, find_server

Said = tuple[int, str, str]
TOKENS = {"vision": "the-token-of-vision", "speech": "the-token-of-speech"}


def written(folder: Path, text: str) -> None:
    (folder / "tenants.yml").write_text(text)
    for name, token in TOKENS.items():
        (folder / f"{name}.token").write_text(token + "\n")


def test_a_wrong_file_is_refused_with_all_of_its_lines_and_no_token(
    pliant: Callable[..., Said], tmp_path: Path
) -> None:
    written(
        tmp_path,
        "vision: {weight: heavy, quota: {cpu: 3}, token_file: vision.token}\n"
        "speech:\n"
        "  quota: {cpu: 2, t4: 1}\n"
        "  token_file: vision.token\n"
        "guests: {token: the-token-of-guests}\n",
    )
    code, out, err = pliant("serve", "--devices", "cpu=4", "--port", "0", "--tenants", "tenants.yml")
    assert (code, out) == (2, "")
    assert err == (
        "pliant: tenants.yml:1: weight 'heavy': use a number\n"
        "tenants.yml:3: quota.cpu 2: with it all quotas are 5 cpu, and the cluster has cpu=4; lower one\n"
        "tenants.yml:3: quota.t4 1: the cluster has cpu=4; name one of these types\n"
        "tenants.yml:4: the token of speech is that of vision, too: give each its own\n"
        "tenants.yml:5: unknown key 'token': did you mean token_file?\n"
    )
    assert "the-token" not in err
    assert not (tmp_path / "state").exists(), "nothing was begun"


def test_a_tenant_with_the_servers_own_token_is_refused(pliant: Callable[..., Said], tmp_path: Path) -> None:
    written(tmp_path, "vision: {token_file: vision.token}\n")
    words = ("--devices", "cpu=1", "--port", "0", "--tenants", "tenants.yml", "--token-file", "vision.token")
    assert pliant("serve", *words) == (
        2,
        "",
        "pliant: --tenants: the token of vision is the server's own: give the tenant another one\n",
    )


@contextmanager
def tenants_served(folder: Path) -> Iterator[str]:
    """Run a server for two tenants; yield its address."""
    state = folder / "state/pliant"
    words = ("serve", "--devices", "cpu=2", "--port", "0", "--tenants", "tenants.yml")
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", MAIN, *words], stdout=log, stderr=log)
    try:
        until((state / "server.json").exists, "the server")
        with JobsClient(find_server(state=str(state), environ={})) as client:
            yield client.server.url
            for job in client.jobs():
                client.stop(job.name, kill=True)
            until(lambda: all(job.is_over for job in client.jobs()), "the jobs to end")
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_each_tenant_commands_its_own_jobs(
    pliant: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "vision: {quota: {cpu: 1}, token_file: vision.token}\nspeech: {token_file: speech.token}\n")
    (tmp_path / "endless.sh").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "endless.sh").chmod(0o755)
    (tmp_path / "job.yml").write_text("program: endless.sh\nreplicas: 1\nflags: [--plain]\n")
    with tenants_served(tmp_path) as url:
        monkeypatch.setenv("PLIANT_SERVER", url)
        for tenant, token in TOKENS.items():
            monkeypatch.setenv("PLIANT_TOKEN", token)
            assert pliant("submit", "job.yml", "--name", tenant) == (0, f"{tenant}\n", "")
        # The names of others are taken, though they are not shown.
        assert pliant("submit", "job.yml", "--name", "vision")[0] == 2
        assert pliant("submit", "job.yml") == (0, "job-1\n", "")
        monkeypatch.setenv("PLIANT_TOKEN", TOKENS["vision"])
        assert pliant("submit", "job.yml") == (0, "job-2\n", ""), "job-1 is of somebody else"
        assert pliant("list", "-q") == (0, "vision\njob-2\n", "")
        assert pliant("stop", "speech") == (
            2, "", f"pliant: {url}: job 'speech' is not of tenant vision: only its own tenant and the server's owner may ask\n",
        )  # fmt: skip
        code, _, err = pliant("serve", "--reserve", "cpu=1")
        assert (code, err) == (2, f"pliant: {url}: tenant vision may not reserve devices: ask the server's owner\n")

        monkeypatch.delenv("PLIANT_TOKEN")
        monkeypatch.delenv("PLIANT_SERVER")
        rows = [line.split("\t") for line in pliant("list")[1].splitlines()]
        assert [(row[0], row[2], row[7]) for row in rows] == [
            ("vision", "cpu=1", "vision"), ("speech", "cpu=1", "speech"), ("job-1", "-", "speech"), ("job-2", "-", "vision"),
        ]  # fmt: skip
        assert rows[2][8] == "waits: tenant speech has its 1 cpu, vision has borrowed none"
        tables = on_terminal("list").split("\n\n")
        assert "TENANT" in tables[0].splitlines()[0]
        assert [" ".join(line.split()) for line in tables[1].splitlines()] == [
            "TENANT HAS QUOTA SHARE BORROWED JOBS",
            "vision cpu=1 cpu=1 cpu=1 - 1 runs, 1 waits",
            "speech cpu=1 - cpu=1 - 1 runs, 1 waits",
        ]
