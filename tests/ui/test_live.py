"""The page of `pliant serve --dash` in a real browser: a job of the cluster and a federated one, both while they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gang import FULL
from pages import Browser, Home, said
from patience import until

from pliant.errors import ServerUnavailable
from pliant.jobs.client import JobsClient, find_server
from pliant.jobs.schema import job_from_json

PROGRAM = Path(__file__).with_name("job_program.py")
SUBMITTED = {"name": "spirals", "program": str(PROGRAM), "replicas": 2}
FEDERATED = """\
name: digits
participants: 4
rounds: 100000
target: 0.999
data: {kind: digits, clients: 30}
model: logistic
local: {steps: 1, batch_size: 5, lr: 0.1}
evaluate_every: 5
batching: 0
workers: 0
"""
LAST_ROUND = """() => Math.max(...[...document.querySelectorAll('.nicegui-echart')].flatMap(each =>
    (getElement(Number(each.id.slice(1))).chart?.getOption()?.series ?? []).filter(line => line.name === 'aggregated')
        .map(line => line.data?.at(-1)?.[0] ?? 0)), 0)"""
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture
def clean(home: Home) -> Iterator[None]:
    """Jobs outlive those who started them, and a test that fails: whatever is left is ended."""
    yield
    with suppress(ServerUnavailable), JobsClient(find_server(environ=home.environ)) as client:
        for job in client.jobs():
            if not job.is_over:
                client.stop(job.name, kill=True)
        until(lambda: all(job.is_over for job in client.jobs()), "the end of the cluster's jobs", 20)


def stop(page: Any) -> None:
    page.get_by_role("button", name="Stop").click()
    page.locator(".q-dialog").get_by_role("button", name="Stop it").click()


@pytest.mark.skipif(not FULL, reason="tens of seconds beside what smaller tests show: PLIANT_FULL=1")
@pytest.mark.usefixtures("clean")
def test_a_cluster_and_a_federated_job_are_watched_and_stopped(home: Home, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "digits.yml").write_text(FEDERATED)
    with (tmp_path / "serve.err").open("w") as errors:
        server = home.start("serve", "--devices", "cpu=2", "--port", "0", "--dash", "0", stderr=errors)
    url = said(server, r"the page is at (\S+)")
    token = next((tmp_path / "state").rglob("token")).read_text().strip()
    submitting = home.start("submit", "digits.yml")
    client = JobsClient(find_server(environ=home.environ))
    client.submit(job_from_json(SUBMITTED | {"directory": str(tmp_path)}))
    page = browser.page("dark")
    page.goto(f"{url}?token={token}")
    for name in ("spirals", "digits"):
        page.locator(".job", has_text=name).filter(has_text="running").wait_for()
    page.get_by_role("img", name="2 devices; spirals has cpu=").wait_for()
    page.get_by_role("heading", name="What the cluster has decided").wait_for()

    # The federated job: rounds go on, who was picked is there, and Stop stops it.
    page.locator(".job", has_text="digits").click()
    for heading in ("Time to accuracy", "Loss", "Who was picked", "How often clients were picked", "Log"):
        page.get_by_role("heading", name=heading, exact=True).wait_for()
    figures = page.locator(".figures")
    for told in ("clients picked", "fairness (Jain)", "an update takes", "in real time"):
        figures.get_by_text(told, exact=True).wait_for()
    first = until(lambda: page.evaluate(LAST_ROUND), "the first rounds")
    until(lambda: page.evaluate(LAST_ROUND) > first, "the next rounds")
    assert not page.get_by_role("button", name="Resize").is_visible(), "its executors come and go by themselves"
    stop(page)
    page.locator(".chip", has_text="stopped").wait_for()

    # The cluster's: what it decided is among the events, and its devices are the policy's business.
    page.get_by_role("link", name="pliant: all jobs").click()
    page.locator(".job", has_text="spirals").click()
    page.get_by_role("heading", name="Throughput").wait_for()
    figures.get_by_text("a step takes", exact=True).wait_for()
    page.get_by_role("heading", name="Where the time of a step goes").wait_for()
    page.locator(".event", has_text="starting").wait_for()
    assert not page.get_by_role("button", name="Resize").is_visible()
    stop(page)
    page.locator(".chip", has_text="stopped").wait_for()
    with client:
        assert client.job("spirals").state == "stopped"
    assert submitting.wait(timeout=30) == 0
