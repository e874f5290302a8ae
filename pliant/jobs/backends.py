"""The backends: this machine, and a Ray cluster. Each run is a process in a session of its own, with a keeper beside it.

Runs outlive the scheduler. What is needed to find one again is in its directory: a lock that its keeper holds, what the
keeper and the runner have written (`jobs.keeper`, `launch.processes`), the token of its config server, the devices of its
slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pliant.child import JOB_MARK, kill_group, marked_processes, start_ticks
from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError, LaunchError, ServerUnavailable
from pliant.fed.jobfile import FederatedJob
from pliant.files import is_locked, write_atomic
from pliant.identity import JOB_NAME
from pliant.jobs import keeper
from pliant.jobs.client import PLIANT
from pliant.jobs.rules import RunEnd
from pliant.jobs.scheduler import JobRun, RunHandle
from pliant.jobs.schema import TrainJob
from pliant.launch.plan import device_files, visible_devices
from pliant.launch.processes import LivingWorker, RunnerState, read_runner_state
from pliant.sched.planner import Counts

HOST = "127.0.0.1"
FIRST_PORT, NUM_PORTS, NUM_RANGES = 10000, 200, 110
"""Each run has a range of ports: two config servers that grow their jobs would otherwise choose the same port."""
ANSWER_S = 2.0
NOT_INHERITED = (JOB_MARK, "PLIANT_TOKEN", "PLIANT_SERVER", "PLIANT_CONFIG_SERVER", "PLIANT_WORKER")
Slot = tuple[str, str | None]
"""A device's type, and the value of CUDA_VISIBLE_DEVICES for it; None: left alone."""


# --- this machine ---


class LocalBackend:
    """The devices of this machine, as the user counts them."""

    def __init__(self, devices: Counts, environ: Mapping[str, str] = os.environ) -> None:
        self._devices = dict(devices)
        self._environ = environ
        self._ids = _cuda_devices(devices, visible_devices(environ, device_files()))
        self._runs: dict[int, TrainRun | FederatedRun] = {}

    def devices(self) -> dict[str, int]:
        return dict(self._devices)

    def start(self, run: JobRun, devices: Counts) -> RunHandle:
        handle = self._runs[run.number] = self._handle(run)
        try:
            run.place.mkdir(mode=0o700, parents=True)
            handle.assign(devices)
            handle.begin(handle.command(devices), self._environ, handle.environment())
        except OSError as error:
            self.forget(run)
            raise LaunchError(f"{run.place}: {error.strerror or error}; make room, or give another --state") from None
        return handle

    def adopt(self, run: JobRun) -> RunHandle | None:
        handle = self._handle(run)
        if not handle.was_started():
            return None
        handle.follow_keeper()
        self._runs[run.number] = handle
        return handle

    def _handle(self, run: JobRun) -> TrainRun | FederatedRun:
        return FederatedRun(run, self) if isinstance(run.spec, FederatedJob) else TrainRun(run, self)

    def close(self) -> None:
        """Close the descriptors by which ends of runs are noticed."""
        for handle in self._runs.values():
            handle.close()

    def pick(self, kind: str) -> Slot:
        """Return a device of the type that no run has a slot on."""
        ids = self._ids.get(kind)
        if ids is None:
            return kind, None
        taken = [slot for handle in self._runs.values() for slot in handle.slots() if slot is not None]
        free = [each for each in ids if (kind, each) not in taken]
        # If the user has counted more slots than there are devices, slots share devices.
        return kind, free[0] if free else min(ids, key=lambda each: taken.count((kind, each)))

    def forget(self, run: JobRun) -> None:
        self._runs.pop(run.number, None)


class ProcessRun:
    """A run whose process a keeper on this machine watches."""

    def __init__(self, run: JobRun, backend: LocalBackend) -> None:
        self._run, self._backend = run, backend
        self._place = run.place
        self._wanted: dict[str, int] = {}
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        """The keeper as a descriptor, until it has ended."""
        self._end: RunEnd | None = None

    # --- start ---

    def begin(self, command: list[str], environ: Mapping[str, str], own: Mapping[str, str]) -> None:
        """Start the keeper, which starts the command; `own` are variables of this run alone."""
        token = secrets.token_urlsafe(24)
        write_atomic(self._place / "token", token, private=True)
        kept = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
        home = str(self._run.directory.parents[1])
        lock = os.open(self._place / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Locked before there is a keeper: whoever looks later sees it held, or a run that was never begun.
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._run.log.open("ab") as log:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, str(self._place), str(lock), *command],
                    env={**kept, **own, "PLIANT_TOKEN": token, "PLIANT_HOME": home, JOB_NAME: self._run.spec.name},
                    cwd=self._run.spec.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
            with contextlib.suppress(OSError):  # too many open files: its end is seen when somebody looks
                self._pidfd = os.pidfd_open(self._keeper.pid)
        finally:
            os.close(lock)

    def follow_keeper(self) -> None:
        """Have the end of a keeper noticed that an earlier scheduler has started."""
        started = _read_json(self._place / "started.json")
        if started is None or "keeper" not in started:
            return  # it is only just starting, or of an earlier version
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(started["keeper"])
        if not self._is_kept():
            self.close()  # it has ended: another process may have got its number

    def was_started(self) -> bool:
        return self._is_kept() or (self._place / "started.json").exists() or (self._place / "exit.json").exists()

    # --- devices ---

    def slots(self) -> list[Slot | None]:
        """Return the device of each slot; None for a slot without a device, on which nothing is started."""
        try:
            listed = json.loads((self._place / "slots.json").read_text())
        except (OSError, ValueError):
            return []
        return [None if slot is None else (slot[0], slot[1]) for slot in listed]

    def assign(self, devices: Counts) -> None:
        """Have slots for these devices: more where there are too few, fewer where no process is on them any more."""
        self._wanted = {kind: count for kind, count in devices.items() if count}
        slots, busy = self.slots(), self._busy_slots()
        have = Counter(slot[0] for slot in slots if slot is not None)
        for number in reversed(range(len(slots))):
            slot = slots[number]
            if slot is not None and number not in busy and have[slot[0]] > self._wanted.get(slot[0], 0):
                have[slot[0]] -= 1
                slots[number] = None
        for kind, count in self._wanted.items():
            for _ in range(count - have[kind]):
                slot = self._backend.pick(kind)
                # The runner starts a worker on the lowest slot that is free.
                if None in slots:
                    slots[slots.index(None)] = slot
                else:
                    slots.append(slot)
                self._write_slots(slots)  # the next pick must see it
        self._write_slots(slots)

    def _busy_slots(self) -> set[int]:
        """Return the slots that a process is on."""
        return set()

    def _write_slots(self, slots: list[Slot | None]) -> None:
        for name, value in (("slots", slots), ("devices", [slot[1] if slot else None for slot in slots])):
            write_atomic(self._place / f"{name}.json", json.dumps(value))

    # --- end ---

    def ended(self) -> RunEnd | None:
        """Return how the run ended; None as long as any of its processes lives."""
        if self._end is None:
            self._end = self._look_for_end()
            if self._end is not None:
                self._backend.forget(self._run)
        return self._end

    def _look_for_end(self) -> RunEnd | None:
        if self._keeper is not None:
            self._keeper.poll()  # reaps it
        if self._is_kept():
            return None
        self.close()  # it would go on to say that the keeper has ended, while others of the run still live
        if self._process() is not None or self._is_alive():
            return None
        exit_ = _read_json(self._place / "exit.json")
        return RunEnd(None, time.time()) if exit_ is None else RunEnd(int(exit_["code"]), float(exit_["at_s"]))

    def end_signal(self) -> int | None:
        """Return the keeper's descriptor, which can be read once it has ended, as the last process of a run usually does."""
        return self._pidfd

    def close(self) -> None:
        """Close the keeper's descriptor."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    # --- processes ---

    def _is_kept(self) -> bool:
        """Return whether the keeper lives."""
        return is_locked(self._place / "lock")

    def _process(self) -> int | None:
        """Return the id of the command's process, if it lives."""
        started = _read_json(self._place / "started.json")
        is_same = started is not None and start_ticks(started["pid"]) == started["start_ticks"]
        return started["pid"] if started is not None and is_same else None

    def _is_alive(self) -> bool:
        """Return whether other processes of the run live."""
        return False

    def _kill_process(self) -> bool:
        """Kill the command's process; returns whether there was one.

        Raises:
            ServerUnavailable: it is only just starting.
        """
        process = self._process()
        if process is None and self._is_kept():
            raise ServerUnavailable(f"job {self._run.spec.name}: its runner is only just starting")
        if process is not None:
            _send(process, signal.SIGKILL)
        return process is not None


class TrainRun(ProcessRun):
    """A `pliant run -w` on this machine, which is resized through its config server."""

    def __init__(self, run: JobRun, backend: LocalBackend) -> None:
        super().__init__(run, backend)
        self._before: Counter[str] = Counter()
        """The most that was wanted since the runner acted on the newest view."""
        self._version = -1
        self._killed = False

    def command(self, devices: Counts) -> list[str]:
        """Return `pliant run -w` with enough slots for the job's maximum."""
        begin = FIRST_PORT + NUM_PORTS * (self._run.number % NUM_RANGES)
        flags = {
            "-np": sum(devices.values()),
            "-H": f"{HOST}:{self._spec.max}",
            "-port-range": f"{begin}-{begin + NUM_PORTS - 1}",
            "--slot-devices": self._place / "devices.json",
        }
        return self._run_command(["-w"], flags)

    def environment(self) -> dict[str, str]:
        return dict(self._spec.env)

    @property
    def _spec(self) -> TrainJob:
        assert isinstance(self._run.spec, TrainJob), "made for a train job"
        return self._run.spec

    def _run_command(self, switches: Sequence[str], flags: Mapping[str, object]) -> list[str]:
        """Return `pliant run` with these flags and those that every run gets."""
        run, spec = self._run, self._spec
        kept = spec.model_copy(update={"record": str(run.record), "checkpoint_dir": str(run.checkpoints)})
        own = {**flags, "--resume": "auto", "--state-file": run.place / "state.json"}
        words = [str(word) for flag in own.items() for word in flag]
        return [*PLIANT, "run", "-q", *switches, *words, *kept.run_flags(), spec.program, *spec.args]

    def _busy_slots(self) -> set[int]:
        return {process.slot for process in self._living().values()}

    def resize(self, devices: Counts) -> None:
        with self._client() as client:
            view = client.wanted().view
            if view is None or not view.workers:
                raise ServerUnavailable(f"job {self._run.spec.name}: it is ending")
            leaving = self._leaving(devices, [str(worker) for worker in view.workers])
            self._before |= Counter(self._wanted)
            self.assign(devices)
            if leaving:
                kept = tuple(worker for worker in view.workers if str(worker) not in leaving)
                view = client.put(replace(view, workers=kept), expected=view.number)
            if view.size != sum(devices.values()):
                view = client.resize(sum(devices.values()), expected=view.number)
            self._version = view.number

    def _leaving(self, devices: Counts, workers: list[str]) -> set[str]:
        """Return which workers are to leave, where it matters: of several types, those with too many lose their last."""
        slots, living = self.slots(), self._living()
        on: dict[str, list[str]] = {}
        for worker in workers:
            if worker in living and living[worker].slot < len(slots):
                slot = slots[living[worker].slot]
                on.setdefault(slot[0] if slot else "", []).append(worker)
        if len({*on, *devices}) == 1:
            return set()
        leaving = {worker for kind, theirs in on.items() for worker in theirs[devices.get(kind, 0) :]}
        return leaving if len(leaving) < len(workers) else set()

    def occupied(self) -> dict[str, int]:
        """Return the devices of living workers, and of those that the runner may still start."""
        state, slots = self._state(), self.slots()
        if self._process() is None and (self._killed or not self._is_kept()):
            self._before.clear()
        elif state is None:
            self._before |= Counter(self._wanted)
        elif state.version >= self._version:
            self._before.clear()
        on = [process.slot for process in self._living(state).values()]
        kinds = [slot[0] for number in on if number < len(slots) and (slot := slots[number]) is not None]
        if self._wanted and sum(slot is not None for slot in slots) > sum(self._wanted.values()):
            self.assign(self._wanted)  # a worker has left: others may have the device
        return dict(Counter(kinds) | self._before)

    def drop(self) -> None:
        with self._client() as client:
            view = client.wanted().view
        wanted = {str(worker) for worker in view.workers} if view is not None else set()
        for worker, process in self._living().items():
            if worker not in wanted:
                kill_group(process.pid, signal.SIGKILL)

    def end(self, *, kill: bool = False) -> None:
        if kill:
            # The runner's guardian would end the workers, too; this is sooner.
            processes = self._living().values()
            self._killed |= self._kill_process()
            for process in processes:
                kill_group(process.pid, signal.SIGKILL)
        elif self._state() is None and (runner := self._process()) is not None:
            _send(runner, signal.SIGTERM)  # it has nothing to save yet
        else:
            with self._client() as client:
                self._before |= Counter(self._wanted)
                self._version = client.clear().number

    def _is_alive(self) -> bool:
        return bool(self._living())

    def _state(self) -> RunnerState | None:
        return read_runner_state(self._place / "state.json")

    def _living(self, state: RunnerState | None = None) -> dict[str, LivingWorker]:
        state = state or self._state()
        return {} if state is None else {name: each for name, each in state.workers.items() if each.lives}

    @contextlib.contextmanager
    def _client(self) -> Iterator[ConfigClient]:
        state = self._state()
        if state is None:
            raise ServerUnavailable(f"job {self._run.spec.name}: its runner is not up yet")
        token = (self._place / "token").read_text()
        with ConfigClient(state.config_server, token, timeout_s=ANSWER_S, origin="pliant serve") as client:
            yield client


class FederatedRun(ProcessRun):
    """The coordinator of a federated job, which starts its workers by itself. It is started and ended, never resized."""

    def command(self, devices: Counts) -> list[str]:
        return [sys.executable, "-P", "-m", "pliant.jobs.federated", str(self._run.folder)]

    def environment(self) -> dict[str, str]:
        """Return the mark by which all processes of the run are found, and the devices that they may use."""
        devices = [slot[1] for slot in self.slots() if slot is not None and slot[1] is not None]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        return {JOB_MARK: str(self._place), **visible}

    def resize(self, devices: Counts) -> None:
        """Do nothing: the rules give a rigid job all of its devices or none."""

    def occupied(self) -> dict[str, int]:
        """Return the devices that the run was given; it leaves them at its end."""
        return dict(Counter(slot[0] for slot in self.slots() if slot is not None))

    def drop(self) -> None:
        """Kill the run: it cannot do without some of its workers."""
        self.end(kill=True)

    def end(self, *, kill: bool = False) -> None:
        """Tell the coordinator to end after its round, or kill all processes of the run."""
        if kill:
            self._kill_process()
            self._kill_marked()
        elif (coordinator := self._process()) is not None:
            _send(coordinator, signal.SIGTERM)
        elif self._is_kept():
            raise ServerUnavailable(f"job {self._run.spec.name}: its coordinator is only just starting")

    def _look_for_end(self) -> RunEnd | None:
        end = super()._look_for_end()
        if end is None:
            return None
        if marked_processes(str(self._place)):  # workers whose coordinator was killed
            self._kill_marked()
            return None
        why = last_line(self._run.log).removeprefix("pliant: ") if end.code else ""
        return RunEnd(end.code, end.at_s, finished=end.code == 0, why=why)

    def _kill_marked(self) -> None:
        for pid in marked_processes(str(self._place)):
            _send(pid, signal.SIGKILL)


# --- Ray ---


class RayBackend(LocalBackend):
    """The devices of a Ray cluster: of these types, at most as many as were given; all of them if none were.

    Each train job is a `pliant run --on ray` on this machine, the job's driver: it holds the job's devices in the cluster, and
    its runners are actors there. So jobs outlive the scheduler, and the loss of a node is to each of them like a crash. Record,
    checkpoints and the program must be on a file system that all nodes share.
    """

    def __init__(self, devices: Counts, address: str = "auto", environ: Mapping[str, str] = os.environ) -> None:
        from pliant.launch.on_ray import cluster as ray_cluster

        super().__init__({}, environ)
        self._cluster = ray_cluster
        self._most = dict(devices)
        self.address = address
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(ray_cluster.connected(address))
        self._devices = self._count_devices()
        missing = [kind for kind in devices if not self._devices.get(kind)]
        if missing:
            ray_cluster.check_devices({kind: devices[kind] for kind in missing}, ray_cluster.living_nodes())
        if not any(self._devices.values()):
            self._stack.close()
            raise ConfigError("the Ray cluster has no devices to give: add nodes with `ray start --address=...`")

    def devices(self) -> dict[str, int]:
        """Return the devices of living nodes; the last known ones while the cluster does not answer."""
        with contextlib.suppress(Exception):
            self._devices = self._count_devices()
        return dict(self._devices)

    def _count_devices(self) -> dict[str, int]:
        there = self._cluster.total(self._cluster.living_nodes())
        named = [kind for kind in there if kind not in self._cluster.BUILT_IN] or ["gpu" if "gpu" in there else "cpu"]
        wanted = self._most or {kind: there.get(kind, 0) for kind in named}
        return {kind: min(most, there.get(kind, 0)) for kind, most in wanted.items()}

    def has_actors(self, job: str) -> bool:
        """Return whether actors of a job of Ray's live."""
        return bool(self._cluster.has_actors(job))

    def _handle(self, run: JobRun) -> TrainRun | FederatedRun:
        return FederatedRun(run, self) if isinstance(run.spec, FederatedJob) else RayRun(run, self)

    def close(self) -> None:
        super().close()
        self._stack.close()


class RayRun(TrainRun):
    """A run whose workers are on the nodes of a Ray cluster."""

    def __init__(self, run: JobRun, backend: RayBackend) -> None:
        super().__init__(run, backend)
        self._ray = backend
        self._seen: Counter[str] = Counter()

    def command(self, devices: Counts) -> list[str]:
        wanted = ",".join(f"{kind}={count}" for kind, count in devices.items() if count)
        return self._run_command([], {"--on": "ray", "--ray-address": self._ray.address, "--devices": wanted})

    def environment(self) -> dict[str, str]:
        """Return the variables of the job file, and their names, by which they are handed to the nodes."""
        from pliant.launch.ssh import FORWARD_VARIABLE

        return {**self._spec.env, FORWARD_VARIABLE: ",".join(self._spec.env)}

    def assign(self, devices: Counts) -> None:
        """Note what is wanted; Ray and the driver choose the devices."""
        self._wanted = {kind: count for kind, count in devices.items() if count}

    def resize(self, devices: Counts) -> None:
        with self._client() as client:
            if client.wanted().cleared:
                raise ServerUnavailable(f"job {self._run.spec.name}: it is ending")
            client.set_devices({kind: count for kind, count in devices.items() if count})
        self.assign(devices)

    def occupied(self) -> dict[str, int]:
        try:
            with self._client() as client:
                self._seen = Counter(client.occupied_devices())
        except ServerUnavailable:
            # It has not begun, has ended, or was killed; whatever it had is its own until all of it has gone.
            self._seen |= Counter(self._wanted)
        return dict(self._seen)

    def drop(self) -> None:
        with self._client() as client:
            client.drop_unwanted()

    def _look_for_end(self) -> RunEnd | None:
        from pliant.launch.on_ray.driver import JOB_FILE

        end = super()._look_for_end()
        try:
            job = (self._place / JOB_FILE).read_text()
        except OSError:
            return end  # the driver has ended its runners itself
        if end is None or self._ray.has_actors(job):
            return None
        # An exit code of its own says nothing of the program: Ray ends a driver that has lost the cluster's head.
        return RunEnd(end.code if end.code is not None and end.code < 0 else None, end.at_s)


# --- helpers ---


def _send(pid: int, signum: int) -> None:
    """Send a signal to a process, which may have ended just now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def last_line(path: Path) -> str:
    """Return the last line of a file that is not blank."""
    try:
        lines = path.read_bytes()[-4096:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _cuda_devices(devices: Counts, visible: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the CUDA devices of each type in the order of the types; none for processors, and without CUDA devices.

    Raises:
        ConfigError: some types would have devices, and others not.
    """
    if not visible:
        return {}
    found: dict[str, list[str]] = {}
    left = list(visible)
    for kind, count in devices.items():
        if kind.startswith("cpu"):
            found[kind] = [""]
        elif left:
            found[kind], left = left[:count], left[count:]
        else:
            raise ConfigError(
                f"--devices {kind}={count}: this machine has {len(visible)} CUDA devices, all named before"
            )
    return found


def _read_json(path: Path) -> dict[str, int] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
