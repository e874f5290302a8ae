"""The `pliant dash` command: a page in the browser that shows jobs as they run."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from pliant import child, record
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
from pliant.errors import ConfigError
from pliant.tokens import random_token

Given = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECORD|DIR|URL]...",
        show_default=False,
        help="Records, folders with some, the state of a cluster, or addresses of servers; default: what runs here.",
    ),
]


END_S = 5.0


# Numbers are taken as text and parsed here: click would answer a wrong one with a page of usage.
def dash(
    given: Given = None,
    host: Annotated[str, option("--host", "", "Address to listen on, IPv4 or IPv6.")] = "127.0.0.1",
    port: Annotated[str, option("--port", "PORT", "0 picks a free one.")] = "9300",
    token_file: Annotated[
        str,
        option(
            "--token-file",
            "FILE",
            "File with the token of the page; default: PLIANT_TOKEN, or a random one, which the printed address has.",
        ),
    ] = "",
    tls_cert: TlsCertFlag = "",
    tls_key: TlsKeyFlag = "",
    server_name: ServerNameFlag = "",
) -> None:
    """Show jobs in the browser: curves with events, workers, topology, the cluster, logs. Works offline."""
    from pliant.ui.jobs import Watcher
    from pliant.ui.server import DashConfig, serve
    from pliant.ui.sources import open_sources

    known = read_token(token_file)
    token, is_new = known or random_token(), not known
    config = DashConfig(
        host=host,
        port=parse_int(port, "--port", 9300),
        token=token,
        names=parse_names(server_name),
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    watcher = Watcher(open_sources(given or []))

    def say(url: str) -> None:
        if is_new:
            announce(f"the page is at {url}?token={token}")
        else:
            announce(f"the page is at {url} (token in {token_file or 'PLIANT_TOKEN'})")

    serve(config, watcher, say)


def check_page_port(port: str) -> None:
    """Refuse a value of `--dash` at which no page can be shown, before anything is started.

    Raises:
        ConfigError: it is no port, or somebody uses it.
    """
    if not port:
        return
    if not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"--dash {port!r} is not a port: use a number from 1 to 65535, or 0 for any free one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError as error:
            raise ConfigError(
                f"--dash {port}: the page cannot listen there ({error.strerror}): use another port, or 0 for any free one"
            ) from None


@contextlib.contextmanager
def page_beside(port: str, shown: str, *, token_file: str = "", tls: tuple[str, str] = ("", "")) -> Iterator[None]:
    """Show the page of `pliant dash` at a port of loopback until the block ends; an empty `port` shows none.

    `shown` is a record or a state directory; empty: everything that runs here. The page is a process of its own, so that
    drawing never delays a runner or a scheduler; the kernel ends it if this process is killed. It prints its own address.
    `tls` is its certificate and key.
    """
    if not port:
        yield
        return
    check_page_port(port)
    if shown and not os.path.exists(shown):
        record.Recorder(shown).close()  # a run will write it; the page may look before
    main = [sys.executable, "-c", "from pliant.cli.main import main; main()"]
    given = {"--token-file": token_file, "--tls-cert": tls[0], "--tls-key": tls[1]}
    flags = ["--port", port, *(word for flag, value in given.items() if value for word in (flag, value))]
    words = [*main, "dash", *filter(None, [shown]), *flags]
    process = subprocess.Popen([sys.executable, child.__file__, str(os.getpid()), *words])
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
