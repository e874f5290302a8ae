"""One server per test module, reset before each test."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from serving import serving

from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer


@pytest.fixture(scope="module")
def shared() -> Iterator[ConfigServer]:
    with serving() as (server, _):
        yield server


@pytest.fixture
def server(shared: ConfigServer, client: ConfigClient) -> ConfigServer:
    """A server whose view is unset."""
    return shared


@pytest.fixture
def client(shared: ConfigServer) -> Iterator[ConfigClient]:
    with ConfigClient(shared.url) as client:
        client.reset()
        yield client


@pytest.fixture
def http(server: ConfigServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url.removesuffix("/config"), trust_env=False, verify=False) as http:
        yield http
