"""What the parts of `pliant bench gpu` share: options, results, the time and the device that they have, and contenders."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pliant.errors import ConfigError, LaunchError
from pliant.machine import Json
from pliant_repro import contest
from pliant_repro.bench import version01
from pliant_repro.bench.train import PROGRAM, TrainingTask
from pliant_repro.contest import Contender, Placement, Progress, check_choice, check_least

NETWORKS = ("gpt2", "resnet50", "lstm", "vit", "lstm-dropout")
MODES = ("eager", "compiled", "fp16", "priority")
"""How a network is trained. fp16 is float16 with a GradScaler, and priority is sync="priority"; by default `bits` has them."""
DEFAULT_MODELS = {
    "step": ("gpt2", "resnet50"), "memory": ("gpt2",), "bits": ("gpt2", "resnet50", "lstm", "vit"),
    "changes": ("gpt2", "resnet50", "lstm", "vit"), "live": ("gpt2",), "packed": ("gpt2", "resnet50"),
    "profile": ("gpt2",),
}  # fmt: skip
"""The parts, and the networks that each trains by default."""
DEFAULT_MODES = {"memory": ("eager",), "profile": ("eager",), "packed": ("eager",)}
"""Modes of the parts that do not take both eager and compiled by default."""
MORE_CELLS = {"bits": (("resnet50", "fp16"), ("resnet50", "priority"))}
"""Cells that a part has by default, besides all networks with all modes."""
DEFAULT_REPEAT = {"step": 40, "packed": 12, "live": 3}
"""Rounds, or changes of each kind, where time allows so many."""
DEFAULT_STEPS = {"step": 4, "packed": 3, "bits": 5}
"""Steps of a turn, or steps that are compared."""
CELL_WEIGHT = {"compiled": 1.5}
"""Share of the time of a cell with this mode, where the others have 1: it has to be compiled first."""
SEED = 1234
START_S, TURN_S = 240.0, 300.0
EXTRA_S = 20.0
"""How long a part may go on when its time is over."""
DEVICE_BYTES = 138e9
"""Device memory that processes may need together."""
NEEDED_BYTES = {"gpt2": 12.5e9, "resnet50": 8e9, "vit": 6e9}
"""Device memory of one process that trains the network; others need OTHER_BYTES."""
OTHER_BYTES = 4e9
MAX_PROCESSES = 24
"""Processes that the host can run at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuOptions:
    """Options of `pliant bench gpu`.

    Raises (when made):
        ConfigError: a value is not possible; the message says which are.
    """

    part: str
    models: tuple[str, ...] = ()
    """Networks; empty means those of the part."""
    modes: tuple[str, ...] = ()
    device: str = "cuda"
    tiny: bool = False
    """Whether the networks have a few thousand parameters, so that the program can be tried on a CPU."""
    replicas: int = 4
    batch: int = 0
    size: int = 0
    repeat: int = 0
    """Rounds; in `live`, changes of each kind. 0 means the part's own choice."""
    steps: int = 0
    """Steps of a turn; in `bits`, steps that are compared. 0 means the part's own choice."""
    limit_s: float = 420.0
    """Time in which the part is to end."""
    order: str = ""
    """Order of the sums, as an argument of `pliant.join`; empty means its default, and in `bits` both."""
    gradients: str = ""
    """Where gradients are kept, as an argument of `pliant.join`; empty means its default."""
    sync: str = ""
    """How sums travel, as an argument of `pliant.join`; empty means its default."""
    autocast: bool = True
    """Whether the forward pass runs in bfloat16 where torch's autocast does so."""
    old: Path | None = None
    """Folder with version 0.1 of pliant, for `packed`."""
    traces: Path | None = None
    """Folder for the traces of `profile`."""

    def __post_init__(self) -> None:
        check_choice("PART", self.part, tuple(DEFAULT_MODELS))
        check_choice("--device", self.device, ("cpu", "cuda"))
        for model in self.models:
            check_choice("--models", model, NETWORKS)
        for mode in self.modes:
            check_choice("--modes", mode, MODES)
        check_least(
            ("--replicas", self.replicas, 1), ("--batch", self.batch, 0), ("--size", self.size, 0),
            ("--repeat", self.repeat, 0), ("--steps", self.steps, 0), ("--limit", self.limit_s, 1),
        )  # fmt: skip
        if self.old is not None and not (self.old / "pliant" / "__init__.py").exists():
            raise ConfigError(f"--old {self.old}: there is no pliant/ in it; give a checkout of version 0.1")

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Every network with every mode, the eager ones first."""
        models = self.models or DEFAULT_MODELS[self.part]
        modes = self.modes or DEFAULT_MODES.get(self.part, ("eager", "compiled"))
        more = MORE_CELLS.get(self.part, ()) if not self.models and not self.modes else ()
        return [*((model, mode) for mode in modes for model in models), *more]

    @property
    def num_rounds(self) -> int:
        return self.repeat or DEFAULT_REPEAT.get(self.part, 1)

    @property
    def num_steps(self) -> int:
        return self.steps or DEFAULT_STEPS.get(self.part, 4)

    def task(self, model: str, mode: str, side: str = "pliant", **more: Any) -> TrainingTask:
        """Return what a contender trains: the network with bfloat16 autocast and the kernels pinned that we pin."""
        from pliant_repro import zoo

        name = f"{model}-tiny" if self.tiny else model
        chosen = zoo.network(name)
        sync = "priority" if mode == "priority" else self.sync
        given = {"order": self.order, "gradients": self.gradients, "sync": sync}
        join = {key: value for key, value in given.items() if value} if side == "pliant" else {}
        return TrainingTask(**{
            "side": side, "num_workers": 1, "replicas": 1, "model": name, "optimizer": chosen.optimizer,
            "batch": self.batch or chosen.batch, "size": self.size or chosen.size, "device": self.device,
            "autocast": self.autocast, "compiled": mode == "compiled", "scaler": mode == "fp16", "strict": True,
            "lead": 2, "join": join, **more,
        })  # fmt: skip


@dataclass(slots=True)
class Part:
    """Result of a part: what was measured, how to show it, and what it says about the goals."""

    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    cells: list[Json] = field(default_factory=list)
    verdicts: list[tuple[bool | None, str]] = field(default_factory=list)
    """Whether it holds, None if no time was left to find out, and what was found."""
    remarks: list[str] = field(default_factory=list)
    device: Mapping[str, object] = field(default_factory=dict)
    keep: Callable[[], None] = lambda: None
    """Is called when a cell is done, so that its figures are kept even if the next one fails or never ends."""

    def judge(self, ok: bool | None, text: str) -> None:
        self.verdicts.append((ok, text))


def describe_failure(error: Exception) -> str:
    """Return an error that a part did not expect as one line, and print where it came from."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


class Clock:
    """The time that a part has, shared out among its cells."""

    def __init__(self, limit_s: float, weights: Sequence[float] = (1.0,)) -> None:
        """`weights` say how the time is shared out among the cells, in their order."""
        self._end_s, self._weights = time.monotonic() + limit_s, list(weights)

    def next_cell(self) -> float:
        """Return the moment at which the next cell is to end."""
        share = self._weights[0] / sum(self._weights)
        del self._weights[0]
        return time.monotonic() + self.left_s * share

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def bound(self, timeout_s: float) -> float:
        """Return this time-out, or what is left of the part's time and a little more, if that is less."""
        return max(5.0, min(timeout_s, self.left_s + EXTRA_S))


class DevicePool:
    """Device memory, and processes of the host, for all that runs at the same time.

    Who asks first is served first: a group that needs much would wait for ever if smaller ones could overtake it.
    """

    def __init__(self, most_bytes: float = DEVICE_BYTES, most_processes: int = MAX_PROCESSES) -> None:
        self._free_bytes, self._free_processes = most_bytes, most_processes
        self._most_bytes, self._most_processes = most_bytes, most_processes
        self._changed = threading.Condition()
        self._waiting: list[object] = []

    @contextlib.contextmanager
    def lend(self, num_bytes: float, num_processes: int, timeout_s: float) -> Iterator[bool]:
        """Wait until so much is free, and hold it; `num_bytes` is that of one process. Gives false if time was over."""
        needed = min(num_bytes * num_processes, self._most_bytes), min(num_processes, self._most_processes)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)

            def is_next() -> bool:
                fits = needed[0] <= self._free_bytes and needed[1] <= self._free_processes
                return self._waiting[0] is ticket and fits

            got = self._changed.wait_for(is_next, max(0.0, timeout_s))
            self._waiting.remove(ticket)
            if got:
                self._free_bytes -= needed[0]
                self._free_processes -= needed[1]
            self._changed.notify_all()
        try:
            yield got
        finally:
            if got:
                with self._changed:
                    self._free_bytes += needed[0]
                    self._free_processes += needed[1]
                    self._changed.notify_all()


def process_bytes(model: str, options: GpuOptions) -> float:
    return 0.0 if options.tiny else NEEDED_BYTES.get(model, OTHER_BYTES)


def weights_of(cells: Sequence[tuple[str, str]]) -> list[float]:
    """Return how the time is shared out among the cells."""
    return [CELL_WEIGHT.get(mode, 1.0) for _, mode in cells]


# --- contenders ---


@contextlib.contextmanager
def started(
    tasks: Mapping[str, TrainingTask],
    progress: Progress,
    clock: Clock,
    old: Path | None = None,
) -> Iterator[dict[str, Contender]]:
    """Start a contender for each task, all at the same time, and give them by their names. All are gone afterwards."""
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pliant-bench-")))
        found = {name: cleanup.enter_context(_contender(name, task, folder, old)) for name, task in tasks.items()}
        try:
            contest.start_all(found.values(), clock.bound(START_S), progress)
            yield found
        finally:
            with ThreadPoolExecutor(max(1, len(found))) as threads:  # each may take seconds to end
                list(threads.map(Contender.close, found.values()))


def _contender(name: str, task: TrainingTask, folder: Path, old: Path | None) -> Contender:
    placement = Placement(num_workers=task.num_workers, folder=folder)
    if task.side == "version01":
        assert old is not None, "it was given"
        starter = version01.launcher(old, task.num_workers)
        return placement.contender(name, version01.PROGRAM, task.to_json(), launcher=starter)
    task = replace(task, rendezvous=f"file://{folder / name}.store")
    strategy = "AUTO" if task.side == "pliant" and task.num_workers > 1 else ""
    return placement.contender(name, PROGRAM, task.to_json(), strategy=strategy)


def ask_all(
    contenders: Sequence[Contender], command: Mapping[str, object], clock: Clock
) -> dict[str, list[contest.Answer]]:
    """Let all contenders carry out a command at the same time; those that fail are missing in the answer."""

    def ask(contender: Contender) -> list[contest.Answer] | None:
        try:
            return contender.ask(command, clock.bound(TURN_S))
        except LaunchError:
            return None

    with ThreadPoolExecutor(max(1, len(contenders))) as threads:
        answers = list(threads.map(ask, contenders))
    return {each.name: answer for each, answer in zip(contenders, answers, strict=True) if answer is not None}


def device_of(contenders: Mapping[str, Contender]) -> Mapping[str, object]:
    """Return what the contenders know about their device."""
    for each in contenders.values():
        for answer in each.ready_answers:
            if "device" in answer:
                return cast("Mapping[str, object]", answer["device"])
    return {}
