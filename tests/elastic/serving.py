"""A config server on a loopback port, for tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from pliant.cluster import View, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer, ServerConfig

A0, A1, A2 = (Worker("127.0.0.1", port) for port in (10000, 10001, 10002))
RUN_A = Worker("127.0.0.1", 38080)
ONE, TWO = View(0, (A0,), (RUN_A,)), View(0, (A0, A1), (RUN_A,))


@contextmanager
def serving(**settings: object) -> Iterator[tuple[ConfigServer, ConfigClient]]:
    """A server with these settings, on a free port unless they say which, open to all unless there is a token, and a client
    of it."""
    config = ServerConfig(**{"port": 0, "open": "token" not in settings, **settings})  # type: ignore[arg-type]
    with ConfigServer(config).running() as server, ConfigClient(server.url, config.token) as client:
        yield server, client


def held(server: ConfigServer, version: int) -> socket.socket:
    """A GET of the view that the server is holding."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    sock.sendall(b'GET /config?wait=50 HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: "%d"\r\n\r\n' % version)
    return sock


def until_held(server: ConfigServer, count: int) -> None:
    """Ask the server, again and again, until it says that it holds `count` requests."""
    with httpx.Client(trust_env=False, verify=False) as http:
        while f"held_requests {count}.0\n" not in http.get(server.url.replace("/config", "/metrics")).text:
            pass
