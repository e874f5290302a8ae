"""The `pliant resize` command: asks a running job for another number of workers, and waits until it has them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli import completion
from pliant.cli.output import option, show_waiting
from pliant.duration import format_duration, parse_duration
from pliant.errors import ConfigError, LaunchError, ServerUnavailable
from pliant.jobs.store import START_ONE, choose_run, running_jobs
from pliant.tokens import find_token

if TYPE_CHECKING:
    from pliant.cluster import ClusterSnapshot, Membership, View
    from pliant.elastic.client import MembershipClient

RETRY_S = 0.2


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    # Otherwise -1 would be an unknown option, with a page of usage.
    app.command("resize", context_settings={"ignore_unknown_options": True})(resize)


# Numbers are taken as text and read here: click would answer a wrong one with a page of usage.
def resize(
    size: Annotated[str, typer.Argument(metavar="N", show_default=False, help="Workers to have; 0 ends the job.")],
    config_server: Annotated[
        str,
        option(
            "-config-server --config-server",
            "URL",
            "The job's config server, or etcd://HOSTS; default: PLIANT_CONFIG_SERVER, or that of your job on this machine.",
        ),
    ] = "",
    job: Annotated[str, option("--job", "ID", "Which of several running jobs.", completion.running)] = "",
    wait: Annotated[bool, option("--wait/--no-wait", "", "Return only when the job runs on N workers.")] = True,
    timeout: Annotated[str, option("--timeout", "TIME", "How long to wait.")] = "60s",
) -> None:
    """Give the running job N workers; its result stays the same."""
    from pliant.elastic.client import open_client

    num_workers = _size(size)
    timeout_s = parse_duration(timeout, "--timeout")
    url, token = _server(config_server, job)
    begun_s = time.monotonic()
    with open_client(url, token, origin=f"pliant resize {num_workers}") as client:
        view = _request_size(client, url, num_workers)
        if not wait:
            return
        with show_waiting(
            f"waiting until the job {f'runs on {_workers(num_workers)}' if num_workers else 'has ended'}"
        ):
            _await(client, view, num_workers, begun_s + timeout_s, timeout)
    took = f"{time.monotonic() - begun_s:.2f}s"
    if num_workers == 0:
        print(f"the job has ended after {took}")
    else:
        print(f"the job runs on {_workers(num_workers)} after {took}")


def _server(url: str, job: str) -> tuple[str, str]:
    """Return the URL and the token of the config server."""
    if url and job:
        raise ConfigError(f"--config-server {url} and --job {job} both name a job: give one of them")
    url = url or ("" if job else os.environ.get("PLIANT_CONFIG_SERVER", ""))
    if url:
        return url, find_token(url)
    found = choose_run(running_jobs(), job)
    return found.config_server, found.token or find_token(found.config_server)


def _request_size(client: MembershipClient, url: str, num_workers: int) -> View:
    """Ask for `num_workers`; returns the view that the server made of it."""
    before = client.snapshot().wanted.view
    if before is None:
        raise ConfigError(f"no job runs at {url}: no workers were ever wanted there; {START_ONE}")
    view = client.resize(num_workers)
    print(f"resize {before.size} -> {num_workers} (version {view.number})", flush=True)
    return view


def _await(client: MembershipClient, view: View, num_workers: int, deadline_s: float, timeout: str) -> None:
    """Wait until the job trains on `num_workers` workers.

    Raises:
        LaunchError: the job ended first, or `deadline_s` has passed.
    """
    snapshot: ClusterSnapshot | None = None
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            snapshot = client.snapshot() if snapshot is None else client.wait_for_change(snapshot, max(0.0, left_s))
        except ServerUnavailable:
            if num_workers == 0:
                return  # the server was a part of the job, and has ended with it
            if left_s <= 0:
                raise
            time.sleep(min(RETRY_S, left_s))
            continue
        membership = snapshot.membership
        if membership.over:
            if num_workers > 0:
                raise LaunchError(f"the job ended before it ran on {_workers(num_workers)}; its own output says why")
            return
        if len(membership.members) == num_workers:
            return
        if left_s <= 0:
            raise LaunchError(_still_waiting(view, membership, timeout))


def _still_waiting(view: View, membership: Membership, timeout: str) -> str:
    late = membership.missing(view)
    names = ", ".join(map(str, late[:4])) + (f" and {len(late) - 4} more" if len(late) > 4 else "")
    why = f"{names} not ready" if late else f"the job runs on {_workers(len(membership.members))}"
    hint = "" if membership.number else "; no worker has ever been ready: does the program call pliant.join()?"
    said = format_duration(parse_duration(timeout))
    return f"still waiting after {said}: {why}{hint}; the request (version {view.number}) stands, --no-wait returns at once"


def _size(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"{text!r} is not a number of workers: use 0 (ends the job) or more, as in `pliant resize 2`")
    return int(text)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
