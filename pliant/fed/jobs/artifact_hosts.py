"""What the artifact's job files say about machines: the server's address, and how many executors are where."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pliant.errors import ConfigError
from pliant.fed.jobs.artifact_keys import NOTHING, Keys
from pliant.fed.jobs.job import Ground, absolute
from pliant.fed.workers import parse_workers
from pliant.yaml_source import KeyPath, unknown_key_message

TOP = (
    "ps_ip", "worker_ips", "exp_path", "auth", "setup_commands", "job_conf", "executor_entry", "aggregator_entry",
    "use_container", "ports", "data_path", "container_network",
)  # fmt: skip


def ground_of(said: Mapping[str, object], keys: Keys, folder: Path) -> Ground:
    """What stands beside `job_conf`, checked; mistakes and remarks go to `keys`."""
    for key in said:
        if key not in TOP:
            hint = unknown_key_message(key, key, TOP).partition(": ")[2]
            keys.remarks[(key,)] = f"{key} is not known, and has no effect: {hint}"
    if _given(said.get("use_container")) not in ("", "false", "default"):
        keys.wrong[("use_container",)] = (
            f"use_container {said['use_container']}: executors are processes; start pliant in containers of your own, "
            "or use Ray (workers: ray:4)"
        )
    for key in ("executor_entry", "aggregator_entry"):
        if _given(said.get(key)):
            keys.remarks[(key,)] = f"{key} is not run: server and executors are pliant's own"
    if _given(said.get("setup_commands")):
        keys.remarks[("setup_commands",)] = (
            "setup_commands are not run: executors start with the Python that pliant is installed in"
        )
    auth = said.get("auth")
    user = str(auth.get("ssh_user", "")) if isinstance(auth, dict) else ""
    return Ground(
        workers=_workers(said.get("worker_ips"), keys.wrong),
        log_path=absolute(str(keys.said.get("log_path", ".")), folder),
        host=_host(said, keys),
        port=cast(int, keys.said.get("ps_port", 0)),
        ssh_user="" if user.lower() in NOTHING else user,
    )


def _given(value: object) -> str:
    if isinstance(value, str):
        return "" if value.strip().lower() in NOTHING else value.strip().lower()
    return str(value) if value else ""


def _host(said: Mapping[str, object], keys: Keys) -> str:
    """The server's address; it runs where the job is submitted. Loopback is for executors of this machine alone."""
    places: list[tuple[KeyPath, str]] = [(("ps_ip",), str(said.get("ps_ip", "") or ""))]
    if "ps_ip" in keys.said:
        places.append((keys.places["ps_ip"], str(keys.said["ps_ip"])))
    address = ""
    for place, given in places:
        if given.lower() in NOTHING:
            continue
        found = _own_address(given)
        if not found:
            keys.wrong[place] = (
                f"ps_ip {given}: not an address of this machine, where the server would run; submit it there"
            )
        address = found
    return "" if address.startswith("127.") or address == "::1" else address


def _own_address(name: str) -> str:
    """The address of this machine that `name` means; empty: it is another one's, or none."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.bind((where[0], 0))
                return str(where[0])
    return ""


def _workers(given: object, wrong: dict[KeyPath, str]) -> tuple[str, ...]:
    """`ip:4`, or FedScale's `ip:[2,2]`: so many processes on each of its devices."""
    if given is None:
        return Ground().workers
    if not isinstance(given, list):
        wrong[("worker_ips",)] = "worker_ips: use a list, as in `- 10.0.0.2:4`"
        return ()
    found = []
    for at, item in enumerate(given):
        try:
            found.append(_worker(str(item)))
        except (ValueError, ConfigError):
            wrong[("worker_ips", at)] = f"{item!r:.60} in worker_ips: use host:4, or host:[2,2]"
    return tuple(found)


def _worker(item: str) -> str:
    where, colon, num = item.replace(" ", "").partition(":[")
    text = f"{where}:{sum(int(each) for each in num.rstrip(']').split(','))}" if colon else item
    parse_workers([text])
    return text
