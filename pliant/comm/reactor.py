"""The engine's thread: waits for sockets and submissions, and lets `comm.collective.core` act on them.

One thread per worker does all reading, writing and folding, through all views. It sleeps in epoll and
never polls. Who is connected is `comm.connections`' to say, and what a frame or a submission means
the core's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pliant.comm.collective.core import Core
from pliant.comm.collective.operation import Burst, Operation
from pliant.comm.connections import Connections
from pliant.comm.parting import part
from pliant.comm.transport.poller import Poller
from pliant.errors import CommError, EngineClosed

log = logging.getLogger(__name__)

DOZE_S = 0.001
"""Submissions come in bursts. When the first one wakes the thread, and after the last one it has seen, the
thread dozes for this long: what is submitted meanwhile is found when it wakes, without a system call and a
fight for the interpreter for each tensor. Whoever waits for a result wakes it at once."""
ANNOUNCE_S = 0.01
"""Results are announced when all that was submitted together is done, or this long after the last time."""
WORK_S = 0.001
"""Folding goes on for at most about this long before the sockets have their turn."""
SHARED_WORK_S = 0.004
"""The same where all peers share memory: no wire runs dry meanwhile, and fewer notices cost less."""


@dataclass(frozen=True, slots=True)
class Errand:
    """Something else than a collective for the engine's thread to do."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]
    """Called instead if the engine ends first."""


class Reactor:
    """The thread of one worker. Any thread may `post` and `hurry`."""

    def __init__(self, connections: Connections, poller: Poller, *, linger_s: float) -> None:
        self._connections = connections
        self._poller = poller
        self._linger_s = linger_s
        self._inbox: deque[Operation | Errand] = deque()
        self._asleep = False
        self._dozing = False
        self._busy = False
        self._hurried = False
        self._announced_s = 0.0
        self._work_s = WORK_S
        self._closing = False
        self._ended = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"pliant-engine-{connections.me}", daemon=True)

    # --- for any thread ---

    def start(self) -> None:
        """Begin to serve."""
        self._poller.listen(to_bell=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, say goodbye, end. What still waits fails with EngineClosed."""
        self._closing = True
        if self._thread.ident is None:  # never started
            self._poller.close()
            return
        self._poller.ring()
        self._thread.join(timeout=self._linger_s + 5)

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent. Nothing that it shares with the parent is changed."""
        self._connections.abandon()
        self._poller.abandon()
        self._closing = self._ended = True

    def post(self, call: Operation | Errand) -> None:
        """Have the engine's thread begin this, or do this."""
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise EngineClosed("the engine is closed: submit before leaving its `with`")
        self._inbox.append(call)
        if self._asleep:
            self._poller.ring()
        if self._ended:  # between the look at `_closing` and now
            self._refuse_inbox()

    def hasten(self, errand: Errand) -> None:
        """The same for somebody who waits for it now."""
        self.post(errand)
        self.hurry()

    def hurry(self) -> None:
        """Somebody waits: what lies in the inbox shall not wait as well."""
        self._hurried = True
        if self._dozing and self._inbox:
            self._poller.ring()

    @property
    def is_current(self) -> bool:
        """Whether this is the engine's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def enter(self, core: Core) -> None:
        """Move to another view, on the connections that are there. By an errand.

        Raises:
            CommError: to a member there is none; nothing has changed.
        """
        self._connections.enter(core)
        shared = all(link.shared for link in core.peers.links.values())
        self._work_s = SHARED_WORK_S if shared else WORK_S

    # --- the thread itself ---

    def _run(self) -> None:
        connections = self._connections
        try:
            while not self._closing:
                self._turn()
            self._begin(len(self._inbox))  # so that the goodbye does not count them as finished
            part(connections, self._poller, self._linger_s)
        except Exception as error:
            log.exception("%s: the engine's thread failed", connections.me)
            self._broken = CommError(f"the engine's thread failed: {error!r}")
            if connections.core is not None:
                connections.core.fail_all(self._broken)
        finally:
            if connections.core is not None:
                connections.core.fail_all(EngineClosed("the engine was closed while this was in progress"))
            self._ended = True
            self._refuse_inbox()
            connections.close()
            self._poller.close()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        was_asleep = self._take_in(self._patience_s())
        if was_asleep and self._inbox and not self._hurried:
            self._dozing = True
            self._take_in(0.0 if self._hurried else DOZE_S)
        self._hurried = False
        if self._inbox:
            self._busy = True
            self._begin(len(self._inbox))
        connections = self._connections
        core = connections.core
        if core is not None:
            if core.given_up:
                connections.drop_given_up()
            core.work(time.monotonic() + self._work_s)
        now_s = time.monotonic()
        connections.tend(now_s)
        connections.flush()
        if core is not None and core.has_news:
            late = now_s - self._announced_s > ANNOUNCE_S
            if late:
                self._announced_s = now_s
            core.announce(everything=late)

    def _take_in(self, patience_s: float) -> bool:
        """Read what has come; whether the thread had been asleep before."""
        events = self._poller.poll(patience_s)
        was_asleep = self._asleep
        self._asleep = self._dozing = False
        self._connections.on_events(events)
        return was_asleep

    def _patience_s(self) -> float:
        connections = self._connections
        core = connections.core
        if (core is not None and len(core.runnable)) or not connections.unsent <= connections.full:
            return 0.0
        if self._busy:
            self._busy, self._dozing = False, True
            return 0.0 if self._inbox else DOZE_S
        self._asleep = True
        # Set before the last look: who submits after it sees the flag and rings the bell.
        if self._inbox:
            return 0.0
        if core is not None and core.has_news:
            return ANNOUNCE_S
        return connections.patience_s

    def _begin(self, size: int) -> None:
        """Begin what was submitted, as one burst."""
        items = [self._inbox.popleft() for _ in range(size)]
        burst = Burst(sum(isinstance(item, Operation) and not item.prompt for item in items))
        for item in items:
            if isinstance(item, Operation):
                item.burst = Burst(1) if item.prompt else burst
                item.begin(item)
            else:
                item.run()

    def _refuse_inbox(self) -> None:
        """What comes too late fails at once; whoever gets an item here, the ending thread or a submitting one."""
        error = EngineClosed("the engine was closed while this was submitted")
        with contextlib.suppress(IndexError):
            while True:
                item = self._inbox.popleft()
                if isinstance(item, Operation):
                    item.handle.fail(error)
                else:
                    item.fail(error)
