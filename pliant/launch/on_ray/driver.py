"""A job on a Ray cluster, driven from here (`pliant run --on ray`): its devices, its runners, and what happens to them.

Devices are held by placement groups (`cluster.DeviceHold`), one for each, so that they can be taken and given back one by one.
Each node that has some runs one runner, an actor that goes there by affinity, because it outlives any one of its node's devices.
The config server is in this process, and the driver is its resource provider: a request for another size is served here, by
getting devices from Ray or giving them back, and by putting the view that follows. If a node is lost, the job goes on as after a
crash, and what was lost is replaced where Ray finds room. When this process ends, Ray ends its actors, and the kernel the runners.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pliant.cluster import DEFAULT_RUNNER_PORT, PortRange, View, Worker
from pliant.duration import format_duration
from pliant.elastic.client import ConfigClient
from pliant.elastic.membership import Limits
from pliant.elastic.server import ConfigServer, ServerConfig
from pliant.errors import ENDED_EXIT, ClusterCleared, LaunchError, StaleView
from pliant.launch.events import handle_signals
from pliant.launch.on_ray import cluster
from pliant.launch.on_ray.node import NodeEvent, NodeRunner, RunnerEnded, RunnerLost, RunnerUp
from pliant.launch.on_ray.slots import DeviceSlots
from pliant.launch.output import Console
from pliant.launch.processes import write_runner_state
from pliant.launch.ssh import MARGIN_S, forwarded_environ
from pliant.launch.supervisor import TIMEOUT_EXIT

log = logging.getLogger(__name__)

LEAVING_S = 0.05
"""How often to look whether a worker has left its device, which others wait for."""
PLACING_S = 0.2
QUIET_S = 1.0
SAY_S = 10.0
JOB_FILE = "ray-job"
"""A file beside --state-file with Ray's id of the job, for as long as the driver runs. If it is left behind, the driver was
killed, or Ray is gone, and something of the job may still live."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayJob:
    """A job on a Ray cluster: the program, and the devices."""

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    """The arguments of the runners' `pliant run`, with the program, without those that differ between them."""
    devices: Mapping[str, int]
    """How many devices of each type the job may have, the best type first."""
    np: int
    """The number of workers that it starts with."""
    bounded: bool = True
    """Whether the job may not grow beyond `devices`; otherwise the cluster is the limit."""
    asked: str = "--devices"
    """The flag that asked for the devices, for error messages."""
    directory: str
    environ: Mapping[str, str] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)
    address: str = "auto"
    ports: PortRange = field(default_factory=PortRange)
    config_port: int = 0
    timeout_s: float = 0.0
    grace_s: float = 10.0
    patience_s: float = 300.0
    """How long to wait for devices at the start."""
    state_file: str = ""
    """The file in which to write the address of the job's config server; empty: none."""
    record: str = ""
    """The job's record, if `--record` names one; the dashboard finds the job by it."""
    independent: bool = False
    """Whether workers do not train together: a node may then be lost before any worker has joined."""
    resumes: bool = False
    """Whether there are checkpoints to go on from when all workers are lost at once."""


@dataclass(frozen=True, slots=True)
class DevicesWanted:
    """A client has asked for these devices, with a worker on each."""

    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DropUnwanted:
    """A client has asked to kill the workers on devices that are not wanted any more."""


DriverEvent = NodeEvent | DevicesWanted | DropUnwanted | int
"""An int is a signal."""


class RayDriver:
    """The devices, nodes and end of a job on Ray. Also the resource provider of its config server."""

    def __init__(self, job: RayJob, events: queue.SimpleQueue[DriverEvent]) -> None:
        self.num_ended = 0
        """Runners that have ended well."""
        self._job, self._events = job, events
        self._slots = DeviceSlots(tuple(job.devices), job.devices if job.bounded else {})
        self._holds: dict[int, cluster.DeviceHold] = {}
        self._runners: dict[str, NodeRunner] = {}
        self._hosts: dict[str, str] = {}
        self._used: dict[str, set[int]] = {}
        self._failure: int | None = None
        self._end_by_s: float | None = None
        self._begun_s = self._say_at_s = 0.0
        self._server: ConfigServer
        self._client: ConfigClient
        self._token = ""
        self._version = -1
        """Version of the last view that was put. A runner that has not seen it may still start a worker that is to leave."""
        self._published: set[Worker] = set()
        """Workers that have been in a view. One that is in it no longer has crashed, and its runner replaces it."""

    # --- as the resource provider, from the server's thread ---

    def resize(self, size: int) -> None:
        self.set_devices(self._slots.devices_for(size))

    def set_devices(self, devices: Mapping[str, int]) -> None:
        self._events.put(DevicesWanted(dict(devices)))

    def occupied_devices(self) -> dict[str, int]:
        return self._slots.occupied()

    def drop_unwanted(self) -> None:
        self._events.put(DropUnwanted())

    # --- the loop ---

    def drive(self, server: ConfigServer, client: ConfigClient, token: str) -> int:
        """Run the job to its end; return the exit code."""
        self._server, self._client, self._token = server, client, token
        self._begun_s = time.monotonic()
        self._say_at_s = self._begun_s + SAY_S
        self._events.put(DevicesWanted(self._slots.devices_for(self._job.np)))
        try:
            while True:
                for event in self._wait_for_events():
                    self._handle(event)
                if self._end_by_s is None:
                    self._provide()
                if self._is_over():
                    return self._failure if self._failure is not None else self._end_code()
        finally:
            for runner in self._runners.values():
                runner.kill()
            for hold in self._holds.values():
                hold.release()

    def _end_code(self) -> int:
        """Return the exit code of a job that has not failed."""
        ended_by = self._server.membership.ended_by
        if ended_by:
            log.error("the job was ended before its last step: %s", ended_by)
        return ENDED_EXIT if ended_by else 0

    def _wait_for_events(self) -> list[DriverEvent]:
        """Wait for events, for as long as fits what is being waited for, and return them."""
        wait_s = LEAVING_S if self._slots.leaving else PLACING_S if self._slots.unplaced else QUIET_S
        events: list[DriverEvent] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=wait_s))
            while True:
                events.append(self._events.get_nowait())
        return events

    def _is_over(self) -> bool:
        now_s = time.monotonic()
        if self._job.timeout_s and now_s - self._begun_s > self._job.timeout_s and self._end_by_s is None:
            log.error("the job was not done after -timeout %s", format_duration(self._job.timeout_s))
            self._fail(TIMEOUT_EXIT)
        if self._end_by_s is not None and now_s > self._end_by_s and self._runners:
            hosts = ", ".join(runner.host for runner in self._runners.values())
            log.error("%s did not end within %g s: giving up", hosts, self._job.grace_s + MARGIN_S)
            return True
        if self._runners:
            return False
        return self._end_by_s is not None or self._server.membership.over or (self.num_ended > 0 and not self._waits())

    def _waits(self) -> bool:
        """Whether workers are still to be started."""
        return bool(self._slots.unplaced or self._slots.vacant)

    def _handle(self, event: DriverEvent) -> None:
        match event:
            case DevicesWanted(devices):
                if self._server.wanted.view is not None:
                    self._slots.follow(self._server.wanted.view, self._hosts)
                for node, runner in self._runners.items():
                    if any(slot.visible for slot in self._slots.on(node)):
                        self._slots.reassign(node, runner.by_local_rank, runner.living() or {})
                self._slots.want(devices, self._server.wanted.view)
                log.info("wanted: %s", ", ".join(f"{kind}={count}" for kind, count in devices.items() if count))
            case DropUnwanted():
                for node, runner in self._runners.items():
                    runner.drop([str(slot.worker) for slot in self._slots.leaving if slot.node == node])
            case RunnerUp():
                pass  # workers can be assigned to its slots now
            case RunnerEnded(node, code):
                self._on_runner_ended(node, code)
            case RunnerLost(node, why):
                self._on_runner_lost(node, why)
            case int(signum):
                self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        if self._end_by_s is not None:
            for runner in self._runners.values():
                runner.kill()
            return
        log.error("%s received; ending %d runners", signal.Signals(signum).name, len(self._runners))
        self._fail(128 + signum)

    def _fail(self, code: int) -> None:
        """End all runners; the first failure gives the exit code."""
        if self._end_by_s is None:
            self._failure, self._end_by_s = code, time.monotonic() + self._job.grace_s + MARGIN_S
            for runner in self._runners.values():
                runner.end()

    def _on_runner_ended(self, node: str, code: int) -> None:
        """React to the end of a runner: a failure fails the job, and a kill is a loss."""
        if code < 0:
            self._on_runner_lost(node, f"its runner was killed by signal {-code}")
            return
        runner = self._runners.pop(node, None)
        if runner is None:
            return
        runner.kill()
        if code in (0, ENDED_EXIT) or (self._server.membership.over and not self._is_used(node)):
            self.num_ended += 1
        elif self._end_by_s is None:
            log.error("host %s: its runner ended with exit code %d", runner.host, code)
            self._fail(code)

    def _on_runner_lost(self, node: str, why: str) -> None:
        """React to the loss of a runner and all its workers."""
        runner = self._runners.pop(node, None)
        if runner is None:
            return
        runner.kill()
        if self._end_by_s is not None or self._server.membership.over:
            return
        gone = f"the runner on {runner.host} is gone ({why})"
        self._slots.lose(node)
        if not self._server.membership.number and not self._job.independent:
            log.error("%s before the job had begun", gone)
            self._fail(1)
            return
        known = {*self._server.wanted.workers, *self._server.membership.members}
        for worker in sorted(worker for worker in known if worker.host == runner.host):
            self._client.lost(worker, f"the runner on {runner.host} is gone")
        if all(worker.host == runner.host for worker in known) and not self._job.resumes:
            log.error(
                "%s, and all workers with it, so the job ends; with --checkpoint-dir it would go on from its newest checkpoint",
                gone,
            )
            self._fail(1)
            return
        log.warning("%s; the job goes on without it, and gets others where there is room", gone)

    # --- getting and giving back ---

    def _provide(self) -> None:
        """Bring the job closer to what is wanted: place device slots, start runners, assign workers, and put a view."""
        view = self._server.wanted.view
        if view is not None:
            self._slots.follow(view, self._hosts)
        self._release_left()
        self._place()
        if self._server.membership.over:
            # A runner that comes only now would complain that there is nothing to do.
            for node in [node for node in self._runners if not self._is_used(node)]:
                self._runners.pop(node).kill()
            return
        for node in {slot.node for slot in self._slots.vacant}:
            if node not in self._runners:
                self._runners[node] = self._start_runner(node)
        if view is None and (self._waits_for_first() or not self._slots.vacant):
            return
        self._assign_workers()
        self._publish()

    def _is_used(self, node: str) -> bool:
        """Return whether the runner on `node` has been told to start a worker."""
        return any(slot.worker in self._published for slot in self._slots.on(node))

    def _waits_for_first(self) -> bool:
        """Return whether the first view must wait: it needs a place for every worker."""
        if not self._slots.unplaced and all(self._runners[slot.node].is_up for slot in self._slots.vacant):
            return False
        now_s = time.monotonic()
        if self._slots.unplaced and now_s - self._begun_s > self._job.patience_s:
            raise LaunchError(
                f"the Ray cluster had no room for {len(self._slots.unplaced)} of {len(self._slots.all)} devices within "
                f"{self._job.patience_s:g} s: ask for fewer, or wait longer with --rendezvous-timeout"
            )
        return True

    def _release_left(self) -> None:
        """Give devices back whose workers have ended."""
        for node in {slot.node for slot in self._slots.leaving}:
            runner = self._runners.get(node)
            living = {} if runner is None else runner.living(self._version)
            if living is not None:
                self._slots.leave(living, node)
        for number in [number for number in self._holds if number not in self._slots.all]:
            self._holds.pop(number).release()

    def _place(self) -> None:
        """Hold a device for each slot, and note where Ray has found it."""
        if not self._slots.unplaced:
            self._say_at_s = time.monotonic() + SAY_S
            return
        if time.monotonic() > self._say_at_s:
            self._say_at_s = time.monotonic() + SAY_S
            log.info("waiting for %d of %d devices: Ray has no room", len(self._slots.unplaced), len(self._slots.all))
        nodes = cluster.living_nodes()
        for slot in self._slots.unplaced:
            if slot.number not in self._holds:
                self._holds[slot.number] = cluster.DeviceHold(cluster.bundle_of(slot.kind, nodes))
            node = self._holds[slot.number].node()
            known, visible = self._holds[slot.number].visible(node) if node in nodes else (False, None)
            if known:
                slot.node, slot.visible, self._hosts[node] = node, visible, nodes[node].host

    def _start_runner(self, node: str) -> NodeRunner:
        host = self._hosts[node]
        slots = max(1, sum(cluster.living_nodes()[node].devices.get(kind, 0) for kind in self._slots.kinds))
        who = ("-w", "-init-version", "-1", "-config-server", self._server.url, "-H", f"{host}:{slots}", "-self", host)
        environ = {
            **forwarded_environ(self._job.environ),
            "PLIANT_SECRET": self._job.secret.hex(),
            "PLIANT_TOKEN": self._token,
        }
        runner = NodeRunner(node, host, self._used.setdefault(host, set()), self._events.put)
        runner.start((*who, *self._job.arguments), environ, self._job.directory)
        return runner

    def _assign_workers(self) -> None:
        """Assign a worker to each vacant device slot whose runner can start it."""
        for node, runner in self._runners.items():
            vacant = [slot for slot in self._slots.vacant if slot.node == node]
            visible = {slot.number: slot.visible for slot in self._slots.on(node)}
            if vacant and runner.is_up and runner.set_devices(visible):
                for slot, port in zip(vacant, runner.free_ports(len(vacant), self._job.ports), strict=False):
                    slot.worker = Worker(runner.host, port)

    def _publish(self) -> None:
        """Put a view with all assigned workers and the runners of their nodes."""
        while True:
            wanted = self._server.wanted
            if wanted.cleared:
                return
            listed = wanted.view.workers if wanted.view is not None else ()
            if wanted.view is not None:
                self._slots.follow(wanted.view, self._hosts)
            assigned = self._slots.wanted
            new = [worker for worker in assigned if worker not in listed and worker not in self._published]
            workers = (*(worker for worker in listed if worker in assigned), *new)
            hosts = [self._hosts[node] for node in self._slots.nodes]  # also where the last worker is just leaving
            runners = tuple(Worker(host, DEFAULT_RUNNER_PORT) for host in dict.fromkeys(hosts))
            same = wanted.view is not None and (workers, set(runners)) == (listed, set(wanted.view.runners))
            if same or not workers:
                return
            try:
                self._version = self._client.put(View(0, workers, runners), expected=wanted.version).number
            except StaleView:
                continue
            except ClusterCleared:
                return
            self._published.update(new)
            return


def run_on_ray(job: RayJob, *, register: Callable[..., contextlib.AbstractContextManager[object]] | None = None) -> int:
    """Run the job to its end; return the exit code. Call it from the main thread.

    `register` lists the job for the time of a block (`jobs.store.registered`), so that `pliant resize` finds it.

    Raises:
        ConfigError, LaunchError: before any worker was started, with the reason.
    """
    begun_s = time.monotonic()
    events: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
    with cluster.connected(job.address), handle_signals(events.put), contextlib.ExitStack() as stack:
        cluster.check_devices(job.devices, cluster.living_nodes(), job.asked)
        driver = RayDriver(job, events)
        token = job.environ.get("PLIANT_TOKEN") or secrets.token_hex(16)
        config = ServerConfig(
            host=cluster.own_address(),
            port=job.config_port,
            limits=Limits(ports=job.ports),
            token=token,
            provider=driver,
        )
        server = stack.enter_context(ConfigServer(config).running())
        client = stack.enter_context(ConfigClient(server.url, token))
        if register is not None:
            known = register(
                server.url, job.program, host=config.host, token=token, record=job.record, environ=job.environ
            )
            stack.enter_context(known)
        log.info("config server at %s", server.url)
        if job.state_file:
            # First this: who waits for the other file finds both.
            job_file = Path(job.state_file).with_name(JOB_FILE)
            job_file.write_text(cluster.own_job())
            write_runner_state(Path(job.state_file), server.url, 0, {})
            stack.callback(job_file.unlink, missing_ok=True)
        code = driver.drive(server, client, token)
    if code == 0:
        summary = f"all {driver.num_ended}/{driver.num_ended} nodes finished, took {format_duration(time.monotonic() - begun_s)}\n"
        Console(1, coloured=False).write(summary.encode())
    return code
