"""The `pliant config-server` command: serves the wanted view of a job over HTTP until it is told to stop."""

from __future__ import annotations

import ipaddress
import logging
import math
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pliant.cli.output import (
    ServerNameFlag,
    TlsCertFlag,
    TlsKeyFlag,
    announce,
    option,
    parse_int,
    parse_names,
    read_token,
)
from pliant.cluster import PortRange, View, Worker, check_host, parse_hosts
from pliant.duration import parse_duration
from pliant.elastic.membership import NO_LIMITS, Limits
from pliant.errors import ConfigError, reason
from pliant.json_text import parse_json
from pliant.tokens import keep_token, kept_token, random_token

if TYPE_CHECKING:
    from pliant.elastic.server import ServerConfig


# Numbers are taken as text and read here: click would answer a wrong one with a page of usage.
def config_server(
    host: Annotated[str, option("-host --host", "", "Address to listen on; 0.0.0.0 or :: for all.")] = "127.0.0.1",
    port: Annotated[str, option("-port --port", "PORT", "0 picks a free one.")] = "9100",
    init: Annotated[str, option("-init --init", "FILE", "JSON of the first list of workers.")] = "",
    ttl: Annotated[str, option("-ttl --ttl", "TIME", "Stop after this time, such as 90s; 0 means never.")] = "0",
    endpoint: Annotated[str, option("-endpoint --endpoint", "", "URL path of the list.")] = "/config",
    hosts: Annotated[str, option("-H --hosts", "HOST:SLOTS,...", "Slots that a resize may use.")] = "",
    port_range: Annotated[str, option("-port-range --port-range", "BEGIN-END", "Ports that a resize may use.")] = "",
    state: Annotated[str, option("--state", "FILE", "Keep the list in this SQLite file across restarts.")] = "",
    token_file: Annotated[
        str,
        option(
            "--token-file",
            "FILE",
            "File with the token that clients must send; default: PLIANT_TOKEN, or a random one that is kept for you.",
        ),
    ] = "",
    is_open: Annotated[
        bool, option("--open", "", "Let everybody who reaches the port change or end jobs, without a token.")
    ] = False,
    tls_cert: TlsCertFlag = "",
    tls_key: TlsKeyFlag = "",
    server_name: ServerNameFlag = "",
) -> None:
    """Serve the list of workers that a job should have over HTTP, until SIGTERM, SIGINT or a request to /stop."""
    from pliant.elastic.server import ServerConfig

    number = parse_int(port, "-port", 9100)
    given = read_token(token_file)
    config = ServerConfig(
        host=host,
        port=number,
        endpoint=endpoint,
        initial=_view_from(init) if init else None,
        limits=_limits(hosts, port_range),
        state=state or ":memory:",
        # The same one after a restart, because runners and workers of jobs have been told it.
        token=given or ("" if is_open else kept_token(host, number) or random_token()),
        open=is_open,
        names=parse_names(server_name),
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    _serve(config, min(parse_duration(ttl, "-ttl"), threading.TIMEOUT_MAX), token_file, is_made=not (given or is_open))


def _serve(config: ServerConfig, ttl_s: float, token_file: str, *, is_made: bool) -> None:
    from pliant.elastic.http_server import SIGNAL_POLL_S
    from pliant.elastic.server import ConfigServer

    logging.basicConfig(level=logging.INFO, format="[config-server] %(message)s")
    server = ConfigServer(config)
    with ExitStack() as stack, server.running():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        file = keep_token(config.host, server.port, config.token) if is_made else None
        announce(f"config server at {server.url}, version {server.wanted.version}")
        if everywhere := _everywhere(config.host, server.url):
            announce(everywhere)
        if config.open:
            announce("open: everybody who reaches this port can change and end the jobs that use it")
        else:
            announce(f"requests need the token in {file or token_file or 'PLIANT_TOKEN'}")
            if file is not None and config.port == 0:
                stack.callback(file.unlink, missing_ok=True)
        ends_s = time.monotonic() + (ttl_s or math.inf)
        # In short waits: a signal that another thread gets does not wake this one, whose handlers it needs.
        while not server.wait(SIGNAL_POLL_S) and time.monotonic() < ends_s:
            pass


def _everywhere(host: str, url: str) -> str:
    """Return the URLs for other machines of a server that listens on all addresses; empty for any other server."""
    from pliant.launch.addresses import interfaces

    try:
        asked = ipaddress.ip_address(check_host(host))
    except ValueError:
        return ""
    if not asked.is_unspecified:
        return ""
    here = urlsplit(url)
    # `::` takes IPv4 as well, 0.0.0.0 nothing else.
    found = [ipaddress.ip_address(address) for addresses in interfaces().values() for address in addresses]
    others = [Worker(str(a), here.port or 0) for a in found if not a.is_loopback and a.version <= asked.version]
    reached = " or ".join(f"{here.scheme}://{other}{here.path}" for other in others)
    listening = f"listening on all addresses of this machine ({Worker(str(asked), here.port or 0)})"
    return f"{listening}; other hosts use {reached}" if reached else f"{listening}, of which other hosts can reach none"


def _limits(hosts: str, port_range: str) -> Limits:
    return Limits(
        hosts=parse_hosts(hosts) if hosts else (),
        ports=PortRange.parse(port_range) if port_range else NO_LIMITS.ports,
    )


def _view_from(file: str) -> View:
    """Read the view in `file`; the server numbers it."""
    try:
        return View.from_json(parse_json(Path(file).read_text(encoding="utf-8")), number=0)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"-init {file} cannot be read: {reason(error)}; give another file") from None
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"-init {file}: {error}; give the JSON of a cluster, as a config server answers it") from None
