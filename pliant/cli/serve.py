"""The `pliant serve` command: runs the job server, or, with --reserve, takes devices from the jobs of a running one."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pliant.cli import completion
from pliant.cli.connection import ServerFlag, connected, devices_text
from pliant.cli.dash import check_page_port, page_beside
from pliant.cli.output import (
    ServerNameFlag,
    TlsCertFlag,
    TlsKeyFlag,
    announce,
    option,
    parse_counts,
    parse_int,
    parse_names,
    read_token,
)
from pliant.duration import parse_duration
from pliant.errors import ConfigError

if TYPE_CHECKING:
    from pliant.jobs.scheduler import Backend

BACKENDS = ("local", "ray")
LIVE_POLICIES = ("easyscale-heter", "easyscale-homo", "yarn-cs-gang", "yarn-cs")
"""Policies that need not know how long a job will take."""


# Numbers are taken as text and read here: click would answer a wrong one with a page of usage.
def serve(
    devices: Annotated[str, option("--devices", "TYPE=N,...", "Devices to share, such as cpu=4 or v100=8,t4=4.")] = "",
    policy: Annotated[
        str,
        option(
            "--policy",
            "NAME|module:Class",
            f"Scheduling policy: {', '.join(LIVE_POLICIES)}, or a class of your own (also FILE.py:Class).",
            completion.one_of(*LIVE_POLICIES),
        ),
    ] = LIVE_POLICIES[0],
    state: Annotated[
        str, option("--state", "DIR", "Directory of jobs and decisions; use the same one after a restart.")
    ] = "",
    host: Annotated[str, option("--host", "", "Address to listen on, IPv4 or IPv6.")] = "127.0.0.1",
    port: Annotated[str, option("--port", "PORT", "0 picks a free one.")] = "9200",
    token_file: Annotated[
        str,
        option(
            "--token-file",
            "FILE",
            "File with the token that clients must send; default: PLIANT_TOKEN, or a random one.",
        ),
    ] = "",
    tenants: Annotated[
        str,
        option(
            "--tenants",
            "FILE",
            "Share the devices among the tenants in this YAML file, by quotas and weights; each has a token of its own.",
        ),
    ] = "",
    interval: Annotated[str, option("--interval", "TIME", "Time between decisions if nothing happens.")] = "5s",
    tls_cert: TlsCertFlag = "",
    tls_key: TlsKeyFlag = "",
    server_name: ServerNameFlag = "",
    dash: Annotated[str, option("--dash", "PORT", "Show the page of `pliant dash` there, with the same token.")] = "",
    on: Annotated[str, option("--on", "local|ray", "Where jobs run.", completion.one_of(*BACKENDS))] = "local",
    ray_address: Annotated[
        str, option("--ray-address", "HOST:PORT", "With --on ray, which cluster; auto: this machine's.")
    ] = "auto",
    reserve: Annotated[
        str,
        option(
            "--reserve",
            "TYPE=N,...",
            "Take devices from the jobs of the running server, within a second; 0 gives them back.",
        ),
    ] = "",
    server: ServerFlag = "",
    embedded: Annotated[bool, option("--embedded", "", "", hidden=True)] = False,
) -> None:
    """Run the job server, which shares devices among submitted jobs. Jobs outlive it; started again, it finds them."""
    if reserve:
        _reserve(parse_counts(reserve, "--reserve"), server, state)
        return
    if server:
        raise ConfigError(f"--server {server} names a server that runs: add --reserve TYPE=N, or leave it out")
    from pliant.jobs.api import JobServerConfig
    from pliant.jobs.api import serve as run
    from pliant.sched import policies as schedulers
    from pliant.sched.tenants_file import read_tenants
    from pliant.tokens import state_directory

    if on not in BACKENDS:
        raise ConfigError(f"--on {on!r} is not known: use {' or '.join(BACKENDS)}")
    if policy not in LIVE_POLICIES and ":" not in policy:
        raise ConfigError(
            f"--policy {policy!r} cannot be used live: use {', '.join(LIVE_POLICIES)}, module:Class or FILE.py:Class"
        )
    check_page_port(dash)
    chosen = schedulers.make_policy(policy)
    given = parse_counts(devices, "--devices")
    config = JobServerConfig(
        state=Path(state).absolute() if state else state_directory(),
        host=host,
        port=0 if embedded else parse_int(port, "--port", 9200),
        token="" if embedded else read_token(token_file),
        interval_s=parse_duration(interval, "--interval"),
        names=parse_names(server_name),
        tls_cert=tls_cert,
        tls_key=tls_key,
        tenants=read_tenants(Path(tenants), given, with_tokens=True) if tenants else (),
        embedded=embedded,
    )
    logging.basicConfig(level=logging.INFO, format="[serve] %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # The page's token is the server's: from the file, from PLIANT_TOKEN, or the one that the server keeps.
    shown_token = token_file or ("" if config.token else str(config.state / "token"))
    # This user's own cluster is shown with all else that runs here, as by `pliant list`; another one alone.
    is_mine = config.state == state_directory() and not os.environ.get("PLIANT_SERVER")
    shown = "" if is_mine else str(config.state)
    with ExitStack() as stack:

        def say(text: str) -> None:
            announce(text)
            if text.startswith("pliant serve at"):  # from now on there is something to show
                stack.enter_context(page_beside(dash, shown, token_file=shown_token, tls=(tls_cert, tls_key)))

        if embedded:
            on, given, ray_address = _embedded_backend(config.state)
        run(
            config,
            lambda: _backend(config.state, on, given, ray_address, embedded=embedded),
            chosen,
            say,
        )


def _reserve(wanted: dict[str, int], server: str, state: str) -> None:
    with connected(server, state) as client:
        done = client.reserve(wanted)
    if done.reserved:
        print(f"reserved {devices_text(done.reserved)}, free after {done.took_s:.2f} s")
    else:
        print("nothing is reserved: all devices are for jobs")


def _backend(state: Path, on: str, devices: dict[str, int], ray_address: str, *, embedded: bool) -> Backend:
    from pliant.jobs.backends import LocalBackend, RayBackend
    from pliant.jobs.store import JobStore

    if on == "local" and not any(devices.values()):
        raise ConfigError("no devices to give: say how many, as in --devices cpu=4")
    backend = RayBackend(devices, ray_address) if on == "ray" else LocalBackend(devices)
    if not embedded:  # an embedded server that takes up these jobs must have the same devices
        with JobStore(state) as store:
            store.set("server", {"on": on, "devices": devices, "ray_address": ray_address})
    return backend


def _embedded_backend(state: Path) -> tuple[str, dict[str, int], str]:
    """Return the backend of the last server if it has left jobs; else all GPUs, or all processors, of this machine."""
    from pliant.jobs.store import JobStore
    from pliant.launch.plan import device_files, visible_devices

    with JobStore(state) as store:
        last = store.setting("server")
        is_needed = any(job["state"] not in ("finished", "failed", "stopped") for job in store.jobs(scheduled=True))
    if last and is_needed:
        return last["on"], last["devices"], last["ray_address"]
    if gpus := len(visible_devices(os.environ, device_files())):
        return "local", {"gpu": gpus}, ""
    return "local", {"cpu": len(os.sched_getaffinity(0))}, ""
