"""Who gets the machines of a job, where that takes more than a new view.

A config server that knows a caterer leaves it the job's size: asked for another one, it tells the caterer and answers with
the view as it is. The caterer puts a view itself as soon as there are machines for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from pliant.elastic.door import json_answer
from pliant.elastic.inputs import body_of, check_no_body, decoded
from pliant.errors import ConfigError


class Caterer(Protocol):
    """Called by the server's thread: every method returns at once.

    Raises:
        PliantError: refused, with the reason; nothing has changed.
    """

    def resize(self, size: int) -> None:
        """Somebody wants so many workers, at least one."""

    def equip(self, devices: Mapping[str, int]) -> None:
        """Somebody wants these devices, by type, at least one, with a worker on each."""

    def occupied(self) -> dict[str, int]:
        """The devices on which processes of the job live, wanted or not."""

    def drop(self) -> None:
        """Kill the workers on devices that are not wanted any more."""


class CateredRoutes:
    """What the config server answers beyond the rest, where there is a caterer."""

    def __init__(self, caterer: Caterer) -> None:
        self._caterer = caterer

    async def occupied(self, request: Request) -> Response:
        return self._told()

    async def equip(self, request: Request) -> Response:
        self._caterer.equip(decoded(await body_of(request), _devices_in))
        return self._told()

    async def drop(self, request: Request) -> Response:
        await check_no_body(request)
        self._caterer.drop()
        return self._told()

    def _told(self) -> Response:
        return json_answer({"occupied": self._caterer.occupied()})


def _devices_in(value: object) -> dict[str, int]:
    """The devices in `{"t4": 2, "cpu": 1}`."""
    if isinstance(value, dict) and value and all(type(count) is int and count >= 0 for count in value.values()):
        return {str(kind): count for kind, count in value.items()}
    raise ConfigError(f'{value!r:.60} names no devices: give {{"cpu": 2}}')
