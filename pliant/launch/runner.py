"""The runner: carries a launch plan through its stages on this host, and ends when the job does.

Secret, ports, the other hosts, the config server, then the workers (`crew`). Torch is never
imported here.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pliant.cluster import View, Worker
from pliant.errors import LaunchError
from pliant.launch.assembly import Assembly
from pliant.launch.channel import Message, text_of
from pliant.launch.control import Control, Head, Member
from pliant.launch.crew import Crew
from pliant.launch.duration import format_duration
from pliant.launch.events import Arrived, Rolled, Tell
from pliant.launch.inbox import Inbox
from pliant.launch.plan import LaunchPlan, Machine, first_view
from pliant.launch.ports import bind_ports
from pliant.launch.secret import job_secret
from pliant.launch.supervisor import TIMEOUT_EXIT, Supervisor
from pliant.launch.watch import Follower, follower

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the runner's part of the job ended."""

    code: int
    """The exit code of `pliant run`."""
    summary: str
    """The last line for the user; empty where a failure has been told already."""


def launch(
    plan: LaunchPlan,
    machine: Machine,
    clock: Callable[[], float] = time.monotonic,
    *,
    register: Callable[..., contextlib.AbstractContextManager[object]] | None = None,
) -> Outcome:
    """Run the job's part of this host to its end. Call it from the main thread.

    `register` lists the job for the time of a block (`jobs.store.registered`), so that `pliant resize` finds it.

    Raises:
        ConfigError, LaunchError: before any worker was started, with the reason.
    """
    options = plan.options
    time.sleep(options.delay_s)
    begun_s = clock()
    for warning in plan.warnings:
        log.warning("%s", warning)
    # Independent workers talk to somebody else, whose secret comes over ssh in the environment.
    is_shared = _is_shared(plan) or (options.independent and "PLIANT_SECRET" in machine.environ)
    secret = job_secret(secret_file=options.secret_file, shared=is_shared, environ=machine.environ)
    with contextlib.ExitStack() as stack:
        listeners = _bind(plan, stack)
        inbox = Inbox()
        stack.callback(inbox.close)
        followed = stack.enter_context(follower(plan, secret, machine.environ))
        control = _make_control(plan, secret, inbox, followed.url)
        ports = {plan.self_host: list(listeners)}
        if control is not None:
            stack.callback(control.close)
            try:
                ports = _meet(plan, control, list(listeners), followed)
            except LaunchError as error:
                if not options.timeout_s or clock() - begun_s < options.timeout_s:
                    raise
                log.error("-timeout: %s", error)
                return Outcome(TIMEOUT_EXIT, "")
        supervisor = Supervisor(
            plan.self_host,
            grace_s=options.grace_s,
            watch=options.watch,
            keep=options.keep,
            alone=control is None,
            slots=next(host.slots for host in plan.hosts if host.address == plan.self_host),
            max_restarts=options.max_restarts,
            independent=options.independent,
        )
        crew = Crew(
            plan,
            supervisor,
            inbox,
            environ=_with_token(machine.environ, followed),
            secret=secret,
            listeners=listeners,
            config_server=followed.url,
            tell=_teller(plan, control),
            token=followed.token,
        )
        if options.debug_port:
            from pliant.launch.debug import serve_state

            port = stack.enter_context(serve_state(plan.self_host, options.debug_port, crew.state))
            log.info("state at http://%s/", Worker(plan.self_host, port))
        _give_first_view(plan, ports, inbox, followed)
        if register is not None and plan.is_head and followed.url and options.init_version >= 0:
            stack.enter_context(
                register(
                    followed.url,
                    options.program,
                    host=plan.self_host,
                    token=followed.token,
                    record=options.adapting.get("record", ""),
                    logdir=options.logdir,
                    environ=machine.environ,
                )
            )
        code = crew.run(begun_s + options.timeout_s if options.timeout_s else None)
    return Outcome(code, _summary(supervisor, clock() - begun_s) if code == 0 else "")


def _is_shared(plan: LaunchPlan) -> bool:
    """Whether a runner on another host must find the same secret."""
    return len(plan.hosts) > 1 or bool(plan.options.config_server)


def _bind(plan: LaunchPlan, stack: contextlib.ExitStack) -> dict[int, socket.socket]:
    options = plan.options
    num_ports = 0 if options.init_version < 0 else plan.num_local
    listeners = bind_ports(plan.self_host, num_ports, options.port_range, avoid={options.port})
    for listener in listeners.values():
        stack.callback(listener.close)
    return listeners


def _make_control(plan: LaunchPlan, secret: bytes, inbox: Inbox, config_server: str) -> Control | None:
    """The connection to the other hosts; None for a job of one host, and for a runner that waits to be added."""
    if len(plan.hosts) == 1 or plan.options.init_version < 0:
        return None
    if not plan.is_head:
        # Without its head, a job whose config server runs elsewhere is still a job.
        outlives_head = plan.options.watch and not plan.options.follows_builtin
        return Member(plan.head, secret, inbox.post, outlives_head=outlives_head)
    assembly = Assembly([host.address for host in plan.hosts], plan.agreement, elastic=plan.options.watch)
    return Head(plan.head, assembly, secret, inbox.post, {"config_server": config_server})


def _meet(plan: LaunchPlan, control: Control, bound: Sequence[int], followed: Follower) -> dict[str, list[int]]:
    """Come together with the other hosts; the ports of all."""
    options = plan.options
    timeout_s = min(options.rendezvous_timeout_s, options.timeout_s or options.rendezvous_timeout_s)
    control.open()
    welcome = control.meet(plan.self_host, plan.agreement, bound, timeout_s)
    followed.use(text_of(welcome, "config_server"))
    return _ports_of(welcome)


def _ports_of(welcome: Message) -> dict[str, list[int]]:
    """The ports of every host, from the head."""
    ports = welcome.get("ports")
    if not isinstance(ports, dict):
        raise LaunchError(f"the head sent no ports: {welcome!r:.100}; start all runners with one version of pliant")
    return {str(host): [int(port) for port in bound] for host, bound in ports.items()}


def _with_token(environ: Mapping[str, str], followed: Follower) -> Mapping[str, str]:
    """`environ`, with what lets workers talk to the config server."""
    return {**environ, "PLIANT_TOKEN": followed.token} if followed.token else environ


def _teller(plan: LaunchPlan, control: Control | None) -> Callable[[Tell], None]:
    def tell(news: Tell) -> None:
        if control is not None:
            control.tell(plan.self_host, news.status, news.cause, news.code)

    return tell


def _give_first_view(plan: LaunchPlan, ports: dict[str, list[int]], inbox: Inbox, followed: Follower) -> None:
    """Post the first view, or, in watch mode, offer it to the config server and post what it has from then on."""
    view: View | None = first_view(plan, ports) if plan.options.init_version >= 0 else None
    options = plan.options
    offered = view if plan.is_head else None
    if options.watch:
        followed.start(
            offered,
            lambda wanted: inbox.post(Arrived(wanted)),
            lambda roll: inbox.post(Rolled(roll)),
            options.rendezvous_timeout_s,
        )
        return
    if options.follows_builtin:
        followed.offer(offered, options.rendezvous_timeout_s)
    if view is not None:
        inbox.post(Arrived(view))


def _summary(supervisor: Supervisor, took_s: float) -> str:
    done, lost = supervisor.num_finished, supervisor.num_lost
    told = f"all {done}/{supervisor.num_started - lost} local workers finished"
    return f"{told}{f' ({lost} lost)' if lost else ''}, took {format_duration(took_s)}"
