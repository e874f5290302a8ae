"""Requests that wait for a change: held until it comes, and never longer than their client."""

from __future__ import annotations

import asyncio

from starlette.requests import Request


class Bell:
    """Wakes all requests that wait for one kind of change. Lives on one event loop."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._rung = asyncio.Event()
        self._closed = False

    def ring(self) -> None:
        """Wake all who wait now."""
        self._rung.set()
        self._rung = asyncio.Event()

    def close(self) -> None:
        """Wake all who wait, and let nobody wait again."""
        self._closed = True
        self.ring()

    async def heard(self, request: Request, hold_s: float) -> bool:
        """Wait until it rings; False if `hold_s` was over, the client went away, or it was closed."""
        if self._closed:
            return False
        rung = self._rung
        waits = {asyncio.ensure_future(rung.wait()), asyncio.ensure_future(_gone(request))}
        self.num_waiting += 1
        try:
            await asyncio.wait(waits, timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_waiting -= 1
            for wait in waits:
                wait.cancel()
        return rung.is_set() and not self._closed


async def _gone(request: Request) -> None:
    """Returns when the client has closed its end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
