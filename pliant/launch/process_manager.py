"""Runs the workers of this host: starts, signals and reaps them as `supervisor` says, and shows what they print."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pliant.child import process_state
from pliant.cluster import View, Worker
from pliant.duration import format_duration
from pliant.errors import PliantError
from pliant.files import LineFile
from pliant.launch import events
from pliant.launch.addresses import bind_ports, listen_on
from pliant.launch.output import Console, OutputReader, OutputStream, prefix
from pliant.launch.processes import (
    Guardian,
    OutOfMemory,
    WarmProcess,
    WorkerProcess,
    WorkerStarter,
    can_start_warm,
    write_runner_state,
)
from pliant.launch.worker_watch import WorkerWatch
from pliant.progress_board import NUM_SLOTS, Activity, Board
from pliant.stall_rule import StallRule

if TYPE_CHECKING:
    from pliant.elastic.client import ConfigSender
    from pliant.launch.control import Control
    from pliant.launch.plan import LaunchPlan
    from pliant.launch.supervisor import Supervisor

log = logging.getLogger(__name__)

STATE_RETRY_PERIOD_S = 5.0
TAIL_WAIT_S = 1.0
"""How long to wait for the last lines of a worker that has failed."""
MAX_KILLED_WARM_UPS = 3
"""After so many warm processes that were killed before they had done their imports, no other one is started."""


@dataclass
class StartedWorker:
    """A worker that was started."""

    process: WorkerProcess
    slot: int
    stdout: OutputStream
    stderr: OutputStream
    board_slot: int
    """Its slot on the progress board."""
    oom_kills: int
    """What `OutOfMemory.note_start` said when it was started."""


class ProcessManager:
    """The local workers of a job. `run` blocks until the job is over."""

    def __init__(
        self,
        plan: LaunchPlan,
        supervisor: Supervisor,
        queue: events.EventQueue,
        control: Control | None,
        *,
        environ: Mapping[str, str],
        secret: bytes,
        listeners: dict[int, socket.socket],
        config_server: str,
        sender: ConfigSender | None,
    ) -> None:
        self._plan, self._supervisor, self._queue, self._control = plan, supervisor, queue, control
        self._environ, self._secret, self._config_server = environ, secret, config_server
        self._listeners, self._sender = listeners, sender
        self._mark = secrets.token_hex(16)
        self._guardian = Guardian(self._mark, environ)
        self._memory = OutOfMemory()
        self._board = Board.make()
        self._free_slots = list(range(NUM_SLOTS))[::-1]
        self._watch = WorkerWatch(
            self._board,
            StallRule(plan.options.stall_timeout_s),
            queue.post,
            stopped_limit_s=plan.options.heartbeat_timeout_s,
            replaces=plan.options.watch,
            must_join=not (plan.options.plain or plan.options.independent),
            record=plan.options.adapting.get("record", ""),
        )
        self._output = OutputReader()
        self._consoles = {fd: Console(fd, coloured=_shows_colour(fd, environ)) for fd in (1, 2)}
        self._starter = WorkerStarter(plan.command)
        self._killed_warm_ups = 0
        self._held: dict[Worker, tuple[events.StartWorker, socket.socket]] = {}
        """Workers to be started once the first warm process is up."""
        self._reserved: dict[int, socket.socket] = {}
        """Ports for replacements that were requested."""
        self._used_ports = {plan.options.port}
        self._launched: dict[Worker, StartedWorker] = {}
        self._views: dict[int, View] = {}
        """The views that were seen, by number."""
        self._state_retry_s: float | None = None
        """When to write --state-file again, if it could not be written."""
        self._code: int | None = None
        self._last_failure = ""

    def run(self, deadline_s: float | None, begin: Callable[[], None]) -> int:
        """Work until the supervisor says that the job is over; return the exit code. Nothing of the job lives afterwards.

        `begin` posts the first event. It is called once the warm process is at its imports, which take seconds, as does the
        start of the config server that `begin` may have to wait for.
        """
        self._output.start()
        try:
            with self._guardian, contextlib.ExitStack() as stack:
                stack.callback(self._board.close)
                self._watch.start()
                stack.callback(self._watch.close)
                self._warm_up()
                stack.callback(self._end_all)
                with events.handle_signals(_leave):
                    begin()
                self._write_state()
                if self._sender is not None:
                    self._sender.start()  # now, so that the first report of a loss need not wait for it
                    stack.callback(self._sender.close)
                with self._queue.signals():
                    while self._code is None:
                        self._wait_and_handle(deadline_s)
        finally:
            # Signals have their usual meaning again: a console that blocks can be left with Ctrl-C.
            self._output.finish()
        if self._plan.options.independent and self._last_failure:
            log.error("%s", self._last_failure)  # again: the program that started these workers reads the last line
        return self._code

    def state(self) -> dict[str, object]:
        """Return what -debug-port shows: the views seen, and the local workers."""
        workers = {
            str(worker): {
                "pid": started.process.pid,
                "slot": started.slot,
                "state": "running" if started.process.code is None else f"ended with {started.process.code}",
            }
            for worker, started in list(self._launched.items())
        }
        return {
            "stages": {str(number): view.to_json() for number, view in sorted(self._views.items())},
            "workers": workers,
        }

    def _warm_up(self) -> None:
        """Start the warm process, if the workers can be forked from one."""
        command = self._plan.command
        if not (self._plan.options.forks_workers and can_start_warm(command, self._environ.get("PATH"))):
            return
        environ = self._plan.common_environ(self._environ, self._mark)
        changed = partial(self._queue.post, events.WarmProcessChanged())
        try:
            warm = WarmProcess(environ, changed, shown=command[1:]).__enter__()
        except OSError as error:
            log.warning("cannot start the process to fork workers from (%s): each worker imports torch", error.strerror)
            return
        self._guardian.watch(warm.pid)
        self._read_output("warm", warm.stdout, warm.stderr)
        self._starter.warm = warm

    def _tend_warm_process(self) -> None:
        """Start another warm process if it was killed, and the workers that have waited for it."""
        warm = self._starter.warm
        if warm is not None and warm.is_up:
            self._killed_warm_ups = 0
        elif warm is not None and warm.is_up is False:
            self._end_warm_process()
            self._killed_warm_ups += 1
            if warm.was_killed and self._killed_warm_ups <= MAX_KILLED_WARM_UPS:
                log.warning(
                    "the process that workers are forked from was killed: workers go on, and another one is started"
                )
                self._warm_up()
            else:
                log.warning(
                    "the process that workers are forked from has ended: from now on each worker imports torch, and starts "
                    "more slowly"
                )
        held, self._held = self._held, {}
        for start, listener in held.values():
            self._launch(start, listener)

    def _end_warm_process(self) -> None:
        if self._starter.warm is not None:
            self._starter.warm.__exit__()
            self._guardian.forget(self._starter.warm.pid)
            self._starter.warm = None

    def _wait_and_handle(self, deadline_s: float | None) -> None:
        """Wait for events, and do what the supervisor says about them."""
        if self._supervisor.failed:
            deadline_s = None  # -timeout has nothing more to end
        if self._state_retry_s is not None and time.monotonic() >= self._state_retry_s:
            self._write_state()
        deadlines = (deadline_s, self._supervisor.next_deadline_s, self._state_retry_s)
        waits = [at_s for at_s in deadlines if at_s is not None]
        arrived, ended = self._queue.wait(max(0.0, min(waits) - time.monotonic()) if waits else None)
        # Ends of workers first: one that failed by itself is the cause, whatever came after.
        for event in [*(self._reap(worker) for worker in ended), *arrived, events.Tick()]:
            self._handle(event)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            self._handle(events.TimedOut(format_duration(self._plan.options.timeout_s)))

    def _handle(self, event: events.Event) -> None:
        for action in self._supervisor.handle(event, time.monotonic()):
            self._perform(action)
        if isinstance(event, events.WarmProcessChanged):
            self._tend_warm_process()
        if isinstance(event, events.StateChanged) and event.view is not None and event.view.number not in self._views:
            self._views[event.view.number] = event.view
            self._used_ports |= {worker.port for worker in event.view.workers if worker.host == self._plan.self_host}
            # Close ports that were bound for a first view which the config server has overruled.
            while self._listeners:
                self._listeners.popitem()[1].close()
            self._write_state()

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.StartWorker():
                self._start(action)
            case events.TerminateWorker(worker):
                self._signal(worker, signal.SIGTERM)
            case events.KillWorker():
                self._kill(action)
            case events.ReportLoss(worker, why):
                if self._sender is not None:
                    self._sender.report(f"{worker} is lost", lambda client: client.lost(worker, why))
            case events.RequestReplacement():
                self._request_replacement()
            case events.ReportFailure():
                self._report_failure(action)
            case events.SendStatus(status, cause, code):
                if self._control is not None:
                    self._control.send_status(self._plan.self_host, status, cause, code)
            case events.ShowMessage(text, is_error):
                log.log(logging.ERROR if is_error else logging.INFO, "%s", text)
            case events.ExitRunner(code):
                self._code = code

    def _start(self, start: events.StartWorker) -> None:
        """Bind the worker's port, and start it. Only the first workers wait for the warm process: others wait for later ones."""
        worker = start.worker
        try:
            listener = self._listeners.pop(worker.port, None) or self._reserved.pop(worker.port, None)
            listener = listener or listen_on(worker.host, worker.port)
        except OSError as error:
            self._fail_start(worker, error)
            return
        if self._starter.is_warming and not self._launched:
            self._held[worker] = (start, listener)
        else:
            self._launch(start, listener)

    def _launch(self, start: events.StartWorker, listener: socket.socket) -> None:
        worker, view, slot = start.worker, start.view, start.slot
        board_slot, oom_kills = self._free_slots.pop(), self._memory.note_start()
        self._board.clear(board_slot)
        try:
            with listener:
                spec = self._plan.make_spec(
                    worker,
                    view,
                    self._secret,
                    self._config_server,
                    listener.fileno(),
                    self._board.descriptor,
                    board_slot=board_slot,
                    shadow=start.shadow,
                )
                environ = self._plan.worker_environ(self._environ, spec, slot=slot, mark=self._mark)
                process = self._starter.start(environ, listener, self._board.descriptor)
        except OSError as error:
            self._free_slots.append(board_slot)
            self._fail_start(worker, error)
            return
        self._guardian.watch(process.pid)
        self._watch.add(worker, process.pid, board_slot)
        log_name = f"{worker.label}@{view.number}" if self._plan.options.watch else worker.label
        stdout, stderr = self._read_output(worker.label, process.stdout, process.stderr, slot, log_name)
        self._launched[worker] = StartedWorker(process, slot, stdout, stderr, board_slot, oom_kills)
        self._queue.watch(worker, process.pidfd)
        self._write_state()

    def _write_state(self) -> None:
        """Bring --state-file up to date."""
        if self._plan.options.state_file:
            living = {
                str(worker): (launched.process.pid, launched.slot)
                for worker, launched in self._launched.items()
                if launched.process.code is None
            }
            version = self._supervisor.view.number if self._supervisor.view is not None else -1
            path = Path(self._plan.options.state_file)
            is_first_try = self._state_retry_s is None
            written = write_runner_state(path, self._config_server, version, living, warn=is_first_try)
            self._state_retry_s = None if written else time.monotonic() + STATE_RETRY_PERIOD_S

    def _fail_start(self, worker: Worker, error: OSError) -> None:
        # Posted, not handled here: the actions that came with this one must be done first.
        self._queue.post(
            events.StartFailed(worker, f"{error.strerror or error}; give it a free port, or free resources")
        )

    def _request_replacement(self) -> None:
        """Ask for one more worker here, on a port that was never used.

        A peer that notices the loss late would otherwise report, or connect to, the wrong worker.
        """
        assert self._sender is not None, "only a watching runner replaces"
        options, host = self._plan.options, self._plan.self_host
        try:
            bound = bind_ports(host, 1, options.port_range, avoid=self._used_ports)
        except PliantError as error:
            self._queue.post(events.NotReplaced(str(error)))
            return
        self._reserved |= bound
        self._used_ports |= set(bound)
        worker = Worker(host, *bound)

        def check(done: Future[View]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None:
                listener = self._reserved.pop(worker.port, None)  # None: an answer was lost, and it was started
                if listener is not None:
                    listener.close()
                self._queue.post(events.NotReplaced(str(error)))
            elif not done.cancelled():
                self._queue.post(events.ReplacementAdded(worker, done.result().number))

        self._sender.submit(lambda client: client.add_worker(worker)).add_done_callback(check)

    def _read_output(
        self, label: str, stdout: int, stderr: int, colour: int | None = None, log_name: str = ""
    ) -> tuple[OutputStream, OutputStream]:
        """Begin to read a process's output; with a `log_name`, also write it to files under -logdir."""
        options = self._plan.options
        made = []
        for name, descriptor, console in (("stdout", stdout, self._consoles[1]), ("stderr", stderr, self._consoles[2])):
            log_file = Path(options.logdir) / f"{log_name}.{name}.log"
            stream = OutputStream(
                descriptor=descriptor,
                prefix=prefix(label, name, colour if console.coloured else None),
                console=console if options.show_output else None,
                file=LineFile(log_file) if options.logdir and log_name else None,
            )
            self._output.add(stream)
            made.append(stream)
        return made[0], made[1]

    def _kill(self, action: events.KillWorker) -> None:
        launched = self._launched.get(action.worker)
        reading = self._board.read(launched.board_slot) if launched is not None else None
        if action.unless_ending and (reading is None or reading.activity is Activity.ENDING):
            return
        if launched is not None and not process_state(launched.process.pid):
            return  # it has ended, and is about to be reaped
        log.warning("worker %s %s: killing it", action.worker, action.why)
        self._signal(action.worker, signal.SIGKILL)

    def _signal(self, worker: Worker, signum: int) -> None:
        if worker in self._held:
            self._held.pop(worker)[1].close()
            self._queue.post(events.Exited(worker, -signum))
        elif worker in self._launched:
            self._launched[worker].process.signal(signum)

    def _reap(self, worker: Worker) -> events.Exited:
        launched = self._launched[worker]
        process = launched.process
        self._queue.forget(process.pidfd)
        self._watch.forget(worker)
        code = process.reap()
        self._guardian.forget(process.pid)
        self._write_state()
        joined, failure = self._board.has_joined(launched.board_slot), self._board.failure(launched.board_slot)
        self._free_slots.append(launched.board_slot)
        return events.Exited(worker, code, joined, self._memory.explains(code, launched.oom_kills), failure)

    def _report_failure(self, failure: events.ReportFailure) -> None:
        worker = failure.worker
        if worker not in self._launched:
            log.error("worker %s %s: %s", worker, failure.how, failure.what)
            return
        launched = self._launched[worker]
        deadline_s = time.monotonic() + TAIL_WAIT_S
        for stream in (launched.stderr, launched.stdout):
            stream.ended.wait(max(0.0, deadline_s - time.monotonic()))
        name, tail = ("stderr", launched.stderr.tail) if launched.stderr.tail else ("stdout", launched.stdout.tail)
        lines = [line.decode(errors="backslashreplace") for line in tail]
        last = lines[-1:]
        if self._plan.options.show_output and not failure.is_repeated:
            lines = []  # they stand above
        view = self._supervisor.view
        rank = view.workers.index(worker) if view is not None and worker in view.workers else None
        who = f"worker {worker}" + (f" (rank {rank})" if rank is not None else "")
        said = f": {last[0]}" if last else "; it printed nothing"
        self._last_failure = f"{who} {failure.how}: {failure.what}{said if last else ''}"
        if lines:
            said = "\n  ".join([f"; its last lines of {name}:", *lines])
        log.error("%s %s: %s%s", who, failure.how, failure.what, said)

    def _end_all(self) -> None:
        """End the warm process, and workers that still run; only after an exception does a job that is over have some left."""
        self._end_warm_process()
        for listener in [*(listener for _, listener in self._held.values()), *self._reserved.values()]:
            listener.close()
        for launched in self._launched.values():
            if launched.process.code is None:
                launched.process.signal(signal.SIGKILL)
                launched.process.reap()


def _leave(signum: int) -> None:
    """End this process in order, as a shell would say it: no worker was started yet."""
    log.error("%s received before the first worker was started", signal.Signals(signum).name)
    raise SystemExit(128 + signum)


def _shows_colour(descriptor: int, environ: Mapping[str, str]) -> bool:
    return os.isatty(descriptor) and "NO_COLOR" not in environ and environ.get("TERM") != "dumb"
