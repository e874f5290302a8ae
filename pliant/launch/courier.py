"""The runner's messages to the config server: who is lost, and who shall come instead.

A thread of its own sends them, in their order, and repeats what the server did not answer: the
runner's loop never waits for a server.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from pliant.cluster import Worker
from pliant.errors import PliantError, ServerUnavailable
from pliant.launch.events import NotReplaced

if TYPE_CHECKING:
    from pliant.elastic.client import ConfigClient

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Courier:
    """Carries messages to the config server at `url`. `start` it; `close` drops what was not sent."""

    def __init__(self, url: str, token: str, refuse: Callable[[Worker, NotReplaced], None]) -> None:
        self._url, self._token, self._refuse = url, token, refuse
        self._errands: queue.SimpleQueue[Callable[[ConfigClient], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, worker: Worker, why: str) -> None:
        """Say that `worker` is lost."""

        def say(client: ConfigClient) -> None:
            try:
                client.lost(worker, why)
            except ServerUnavailable:
                raise
            except PliantError as error:
                log.warning("the config server does not take note that %s is lost: %s", worker, error)

        self._errands.put(say)

    def add(self, worker: Worker) -> None:
        """Ask for `worker`; `refuse` is called, from the courier's thread, if the server will not have it."""

        def ask(client: ConfigClient) -> None:
            try:
                client.add_worker(worker)
            except ServerUnavailable:
                raise
            except PliantError as error:
                self._refuse(worker, NotReplaced(str(error)))

        self._errands.put(ask)

    def close(self) -> None:
        self._closing.set()
        self._errands.put(lambda _: None)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        from pliant.elastic.client import ConfigClient

        with ConfigClient(self._url, self._token) as client:
            while not self._closing.is_set():
                self._send(self._errands.get(), client)

    def _send(self, errand: Callable[[ConfigClient], None], client: ConfigClient) -> None:
        has_warned = False
        while not self._closing.is_set():
            try:
                errand(client)
                return
            except ServerUnavailable as error:
                if not has_warned:
                    log.warning("%s; trying again", error)
                has_warned = True
                self._closing.wait(RETRY_S)
