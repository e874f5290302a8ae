"""Watch mode: the config server that a runner follows, its own or another one's."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from pliant.cluster import ClusterSnapshot, Membership, View, Wanted
from pliant.elastic.membership import Limits
from pliant.errors import ClusterCleared, LaunchError, ServerUnavailable, StaleView
from pliant.launch.plan import LaunchPlan

if TYPE_CHECKING:
    from pliant.elastic.client import ConfigClient, ConfigFollower

log = logging.getLogger(__name__)

HOLD_S = 30.0
RETRY_S = 1.0
SAY_S = 10.0


class Follower:
    """Reads the wanted view and the roll from a config server, and hands over each new one."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self._stopping = threading.Event()
        self._follower: ConfigFollower | None = None

    def use(self, url: str) -> None:
        """Take the head's server, where the user named none."""
        self.url = self.url or url

    def offer(self, first: View | None, timeout_s: float) -> Wanted:
        """What the server wants; `first`, if it has no view yet.

        Raises:
            ConfigError: the address is wrong, or the server refuses.
            LaunchError: it does not answer within `timeout_s`.
        """
        from pliant.elastic.client import ConfigClient

        with ConfigClient(self.url, self.token) as client:
            return self._first_state(client, first, time.monotonic() + timeout_s, timeout_s)

    def start(
        self,
        first: View | None,
        arrive: Callable[[View], None],
        roll_on: Callable[[Membership], None],
        timeout_s: float,
    ) -> None:
        """Offer `first`, then call `arrive` with each view and `roll_on` with each membership there is, from threads.

        Raises:
            ClusterCleared: the last job of this server has ended, and nobody has reset it.
            ConfigError, LaunchError: as `offer`.
        """
        from pliant.elastic.client import ConfigClient, ConfigFollower

        self.offer(first, timeout_s)
        with ConfigClient(self.url, self.token) as client:
            snapshot = client.snapshot()
        wanted = snapshot.wanted
        if wanted.cleared or snapshot.membership.over:
            how = "was told to stop" if wanted.cleared else "has finished"
            raise ClusterCleared(
                f"config server {self.url}: the last job there {how} (version {wanted.version}); "
                f"reset it first, as with `curl {urljoin(self.url, '/reset')}`"
            )
        if wanted.view is None:
            log.info("waiting to be added: no view is set at %s", self.url)

        def take(snapshot: ClusterSnapshot) -> None:
            roll_on(snapshot.membership)
            if snapshot.wanted.view is not None:
                arrive(snapshot.wanted.view)

        take(snapshot)
        self._follower = ConfigFollower(self.url, self.token, take)
        self._follower.start(snapshot)

    def stop(self) -> None:
        """Hand over nothing more. The threads end with their held requests."""
        self._stopping.set()
        if self._follower is not None:
            self._follower.stop()

    def _first_state(self, client: ConfigClient, first: View | None, deadline_s: float, timeout_s: float) -> Wanted:
        say_at_s = time.monotonic() + SAY_S
        while True:
            try:
                wanted = client.wanted()
                if wanted.view is None and first is not None:
                    view = client.put(first, expected=wanted.version)
                    return Wanted(view.number, view)
                return wanted
            except StaleView:
                continue  # somebody set it just now: theirs counts
            except ServerUnavailable as error:
                if time.monotonic() > deadline_s:
                    raise LaunchError(f"{error} (waited {timeout_s:g} s)") from None
                if time.monotonic() > say_at_s:
                    log.info("waiting for the config server: %s", error)
                    say_at_s += SAY_S
                self._stopping.wait(RETRY_S)


@contextlib.contextmanager
def follower(plan: LaunchPlan, secret: bytes, environ: Mapping[str, str]) -> Iterator[Follower]:
    """A follower of the config server that the plan names; one is run in this process where it asks for that.

    Raises:
        ConfigError: the server's port cannot be used.
    """
    options = plan.options
    token = environ.get("PLIANT_TOKEN", "")
    with contextlib.ExitStack() as stack:
        url = options.config_server
        if options.follows_builtin:
            url = ""  # on hosts other than the head, it comes with the head's welcome
            token = token or _own_token(plan, secret)
        if options.follows_builtin and plan.is_head:
            from pliant.elastic.server import ConfigServer, ServerConfig

            config = ServerConfig(
                host=plan.self_host,
                port=options.builtin_config_port,
                limits=Limits(hosts=plan.hosts, ports=options.port_range),
                token=token,
            )
            url = stack.enter_context(ConfigServer(config).running()).url
            how = "; requests need the token in PLIANT_TOKEN, set it to choose one" if token else ""
            log.info("config server at %s%s", url, how)
        found = Follower(url, token)
        stack.callback(found.stop)
        yield found


def _own_token(plan: LaunchPlan, secret: bytes) -> str:
    """What our own config server asks for: nothing on loopback, else what only the job's members can derive."""
    if ipaddress.ip_address(plan.head.host).is_loopback:
        return ""
    return hmac.new(secret, b"config-server", hashlib.sha256).hexdigest()
