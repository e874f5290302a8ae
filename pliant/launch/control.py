"""How the runners of several hosts find each other, exchange their ports, and learn how the job ended.

The first host's runner is the head. The others connect to its control port over an authenticated channel, report the ports
that they bound, and get everybody's ports back. Later the same channel carries each runner's status and, from the head, the
verdict. `HostGroup` holds the rules, without I/O.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pliant.channel import HANDSHAKE_S, Channel, ChannelServer, connect_channel
from pliant.cluster import Worker
from pliant.errors import CommError, ConfigError, HandshakeRefused, LaunchError
from pliant.identity import SECRET_REMEDY
from pliant.launch.addresses import listen_on
from pliant.launch.events import BUSY, DONE, FAILED, IDLE, STRANDED, RunnerGone, Verdict

log = logging.getLogger(__name__)

PURPOSE = "runner"
RETRY_S = 0.2
SAY_S = 10.0

Body = dict[str, Any]


class HostGroup:
    """What the head knows about the job's hosts: which have joined, the status of each, and the verdict. Pure."""

    def __init__(self, hosts: Sequence[str], agreement: Mapping[str, object], *, elastic: bool = False) -> None:
        self.elastic = elastic
        """Whether the job may go on without a host."""
        self.ports: dict[str, list[int]] = {}
        """The ports of each host that has joined."""
        self.begun = False
        """Whether all hosts have joined, and were told so."""
        self.verdict: Verdict | None = None
        self._hosts = tuple(hosts)
        self._agreement = dict(agreement)
        self._status: dict[str, str] = {}
        self._good_end = Verdict("", 0)
        self._stranding = Verdict("", 1)  # of the host that last said that it is stranded

    @property
    def missing(self) -> tuple[str, ...]:
        """The hosts that have not joined."""
        return tuple(host for host in self._hosts if host not in self.ports)

    def join(self, host: str, agreement: Mapping[str, object], ports: Sequence[int]) -> None:
        """Note a runner and its ports.

        Raises:
            ConfigError: the host is not on the list, has joined already, or was started with other flags.
        """
        if host not in self._hosts:
            raise ConfigError(
                f"host {host} is not in the list {','.join(self._hosts)} of the first runner: give the same -H on every host"
            )
        if host in self.ports:
            raise ConfigError(f"a runner on {host} has joined already: start one per host, or give another -port")
        for flag, value in self._agreement.items():
            if agreement.get(flag) != value:
                raise ConfigError(
                    f"{flag} is {agreement.get(flag)!r} on {host} but {value!r} on {self._hosts[0]}: "
                    "start all runners with the same flags"
                )
        self.ports[host] = list(ports)

    def set_status(self, host: str, status: str, cause: str = "", code: int = 0) -> Verdict | None:
        """Note the status of `host`; return the verdict if the job has now ended: its program has, somebody has ended it, as
        `cause` and `code` say, or nobody can go on.
        """
        self._status[host] = status
        if status == DONE and code and not self._good_end.code:
            self._good_end = Verdict(cause, code)
        if status == STRANDED:
            self._stranding = Verdict(cause, code)
        states = [self._status.get(known, BUSY) for known in self._hosts]
        if self.verdict is not None or BUSY in states:
            return None
        if DONE in states:
            self.verdict = self._good_end
        elif STRANDED in states:
            self.verdict = self._stranding
        return self.verdict

    def fail(self, cause: str, code: int) -> Verdict:
        """Note a failure; the first one stays the verdict."""
        if self.verdict is None:
            self.verdict = Verdict(cause, code)
        return self.verdict

    def leave(self, host: str) -> Verdict | None:
        """Note that the connection to `host` is lost: a failure, unless the job is over, has not begun, or is elastic.

        Before the job has begun, the host may join again.
        """
        if not self.begun:
            self.ports.pop(host, None)
        if not self.begun or self.verdict is not None:
            return None
        if self.elastic:
            return self.set_status(host, IDLE)
        return self.fail(f"the runner on {host} is gone", 1)


class HeadRunner:
    """The control connection of the first host's runner: gathers the others, and tells them the verdict."""

    def __init__(
        self,
        address: Worker,
        group: HostGroup,
        secret: bytes,
        post: Callable[[Verdict | RunnerGone], None],
        config_server: str,
    ) -> None:
        self._address, self._group, self._secret = address, group, secret
        self._post, self._config_server = post, config_server
        self._channels: dict[str, Channel] = {}
        self._changed = threading.Condition()
        self._server: ChannelServer | None = None
        self._closing = False

    def open(self) -> None:
        """Listen; raise ConfigError where the control port is taken."""
        try:
            listener = listen_on(self._address.host, self._address.port)
        except OSError as error:
            raise ConfigError(
                f"control port {self._address} cannot be used ({error.strerror}): the runners of several hosts meet "
                "there; give another one with -port, the same on every host"
            ) from None
        self._server = ChannelServer(listener, self._secret, self._serve, purpose=PURPOSE)
        self._server.start()

    def meet(self, host: str, agreement: Mapping[str, object], ports: Sequence[int], timeout_s: float) -> Body:
        """Wait until every host has joined; return the welcome that all of them then get. Raises LaunchError."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._group.join(host, agreement, ports)
            while missing := self._group.missing:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LaunchError(
                        f"no runner came from {', '.join(missing)} within {timeout_s:g} s: start `pliant run` with "
                        f"the same flags there, and let it reach {self._address}; --rendezvous-timeout waits longer"
                    )
                if not self._changed.wait(min(SAY_S, left_s)) and (missing := self._group.missing):
                    log.info("waiting for the runners on %s", ", ".join(missing))
                    self._broadcast({"waiting": ", ".join(missing)})
            self._group.begun = True
            welcome = {"ports": self._group.ports, "config_server": self._config_server}
            self._broadcast(welcome)
        return welcome

    def send_status(self, host: str, status: str, cause: str = "", code: int = 0) -> None:
        """Note the status of this or another host."""
        with self._changed:
            is_failure = status == FAILED
            verdict = self._group.fail(cause, code) if is_failure else self._group.set_status(host, status, cause, code)
            if verdict is not None:
                self._announce(verdict)

    def close(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()

    def _announce(self, verdict: Verdict) -> None:
        self._broadcast({"verdict": verdict.cause, "code": verdict.code})
        self._post(verdict)

    def _broadcast(self, body: Body) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(CommError):  # the connection's own thread sees that it is gone
                channel.send(body)

    def _serve(self, host: str, channel: Channel) -> None:
        """Serve one runner as long as it is connected, in a thread of its own."""
        if not self._admit(host, channel):
            return
        with contextlib.suppress(CommError):
            while (message := channel.receive()) is not None:
                self.send_status(host, message.body["status"], message.body["cause"], message.body["code"])
        with self._changed:
            self._channels.pop(host, None)
            if self._group.elastic and self._group.begun and self._group.verdict is None and not self._closing:
                self._post(RunnerGone(host))
            verdict = self._group.leave(host)
            if verdict is not None:
                self._announce(verdict)

    def _admit(self, host: str, channel: Channel) -> bool:
        try:
            request = channel.receive(HANDSHAKE_S)
            body = request.body if request is not None else {}
            agreement, ports = body.get("agreement"), body.get("ports")
            if not isinstance(agreement, dict) or not isinstance(ports, list):
                return False
            with self._changed:
                self._group.join(host, agreement, [int(port) for port in ports])
                self._channels[host] = channel
                self._changed.notify_all()
        except ConfigError as error:
            log.warning("refused the runner on %s: %s", host, error)
            channel.send({"refused": str(error)})
            return False
        except (OSError, ValueError):
            return False
        return True


class MemberRunner:
    """The control connection of any other host's runner."""

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
        """Do nothing: `meet` connects."""

    def meet(self, host: str, agreement: Mapping[str, object], ports: Sequence[int], timeout_s: float) -> Body:
        """Join the head, and wait until every host has; return its welcome.

        Raises:
            ConfigError: the head refuses.
            LaunchError: the head cannot be reached in time, or went away.
        """
        deadline_s = time.monotonic() + timeout_s
        self._channel = channel = self._connect(host, deadline_s, timeout_s)
        try:
            channel.send({"agreement": dict(agreement), "ports": list(ports)})
            while True:
                message = channel.receive(max(0.001, deadline_s - time.monotonic()))
                if message is None or "waiting" not in message.body:
                    break
                log.info("waiting for the runners on %s", message.body["waiting"])
        except (CommError, OSError) as error:
            raise LaunchError(f"the runner at {self._head} did not bring all hosts together: {error}") from None
        if message is None:
            raise LaunchError(f"the runner at {self._head} went away before all hosts had come: see its messages")
        if refused := message.body.get("refused"):
            raise ConfigError(f"the runner at {self._head} refused this one: {refused}")
        threading.Thread(target=self._follow, args=(channel,), name="control", daemon=True).start()
        return message.body

    def send_status(self, host: str, status: str, cause: str = "", code: int = 0) -> None:
        """Tell the head the status of this host."""
        if self._channel is not None:
            with contextlib.suppress(CommError):  # the following thread sees that the head is gone
                self._channel.send({"status": status, "cause": cause, "code": code})

    def close(self) -> None:
        self._closing = True
        if self._channel is not None:
            self._channel.close()

    def _connect(self, host: str, deadline_s: float, timeout_s: float) -> Channel:
        address, say_at_s = (self._head.host, self._head.port), time.monotonic() + SAY_S
        while True:
            try:
                return connect_channel(address, self._secret, purpose=PURPOSE, name=host, remedy=SECRET_REMEDY)
            except HandshakeRefused as error:
                raise ConfigError(f"the runner at {self._head}: {error}") from None
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

    def _follow(self, channel: Channel) -> None:
        with contextlib.suppress(CommError):
            while (message := channel.receive()) is not None:
                if "verdict" in message.body:
                    self._post(Verdict(message.body["verdict"], message.body["code"]))
                    return
        if self._closing:
            return
        if self._outlives_head:
            self._post(RunnerGone(self._head.host, was_head=True))
        else:
            self._post(Verdict(f"the runner at {self._head} is gone", 1))


Control = HeadRunner | MemberRunner
