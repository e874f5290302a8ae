"""How our HTTP servers run uvicorn: its settings, certificates, and an end by signal."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from pliant.errors import ConfigError

_GRACE_S = 3
# Longer than a client keeps an idle connection, so that the server is never the one who closes it
# just as the next request is on its way.
_KEEP_ALIVE_S = 75


def settings(app: ASGIApp, *, tls_cert: str = "", tls_key: str = "") -> uvicorn.Config:
    """Plain HTTP/1.1, or TLS where there is a certificate; silent, and slow to close."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns at every malformed request, which is the client's mistake
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=tls_cert or None,
        ssl_keyfile=tls_key or None,
    )


def loaded(settings: uvicorn.Config) -> uvicorn.Config:
    """These settings, with the certificate read.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        settings.load()
    except OSError as error:
        raise ConfigError(
            f"--tls-cert {settings.ssl_certfile or ''} --tls-key {settings.ssl_keyfile or ''}: {error}; give PEM files "
            "that belong together"
        ) from None
    return settings


def until_signalled(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. In a thread, for uvicorn would send itself the signal once more at its end."""
    thread = threading.Thread(target=server.run, args=([listener],), name="pliant-serving", daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    thread.start()
    thread.join()


class HoldingServer(uvicorn.Server):
    """Uvicorn that tells when it listens, and that calls `closing` before it stops, so that held requests are answered."""

    def __init__(self, config: uvicorn.Config, closing: Callable[[], object]) -> None:
        super().__init__(config)
        self.listening = threading.Event()
        self._closing = closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing()
        await super().shutdown(sockets)
