"""A loader process: plays the w-th loader worker of every replica that its worker hosts, in turn.

What differs between those loader workers, the random state, is kept per *track*: opened with a base seed
(and, for a replica that has come from elsewhere, the state to go on from), advanced by every batch, dropped
when it is of no more use. What does not differ is shared: one copy of the dataset per process, not one per
replica. `pool` starts these processes and talks to them.

`get_worker_info` and numpy's seed are torch's private functions, used so that both are the same in whatever version.
"""

from __future__ import annotations

import queue
import random
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from pliant.child import die_with
from pliant.train import rng
from pliant.train.data import parcel

parent_ends: set[Connection[Any, Any] | socket.socket] = set()
"""The parent's ends of all pipes to loader processes; a forked one closes its copies, which would keep others' open."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every loader process needs to make batches."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    worker_init_fn: Callable[[int], None] | None
    num_workers: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch, or the error that it met, and the random state of its loader worker after it."""

    track: int
    batch: int
    data: Any
    state: bytes

    def take(self) -> Any:
        """The batch; raises what the dataset raised, with the traceback of the loader process."""
        if isinstance(self.data, ExceptionWrapper):
            self.data.reraise()  # type: ignore[no-untyped-call]
        return self.data


@dataclass(frozen=True, slots=True)
class Open:
    track: int
    base_seed: int
    state: bytes | None


@dataclass(frozen=True, slots=True)
class Load:
    track: int
    batch: int
    indices: list[int]


@dataclass(frozen=True, slots=True)
class Drop:
    track: int


def caught(where: str) -> ExceptionWrapper:
    """The exception that is being handled, so that it can be raised in the parent with its type and traceback."""
    return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


def fetch(dataset: Any, collate_fn: Callable[[list[Any]], Any], indices: list[int]) -> Any:
    """The batch of these samples; a dataset that has `__getitems__` is asked once for all of them."""
    if getattr(dataset, "__getitems__", None):
        return collate_fn(dataset.__getitems__(indices))
    return collate_fn([dataset[index] for index in indices])


def serve(
    recipe: Recipe,
    worker: int,
    parent: int,
    tie: bool,
    tasks: Connection[Any, Any],
    results: socket.socket,
) -> None:
    """The life of a loader process."""
    _stand_alone(parent, tie)
    torch.set_num_threads(1)
    inbox = _Inbox(tasks)
    desk = _Desk(recipe, worker)
    while (message := inbox.get()) is not None:
        match message:
            case Open():
                desk.open(message)
            case Load() if inbox.is_wanted(message.track):
                try:
                    parcel.send(results, _packed(desk.load(message)))
                except OSError:
                    return  # the parent has closed its end, or is gone
            case Drop():
                desk.drop(message.track)


def _packed(loaded: Loaded) -> parcel.Parcel:
    try:
        return parcel.pack(loaded)
    except Exception:
        problem = caught("while a batch was pickled, to be sent from the loader process")
        return parcel.pack(Loaded(loaded.track, loaded.batch, problem, loaded.state))


def _stand_alone(parent: int, tie: bool) -> None:
    """Undo what a forked process has from the training program, and end with it."""
    if tie:
        die_with(parent)
    signal.set_wakeup_fd(-1)  # it would wake the parent
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for connection in parent_ends:
        connection.close()
    parent_ends.clear()


class _Inbox:
    """The messages to a loader process.

    Read by a thread of their own at once: the parent never waits for a process that waits for the parent to take a
    batch, and a drop takes effect before the loads that it overtakes.
    """

    def __init__(self, tasks: Connection[Any, Any]) -> None:
        self._tasks = tasks
        self._messages: queue.SimpleQueue[Open | Load | Drop | None] = queue.SimpleQueue()
        self._wanted: set[int] = set()
        threading.Thread(target=self._read, name="pliant-inbox", daemon=True).start()

    def get(self) -> Open | Load | Drop | None:
        """The next message; None: this is the end."""
        message = self._messages.get()
        return None if self._ended else message

    def is_wanted(self, track: int) -> bool:
        return track in self._wanted

    _ended = False

    def _read(self) -> None:
        message = None
        while not self._ended:
            try:
                message = self._tasks.recv()
            except (EOFError, OSError):
                message = None
            match message:
                case Open():
                    self._wanted.add(message.track)
                case Drop():
                    self._wanted.discard(message.track)
                case None:
                    self._ended = True
            self._messages.put(message)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A loader worker before its first batch."""

    state: rng.RngState
    failure: ExceptionWrapper | None


class _Desk:
    """The loader workers that one process plays, by track."""

    def __init__(self, recipe: Recipe, worker: int) -> None:
        self._recipe, self._worker = recipe, worker
        self._states: dict[int, rng.RngState] = {}
        self._seeds: dict[int, int] = {}
        self._beginnings: dict[int, _Beginning] = {}

    def open(self, message: Open) -> None:
        """Make a loader worker, and bring it to the given state."""
        self._seeds[message.track] = message.base_seed
        self._introduce(message.track)
        # Of the loader workers with one base seed, only the first begins in earnest: so `worker_init_fn` is not called
        # again for every epoch of a persistent loader, nor for batches that are loaded again.
        if message.base_seed not in self._beginnings:
            self._beginnings[message.base_seed] = self._begin(message.base_seed)
        self._states[message.track] = (
            self._beginnings[message.base_seed].state
            if message.state is None
            else rng.RngState.from_bytes(message.state)
        )

    def _begin(self, base_seed: int) -> _Beginning:
        """What a loader worker of torch's does before its first batch."""
        seed = base_seed + self._worker
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(base_seed, self._worker))  # type: ignore[no-untyped-call]
        failure = None
        if self._recipe.worker_init_fn is not None:
            try:
                self._recipe.worker_init_fn(self._worker)
            except Exception:
                failure = caught(f"in worker_init_fn of loader process {self._worker}")
        return _Beginning(rng.capture(), failure)

    def load(self, message: Load) -> Loaded:
        track = message.track
        self._introduce(track)
        rng.restore(self._states[track])
        data: Any = self._beginnings[self._seeds[track]].failure
        if data is None:
            try:
                data = fetch(self._recipe.dataset, self._recipe.collate_fn, message.indices)
            except Exception:
                data = caught(f"in loader process {self._worker}")
        state = self._states[track] = rng.capture()
        return Loaded(track, message.batch, data, state.to_bytes())

    def drop(self, track: int) -> None:
        self._states.pop(track, None)
        self._seeds.pop(track, None)

    def _introduce(self, track: int) -> None:
        """Let `torch.utils.data.get_worker_info` tell whose loader worker this is now."""
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._worker,
            num_workers=self._recipe.num_workers,
            seed=self._seeds[track] + self._worker,
            dataset=self._recipe.dataset,
        )
