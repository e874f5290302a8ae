"""Serves the page until it is told to end. NiceGUI is imported here and below, and nowhere else."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from pliant.elastic.serving import loaded, until_signalled
from pliant.errors import ConfigError
from pliant.ui.gate import LOOPBACK, Gate
from pliant.ui.watch import Watch

MISSING = "the page needs NiceGUI: pip install 'pliant[dash]'; `pliant top` shows the same in a terminal"


@dataclass(frozen=True, kw_only=True, slots=True)
class DashConfig:
    """Where the page is, and who may act."""

    host: str = "127.0.0.1"
    port: int = 9300
    """0 picks a free one."""
    token: str = field(repr=False)
    """Whoever resizes or stops a job must know it; beyond loopback, whoever looks."""
    tls_cert: str = ""
    """Certificate chain, PEM; empty: plain HTTP."""
    tls_key: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port}: use a number from 1 to 65535, or 0 for any free port")
        if not self.token:
            raise ConfigError("the token is empty: set PLIANT_TOKEN to something, or leave it out")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def serve(config: DashConfig, watch: Watch, say: Callable[[str], None]) -> None:
    """Show what `watch` sees until SIGTERM or SIGINT. Call it from the main thread.

    Raises:
        ConfigError: the address cannot be used, or NiceGUI is not installed.
    """
    # NiceGUI would make a folder for what users store; nobody does. It looks where when it is imported.
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pliant-dash-"))
        os.environ.setdefault("NICEGUI_STORAGE_PATH", folder)
        listener = stack.enter_context(_listening(config.host, config.port))
        server = uvicorn.Server(_settings(config, application(config, watch)))
        stack.enter_context(watch.running())
        say(_url("https" if config.tls_cert else "http", config.host, listener.getsockname()[1]))
        until_signalled(server, listener)


def _settings(config: DashConfig, app: Gate) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        loop="asyncio",
        timeout_graceful_shutdown=1,
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )
    return loaded(settings)


def application(config: DashConfig, watch: Watch) -> Gate:
    """The page behind its door. There can be one in a process."""
    try:
        from fastapi import FastAPI
        from nicegui import ui
    except ImportError:
        raise ConfigError(MISSING) from None
    from pliant.ui.acting import Acting
    from pliant.ui.look import ICON
    from pliant.ui.page import lay_out

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    lay_out(watch, Acting(config.token))
    ui.run_with(
        app,
        title="pliant",
        favicon=ICON,
        dark=None,
        language="en-US",
        tailwind=False,
        show_welcome_message=False,
        reconnect_timeout=10,
    )
    open_to = LOOPBACK | {config.host} if config.is_loopback else None
    return Gate(app, config.token, open_to=open_to)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}; use another, or --port 0 for a free one"
        ) from None
    with listener:
        yield listener


def _url(scheme: str, host: str, port: int) -> str:
    bare = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"{scheme}://{f'[{bare}]' if ':' in bare else bare}:{port}/"
