"""The runner: carries a launch plan out on this host, and ends when the job does.

In order: the secret, the ports, the config server (its own or another one's), the other hosts, and then the workers
(`process_manager`). Torch is never imported here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.cluster import ClusterSnapshot, View
from pliant.duration import format_duration
from pliant.elastic.membership import Limits
from pliant.errors import ClusterCleared, ConfigError, LaunchError, ServerUnavailable, StaleView
from pliant.identity import job_secret
from pliant.launch.addresses import bind_ports
from pliant.launch.control import Control, HeadRunner, HostGroup, MemberRunner
from pliant.launch.events import EventQueue, ServerContact, StateChanged
from pliant.launch.plan import LaunchPlan, Machine, first_view
from pliant.launch.process_manager import ProcessManager
from pliant.launch.supervisor import TIMEOUT_EXIT, Supervisor
from pliant.tokens import find_token, job_token, token_kept

if TYPE_CHECKING:
    from pliant.elastic.client import ConfigSender

log = logging.getLogger(__name__)

RETRY_S = 1.0
SAY_S = 10.0


@dataclass(frozen=True, slots=True)
class RunnerOutcome:
    """How the runner's part of the job ended."""

    code: int
    """The exit code of `pliant run`."""
    summary: str
    """The last line for the user; empty where a failure has been shown already."""


@dataclass(frozen=True, slots=True)
class ConfigAddress:
    """The config server that a runner follows; an empty URL means none."""

    url: str = ""
    token: str = field(default="", repr=False)


def launch(
    plan: LaunchPlan,
    machine: Machine,
    *,
    register: Callable[..., contextlib.AbstractContextManager[object]] | None = None,
    servers: Path | None = None,
) -> RunnerOutcome:
    """Run the job's part of this host to its end. Call it from the main thread.

    `register` lists the job for the time of a block (`jobs.store.registered`), so that `pliant resize` finds it. In
    `servers` the job's own config server keeps its state; None: in memory.

    Raises:
        ConfigError, LaunchError: before any worker was started, with the reason.
    """
    options = plan.options
    time.sleep(options.delay_s)
    begun_s = time.monotonic()
    for warning in plan.warnings:
        log.warning("%s", warning)
    # Independent workers talk to another process, whose secret comes over ssh in the environment.
    is_given = options.independent and "PLIANT_SECRET" in machine.environ
    is_shared = len(plan.hosts) > 1 or bool(options.config_server) or is_given
    secret = job_secret(secret_file=options.secret_file, shared=is_shared, environ=machine.environ)
    with contextlib.ExitStack() as stack:
        num_ports = 0 if options.init_version < 0 else plan.num_local
        listeners = bind_ports(plan.self_host, num_ports, options.port_range, avoid={options.port})
        for listener in listeners.values():
            stack.callback(listener.close)
        events = EventQueue()
        stack.callback(events.close)
        config = stack.enter_context(_config_server(plan, secret, machine.environ, servers))
        control = _make_control(plan, secret, events, config.url)
        ports: Mapping[str, Sequence[int]] = {plan.self_host: list(listeners)}
        if control is not None:
            stack.callback(control.close)
            timeout_s = min(options.rendezvous_timeout_s, options.timeout_s or options.rendezvous_timeout_s)
            try:
                control.open()
                welcome = control.meet(plan.self_host, plan.agreement, list(listeners), timeout_s)
            except LaunchError as error:
                if not options.timeout_s or time.monotonic() - begun_s < options.timeout_s:
                    raise
                log.error("-timeout: %s", error)
                return RunnerOutcome(TIMEOUT_EXIT, "")
            ports = welcome["ports"]
            config = ConfigAddress(config.url or welcome["config_server"], config.token)
        supervisor = Supervisor(
            plan.self_host,
            grace_s=options.grace_s,
            watch=options.watch,
            keep=options.keep,
            alone=control is None,
            slots=next(host.slots for host in plan.hosts if host.address == plan.self_host),
            max_restarts=options.max_restarts,
            independent=options.independent,
            plain=options.is_plain,
        )
        sender = _make_sender(config) if options.watch else None
        manager = ProcessManager(
            plan,
            supervisor,
            events,
            control,
            environ={**machine.environ, "PLIANT_TOKEN": config.token} if config.token else machine.environ,
            secret=secret,
            listeners=listeners,
            config_server=config.url,
            sender=sender,
        )
        if options.debug_port:
            token = config.token or job_token(secret)
            stack.enter_context(serve_state(plan.self_host, options.debug_port, token, manager.state))
            file = stack.enter_context(token_kept(plan.self_host, options.debug_port, token, machine.environ))
            where = file or "PLIANT_TOKEN"
            log.info("state at http://%s:%d/ (token in %s)", plan.self_host, options.debug_port, where)
        view = first_view(plan, ports) if options.init_version >= 0 else None

        def begin() -> None:
            if sender is not None:
                limits = Limits(hosts=plan.hosts, ports=options.port_range)
                offered = view if plan.is_head else None
                _follow_server(offered, limits, events, sender, config, options.rendezvous_timeout_s, stack)
            elif view is not None:
                if options.follows_builtin:
                    _offer_view(config, view if plan.is_head else None, None, options.rendezvous_timeout_s)
                events.post(StateChanged(view))
            if register is not None and plan.is_head and config.url and options.init_version >= 0:
                stack.enter_context(
                    register(
                        config.url,
                        options.program,
                        host=plan.self_host,
                        token=config.token,
                        record=options.adapting.get("record", ""),
                        logdir=options.logdir,
                        environ=machine.environ,
                    )
                )

        code = manager.run(begun_s + options.timeout_s if options.timeout_s else None, begin)
    return RunnerOutcome(code, _summary(supervisor, time.monotonic() - begun_s) if code == 0 else "")


def _summary(supervisor: Supervisor, took_s: float) -> str:
    done, lost = supervisor.num_finished, supervisor.num_lost
    text = f"all {done}/{supervisor.num_started - lost} local workers finished"
    return f"{text}{f' ({lost} lost)' if lost else ''}, took {format_duration(took_s)}"


def _make_control(plan: LaunchPlan, secret: bytes, events: EventQueue, config_server: str) -> Control | None:
    """Return the connection to the other hosts; None for a job of one host, and for a runner that waits to be added."""
    if len(plan.hosts) == 1 or plan.options.init_version < 0:
        return None
    if not plan.is_head:
        # Without its head, an elastic job is still a job: its config server is another process.
        return MemberRunner(plan.head, secret, events.post, outlives_head=plan.options.watch)
    group = HostGroup([host.address for host in plan.hosts], plan.agreement, elastic=plan.options.watch)
    return HeadRunner(plan.head, group, secret, events.post, config_server)


# --- the config server ---


@contextlib.contextmanager
def _config_server(
    plan: LaunchPlan, secret: bytes, environ: Mapping[str, str], folder: Path | None
) -> Iterator[ConfigAddress]:
    """Yield the address of the config server that the plan names; start one where it asks for that.

    Raises:
        ConfigError: the server's port cannot be used.
    """
    options = plan.options
    if options.config_server and not options.follows_builtin:
        yield ConfigAddress(options.config_server, find_token(options.config_server, environ))
        return
    token = environ.get("PLIANT_TOKEN") or job_token(secret)
    if not options.follows_builtin:
        yield ConfigAddress("", token)
        return
    if not plan.is_head:
        yield ConfigAddress("", token)  # the URL comes with the head's welcome
        return
    from pliant.launch.job_server import JobServer

    limits = Limits(hosts=plan.hosts, ports=options.port_range)
    with (
        JobServer(plan.self_host, options.builtin_config_port, limits, token, environ, folder) as server,
        token_kept(plan.self_host, server.port, token, environ) as file,
    ):
        log.info("config server at %s (token in %s)", server.url, file or "PLIANT_TOKEN")
        yield ConfigAddress(server.url, token)


def _make_sender(config: ConfigAddress) -> ConfigSender:
    from pliant.elastic.client import ConfigSender

    return ConfigSender(config.url, config.token)


def _follow_server(
    offered: View | None,
    limits: Limits,
    events: EventQueue,
    sender: ConfigSender,
    config: ConfigAddress,
    timeout_s: float,
    stack: contextlib.ExitStack,
) -> None:
    """Offer the config server its first view, and post every state that it has from then on; `sender` learns of which job.

    Raises:
        ClusterCleared: the last job of the config server has ended, and nobody has reset it.
        ConfigError: the server's address is wrong, or it refuses.
        LaunchError: the server does not answer in time.
    """
    from pliant.elastic.client import ConfigFollower, reset_remedy

    snapshot = _offer_view(config, offered, limits, timeout_s)
    wanted = snapshot.wanted
    if wanted.cleared or snapshot.membership.over:
        how = "was told to stop" if wanted.cleared else "has finished"
        raise ClusterCleared(
            f"config server {config.url}: the last job there {how} (version {wanted.version}); "
            f"{reset_remedy(config.url)}"
        )
    if wanted.view is None:
        log.info("waiting to be added: no view is set at %s", config.url)

    def post(latest: ClusterSnapshot) -> None:
        sender.job = latest.id
        events.post(StateChanged(latest.wanted.view, latest.membership, latest.restored))

    post(snapshot)
    follower = ConfigFollower(config.url, config.token, post, on_contact=lambda why: events.post(ServerContact(why)))
    stack.callback(follower.stop)
    follower.start(snapshot)


def _offer_view(
    config: ConfigAddress, offered: View | None, limits: Limits | None, timeout_s: float
) -> ClusterSnapshot:
    """Put `offered` if the server has no view yet; return the server's state after that."""
    from pliant.elastic.client import open_client

    deadline_s, say_at_s = time.monotonic() + timeout_s, time.monotonic() + SAY_S
    with open_client(config.url, config.token) as client:
        while True:
            try:
                snapshot = client.snapshot()
                if snapshot.wanted.view is not None or offered is None:
                    return snapshot
                client.put(offered, snapshot.wanted.version, limits)
            except StaleView:
                continue  # somebody else put one just now: theirs counts
            except ServerUnavailable as error:
                if time.monotonic() > deadline_s:
                    raise LaunchError(f"{error} (waited {timeout_s:g} s)") from None
                if time.monotonic() > say_at_s:
                    log.info("waiting for the config server: %s", error)
                    say_at_s += SAY_S
                time.sleep(RETRY_S)


# --- -debug-port ---


@contextlib.contextmanager
def serve_state(address: str, port: int, token: str, state: Callable[[], dict[str, object]]) -> Iterator[None]:
    """Answer `GET /` with `state()` as JSON until the end of the block, to requests with the token.

    Raises:
        ConfigError: the port cannot be used.
    """
    from starlette.responses import Response  # few ask for it

    from pliant.elastic.http_server import listening, serving, single_page, uvicorn_config

    def answer() -> Response:
        return Response(json.dumps(state(), indent=2) + "\n", media_type="application/json")

    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listening(address, port))
        except ConfigError as error:
            raise ConfigError(f"-debug-port {port} on {address}: {error}") from None
        settings = uvicorn_config(single_page("/", answer, token), names=(address,))
        stack.enter_context(serving(settings, listener, "debug"))
        yield
