"""How the runners of several hosts find each other, agree on ports, and learn how the job ended.

The first host's runner is the head. The others connect to its control port, prove that they know the
job's secret, report the ports that they bound, and get everybody's ports back. Later the same connection carries
each runner's standing and, from the head, the verdict. The rules are in `assembly`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pliant.cluster import Worker
from pliant.errors import ConfigError, LaunchError
from pliant.launch.assembly import Assembly
from pliant.launch.channel import HANDSHAKE_S, Channel, Message, greet, introduce, keep_alive, text_of
from pliant.launch.events import FAILED, RunnerGone, Verdict
from pliant.launch.ports import listen_on
from pliant.launch.secret import REMEDY

log = logging.getLogger(__name__)

RETRY_S = 0.2
SAY_S = 10.0
MAX_STRANGERS = 64
"""Connections that have not yet proved themselves, at once; more are closed unheard."""


class Head:
    """The first host's runner: gathers the others, relays the verdict."""

    def __init__(
        self,
        address: Worker,
        assembly: Assembly,
        secret: bytes,
        post: Callable[[Verdict | RunnerGone], None],
        welcome: Message,
    ) -> None:
        self._address, self._assembly, self._secret = address, assembly, secret
        self._post, self._welcome = post, welcome
        self._channels: dict[str, Channel] = {}
        self._changed = threading.Condition()
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._listener: socket.socket | None = None
        self._closing = False

    def open(self) -> None:
        """Listen; raises ConfigError where the control port is taken."""
        try:
            self._listener = listen_on(self._address.host, self._address.port)
        except OSError as error:
            raise ConfigError(
                f"control port {self._address} cannot be used ({error.strerror}): the runners of several hosts meet "
                "there; give another one with -port, the same on every host"
            ) from None
        threading.Thread(target=self._accept, args=(self._listener,), name="control", daemon=True).start()

    def meet(self, host: str, agreement: Mapping[str, object], ports: Sequence[int], timeout_s: float) -> Message:
        """Wait until every host has come; the welcome that all of them then get. Raises LaunchError."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._assembly.join(host, agreement, ports)
            while missing := self._assembly.missing:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LaunchError(
                        f"no runner came from {', '.join(missing)} within {timeout_s:g} s: start `pliant run` with "
                        f"the same flags there, and let it reach {self._address}; --rendezvous-timeout waits longer"
                    )
                if not self._changed.wait(min(SAY_S, left_s)) and (missing := self._assembly.missing):
                    log.info("waiting for the runners on %s", ", ".join(missing))
                    self._broadcast({"waiting": ", ".join(missing)})
            self._assembly.begun = True
            welcome = {**self._welcome, "ports": self._assembly.ports}
            self._broadcast(welcome)
        return welcome

    def tell(self, host: str, status: str, cause: str = "", code: int = 0) -> None:
        """Note how this or another host stands."""
        with self._changed:
            verdict = self._assembly.fail(cause, code) if status == FAILED else self._assembly.stand(host, status)
            if verdict is not None:
                self._announce(verdict)

    def close(self) -> None:
        self._closing = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; close alone does not
            self._listener.close()
        with self._changed:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _announce(self, verdict: Verdict) -> None:
        self._broadcast({"verdict": verdict.cause, "code": verdict.code})
        self._post(verdict)

    def _broadcast(self, message: Message) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # the connection's own thread sees that it is gone
                channel.send(message)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                log.warning("control port %s: %s", self._address, error)
                time.sleep(RETRY_S)  # out of descriptors: without a pause this would spin
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="control-runner", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                peer = sock.getpeername()[0]
                keep_alive(sock)
                greeted = greet(sock, self._secret)
            except OSError as error:
                log.warning("control connection broke before its handshake was done: %s", error)
                return
            finally:
                self._strangers.release()
            if greeted is None:
                log.warning("refused a runner from %s: it does not know the job's secret; %s", peer, REMEDY)
                return
            host, channel = greeted
            if self._admit(host, channel):
                self._follow(host, channel)

    def _admit(self, host: str, channel: Channel) -> bool:
        try:
            request = channel.receive(HANDSHAKE_S) or {}
            agreement, ports = request.get("agreement"), request.get("ports")
            if not isinstance(agreement, dict) or not isinstance(ports, list):
                return False
            with self._changed:
                self._assembly.join(host, agreement, [int(port) for port in ports])
                self._channels[host] = channel
                self._changed.notify_all()
        except ConfigError as error:
            log.warning("refused the runner on %s: %s", host, error)
            with contextlib.suppress(OSError):
                channel.send({"refused": str(error)})
            return False
        except (OSError, ValueError):
            return False
        return True

    def _follow(self, host: str, channel: Channel) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            while (message := channel.receive(None)) is not None:
                code = message.get("code", 1)
                self.tell(
                    host, text_of(message, "status"), text_of(message, "cause"), code if isinstance(code, int) else 1
                )
        with self._changed:
            self._channels.pop(host, None)
            if self._assembly.elastic and self._assembly.begun and self._assembly.verdict is None and not self._closing:
                self._post(RunnerGone(host))
            verdict = self._assembly.leave(host)
            if verdict is not None:
                self._announce(verdict)


class Member:
    """Any other host's runner."""

    def __init__(
        self,
        head: Worker,
        secret: bytes,
        post: Callable[[Verdict | RunnerGone], None],
        *,
        outlives_head: bool = False,
    ) -> None:
        self._head, self._secret, self._post = head, secret, post
        self._outlives_head = outlives_head
        self._channel: Channel | None = None
        self._closing = False

    def open(self) -> None:
        """Nothing to open before `meet`."""

    def meet(self, host: str, agreement: Mapping[str, object], ports: Sequence[int], timeout_s: float) -> Message:
        """Join the head, and wait until every host has; its welcome.

        Raises:
            ConfigError: the head refuses.
            LaunchError: the head cannot be reached in time, or went away.
        """
        deadline_s = time.monotonic() + timeout_s
        self._channel = self._connect(host, deadline_s, timeout_s)
        try:
            self._channel.send({"agreement": dict(agreement), "ports": list(ports)})
            welcome = self._channel.receive(max(0.001, deadline_s - time.monotonic()))
            while waiting := text_of(welcome, "waiting"):
                log.info("waiting for the runners on %s", waiting)
                welcome = self._channel.receive(max(0.001, deadline_s - time.monotonic()))
        except OSError as error:
            raise LaunchError(f"the runner at {self._head} did not bring all hosts together: {error}") from None
        if welcome is None:
            raise LaunchError(f"the runner at {self._head} went away before all hosts had come: see its messages")
        if refused := text_of(welcome, "refused"):
            raise ConfigError(f"the runner at {self._head} refused this one: {refused}")
        threading.Thread(target=self._follow, args=(self._channel,), name="control", daemon=True).start()
        return welcome

    def tell(self, host: str, status: str, cause: str = "", code: int = 0) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):  # the following thread sees that the head is gone
                self._channel.send({"status": status, "cause": cause, "code": code})

    def close(self) -> None:
        self._closing = True
        if self._channel is not None:
            self._channel.close()

    def _connect(self, host: str, deadline_s: float, timeout_s: float) -> Channel:
        say_at_s = time.monotonic() + SAY_S
        while True:
            try:
                return self._try_connect(host)
            except OSError as error:
                now_s = time.monotonic()
                if now_s > deadline_s:
                    raise LaunchError(
                        f"no runner answers at {self._head} after {timeout_s:g} s ({error}): start one on "
                        f"{self._head.host} with the same flags; -port must be the same on every host"
                    ) from None
                if now_s > say_at_s:
                    log.info("waiting for the runner at %s (%s)", self._head, error)
                    say_at_s = now_s + SAY_S
                time.sleep(RETRY_S)  # nobody listens there yet who could tell us when to try again

    def _try_connect(self, host: str) -> Channel:
        sock = socket.create_connection((self._head.host, self._head.port), timeout=HANDSHAKE_S)
        try:
            keep_alive(sock)
            return introduce(sock, self._secret, host, self._head)
        except BaseException:
            sock.close()
            raise

    def _follow(self, channel: Channel) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            while (message := channel.receive(None)) is not None:
                if "verdict" in message:
                    code = message.get("code")
                    self._post(Verdict(text_of(message, "verdict"), code if isinstance(code, int) else 1))
                    return
        if self._closing:
            return
        if self._outlives_head:
            self._post(RunnerGone(self._head.host, was_head=True))
        else:
            self._post(Verdict(f"the runner at {self._head} is gone", 1))


Control = Head | Member
