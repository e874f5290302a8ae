"""The runners of a job's hosts: who has come, how each stands, and the verdict. Pure; `control` does the I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pliant.errors import ConfigError
from pliant.launch.events import BUSY, DONE, IDLE, Verdict


class Assembly:
    """What the head knows about the job's hosts."""

    def __init__(self, hosts: Sequence[str], agreement: Mapping[str, object], *, elastic: bool = False) -> None:
        self.elastic = elastic
        """Whether the job may go on without a host."""
        self.ports: dict[str, list[int]] = {}
        self.begun = False
        """Whether all have come, and were told so."""
        self._hosts = tuple(hosts)
        self._agreement = dict(agreement)
        self._standing: dict[str, str] = {}
        self.verdict: Verdict | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(host for host in self._hosts if host not in self.ports)

    def join(self, host: str, agreement: Mapping[str, object], ports: Sequence[int]) -> None:
        """Note a runner and its ports.

        Raises:
            ConfigError: it is not on the list, is there already, or was started with other flags.
        """
        if host not in self._hosts:
            raise ConfigError(f"host {host} is not in the head's list {','.join(self._hosts)}: start all with one -H")
        if host in self.ports:
            raise ConfigError(f"a runner on {host} has joined already: start one per host, or give another -port")
        for flag, value in self._agreement.items():
            if agreement.get(flag) != value:
                raise ConfigError(
                    f"{flag} is {agreement.get(flag)!r} on {host} but {value!r} on {self._hosts[0]}: "
                    "start all runners with the same flags"
                )
        self.ports[host] = list(ports)

    def stand(self, host: str, status: str) -> Verdict | None:
        """Note how `host` stands; returns the verdict if this makes the job end well."""
        self._standing[host] = status
        states = [self._standing.get(known, BUSY) for known in self._hosts]
        if self.verdict is None and BUSY not in states and DONE in states:
            self.verdict = Verdict("", 0)
            return self.verdict
        return None

    def fail(self, cause: str, code: int) -> Verdict:
        """Note a failure; what failed first stays the verdict."""
        if self.verdict is None:
            self.verdict = Verdict(cause, code)
        return self.verdict

    def leave(self, host: str) -> Verdict | None:
        """Note that the connection to `host` is gone: a failure, unless the job is over, has not begun, or is elastic.

        Before it has begun, the host may come again.
        """
        if not self.begun:
            self.ports.pop(host, None)
        if not self.begun or self.verdict is not None:
            return None
        if self.elastic:
            return self.stand(host, IDLE)
        return self.fail(f"the runner on {host} is gone", 1)
