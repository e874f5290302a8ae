"""This machine as a ground: each job is a `pliant run -w` in a session of its own, with a keeper beside it.

Runs outlive the scheduler. What is needed to find one again is in its place: a lock that its keeper holds, what the
keeper and the runner have written (`keeper`, `launch.state_file`), the token of its config server, its slots' devices.
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

from pliant.elastic.client import ConfigClient
from pliant.errors import ConfigError, LaunchError, ServerUnavailable
from pliant.launch.devices import device_files, visible_devices
from pliant.launch.guardian import MARK, kill_group
from pliant.launch.registry import is_held, start_ticks
from pliant.launch.state_file import RunnerState, WorkerProcess, read
from pliant.sched.live import keeper
from pliant.sched.live.ground import Counts, Ended, Run

PLIANT = (sys.executable, "-c", "from pliant.cli.main import main; main()")
HOST = "127.0.0.1"
FIRST_PORT, NUM_PORTS, NUM_RANGES = 10000, 200, 110
"""Each run has a range of its own: two config servers that grow their jobs would else choose the same port."""
ANSWER_S = 2.0
NOT_INHERITED = (MARK, "PLIANT_TOKEN", "PLIANT_SERVER", "PLIANT_CONFIG_SERVER")
Slot = tuple[str, str | None]
"""A device's type, and what CUDA_VISIBLE_DEVICES is set to for it; None: left alone."""


class LocalGround:
    """The devices of this machine, as the user counts them."""

    name = "local"

    def __init__(self, devices: Counts, environ: Mapping[str, str] = os.environ) -> None:
        self._devices = dict(devices)
        self._environ = environ
        self._ids = _ids(devices, visible_devices(environ, device_files()))
        self._running: dict[int, LocalRunning] = {}

    def devices(self) -> dict[str, int]:
        return dict(self._devices)

    def start(self, run: Run, devices: Counts) -> LocalRunning:
        running = self._running[run.number] = self._made(run)
        try:
            run.place.mkdir(mode=0o700, parents=True)
            running.assign(devices)
            running.begin(*self._order(run, devices))
        except OSError as error:
            self.forget(run)
            raise LaunchError(f"{run.place}: {error.strerror or error}; make room, or give another --state") from None
        return running

    def adopt(self, run: Run) -> LocalRunning | None:
        running = self._made(run)
        if not running.was_started():
            return None
        self._running[run.number] = running
        return running

    def _made(self, run: Run) -> LocalRunning:
        return LocalRunning(run, self)

    def _order(self, run: Run, devices: Counts) -> tuple[list[str], Mapping[str, str]]:
        """The command of a run, and the environment that it is given."""
        return _command(run, sum(devices.values())), self._environ

    def close(self) -> None:
        """Nothing is held here."""

    def pick(self, kind: str) -> Slot:
        """A device of the type that no run has a slot on."""
        ids = self._ids.get(kind)
        if ids is None:
            return kind, None
        taken = [slot for running in self._running.values() for slot in running.slots() if slot is not None]
        free = [each for each in ids if (kind, each) not in taken]
        # More slots than devices, as the user has counted them, share.
        return kind, free[0] if free else min(ids, key=lambda each: taken.count((kind, each)))

    def forget(self, run: Run) -> None:
        self._running.pop(run.number, None)


class LocalRunning:
    """A run on this machine."""

    def __init__(self, run: Run, ground: LocalGround) -> None:
        self._run, self._ground = run, ground
        self._place = run.place
        self._wanted: dict[str, int] = {}
        self._before: Counter[str] = Counter()
        """The most that was wanted, until the runner has acted on the newest view."""
        self._version = -1
        self._killed = False
        self._keeper: subprocess.Popen[bytes] | None = None
        self._ended: Ended | None = None

    # --- beginning ---

    def begin(self, command: list[str], environ: Mapping[str, str]) -> None:
        """Start the keeper, which starts the runner."""
        token = secrets.token_urlsafe(24)
        with open(os.open(self._place / "token", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(token)
        kept = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
        lock = os.open(self._place / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Locked before there is a keeper: whoever looks later sees it held, or a run that was never begun.
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._run.log.open("ab") as log:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, str(self._place), str(lock), *command],
                    env={**kept, **self._run.spec.env, "PLIANT_TOKEN": token},
                    cwd=self._run.spec.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def was_started(self) -> bool:
        """Whether a keeper had begun."""
        return self._is_kept() or (self._place / "started.json").exists() or (self._place / "exit.json").exists()

    # --- devices ---

    def slots(self) -> list[Slot | None]:
        """The device of each of the runner's slots; None: it has none there, and starts nobody."""
        try:
            listed = json.loads((self._place / "slots.json").read_text())
        except (OSError, ValueError):
            return []
        return [None if slot is None else (slot[0], slot[1]) for slot in listed]

    def assign(self, devices: Counts) -> None:
        """Have slots for these devices: more where there are too few, fewer where nobody is on them any more."""
        self._wanted = {kind: count for kind, count in devices.items() if count}
        slots, busy = self.slots(), {process.slot for process in self._living().values()}
        have = Counter(slot[0] for slot in slots if slot is not None)
        for number in reversed(range(len(slots))):
            slot = slots[number]
            if slot is not None and number not in busy and have[slot[0]] > self._wanted.get(slot[0], 0):
                have[slot[0]] -= 1
                slots[number] = None
        for kind, count in self._wanted.items():
            for _ in range(count - have[kind]):
                slot = self._ground.pick(kind)
                # The runner starts a worker on the lowest slot that is free.
                if None in slots:
                    slots[slots.index(None)] = slot
                else:
                    slots.append(slot)
                self._write_slots(slots)  # the next pick must see it
        self._write_slots(slots)

    def _write_slots(self, slots: list[Slot | None]) -> None:
        for name, value in (("slots", slots), ("devices", [slot[1] if slot else None for slot in slots])):
            draft = self._place / f"{name}.draft"
            draft.write_text(json.dumps(value))
            draft.replace(self._place / f"{name}.json")

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
        """Whom to name, where it matters which worker goes: of several types, those with too many lose their last."""
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
        state, slots = self._state(), self.slots()
        if self._runner() is None and (self._killed or not self._is_kept()):
            self._before.clear()
        elif state is None:
            self._before |= Counter(self._wanted)
        elif state.version >= self._version:
            self._before.clear()
        on = [process.slot for process in self._living(state).values()]
        kinds = [slot[0] for number in on if number < len(slots) and (slot := slots[number]) is not None]
        if self._wanted and sum(slot is not None for slot in slots) > sum(self._wanted.values()):
            self.assign(self._wanted)  # somebody has left: others may have the device
        return dict(Counter(kinds) | self._before)

    def drop(self) -> None:
        with self._client() as client:
            view = client.wanted().view
        wanted = {str(worker) for worker in view.workers} if view is not None else set()
        for worker, process in self._living().items():
            if worker not in wanted:
                kill_group(process.pid, signal.SIGKILL)

    # --- ending ---

    def end(self, *, kill: bool = False) -> None:
        runner = self._runner()
        if kill:
            if runner is None and self._is_kept():
                raise ServerUnavailable(f"job {self._run.spec.name}: its runner is only just starting")
            # The guardian would end the workers too; this is sooner.
            processes = self._living().values()
            if runner is not None:
                os.kill(runner, signal.SIGKILL)
                self._killed = True
            for process in processes:
                kill_group(process.pid, signal.SIGKILL)
        elif self._state() is None and runner is not None:
            os.kill(runner, signal.SIGTERM)  # it has nothing to save yet
        else:
            with self._client() as client:
                self._before |= Counter(self._wanted)
                self._version = client.clear().number

    def ended(self) -> Ended | None:
        if self._ended is None:
            self._ended = self._seen_end()
            if self._ended is not None:
                self._ground.forget(self._run)
        return self._ended

    def _seen_end(self) -> Ended | None:
        if self._keeper is not None:
            self._keeper.poll()  # reaps it
        if self._is_kept() or self._runner() is not None or self._living():
            return None
        told = _json(self._place / "exit.json")
        return Ended(None, time.time()) if told is None else Ended(int(told["code"]), float(told["at_s"]))

    # --- looking ---

    def _is_kept(self) -> bool:
        """Whether the keeper lives."""
        return is_held(self._place / "lock")

    def _runner(self) -> int | None:
        """The runner's process, if it lives."""
        told = _json(self._place / "started.json")
        return told["pid"] if told is not None and start_ticks(told["pid"]) == told["start_ticks"] else None

    def _state(self) -> RunnerState | None:
        return read(self._place / "state.json")

    def _living(self, state: RunnerState | None = None) -> dict[str, WorkerProcess]:
        state = state or self._state()
        return {} if state is None else {name: each for name, each in state.workers.items() if each.lives}

    @contextlib.contextmanager
    def _client(self) -> Iterator[ConfigClient]:
        state = self._state()
        if state is None:
            raise ServerUnavailable(f"job {self._run.spec.name}: its runner is not up yet")
        token = (self._place / "token").read_text()
        with ConfigClient(state.config_server, token, timeout_s=ANSWER_S) as client:
            yield client


def _command(run: Run, workers: int) -> list[str]:
    begin = FIRST_PORT + NUM_PORTS * (run.number % NUM_RANGES)
    flags = {
        "-np": workers,
        "-H": f"{HOST}:{run.spec.max}",
        "-port-range": f"{begin}-{begin + NUM_PORTS - 1}",
        "--slot-devices": run.place / "devices.json",
    }
    return run_command(run, ["-w"], flags)


def run_command(run: Run, switches: Sequence[str], flags: Mapping[str, object]) -> list[str]:
    """`pliant run` with these flags and with those of every run: what it keeps, and what it goes on from."""
    spec = run.spec
    flags = {
        **flags,
        "--record": run.record,
        "--checkpoint-dir": run.checkpoints,
        "--checkpoint-every": spec.checkpoint_every,
        "--resume": "auto",
        "--state-file": run.place / "state.json",
        **({"--determinism": spec.determinism} if spec.determinism else {}),
    }
    told = [str(word) for flag in flags.items() for word in flag]
    return [*PLIANT, "run", "-q", *switches, *told, spec.program, *spec.args]


def _ids(devices: Counts, visible: tuple[str, ...]) -> dict[str, list[str]]:
    """The CUDA devices of each type, in the order of the types; none for processors, and where there are no devices.

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


def _json(path: Path) -> dict[str, int] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
