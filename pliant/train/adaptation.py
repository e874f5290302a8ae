"""Policies, measurements and the record of a running job.

With each step every worker tells the others how its last step went, so all of them observe the same job and ask their
policies. The answers of the first worker's policies travel with the next step, and all workers carry them out at its
end. A worker that becomes the first one continues where the last one stood.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from pliant import adapt, record
from pliant.adapt import Decision, Observation, Policies, Policy, WorkerFigures
from pliant.adapt.monitors import check_monitors, parse_monitors
from pliant.adapt.policy import KINDS, LinkRates, decision_from_json, maths_decisions
from pliant.comm import probe as links
from pliant.comm.engine import Engine
from pliant.comm.topology import host_leaders
from pliant.errors import ConfigError
from pliant.identity import JOB_NAME, WorkerSpec
from pliant.train.gpu_meter import GpuMeter

if TYPE_CHECKING:
    from pliant.train.events import Progress
    from pliant.train.gradient_probe import GradientProbe
    from pliant.train.replicas import Replicas


class Adaptation:
    """One worker's part in the decisions of the job. Without policies, monitors and record it does nothing."""

    def __init__(
        self,
        settings: AdaptationSettings,
        progress: Progress,
        replicas: Replicas,
        monitor: GradientProbe | None,
        request_workers: Callable[[int], None],
        notify: Callable[[str], None],
    ) -> None:
        self.is_active = settings.is_active
        self.policies, self.monitor = settings.policies, monitor
        self.batch_size, self.learning_rate_factor = replicas.loading.batch_size, 1.0
        """`wrapping` applies the factor whenever an optimizer steps."""
        self.observation: Observation | None = None
        """The job after the last step."""
        self.listeners: list[Callable[[Observation, int], None]] = []
        """Called after each step with the observation and this worker's rank."""
        self.view_listeners: list[Callable[[Engine], None]] = []
        """Called with the engine of each view."""
        self.order = "ddp"
        """How gradients are added, for the record."""
        self.not_promised: tuple[str, ...] = ()
        """The operators without deterministic kernels that the user allows, for the record."""
        self.resumed_at: int | None = None
        """The step of the checkpoint that this process has started from."""
        self.values: dict[str, float] = {}
        """Values that the program has reported in the step in progress."""
        self.last_values: dict[str, float] = {}
        """Values that it has reported in the last committed step."""
        self._progress, self._replicas = progress, replicas
        self._request_workers, self._notify = request_workers, notify
        self._replayed = settings.replayed
        self._may_resize = settings.may_resize
        self._record_path = settings.record
        self._recorder: record.Recorder | None = None
        """Opened when this worker writes its first fact."""
        self._engine: Engine
        """Set by `enter_view`, before anything is observed."""
        self._began_s: float | None = None
        """The first worker's clock when the job began."""
        self._pending: list[NamedDecision] = []
        self._agreed: list[NamedDecision] = []
        """The decisions to carry out at the end of the step in progress."""
        self._figures = WorkerFigures(name="")
        self._workers: tuple[WorkerFigures, ...] = ()
        self._time_s = 0.0
        """Time since the job began, by the first worker's clock."""
        self._before, self._waited_s = (0.0, 0), 0.0
        self._gpu = GpuMeter()
        self._recorded_view = -1
        """The newest view whose workers are in the record."""
        self._asked = {"train": False, "epoch": -1}

    # --- what travels with a step ---

    def enter_view(self, engine: Engine, waited_s: float) -> None:
        """Use this engine. `waited_s`: how long the program has waited so far; a wait that ended with a loss is no step's."""
        self._engine = engine
        if not self.is_active:
            return
        for listener in self.view_listeners:
            listener(engine)
        engine.throughput()  # reset the counters
        self._before, self._waited_s = (time.monotonic(), engine.wire_bytes), waited_s
        self._figures = WorkerFigures(name="")
        self._workers = tuple(WorkerFigures(name=str(worker)) for worker in engine.view.workers)

    @property
    def row_size(self) -> int:
        """The bytes of a row; the same on all workers of a view."""
        if not self.is_active:
            return 0
        return MESSAGE_BYTES + (self.monitor.row_size if self.monitor is not None else 0)

    def pack_row(self) -> bytes:
        """Return this worker's row: how its last step went, and the length of its decisions."""
        if not self.is_active:
            return b""
        probed = self.monitor.pack_row() if self.monitor is not None else b""
        length = len(encode_decisions(self._pending)) if self._pending else 0
        return AdaptationMessage(length, time.time(), self._figures, probed).to_bytes()

    def receive(self, rows: Sequence[bytes]) -> ReceivedRows | None:
        """Read everybody's rows of the step in progress. If the first worker has decided something, receive that, too.
        Nothing is learned before `learn`.

        Raises:
            CommError: a worker is lost.
        """
        if not self.is_active:
            return None
        workers = self._engine.view.workers
        messages = [AdaptationMessage.from_bytes(str(worker), row) for worker, row in zip(workers, rows, strict=True)]
        decided = self._receive_decisions(messages[0].num_bytes) if messages[0].num_bytes else []
        return ReceivedRows(messages, decided)

    def learn(self, received: ReceivedRows) -> None:
        """Learn from the rows of a step that counts."""
        messages = received.messages
        self._workers = tuple(each.figures for each in messages)
        clock_s = messages[0].clock_s
        if self._began_s is None:
            self._began_s = clock_s
        self._time_s = max(self._time_s, clock_s - self._began_s)
        if self.monitor is not None:
            self.monitor.learn([each.probed for each in messages])
        self._agreed = received.decided

    def _receive_decisions(self, num_bytes: int) -> list[NamedDecision]:
        """Return the first worker's decisions, on all workers."""
        if self._engine.size == 1:
            return self._pending
        text = torch.zeros(num_bytes, dtype=torch.uint8)
        if self._engine.rank == 0:
            text = torch.frombuffer(bytearray(encode_decisions(self._pending)), dtype=torch.uint8)
        received = self._engine.broadcast("decision", text, 0).wait()
        assert received is not None, "a broadcast has a result on every rank"
        return decode_decisions(bytes(received.numpy()))

    # --- a step's end ---

    @property
    def has_decided(self) -> bool:
        """Whether decisions are carried out at the end of the step in progress. Its sums must all have arrived before."""
        return bool(self._agreed) or self._progress.step + 1 in (self._replayed or ())

    def record_timing(self, compute_s: float, waited_s: float) -> None:
        """Record how long the step took here, and what it sent. `waited_s`: how long the program has waited so far, in all
        its steps."""
        if not self.is_active:
            return
        lanes = self._engine.throughput().values()
        now_s, sent = time.monotonic(), self._engine.wire_bytes
        step_s = now_s - self._before[0]
        gpu_bytes, gpu_use = self._gpu.read(now_s)
        self._figures = WorkerFigures(
            name="",
            step_s=step_s,
            compute_s=compute_s,
            comm_bytes=sum(lane.num_bytes for lane in lanes),
            comm_s=max((lane.busy_s for lane in lanes), default=0.0),
            egress_bytes=sent - self._before[1],
            wait_s=min(waited_s - self._waited_s, step_s),
            gpu_bytes=gpu_bytes,
            gpu_use=gpu_use,
        )
        self._before, self._waited_s = (now_s, sent), waited_s

    def end_step(self) -> None:
        """Carry out what was agreed on, observe the job, and ask the policies what to do next.

        Raises:
            CommError: a worker is lost while all carry something out together.
        """
        self.last_values, self.values = self.values, {}
        if not self.is_active:
            return
        agreed, self._agreed = self._agreed, []
        self._pending = []  # the first worker's have been sent; those of others do not count
        if self._replayed is not None:
            agreed = [each for each in agreed if not each[1].is_maths]
            agreed += [("replay", decision) for decision in self._replayed.get(self._progress.step, ())]
        # What needs no other worker comes first: a worker lost in the rest must not leave the others with different
        # settings.
        refused = set()
        order = list(KINDS)
        for name, decision in sorted(agreed, key=lambda each: [*order, each[1].kind].index(each[1].kind)):
            if decision.is_maths and name in refused:
                continue  # a learning rate for a refused batch size
            if not self._carry_out(name, decision):
                refused.add(name)
        self._observe_and_ask()

    def _observe_and_ask(self) -> None:
        seen = self.observation = self._observe()
        self._record_step(seen)
        for listener in self.listeners:
            listener(seen, self._engine.rank)
        epoch_over = self._replicas.batches_left(seen.epoch) <= 0
        decided = self.policies.ask("after_step", seen)
        self._decide(decided + self.policies.ask("after_epoch" if epoch_over else "before_step", seen))

    def _decide(self, decided: Sequence[NamedDecision]) -> None:
        """Plan decisions for the end of the next step. They count if this is the first worker then."""
        kinds = {decision.kind for _, decision in decided}
        self._pending = [each for each in self._pending if each[1].kind not in kinds] + list(decided)

    def begin_epoch(self) -> None:
        """Ask the policies at the start of an epoch, and of the job."""
        if not self.is_active:
            return
        if self.resumed_at is not None:  # later steps in the record have been undone
            self._record_if_first("resumed")
            self.resumed_at = None
        if self._asked["epoch"] == self._progress.epoch:
            return
        seen = self._observe()
        if not self._asked["train"]:
            self._record_if_first(
                "start",
                replicas=seen.replicas,
                batch_size=self.batch_size,
                workers=self._engine.size,
                order=self.order,
                **({"bits_not_promised": list(self.not_promised)} if self.not_promised else {}),
            )
            self._decide(self.policies.ask("before_train", seen))
        self._decide(self.policies.ask("before_epoch", seen))
        self._asked = {"train": True, "epoch": seen.epoch}

    def end_job(self) -> None:
        """Ask the policies at the end of the job."""
        if not self.is_active:
            return
        seen = self._observe()
        self.policies.ask("after_train", seen)
        self._record_if_first("end", time_s_since_begin=round(seen.time_s, 3))

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _observe(self, link_rates: LinkRates | None = None) -> Observation:
        figures = self.monitor.figures() if self.monitor is not None else {}
        strategy, progress, replicas = self._engine.strategy, self._progress, self._replicas
        return Observation(
            step=progress.step,
            epoch=progress.epoch,
            epoch_step=progress.epoch_step,
            steps_per_epoch=replicas.num_batches,
            time_s=self._time_s,
            view=self._engine.view.number,
            replicas=replicas.count,
            order=self.order,
            batch_size=self.batch_size,
            learning_rate_factor=self.learning_rate_factor,
            strategy=",".join(map(str, strategy.forest)) or strategy.name,
            workers=self._workers,
            may_resize=self._may_resize,
            link_rates=link_rates,
            **figures,
        )

    # --- carrying out decisions ---

    def _carry_out(self, name: str, decision: Decision) -> bool:
        """Carry out a decision; return whether it was possible."""
        step = self._progress.step
        try:
            self._apply(decision)
        except ConfigError as error:
            # Every worker refuses it, for the same reason.
            self._notify_first(f"policy {name}: {decision.kind} at step {step} cannot be done: {error}")
            self._record_if_first("refused", policy=name, decision=decision.to_json(), why=str(error))
            return False
        if not isinstance(decision, adapt.ProbeLinks):
            self._notify_first(f"policy {name}: {_summarise(decision)} after step {step}: {decision.reason}")
        self._record_if_first("decision", policy=name, decision=decision.to_json())
        return True

    def _apply(self, decision: Decision) -> None:
        match decision:
            case adapt.SetBatchSize():
                self._replicas.set_batch_size(decision.size, self._progress.epoch)
                self.batch_size = decision.size
            case adapt.SetLearningRate():
                self.learning_rate_factor = decision.factor
            case adapt.SetTopology():
                if self._engine.size > 1:
                    self._engine.set_strategy(decision.strategy)
            case adapt.Resize():
                if not self._may_resize:
                    raise ConfigError(
                        "the scheduler of `pliant serve` decides on workers: leave it to that, or run the job by itself with "
                        "`pliant run -w`"
                    )
                if self._engine.rank == 0:
                    self._request_workers(decision.workers)
            case adapt.ProbeLinks():
                self._measure_links(decision)
            case _:
                raise ConfigError(
                    f"a policy returned a {type(decision).__name__}, which a job cannot carry out: return SetBatchSize, "
                    "SetLearningRate, SetTopology, Resize or ProbeLinks of pliant"
                )

    def _measure_links(self, decision: adapt.ProbeLinks) -> None:
        """Measure the links between all workers, and ask the policies again at once."""
        if self._engine.size == 1:
            return
        # As for every sum of training: a late worker is waited for, and a lost one tears the view.
        rates = links.measure(self._engine, decision.num_bytes)
        self._record_if_first("links", **links_fact([worker.host for worker in self._engine.view.workers], rates))
        decided = self.policies.ask("after_step", self._observe(rates))
        mine = encode_decisions([each for each in decided if isinstance(each[1], adapt.SetTopology)])
        received = self._engine.all_gather_bytes("decision:probed", mine)[0]
        for name, each in decode_decisions(received):
            self._carry_out(name, each)

    # --- the record, and the state ---

    def _record_if_first(self, kind: str, **data: Any) -> None:
        if self._engine.rank == 0:
            self.record(kind, self._progress.step, **data)

    def record(self, kind: str, step: int, **data: Any) -> None:
        """Append a fact to the record. One worker of the job does so."""
        if self._record_path:
            self._recorder = self._recorder or record.Recorder(self._record_path)
            self._recorder.write(kind, step, **data)

    def _record_step(self, seen: Observation) -> None:
        if self._engine.rank != 0:
            return
        if self._recorded_view != seen.view:
            self._recorded_view = seen.view
            workers = [each.name for each in seen.workers]
            self._record_if_first(
                "workers", view=seen.view, workers=workers, replicas=seen.replicas, strategy=seen.strategy
            )
        self._record_if_first("step", **step_fact(seen, self.last_values))

    def _notify_first(self, text: str) -> None:
        if self._engine.rank == 0:
            self._notify(text)

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "learning_rate_factor": self.learning_rate_factor,
            "began_s": self._began_s,
            "time_s": self._time_s,
            "asked": self._asked,
            "pending": [[name, decision.to_json()] for name, decision in self._pending],
            "policies": self.policies.state_dict(),
            "monitor": self.monitor.state_dict() if self.monitor is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._agreed = []
        self.learning_rate_factor = state["learning_rate_factor"]
        self._began_s, self._time_s, self._asked = state["began_s"], state["time_s"], dict(state["asked"])
        self._pending = [(name, decision_from_json(decision)) for name, decision in state.get("pending", ())]
        begun_with = state["policies"]
        if begun_with and len(self.policies):
            if len(begun_with) != len(self.policies):
                raise ConfigError(
                    f"the state to load is of a job with {len(begun_with)} policies, but this one has {len(self.policies)}: "
                    "give the same --policy options and pliant.join(policies=...)"
                )
            self.policies.load_state_dict(begun_with)
        if self.monitor is not None and state["monitor"]:
            self.monitor.load_state_dict(state["monitor"])
        if state["batch_size"] != self.batch_size:
            if self.resumed_at is not None:
                self._notify(f"going on with the checkpoint's batch size, {state['batch_size']}, not {self.batch_size}")
            self._replicas.use_batch_size(state["batch_size"])
            self.batch_size = state["batch_size"]


def _summarise(decision: Decision) -> str:
    match decision:
        case adapt.SetBatchSize():
            return f"batch size {decision.size} per replica"
        case adapt.SetLearningRate():
            return f"learning rate x {decision.factor:.4g}"
        case adapt.Resize():
            return f"{decision.workers} workers"
        case adapt.SetTopology():
            return f"topology {decision.strategy}"
        case _:
            return decision.kind


# --- settings ---


@dataclass(slots=True)
class AdaptationSettings:
    """What a job adapts by: policies, monitors with their intervals, files."""

    policies: Policies = field(default_factory=lambda: Policies(()))
    monitors: dict[str, int] = field(default_factory=dict)
    record: str = ""
    replayed: Mapping[int, Sequence[Decision]] | None = None
    """The decisions of another run about batch sizes and learning rates, by step. They replace those of the policies.
    """
    metrics: bool = False
    tensorboard: str = ""
    may_resize: bool = True
    """Whether policies may ask for other workers."""

    @property
    def is_active(self) -> bool:
        """Whether anything travels with the steps."""
        asked = (self.policies, self.monitors, self.record, self.metrics, self.tensorboard)
        return any(asked) or self.replayed is not None

    def __str__(self) -> str:
        """Describe what must be the same on all workers."""
        if not self.is_active:
            return "nothing to adapt by"
        monitored = ", ".join(f"{name} every {steps} steps" for name, steps in sorted(self.monitors.items()))
        return f"{len(self.policies)} policies, {monitored or 'no monitors'}"


def adaptation_settings(
    spec: WorkerSpec | None,
    policies: Sequence[Policy],
    monitor: Mapping[str, int],
    record: str,
    replay: str,
    environ: Mapping[str, str] = os.environ,
) -> AdaptationSettings:
    """Combine the options of `pliant run` with those of the program; the policies of the command line come first.

    Raises:
        ConfigError: an unknown monitor or policy, a wrong interval, or a file given twice.
    """
    options = spec.adapting if spec is not None else {}
    every = Policies([*_parse_policies(options.get("policy", "")), *policies])
    monitors = dict(every.needs)
    for name, interval in [*parse_monitors(options.get("monitor", "")).items(), *check_monitors(monitor).items()]:
        monitors[name] = min(interval, monitors.get(name, interval))
    for name, value in (("record", record), ("replay", replay)):
        if value and options.get(name) and options[name] != value:
            raise ConfigError(f"{name}={value!r} in the program, but --{name} {options[name]}: give one of them")
    return AdaptationSettings(
        policies=every,
        monitors=check_monitors(monitors),
        record=record or options.get("record", ""),
        replayed=maths_decisions(replay) if (replay := replay or options.get("replay", "")) else None,
        metrics=options.get("metrics", "") == "1",
        tensorboard=options.get("tensorboard", ""),
        may_resize=JOB_NAME not in environ,
    )


def _parse_policies(text: str) -> list[Policy]:
    from pliant.adapt import registry  # it imports the user's own policies

    return [registry.parse(line) for line in text.splitlines()]


# --- rows and decisions as bytes ---


_MESSAGE = struct.Struct(f"<I{len(fields(WorkerFigures))}d")
"""The length of the decisions, the clock, and the fields of `WorkerFigures`."""
MESSAGE_BYTES = _MESSAGE.size
NamedDecision = tuple[str, Decision]
"""The name of a policy, and its decision."""


@dataclass(frozen=True, slots=True)
class AdaptationMessage:
    """One worker's row: the length of its decisions (0 without any), its clock, its last step, its probe's row."""

    num_bytes: int
    clock_s: float
    figures: WorkerFigures
    probed: bytes

    def to_bytes(self) -> bytes:
        _, *numbers = astuple(self.figures)
        return _MESSAGE.pack(self.num_bytes, self.clock_s, *numbers) + self.probed

    @classmethod
    def from_bytes(cls, name: str, row: bytes) -> AdaptationMessage:
        """Read the row of the worker with this name."""
        length, clock_s, *numbers = _MESSAGE.unpack_from(row)
        names = (field.name for field in fields(WorkerFigures))
        figures = WorkerFigures(**dict(zip(names, (name, *numbers), strict=True)))
        return cls(length, clock_s, figures, row[_MESSAGE.size :])


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """The rows of all workers, and what the first one has decided."""

    messages: Sequence[AdaptationMessage]
    decided: list[NamedDecision]


def encode_decisions(decided: Sequence[NamedDecision]) -> bytes:
    return json.dumps([[name, decision.to_json()] for name, decision in decided]).encode()


def decode_decisions(data: bytes) -> list[NamedDecision]:
    return [(name, decision_from_json(decision)) for name, decision in json.loads(data)]


# --- facts of the record ---


def step_fact(seen: Observation, values: Mapping[str, float]) -> dict[str, Any]:
    """Describe a step; `values` are those that the program has reported."""
    measured = {"noise_scale": seen.noise_scale, "variance": seen.variance}
    return {
        "epoch": seen.epoch,
        "workers": seen.num_workers,
        "batch_size": seen.batch_size,
        "learning_rate_factor": seen.learning_rate_factor,
        "step_s": round(seen.step_s, 6),
        "samples_per_s": round(seen.samples_per_s, 3),
        **_phases(seen.workers),
        **{name: value for name, value in measured.items() if value is not None},
        **({"values": values} if values else {}),
    }


def _phases(workers: Sequence[WorkerFigures]) -> dict[str, Any]:
    """Describe how the time of a step divides, whom the others waited for, and what the GPUs did."""
    if not any(each.step_s for each in workers):  # the first step of a view
        return {}
    count = len(workers)
    found: dict[str, Any] = {
        "compute_s": round(sum([each.compute_s for each in workers]) / count, 6),
        "wait_s": round(sum([each.wait_s for each in workers]) / count, 6),
    }
    if count > 1:
        own_s = [each.step_s - each.wait_s for each in workers]
        slowest = own_s.index(max(own_s))
        found |= {"slowest": slowest, "slowest_s": round(own_s[slowest], 6)}
    if any(each.gpu_bytes for each in workers):
        found["gpu_bytes"] = int(max(each.gpu_bytes for each in workers))
        found["gpu_use"] = round(sum([each.gpu_use for each in workers]) / count, 3)
    return found


def links_fact(hosts: Sequence[str], rates: LinkRates) -> dict[str, Any]:
    """Describe the rates between hosts, each measured by its first worker. `hosts` are those of all workers."""
    firsts = host_leaders(hosts)
    between = [[round(rates[one][other]) for other in firsts] for one in firsts]
    return {"hosts": [hosts[first] for first in firsts], "bytes_per_s": between}
