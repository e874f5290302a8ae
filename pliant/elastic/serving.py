"""How our HTTP servers run uvicorn."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

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
