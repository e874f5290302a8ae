"""The runner's state over HTTP (`-debug-port`): the views it has seen, and its workers."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pliant.errors import ConfigError


@contextmanager
def serve_state(address: str, port: int, state: Callable[[], dict[str, object]]) -> Iterator[int]:
    """Answer `GET /` with `state()` as JSON, on (`address`, `port`) until the end of the block; yields the port.

    Raises:
        ConfigError: the port cannot be used.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            body = json.dumps(state(), indent=2).encode() + b"\n"
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet: this is for a look now and then."""

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads = True

        def server_bind(self) -> None:
            # The parent class looks up the host's name here, which can take seconds and serves nothing.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = address, self.server_address[1]

    try:
        server = Server((address, port), Handler)
    except OSError as error:
        raise ConfigError(f"-debug-port {port} on {address}: {error.strerror}; give another one") from None
    with server:
        threading.Thread(target=server.serve_forever, args=(0.1,), name="debug", daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
