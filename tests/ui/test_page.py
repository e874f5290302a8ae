"""The page in a real browser: it loads, moves with a real job, acts on it for who knows the token, and bears a lot."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
import records
from pages import Browser, Home, said
from patience import until
from playwright.sync_api import Error as PlaywrightError

from pliant.elastic.client import ConfigClient
from pliant.errors import ENDED_EXIT
from pliant.fed.report import read_curve
from pliant.jobs.store import running_jobs

PROGRAM = Path(__file__).with_name("job_program.py")
LAST_X = """() => {
    for (const each of document.querySelectorAll('.nicegui-echart')) {
        const data = getElement(Number(each.id.slice(1))).chart?.getOption()?.series?.at(-1)?.data;
        if (data?.length) return data.at(-1)[0];
    }
    return 0;
}"""
"""How far the first curve goes."""
FIRST_X = LAST_X.replace("data.at(-1)[0]", "data[0][0]")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def fact(page: Any, name: str) -> str:
    """A figure of the headline."""
    found = page.locator(".fact", has=page.locator("small", has_text=name)).first.inner_text()
    return str(found).splitlines()[-1].replace(",", "")


def scrolls_sideways(page: Any) -> bool:
    root = "document.documentElement"
    return bool(page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"))


def is_drawn_anew(page: Any) -> bool:
    try:
        return bool(page.evaluate("window.old !== 1 && document.querySelector('canvas') !== null"))
    except PlaywrightError:  # in the middle of it
        return False


def opens_job(page: Any, name: str) -> bool:
    """A click is lost if the list of jobs is drawn anew just then."""
    page.locator(".job", has_text=name).click()
    with contextlib.suppress(PlaywrightError):
        page.wait_for_url("**/job/*", timeout=2000)
    return "/job/" in page.url


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_a_real_job_is_watched_resized_and_stopped(home: Home, browser: Browser, tmp_path: Path) -> None:
    words = ("-w", "-q", "--no-v", "-np", "1", "-H", "127.0.0.1:2", "--record", "run.jsonl", "-logdir", "logs")
    with (tmp_path / "runner.err").open("w") as errors:
        runner = home.start("run", *words, "--dash", "0", str(PROGRAM), is_forked=False, stderr=errors)
    url = said(runner, r"the page is at (\S+)")
    page = browser.page()
    page.goto(url)
    job = until(
        lambda: next((each for each in running_jobs(home.environ) if str(tmp_path) in each.record), None), "the job"
    )
    until(lambda: opens_job(page, job.name), "the job's own page")
    assert page.locator(".chip").first.inner_text() in ("running", "starting")

    # The curve moves while the job trains.
    first = until(lambda: page.evaluate(LAST_X), "the first points")
    until(lambda: page.evaluate(LAST_X) > first + 20, "the curve to move")
    assert fact(page, "workers") == "1"

    # Who has not shown the token sees a form, and nothing of the job.
    for path in ("", f"job/{page.url.rpartition('/')[2]}", "_nicegui_ws/socket.io/?EIO=4&transport=polling"):
        assert httpx.get(urljoin(url, f"/{path}"), trust_env=False).status_code == 401
    # Nor may a page of another site, in the browser that has the cookie, also if its name points to this machine.
    foreign = page.context.new_page()
    rebound = urlsplit(url)._replace(netloc=f"evil.example:{urlsplit(url).port}").geturl()
    assert foreign.goto(rebound).status == 403
    with foreign.expect_response(urljoin(url, "/enter")) as posted:
        foreign.evaluate(
            "to => void fetch(to, {method: 'POST', mode: 'no-cors', credentials: 'include'})", urljoin(url, "/enter")
        )
    assert posted.value.status == 403
    socket = f"ws://{urlsplit(url).netloc}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    closed = "to => new Promise(done => { const s = new WebSocket(to); s.onopen = () => done('open'); s.onerror = () => done('refused') })"
    assert foreign.evaluate(closed, socket) == "refused"
    foreign.close()

    # Resizing asks first.
    page.get_by_role("button", name="Resize").click()
    dialog = page.locator(".q-dialog")
    dialog.get_by_label("Workers").fill("2")
    with ConfigClient(job.config_server, job.token) as client:
        assert len(client.membership().members) == 1
        wanted = client.get()
        assert wanted is not None
        assert wanted.size == 1

        # The job that really runs is resized.
        dialog.get_by_role("button", name="Resize it").click()
        until(lambda: len(client.membership().members) == 2, "the second worker")
    page.locator(".event", has_text="1 → 2 workers").wait_for()
    until(lambda: fact(page, "workers") == "2", "the page to show both")
    until(lambda: page.locator(".square").count() == 2, "a square for each")
    page.locator(".figures", has_text="waiting for other workers").filter(has_text="others wait for").wait_for()
    page.get_by_role("heading", name="Where the time of a step goes").wait_for()
    page.locator(".log", has_text="step").wait_for()

    # On a phone nothing is wider than the screen.
    phone = browser.page("dark", 390, 844)
    phone.goto(url)
    phone.goto(page.url)
    phone.locator("canvas").first.wait_for()
    assert not scrolls_sideways(phone)

    # Stopping asks, too.
    page.get_by_role("button", name="Stop").click()
    dialog = page.locator(".q-dialog").last
    dialog.get_by_role("button", name="Cancel").click()
    dialog.wait_for(state="detached")
    assert runner.poll() is None
    page.get_by_role("button", name="Stop").click()
    page.locator(".q-dialog").last.get_by_role("button", name="Stop it").click()
    assert runner.wait(timeout=60) == ENDED_EXIT
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)  # the page has ended with the job


def test_much_is_drawn_soon_in_both_themes_and_on_a_phone(home: Home, browser: Browser, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    records.write(runs / "large" / "record.jsonl", records.large())
    records.write(runs / "speech" / "record.jsonl", records.federated())
    records.write(runs / "everybody" / "record.jsonl", records.federated(60, 100_000, participants=1000))
    records.write(runs / records.EVIL / "record.jsonl", records.evil())
    (runs / records.EVIL / "log").write_text(f"{records.EVIL}\n")
    records.write(runs / "small" / "record.jsonl", records.training(900))
    url = home.dash(str(runs))
    page = browser.page("dark")
    page.goto(url)
    row = page.locator(".job", has_text="large")
    row.filter(has_text="100,000").wait_for()  # it is read to its end
    begun_s = time.monotonic()
    row.click()
    until(lambda: page.evaluate(LAST_X) > 99_000, "100,000 steps of 1,000 workers")
    assert time.monotonic() - begun_s < 20, "some 2 s on a quiet machine"
    assert page.locator(".square").count() == 1000
    assert page.get_by_text("the first 64 of 125 hosts").is_visible()

    # Who cannot see it hears it; a part of it can be chosen, also by keys.
    assert page.get_by_role("img", name="Loss: steps 0 to 100000: loss 0.").is_visible()
    page.locator(".q-slider__thumb").first.focus()
    page.keyboard.press("PageUp")
    page.get_by_text("steps 5,000 to 100,000").wait_for()
    until(lambda: page.evaluate(FIRST_X) > 4_900, "the chosen steps")
    page.get_by_role("button", name="All steps").click()
    until(lambda: page.evaluate(FIRST_X) < 10, "all steps again")

    # As the system says, then as the user does; the choice device_uses.
    dark = background(page)
    page.get_by_label("Theme").click()
    page.get_by_role("menuitem", name="Light").or_(page.locator(".q-item", has_text="Light")).first.click()
    until(lambda: background(page) != dark, "the light theme")
    light = background(page)
    page.goto(url)
    page.locator(".job").first.wait_for()
    assert background(page) == light

    # Near a decision the tooltip gives its reason; what others have written is text, and nothing else.
    page.locator(".job", has_text="img src").click()
    canvas = page.locator("canvas").first
    canvas.wait_for()
    page.locator(".log", has_text="img src").wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator(".chart-tip", has_text="batch size 16 per replica")
    tip.wait_for()
    assert f"noisy {records.EVIL}" in tip.inner_text()
    assert page.evaluate("window.evil") is None

    # 100,000 clients are as soon there, with the figures of the report.
    begun_s = time.monotonic()
    page.goto(url)
    page.locator(".job", has_text="everybody").click()
    facts = dict(read_curve(runs / "everybody").clients.facts())  # type: ignore[union-attr]
    table = page.locator(".figures")
    until(lambda: table.get_by_text(facts["clients picked"], exact=True).count(), "the clients' figures")
    assert time.monotonic() - begun_s < 20, "some 2 s on a quiet machine"
    assert "of 100,000; " in facts["clients picked"]
    assert table.locator("td").all_inner_texts() == list(facts.values())
    for heading in ("How often clients were picked", "How long clients take"):
        page.get_by_role("heading", name=heading, exact=True).wait_for()

    phone = browser.page("light", 390, 844)
    for name, headline in (("speech", "Time to accuracy"), ("small", "Topology")):
        phone.goto(url)
        assert not scrolls_sideways(phone)
        phone.locator(".job", has_text=name).click()
        phone.get_by_role("heading", name=headline).wait_for()
        phone.locator("canvas").first.wait_for()
        assert not scrolls_sideways(phone)

    # A page that was open when its server went away shows the job again once that is back.
    home.end_last()
    phone.get_by_text("Connection lost").wait_for()
    phone.evaluate("window.old = 1")
    assert home.dash(str(runs), port=urlsplit(url).port or 0) == url
    until(lambda: is_drawn_anew(phone), "the page to come back")
