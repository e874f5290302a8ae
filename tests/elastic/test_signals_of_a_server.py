"""A server that serves until it is signalled ends, whichever of its threads the kernel gives the signal to."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

# As with SIGINT and SIGTERM at once: a thread that is not the main one gets both, and the main one is not woken.
SERVER = """
    import signal, socket, threading
    import uvicorn
    from pliant.elastic.http_server import serve_until_signalled

    class Announcing(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            print("up", flush=True)

    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = Announcing(uvicorn.Config(lambda *_: None, log_level="critical", lifespan="off"))
    serve_until_signalled(server, socket.create_server(("127.0.0.1", 0)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_that_another_thread_gets_ends_it(number: signal.Signals) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SERVER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            assert process.wait(20) == 0
        finally:
            process.kill()
