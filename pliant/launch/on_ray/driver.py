"""The driver of a job on Ray: which devices it has, where its runners are, and what is done about what happens to them.

It is the caterer of the job's config server: whoever asks that for another size is served here, by getting devices from Ray or giving
them back, and by putting the view that follows.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pliant.cluster import DEFAULT_RUNNER_PORT, PortRange, View, Worker
from pliant.elastic.client import ConfigClient
from pliant.elastic.server import ConfigServer
from pliant.errors import ClusterCleared, LaunchError, StaleView
from pliant.launch.duration import format_duration
from pliant.launch.on_ray import cluster
from pliant.launch.on_ray.seats import Seats
from pliant.launch.on_ray.side import Lost, RunnerEnded, Side, SideEvent, Up
from pliant.launch.ssh import MARGIN_S, handed_over
from pliant.launch.supervisor import TIMEOUT_EXIT

log = logging.getLogger(__name__)

LEAVING_S = 0.05
"""How often to look whether a worker has left its device, which others wait for."""
PLACING_S = 0.2
QUIET_S = 1.0
SAY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RayJob:
    """What to run, and on what."""

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    """Of the runners' `pliant run`, with the program; without what says who they are."""
    devices: Mapping[str, int]
    """By type, the best first: what the job may have."""
    np: int
    """With so many workers it starts."""
    bounded: bool = True
    """Whether `devices` bounds what it may grow to; else that is up to the cluster."""
    asked: str = "--devices"
    """The flag that was given."""
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
    """Where to say which config server is this job's; empty: nowhere."""
    record: str = ""
    """The file of its facts, where `--record` names one: a page that shows it finds the job by it."""
    resumes: bool = False
    """Whether there are checkpoints to go on from when all workers are lost at once."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Somebody wants these devices, or as many workers."""

    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Drop:
    """Who has not left yet is to be killed."""


Event = SideEvent | Wish | Drop | int
"""An int is a signal."""


class Driver:
    """The job's devices, nodes and end. Also the caterer of its config server."""

    def __init__(self, job: RayJob, events: queue.SimpleQueue[Event]) -> None:
        self.num_ended = 0
        """Runners that have ended well."""
        self._job, self._events = job, events
        self._seats = Seats(tuple(job.devices), job.devices if job.bounded else {})
        self._holds: dict[int, cluster.Hold] = {}
        self._sides: dict[str, Side] = {}
        self._hosts: dict[str, str] = {}
        self._used: dict[str, set[int]] = {}
        self._failure: int | None = None
        self._end_by_s: float | None = None
        self._begun_s = self._say_at_s = 0.0
        self._server: ConfigServer
        self._client: ConfigClient
        self._token = ""
        self._version = -1
        """Of the last view that was put: until a runner has seen it, it may start somebody who shall leave."""
        self._told: set[Worker] = set()
        """Who has been in a view: one that is not any more has crashed, and its runner sees to it."""

    # --- as a caterer, from the server's thread ---

    def resize(self, size: int) -> None:
        self.set_devices(self._seats.devices_for(size))

    def set_devices(self, devices: Mapping[str, int]) -> None:
        self._events.put(Wish(dict(devices)))

    def occupied_devices(self) -> dict[str, int]:
        return self._seats.occupied()

    def drop_unwanted(self) -> None:
        self._events.put(Drop())

    # --- the loop ---

    def drive(self, server: ConfigServer, client: ConfigClient, token: str) -> int:
        """Until the job is over; the exit code."""
        self._server, self._client, self._token = server, client, token
        self._begun_s = time.monotonic()
        self._say_at_s = self._begun_s + SAY_S
        self._events.put(Wish(self._seats.devices_for(self._job.np)))
        try:
            while True:
                for event in self._arrived():
                    self._handle(event)
                if self._end_by_s is None:
                    self._cater()
                if self._is_over():
                    return self._failure or 0
        finally:
            for side in self._sides.values():
                side.kill()
            for hold in self._holds.values():
                hold.release()

    def _arrived(self) -> list[Event]:
        """What has come, after a wait that fits to what is being waited for."""
        wait_s = LEAVING_S if self._seats.leaving else PLACING_S if self._seats.unplaced else QUIET_S
        events: list[Event] = []
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
        if self._end_by_s is not None and now_s > self._end_by_s and self._sides:
            hosts = ", ".join(side.host for side in self._sides.values())
            log.error("%s did not end within %g s: giving up", hosts, self._job.grace_s + MARGIN_S)
            return True
        if self._sides:
            return False
        return self._end_by_s is not None or self._server.membership.over or (self.num_ended > 0 and not self._waits())

    def _waits(self) -> bool:
        """Whether somebody is still to be started."""
        return bool(self._seats.unplaced or self._seats.vacant)

    def _handle(self, event: Event) -> None:
        match event:
            case Wish(devices):
                if self._server.wanted.view is not None:
                    self._seats.follow(self._server.wanted.view, self._hosts)
                for node, side in self._sides.items():
                    if any(seat.visible for seat in self._seats.on(node)):
                        self._seats.reseat(node, side.by_slot, side.living() or {})
                self._seats.want(devices, self._server.wanted.view)
                log.info("wanted: %s", ", ".join(f"{kind}={count}" for kind, count in devices.items() if count))
            case Drop():
                for node, side in self._sides.items():
                    side.drop([str(seat.worker) for seat in self._seats.leaving if seat.node == node])
            case Up():
                pass  # its seats can be given now
            case RunnerEnded(node, code):
                self._end_side(node, code)
            case Lost(node, why):
                self._lose_side(node, why)
            case int(signum):
                self._interrupt(signum)

    def _interrupt(self, signum: int) -> None:
        if self._end_by_s is not None:
            for side in self._sides.values():
                side.kill()
            return
        log.error("%s received; ending %d runners", signal.Signals(signum).name, len(self._sides))
        self._fail(128 + signum)

    def _fail(self, code: int) -> None:
        """End all; the first failure counts."""
        if self._end_by_s is None:
            self._failure, self._end_by_s = code, time.monotonic() + self._job.grace_s + MARGIN_S
            for side in self._sides.values():
                side.end()

    def _end_side(self, node: str, code: int) -> None:
        """React to a runner that has ended: well, badly (as the whole job does), or killed, which is a loss."""
        if code < 0:
            self._lose_side(node, f"its runner was killed by signal {-code}")
            return
        side = self._sides.pop(node, None)
        if side is None:
            return
        side.kill()
        if code == 0 or (self._server.membership.over and not self._is_used(node)):
            self.num_ended += 1
        elif self._end_by_s is None:
            log.error("host %s: its runner ended with exit code %d", side.host, code)
            self._fail(code)

    def _lose_side(self, node: str, why: str) -> None:
        """React to the loss of a runner and all its workers."""
        side = self._sides.pop(node, None)
        if side is None:
            return
        side.kill()
        if self._end_by_s is not None or self._server.membership.over:
            return
        gone = f"the runner on {side.host} is gone ({why})"
        self._seats.lose(node)
        if not self._server.membership.number:
            log.error("%s before the job had begun", gone)
            self._fail(1)
            return
        view, roll = self._server.wanted.view, self._server.membership
        known = {*(view.workers if view is not None else ()), *roll.members}
        for worker in sorted(worker for worker in known if worker.host == side.host):
            self._client.lost(worker, f"the runner on {side.host} is gone")
        if all(worker.host == side.host for worker in known) and not self._job.resumes:
            log.error("%s, and all workers with it; with --checkpoint-dir the job could go on", gone)
            self._fail(1)
            return
        log.warning("%s; the job goes on without it, and gets others where there is room", gone)

    # --- getting and giving back ---

    def _cater(self) -> None:
        """Do what the seats need: places, runners, workers, and a view that says so."""
        view = self._server.wanted.view
        if view is not None:
            self._seats.follow(view, self._hosts)
        self._see_off()
        self._place()
        if self._server.membership.over:
            # A runner that comes only now would complain that there is nothing to do.
            for node in [node for node in self._sides if not self._is_used(node)]:
                self._sides.pop(node).kill()
            return
        for node in {seat.node for seat in self._seats.vacant}:
            if node not in self._sides:
                self._sides[node] = self._start_side(node)
        if view is None and (self._waits_for_first() or not self._seats.vacant):
            return
        self._give()
        self._publish()

    def _is_used(self, node: str) -> bool:
        """Whether the runner there has been told to start somebody."""
        return any(seat.worker in self._told for seat in self._seats.on(node))

    def _waits_for_first(self) -> bool:
        """Whether the first view must still wait: it has all workers."""
        if not self._seats.unplaced and all(self._sides[seat.node].is_up for seat in self._seats.vacant):
            return False
        now_s = time.monotonic()
        if self._seats.unplaced and now_s - self._begun_s > self._job.patience_s:
            raise LaunchError(
                f"the Ray cluster had no room for {len(self._seats.unplaced)} of {len(self._seats.all)} devices within "
                f"{self._job.patience_s:g} s: ask for fewer, or wait longer with --rendezvous-timeout"
            )
        return True

    def _see_off(self) -> None:
        """Give back devices that were left."""
        for node in {seat.node for seat in self._seats.leaving}:
            side = self._sides.get(node)
            living = {} if side is None else side.living(self._version)
            if living is not None:
                self._seats.leave(living, node)
        for number in [number for number in self._holds if number not in self._seats.all]:
            self._holds.pop(number).release()

    def _place(self) -> None:
        """Hold a device for each seat, and note where Ray has found it."""
        if not self._seats.unplaced:
            self._say_at_s = time.monotonic() + SAY_S
            return
        if time.monotonic() > self._say_at_s:
            self._say_at_s = time.monotonic() + SAY_S
            log.info("waiting for %d of %d devices: Ray has no room", len(self._seats.unplaced), len(self._seats.all))
        nodes = cluster.living_nodes()
        for seat in self._seats.unplaced:
            if seat.number not in self._holds:
                self._holds[seat.number] = cluster.Hold(cluster.bundle_of(seat.kind, nodes))
            node = self._holds[seat.number].node()
            known, visible = self._holds[seat.number].visible(node) if node in nodes else (False, None)
            if known:
                seat.node, seat.visible, self._hosts[node] = node, visible, nodes[node].host

    def _start_side(self, node: str) -> Side:
        host = self._hosts[node]
        slots = max(1, sum(cluster.living_nodes()[node].devices.get(kind, 0) for kind in self._seats.kinds))
        who = ("-w", "-init-version", "-1", "-config-server", self._server.url, "-H", f"{host}:{slots}", "-self", host)
        environ = {
            **handed_over(self._job.environ),
            "PLIANT_SECRET": self._job.secret.hex(),
            "PLIANT_TOKEN": self._token,
        }
        side = Side(node, host, self._used.setdefault(host, set()), self._events.put)
        side.start((*who, *self._job.arguments), environ, self._job.directory)
        return side

    def _give(self) -> None:
        """A worker for each seat that has none, where the runner can start it."""
        for node, side in self._sides.items():
            vacant = [seat for seat in self._seats.vacant if seat.node == node]
            visible = {seat.number: seat.visible for seat in self._seats.on(node)}
            if vacant and side.is_up and side.let_see(visible):
                for seat, port in zip(vacant, side.free_ports(len(vacant), self._job.ports), strict=False):
                    seat.worker = Worker(side.host, port)

    def _publish(self) -> None:
        """Have the config server want who sits where he shall, and the runners of all nodes that have seats."""
        while True:
            wanted = self._server.wanted
            if wanted.cleared:
                return
            listed = wanted.view.workers if wanted.view is not None else ()
            if wanted.view is not None:
                self._seats.follow(wanted.view, self._hosts)
            seated = self._seats.wanted
            new = [worker for worker in seated if worker not in listed and worker not in self._told]
            workers = (*(worker for worker in listed if worker in seated), *new)
            hosts = [self._hosts[node] for node in self._seats.nodes]  # also where the last worker is just leaving
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
            self._told.update(new)
            return
