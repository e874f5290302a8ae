"""The workers of this host: started and signalled as `supervisor` says, and seen to their end."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pliant.cluster import View, Worker
from pliant.errors import PliantError
from pliant.launch import processes, state_file
from pliant.launch.courier import Courier
from pliant.launch.duration import format_duration
from pliant.launch.events import (
    Action,
    Arrived,
    Blame,
    Event,
    Exited,
    Finish,
    Kill,
    NotReplaced,
    Replace,
    Report,
    Say,
    Start,
    StartFailed,
    Tell,
    Terminate,
    Tick,
    TimedOut,
    Warmed,
)
from pliant.launch.forker import Starter, WarmProcess, takes_warmth
from pliant.launch.inbox import Inbox
from pliant.launch.output import Console, LogFile, OutputReader, Stream, prefix
from pliant.launch.plan import LaunchPlan, common_environ, log_name, make_spec, worker_environ
from pliant.launch.ports import bind_ports, listen_on
from pliant.launch.supervisor import Supervisor

log = logging.getLogger(__name__)

TAIL_WAIT_S = 1.0
"""How long to wait for the last lines of a worker that has failed."""


@dataclass
class Launched:
    """A worker that was started, kept for -debug-port after its end."""

    process: processes.Process
    slot: int
    stdout: Stream
    stderr: Stream

    @property
    def state(self) -> str:
        return "running" if self.process.code is None else f"ended with {self.process.code}"


class Crew:
    """The local workers of a job. `run` blocks until the job is over."""

    def __init__(
        self,
        plan: LaunchPlan,
        supervisor: Supervisor,
        inbox: Inbox,
        *,
        environ: Mapping[str, str],
        secret: bytes,
        listeners: dict[int, socket.socket],
        config_server: str = "",
        tell: Callable[[Tell], None],
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._supervisor, self._inbox, self._environ = plan, supervisor, inbox, environ
        self._secret, self._listeners, self._config_server = secret, listeners, config_server
        self._tell, self._clock = tell, clock
        self._mark = secrets.token_hex(16)
        self._guardian = processes.Guardian(self._mark, environ)
        self._output = OutputReader()
        self._consoles = {fd: Console(fd, coloured=_takes_colour(fd, environ)) for fd in (1, 2)}
        self._starter = Starter(plan.command, None)
        self._held: dict[Worker, tuple[Start, socket.socket]] = {}
        """Those to be started once the warm process is up."""
        self._courier = Courier(config_server, token, self._forgo) if plan.options.watch else None
        self._reserved: dict[int, socket.socket] = {}
        """Ports for replacements that were asked for."""
        self._used_ports = {plan.options.port}
        self._launched: dict[Worker, Launched] = {}
        self._views: dict[int, View] = {}
        self._code: int | None = None

    def run(self, deadline_s: float | None) -> int:
        """Work until the supervisor says that it is over; the exit code. Nothing of the job lives afterwards."""
        with self._guardian, contextlib.ExitStack() as stack:
            self._output.start()
            self._warm_up(stack)
            stack.callback(self._end_all)
            self._tell_state()
            if self._courier is not None:
                self._courier.start()
                stack.callback(self._courier.close)
            with self._inbox.signals():
                while self._code is None:
                    self._turn(deadline_s)
        # Signals have their usual meaning again: a console that blocks can be left with Ctrl-C.
        self._output.finish()
        return self._code

    def state(self) -> dict[str, object]:
        """For -debug-port: the views seen, and the local workers."""
        return {
            "stages": {str(number): view.to_json() for number, view in sorted(self._views.items())},
            "workers": {
                str(worker): {"pid": launched.process.pid, "slot": launched.slot, "state": launched.state}
                for worker, launched in list(self._launched.items())
            },
        }

    def _warm_up(self, stack: contextlib.ExitStack) -> None:
        """Start the warm process, where the workers can come from one."""
        options = self._plan.options
        if not (options.watch and options.warm and takes_warmth(self._plan.command, self._environ.get("PATH"))):
            return
        environ = common_environ(self._plan, self._environ, self._mark)
        try:
            made = WarmProcess(environ, lambda: self._inbox.post(Warmed()), shown=self._plan.command[1:])
            warm = stack.enter_context(made)
        except OSError as error:
            log.warning("no warm process (%s): workers are started without it", error.strerror)
            return
        self._guardian.watch(warm.pid)
        shown = options.show_output
        for name, descriptor, console in (("stdout", warm.stdout, 1), ("stderr", warm.stderr, 2)):
            to = self._consoles[console]
            self._output.add(Stream(descriptor, prefix("warm", name, None), to if shown else None, None))
        self._starter = Starter(self._plan.command, warm)

    def _turn(self, deadline_s: float | None) -> None:
        """Wait for something to happen, and do what it takes."""
        if self._supervisor.failed:
            deadline_s = None  # -timeout has nothing more to end
        waits = [at_s for at_s in (deadline_s, self._supervisor.next_deadline_s) if at_s is not None]
        events, ended = self._inbox.wait(max(0.0, min(waits) - self._clock()) if waits else None)
        # Ends of workers first: one that failed by itself is the cause, whatever came after.
        for event in [*(self._reap(worker) for worker in ended), *events, Tick()]:
            self._handle(event)
        if deadline_s is not None and self._clock() >= deadline_s:
            self._handle(TimedOut(format_duration(self._plan.options.timeout_s)))

    def _handle(self, event: Event) -> None:
        for action in self._supervisor.handle(event, self._clock()):
            self._do(action)
        if isinstance(event, Warmed):
            held, self._held = self._held, {}
            for start, listener in held.values():
                self._launch(start, listener)
        if isinstance(event, Arrived):
            self._views[event.view.number] = event.view
            self._used_ports |= {worker.port for worker in event.view.workers if worker.host == self._plan.self_host}
            # Ports bound for a first view that the config server has overruled.
            while self._listeners:
                self._listeners.popitem()[1].close()
            self._tell_state()

    def _do(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Terminate(worker):
                self._signal(worker, signal.SIGTERM)
            case Kill(worker):
                log.warning("worker %s did not end when told to: killing it", worker)
                self._signal(worker, signal.SIGKILL)
            case Report(worker, why):
                if self._courier is not None:
                    self._courier.report(worker, why)
            case Replace():
                self._replace()
            case Blame():
                self._blame(action)
            case Tell():
                self._tell(action)
            case Say(text, is_error):
                log.log(logging.ERROR if is_error else logging.INFO, "%s", text)
            case Finish(code):
                self._code = code

    def _start(self, start: Start) -> None:
        """Start a worker, as soon as that can be done, on a port that is its own from now on."""
        worker = start.worker
        try:
            listener = self._listeners.pop(worker.port, None) or self._reserved.pop(worker.port, None)
            listener = listener or listen_on(worker.host, worker.port)
        except OSError as error:
            self._fail_start(worker, error)
            return
        if self._starter.is_ready:
            self._launch(start, listener)
        else:
            self._held[worker] = (start, listener)

    def _launch(self, start: Start, listener: socket.socket) -> None:
        worker, view, slot = start.worker, start.view, start.slot
        try:
            with listener:
                spec = make_spec(
                    self._plan,
                    worker,
                    view,
                    secret=self._secret,
                    config_server=self._config_server,
                    listen_fd=listener.fileno(),
                )
                environ = worker_environ(self._plan, self._environ, spec, slot=slot, mark=self._mark)
                process = self._starter.start(environ, listener)
        except OSError as error:
            self._fail_start(worker, error)
            return
        self._guardian.watch(process.pid)
        stdout, stderr = self._streams(worker, view, slot, process)
        self._launched[worker] = Launched(process, slot, stdout, stderr)
        self._inbox.watch(worker, process.pidfd)
        self._tell_state()

    def _tell_state(self) -> None:
        """Keep --state-file up to date."""
        if self._plan.options.state_file:
            living = {
                str(worker): (launched.process.pid, launched.slot)
                for worker, launched in self._launched.items()
                if launched.process.code is None
            }
            version = self._supervisor.view.number if self._supervisor.view is not None else -1
            state_file.write(Path(self._plan.options.state_file), self._config_server, version, living)

    def _fail_start(self, worker: Worker, error: OSError) -> None:
        # Posted, not handled here: the actions that came with this one must be done first.
        self._inbox.post(StartFailed(worker, f"{error.strerror or error}; give it a free port, or free resources"))

    def _replace(self) -> None:
        """Ask for one more worker here, on a port that was never used.

        Whoever is late to notice the loss would otherwise report, or connect to, the wrong one.
        """
        assert self._courier is not None, "only a watching runner replaces"
        options, host = self._plan.options, self._plan.self_host
        try:
            bound = bind_ports(host, 1, options.port_range, avoid=self._used_ports)
        except PliantError as error:
            self._inbox.post(NotReplaced(str(error)))
            return
        self._reserved |= bound
        self._used_ports |= set(bound)
        self._courier.add(Worker(host, *bound))

    def _forgo(self, worker: Worker, refusal: NotReplaced) -> None:
        self._reserved.pop(worker.port).close()
        self._inbox.post(refusal)

    def _streams(self, worker: Worker, view: View, slot: int, process: processes.Process) -> tuple[Stream, Stream]:
        options = self._plan.options
        version = view.number if options.watch else None
        made = []
        for name, descriptor, console in (("stdout", process.stdout, 1), ("stderr", process.stderr, 2)):
            shown = self._consoles[console]
            stream = Stream(
                descriptor=descriptor,
                prefix=prefix(worker.label, name, slot if shown.coloured else None),
                console=shown if options.show_output else None,
                file=LogFile(Path(options.logdir) / log_name(worker, version, name)) if options.logdir else None,
            )
            self._output.add(stream)
            made.append(stream)
        return made[0], made[1]

    def _signal(self, worker: Worker, signum: int) -> None:
        if worker in self._held:
            self._held.pop(worker)[1].close()
            self._inbox.post(Exited(worker, -signum))
        elif worker in self._launched:
            self._launched[worker].process.signal(signum)

    def _reap(self, worker: Worker) -> Exited:
        process = self._launched[worker].process
        self._inbox.forget(process.pidfd)
        code = process.reap()
        self._guardian.forget(process.pid)
        self._tell_state()
        return Exited(worker, code)

    def _blame(self, blame: Blame) -> None:
        worker = blame.worker
        if worker not in self._launched:
            log.error("worker %s %s: %s", worker, blame.how, blame.what)
            return
        launched = self._launched[worker]
        deadline_s = self._clock() + TAIL_WAIT_S
        for stream in (launched.stderr, launched.stdout):
            stream.ended.wait(max(0.0, deadline_s - self._clock()))
        name, tail = ("stderr", launched.stderr.tail) if launched.stderr.tail else ("stdout", launched.stdout.tail)
        lines = [line.decode(errors="backslashreplace") for line in tail]
        view = self._supervisor.view
        rank = view.workers.index(worker) if view is not None and worker in view.workers else None
        who = f"worker {worker}" + (f" (rank {rank})" if rank is not None else "")
        last = f"; its last lines of {name}:" if lines else "; it printed nothing"
        log.error("%s %s: %s%s", who, blame.how, blame.what, "\n  ".join([last, *lines]))

    def _end_all(self) -> None:
        """Kill what still runs: only after an error of our own, since a job that is over has nothing left."""
        for listener in [*(listener for _, listener in self._held.values()), *self._reserved.values()]:
            listener.close()
        for launched in self._launched.values():
            if launched.process.code is None:
                launched.process.signal(signal.SIGKILL)
                launched.process.reap()


def _takes_colour(descriptor: int, environ: Mapping[str, str]) -> bool:
    return os.isatty(descriptor) and "NO_COLOR" not in environ and environ.get("TERM") != "dumb"
