"""The server's side of all executors: who is there, what each holds, and what comes back. Lives in one asyncio thread.

`pool` is its public face, and calls it only through that thread. Who may come is `door`'s to say, and what is decided
`handout`'s; here it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pliant.errors import CommError, LaunchError, PliantError, TrainError
from pliant.fed.executors import parcels, wire
from pliant.fed.executors.door import Door
from pliant.fed.executors.handout import MAX_LOSSES, Give, Handout, Take
from pliant.fed.executors.wire import Kind, Link
from pliant.fed.work import Evaluation, Unit, UnitResult

log = logging.getLogger(__name__)

AHEAD_BYTES = 1 << 30
"""Results that wait for earlier ones take no more than about that."""
FIRST_SAID_S, MOST_SAID_S = 5.0, 300.0
"""When it is said for the first time that no executor is there; how rarely at last."""
CLOSING_S = 2.0
OTHER_DATA = "its data or model are not those of this job: give all hosts the same files and versions"


@dataclass(frozen=True, slots=True)
class Seen:
    """An executor, to look at."""

    name: str
    host: str
    pid: int
    ready: bool
    holding: tuple[Unit, ...]
    """The first is the one that it works on."""


@dataclass(eq=False)
class Member:
    number: int
    link: Link
    name: str
    host: str
    pid: int
    ready: bool = False
    task: Any = None
    """What it said of its task."""
    kind: str = ""
    """On what it computes."""
    version: int = 0
    """Of the model that it was sent last."""
    leaving: bool = False
    silent: bool = False
    """It may live: stopped, or cut off. What it held is not to blame."""


@dataclass(eq=False)
class Batch:
    """Units that start from one model, and their results as they come."""

    units: Sequence[Unit]
    layout: parcels.TensorLayout
    version: int
    model: list[memoryview]
    """The frame, encoded once for all."""
    results: queue.SimpleQueue[tuple[int, UnitResult] | PliantError] = field(default_factory=queue.SimpleQueue)
    first: int = 0
    """The number of its first unit."""
    taken: int = 0
    """How many results whoever waits for them has."""


class Desk:
    def __init__(
        self,
        config: dict[str, Any],
        token: str,
        tls: ssl.SSLContext | None,
        silence_s: float,
        changed: Callable[[int], None],
    ) -> None:
        self._welcome = {"config": config, "silence_s": silence_s}
        self._door = Door(token, tls, self._take_in)
        self._silence_s = silence_s
        self._changed = changed
        """Told how many executors are ready, each time that changes."""
        self._members: dict[int, Member] = {}
        self._handout = Handout()
        self._batch: Batch | None = None
        self._next_unit = 0
        self._next_member = 0
        self._limit = 0
        self._task: Any = None
        """What executors must say of their task: what the server expects, or as the first of them."""
        self.kind = ""
        """On what executors must compute, or bits would be others: as the server expects, or as the first of them."""
        self._closing = False

    async def serve(self, listener: socket.socket, until: asyncio.Event) -> None:
        """Take in who comes, until told to stop."""
        accepting = asyncio.create_task(self._door.open(listener))
        beating = asyncio.create_task(self._beat())
        stopping = asyncio.create_task(until.wait())
        try:
            await asyncio.wait({accepting, beating, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (accepting, beating):
                if task.done():
                    task.result()  # neither ends by itself: this raises
        finally:
            stopping.cancel()
            for task in (accepting, beating):
                task.cancel()
            self._door.close()

    async def close(self, *, over: bool) -> None:
        self._closing = True
        members = list(self._members.values())
        for member in members:
            if over:
                member.link.send(Kind.OVER)
            member.link.close()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CLOSING_S
        while any(not member.link.why_lost for member in members) and loop.time() < deadline_s:
            await asyncio.sleep(0.01)
        for member in members:
            member.link.cut("the server ends")

    # Who comes

    def _take_in(self, link: Link, hello: dict[str, Any]) -> None:
        self._next_member += 1
        name = "".join(each for each in str(hello.get("name"))[:80] if each.isprintable())
        host, pid = str(hello.get("host"))[:80], hello.get("pid")
        member = Member(self._next_member, link, name, host, pid if isinstance(pid, int) else 0)
        self._members[member.number] = member
        link.admit(self._limit)
        link.send(Kind.WELCOME, self._welcome)
        link.hand_to(lambda frame: self._take(member, frame), lambda why: self._lose(member, why))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        alone_s, said_s = loop.time(), FIRST_SAID_S
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4))
            now_s = loop.time()
            for member in list(self._members.values()):
                silent_s = now_s - member.link.heard_s
                if silent_s > self._silence_s:
                    member.silent = True
                    member.link.cut(f"silent for {silent_s:.0f} s")
                else:
                    member.link.send(Kind.BEAT)
            if self._handout.holding or not self._handout.num_open:
                alone_s, said_s = now_s, FIRST_SAID_S
            elif now_s - alone_s > said_s:
                coming = f", {len(self._members)} are getting ready" if self._members else ""
                log.warning("no executor is ready%s: %d units wait", coming, self._handout.num_open)
                said_s = min(2 * said_s, said_s + MOST_SAID_S)

    # What they say

    def _take(self, member: Member, frame: wire.Frame) -> None:
        match frame.kind:
            case Kind.BEAT:
                return
            case Kind.READY:
                self._begin(member, frame.body)
            case Kind.RESULT:
                self._keep(member, frame)
            case Kind.FAILED:
                self._fail(member, frame.body)
            case Kind.LEAVE:
                member.leaving = True
                member.link.cut(str(frame.body.get("why") or "it ends")[:1000])
            case _:
                raise CommError(f"an executor does not send {frame.kind.name}")

    def _begin(self, member: Member, told: dict[str, Any]) -> None:
        if member.ready:
            raise CommError("it is ready for the second time")
        self._task = self._task or told.get("task")
        member.task, member.kind = told.get("task"), str(told.get("kind", self.kind))[:200]
        if member.task != self._task:
            self._refuse(member, OTHER_DATA)
            return
        self.kind = self.kind or member.kind
        if member.kind != self.kind:
            self._refuse(member, self._other_kind(member))
            return
        member.ready = True
        log.info("executor %s is ready (%s)", member.name, str(told.get("device"))[:20])
        self._handout.join(member.number)
        self._changed(len(self._handout.holding))
        self._hand_out()

    def expect(self, task: str) -> None:
        """Executors must say this of their task; those that have said something else are refused."""
        self._task = task
        for member in self._ready():
            if member.task != task:
                self._send_away(member, OTHER_DATA)

    def expect_kind(self, kind: str) -> None:
        """Executors must compute on this; those that do not are refused."""
        self.kind = kind
        for member in self._ready():
            if member.kind != kind:
                self._send_away(member, self._other_kind(member))

    def _ready(self) -> list[Member]:
        return [member for member in self._members.values() if member.ready]

    def _other_kind(self, member: Member) -> str:
        where = f"it computes on {member.kind:.80}, and this job on {self.kind:.80}"
        return f"{where}, so bits would differ: give hosts that are alike, or `device: cpu`"

    def _send_away(self, member: Member, why: str) -> None:
        self._handout.leave(member.number, blame=False)
        self._changed(len(self._handout.holding))
        self._refuse(member, why)

    def _refuse(self, member: Member, why: str) -> None:
        log.warning("refused executor %s: %s", member.name, why)
        member.leaving = True
        member.link.send(Kind.REFUSED, {"why": why})
        member.link.close()

    def _keep(self, member: Member, frame: wire.Frame) -> None:
        number = frame.body.get("id")
        batch = self._batch
        if batch is None or not isinstance(number, int) or not self._handout.is_open(number):
            return  # of a batch that nobody waits for any more, or done twice
        place = number - batch.first
        done = parcels.done_from_json(frame.body, frame.payload, batch.units[place], batch.layout)
        self._order(self._handout.finish(member.number, number))
        batch.results.put((place, done))
        self._hand_out()

    def _fail(self, member: Member, told: dict[str, Any]) -> None:
        number, why = told.get("id"), str(told.get("why"))[:2000]
        if self._batch is None or not isinstance(number, int) or not self._handout.is_open(number):
            return
        unit = said(self._batch.units[number - self._batch.first])
        log.warning("executor %s could not do %s: %s", member.name, unit, why)
        given_up = self._handout.fail(member.number, number)
        if told.get("final"):
            self._batch.results.put(TrainError(f"{unit}: {why}"))
        elif given_up is not None:
            self._batch.results.put(TrainError(f"{unit} failed {MAX_LOSSES} times, at last on {member.name}: {why}"))
        else:
            self._hand_out()

    def _lose(self, member: Member, why: str) -> None:
        self._members.pop(member.number, None)
        was_ready = member.number in self._handout.holding
        held = len(self._handout.holding.get(member.number, ()))
        given_up = self._handout.leave(member.number, blame=not (member.leaving or member.silent))
        if self._closing:
            return
        again = f"; {held} of its units go to others" if held else ""
        if member.leaving:
            log.info("executor %s has left: %s%s", member.name, why, again)
        else:
            log.warning("lost executor %s: %s%s", member.name, why, again)
        if was_ready:
            self._changed(len(self._handout.holding))
        if given_up is not None and self._batch is not None:
            unit = said(self._batch.units[given_up - self._batch.first])
            self._batch.results.put(
                LaunchError(
                    f"{unit}: {MAX_LOSSES} executors were lost while they did it, the last one {member.name} ({why}); "
                    "see their logs: is there enough memory?"
                )
            )
        self._hand_out()

    # What they are given

    def start(self, batch: Batch) -> None:
        if self._handout.num_open:
            batch.results.put(TrainError("units of another model are still under way: take their results first"))
            return
        batch.first = self._next_unit
        self._next_unit += len(batch.units)
        self._batch = batch
        self._limit = max(self._limit, *(parcels.done_bytes(unit, batch.layout) for unit in batch.units))
        for member in self._members.values():
            member.link.admit(self._limit)
        self._handout.add(range(batch.first, self._next_unit))
        self._hand_out()

    def take(self, batch: Batch) -> None:
        """Whoever waits for the batch has one result more."""
        batch.taken += 1
        if self._batch is batch:
            self._hand_out()

    def stop(self, batch: Batch) -> None:
        """Nobody waits for it any more."""
        if self._batch is batch:
            self._order(self._handout.drop_all())
            self._batch = None

    def seen(self) -> list[Seen]:
        batch = self._batch
        found = []
        for member in self._members.values():
            numbers = self._handout.holding.get(member.number, []) if batch is not None else []
            units = tuple(batch.units[each - batch.first] for each in numbers) if batch is not None else ()
            found.append(Seen(member.name, member.host, member.pid, member.ready, units))
        return found

    def _hand_out(self) -> None:
        batch = self._batch
        if batch is None or self._closing:
            return
        ahead = max(4 * len(self._handout.holding), AHEAD_BYTES // max(1, self._limit))
        self._order(self._handout.next(batch.first + batch.taken + ahead))

    def _order(self, orders: Sequence[Give | Take] | None) -> None:
        for order in orders or ():
            member = self._members[order.executor]
            if isinstance(order, Take):
                member.link.send(Kind.CANCEL, {"id": order.unit})
                continue
            batch = self._batch
            assert batch is not None, "units are given out of a batch"
            if member.version != batch.version:
                member.link.send_encoded(batch.model)
                member.version = batch.version
            unit = parcels.unit_to_json(batch.units[order.unit - batch.first])
            member.link.send(Kind.UNIT, {"id": order.unit, "unit": unit})


def said(unit: Unit) -> str:
    """A unit, for people."""
    if isinstance(unit, Evaluation):
        return f"the test of samples {unit.begin} to {unit.end - 1}"
    clients = ", ".join(map(str, unit.clients[:20])) + (", ..." if len(unit.clients) > 20 else "")
    return f"round {unit.round_number}, client{'s' if len(unit.clients) > 1 else ''} {clients}"
