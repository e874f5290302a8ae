"""The worker side of all training contests: plain PyTorch, stock DDP, Open MPI and pliant train one model with one loop.

A window is a few steps that bring the pipeline into its steady state, then the timed ones, each from before one batch is
loaded to before the next, so loading, commit and whatever else a side does between steps count. See `pliant_repro.worker`
for how commands arrive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from pliant.errors import ConfigError
from pliant.train import determinism, trace
from pliant_repro import zoo
from pliant_repro.bench import training_probes
from pliant_repro.bench.train import TrainingTask
from pliant_repro.paced import PacedNet
from pliant_repro.profiles import PUBLISHED_BATCH, profile, scaled
from pliant_repro.worker import Command, Opened, join_group, pin_threads

EPOCH_STEPS, MAX_EPOCHS = 5_000, 1_000_000
POOL = 61
"""Number of distinct batches: a prime, so that every rank sees all of them, whatever the number of ranks."""
IMAGE = (3, 32, 32)


# --- models and data ---


@dataclass(slots=True)
class Subject:
    """A model, the loss of a batch, and the data."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    dataset: Any
    batch: int = 1
    """Items of the data set that make a batch."""
    paced: PacedNet | None = None
    """The model, if it only pretends to compute."""

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.model.parameters() if each.requires_grad)


def make_subject(task: TrainingTask, waited_until: Callable[[], float] | None = None) -> Subject:
    """Build the task's model with the same initial values in every process.

    `waited_until` returns when the program last stopped waiting for the network; without it, the loop notes that itself.

    Raises:
        ConfigError: the user's function cannot be imported, or returns something else.
    """
    length = EPOCH_STEPS * task.num_replicas
    torch.manual_seed(1)
    if task.compute != "real":
        net = _paced_net(task, waited_until)
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randn(net.num_inputs, generator=generator) for _ in range(POOL)]
        return Subject(net, lambda model, batch: model(batch), zoo.BatchList(batches, length), paced=net)
    if ":" in task.model:
        model, inputs = _model_from_function(task.model, task.batch)
        return Subject(model, _mean_square, zoo.BatchList(_varied(inputs), length))
    chosen = zoo.network(task.model)
    batch = task.batch or min(chosen.batch, 16)
    size = task.size or (64 if chosen.kind == "images" else chosen.size)
    dataset = zoo.ReadyBatches(chosen.kind, size, length * batch, task.device, classes=chosen.classes)
    model = zoo.build(task.model, task.device)
    if task.compiled:
        # If bits are compared, one graph as without DDP: torch would cut it at DDP's buckets, and other kernels have other bits.
        torch._dynamo.config.optimize_ddp = task.seed is None
        model.compile()

    half = torch.float16 if task.scaler and task.device == "cuda" else torch.bfloat16

    def loss(model: nn.Module, pair: zoo.Sample) -> Tensor:
        with torch.autocast(task.device, half, enabled=task.autocast):
            return zoo.compute_loss(model, *pair)

    return Subject(model, loss, dataset, batch)


def _paced_net(task: TrainingTask, waited_until: Callable[[], float] | None) -> PacedNet:
    if task.compute == "scaling":
        from pliant_repro.bench.scaling import lab_profile

        return PacedNet(lab_profile(task.model, task.speed), waited_until=waited_until)
    return PacedNet(scaled(profile(task.model, batch=task.batch or PUBLISHED_BATCH)), waited_until=waited_until)


def _model_from_function(name: str, batch: int) -> tuple[nn.Module, Any]:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {name}: {error}; give a function that can be imported from here") from None
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, torch.randn(batch or 16, *IMAGE))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {name} gave a {type(model).__name__}: return a module, or (module, inputs)")
    return model, inputs


def _varied(inputs: Any) -> list[Any]:
    """Make batches that differ, so that replicas do; whole numbers such as words stay as they are."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return [inputs]
    return [inputs * (1 + number / POOL) for number in range(POOL)]


def _mean_square(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"the model gave a {type(outputs).__name__}: one that returns a tensor is needed")
    return outputs.float().square().mean()


def make_optimizer(task: TrainingTask, model: nn.Module) -> torch.optim.Optimizer:
    if task.optimizer == "p3":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    return zoo.make_optimizer(task.optimizer, model)


def make_scaler(task: TrainingTask) -> torch.amp.GradScaler | None:
    """Return the task's GradScaler; its factor is so large that the first steps overflow, and it changes every few steps."""
    if not task.scaler:
        return None
    return torch.amp.GradScaler(task.device, init_scale=2.0**24, growth_interval=2)


def load_steps(subject: Subject, rank: int, num_ranks: int, per_step: int = 1) -> Iterator[Iterable[Any]]:
    """Yield the steps of one rank without end, `per_step` batches each, as a plain DDP script loads them."""
    batches = _load_batches(subject, rank, num_ranks)
    while True:
        yield islice(batches, per_step)


def _load_batches(subject: Subject, rank: int, num_ranks: int) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(subject.dataset, num_ranks, rank, shuffle=False)
    loader: DataLoader[Any] = DataLoader(
        subject.dataset, batch_size=subject.batch, sampler=sampler, collate_fn=zoo.as_is
    )
    while True:
        yield from loader


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, in their order. `state_dict` waits for updates that are still under way."""
    values = model.state_dict()
    found = hashlib.sha256()
    for name, _ in model.named_parameters():
        found.update(values[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# --- the sides ---


class TrainingLoop:
    """The body of a plain training loop, one step at a time."""

    def __init__(
        self,
        subject: Subject,
        model: nn.Module,
        optimizer: Any,
        steps: Iterator[Iterable[Any]],
        *,
        divisor: int = 1,
        no_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        wait_for_sums: Callable[[], None] | None = None,
        stats: Callable[[], dict[str, object]] = dict,
        scaler: torch.amp.GradScaler | None = None,
        tamper: int = 0,
        num_overlapped: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            steps: the batches of each step.
            divisor: the number of batches whose gradients are accumulated; each loss is divided by it.
            no_sync: the context of all batches of a step but the last one, where gradients are accumulated.
            wait_for_sums: called between the backward pass and the update; where it returns, the program may have waited.
            tamper: the number of steps after which one bit of one parameter is flipped; 0: never.
            num_overlapped: returns how many steps were committed so far while updates were still under way.
        """
        self.subject, self._model, self.optimizer, self._steps = subject, model, optimizer, steps
        self._divisor, self._wait_for_sums, self.stats = divisor, wait_for_sums, stats
        self._no_sync = no_sync
        self.scaler, self._tamper, self.num_overlapped = scaler, tamper, num_overlapped
        self.num_steps = 0
        self._losses: list[Tensor] = []

    def step(self) -> None:
        for number, batch in enumerate(next(self._steps), 1):
            with self._no_sync() if number < self._divisor else contextlib.nullcontext():
                loss = self.subject.loss(self._model, batch)
                scaled = loss if self.scaler is None else self.scaler.scale(loss)
                (scaled / self._divisor if self._divisor > 1 else scaled).backward()  # type: ignore[no-untyped-call]
            self._losses.append(loss.detach())  # read later: reading a loss may wait for the device
        if self._wait_for_sums is not None:
            self._wait_for_sums()
            if self.subject.paced is not None:
                self.subject.paced.device.stalled()  # before the update, which is part of what is paced
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.num_steps += 1
        if self.num_steps == self._tamper:
            flip_bit(self.subject.model)

    def take_losses(self) -> list[float]:
        """Return the losses of the batches since the last call."""
        found, self._losses = self._losses, []
        return [float(loss) for loss in found]


def flip_bit(model: nn.Module) -> None:
    """Flip the lowest bit of one element of one parameter."""
    model.state_dict()  # waits for updates that are still under way
    with torch.no_grad():
        next(model.parameters()).view(-1)[:1].view(torch.int32).bitwise_xor_(1)


Choose = Callable[[Mapping[str, Any]], TrainingLoop]
"""Returns the loop for the options of a command: DDP has one per bucket size, the other sides have one."""


class DdpLoops:
    """Stock DDP. Every set of options asked for has its own model, made when it is first chosen."""

    def __init__(self, task: TrainingTask, rank: int) -> None:
        self._task, self._rank = task, rank
        self._loops: dict[str, TrainingLoop] = {}
        self._random: dict[str, Tensor] = {}
        self._key = ""

    def choose(self, options: Mapping[str, Any]) -> TrainingLoop:
        asked = {name: value for name, value in options.items() if value}
        key = json.dumps(asked, sort_keys=True)
        self._random[self._key] = torch.get_rng_state()  # each model draws as if it were alone
        self._key = key
        if key in self._loops:
            torch.set_rng_state(self._random[key])
            return self._loops[key]
        subject = make_subject(self._task)
        asked.pop("purpose", None)
        model = DistributedDataParallel(subject.model, **{**self._task.ddp, **asked})
        optimizer = make_optimizer(self._task, subject.model)
        accumulate = self._task.num_replicas // self._task.num_workers
        steps = load_steps(subject, self._rank, self._task.num_workers, accumulate)
        if self._task.seed is not None:
            torch.manual_seed(self._task.seed + self._rank)
        self._loops[key] = TrainingLoop(
            subject, model, optimizer, steps, divisor=accumulate, no_sync=model.no_sync, wait_for_sums=lambda: None,
            scaler=make_scaler(self._task), tamper=self._task.tamper,
        )  # fmt: skip
        return self._loops[key]


@contextlib.contextmanager
def _open_plain(task: TrainingTask, rank: int) -> Iterator[Choose]:
    """Plain PyTorch; if one process stands for several replicas, it accumulates the gradients of their batches."""
    subject = make_subject(task)
    accumulate = task.num_replicas // task.num_workers
    steps = load_steps(subject, rank, task.num_workers, accumulate)
    optimizer = make_optimizer(task, subject.model)
    more: dict[str, Any] = {"scaler": make_scaler(task), "tamper": task.tamper}
    loop = TrainingLoop(subject, subject.model, optimizer, steps, divisor=accumulate, **more)
    yield lambda _: loop


@contextlib.contextmanager
def _open_ddp(task: TrainingTask, rank: int) -> Iterator[Choose]:
    with join_group(task.rendezvous, rank, task.num_workers):
        yield DdpLoops(task, rank).choose


@contextlib.contextmanager
def _open_pliant(task: TrainingTask, rank: int) -> Iterator[Choose]:
    import pliant

    with pliant.join(replicas=task.num_replicas, seed=task.seed, **task.join) as job:
        subject = make_subject(task, lambda: job.sync_stats().waited_until_s)
        data: dict[str, Any] = {"batch_size": subject.batch, "shuffle": False, "collate_fn": zoo.as_is}
        model, optimizer = job.wrap(subject.model, make_optimizer(task, subject.model), **task.wrap)
        loader = job.loader(subject.dataset, **data)
        overlapped: list[bool] = []
        job.on_commit(lambda _: overlapped.append(job.has_pending_updates))
        scaler = make_scaler(task)
        if scaler is not None:
            job.track("scaler", scaler)
        epochs = job.epochs(MAX_EPOCHS)
        next(epochs)  # the workers meet here

        def steps() -> Iterator[Iterable[Any]]:
            while True:
                yield from loader
                next(epochs)

        stats = lambda: {**dataclasses.asdict(job.sync_stats()), **training_probes.sent_and_shared(job)}  # noqa: E731
        loop = TrainingLoop(
            subject, model, optimizer, steps(), stats=stats, scaler=scaler, tamper=task.tamper,
            num_overlapped=lambda: sum(overlapped),
        )  # fmt: skip
        yield lambda _: loop


class MpiSums:
    """Sums gradients by Open MPI in buckets, in the order in which backward fills them, on a thread of its own.

    This is what Horovod does, without its coordinator: paced nets have one order on all ranks.
    """

    def __init__(self, model: nn.Module, cap_bytes: int) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = MPI.COMM_WORLD, MPI.IN_PLACE
        self._buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(list(model.parameters())):
            if sum(each.numel() * 4 for each in self._buckets[-1]) >= cap_bytes:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
        self._flat = [torch.empty(sum(each.numel() for each in bucket)) for bucket in self._buckets]
        self._missing = [len(bucket) for bucket in self._buckets]
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._summed: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, number=number: self._add_gradient(number)
                )
        self._thread = threading.Thread(target=self._sum_buckets, daemon=True)
        self._thread.start()

    def _add_gradient(self, number: int) -> None:
        self._missing[number] -= 1
        if self._missing[number] == 0:
            torch.cat([each.grad.view(-1) for each in self._buckets[number]], out=self._flat[number])  # type: ignore[union-attr]
            self._ready.put(number)

    def _sum_buckets(self) -> None:
        while (number := self._ready.get()) is not None:
            self._comm.Allreduce(self._in_place, self._flat[number].numpy())
            self._summed.put(number)

    def wait(self) -> None:
        """Wait until all sums of this step are in the gradients, as means."""
        for _ in self._buckets:
            number = self._summed.get()
            sizes = [parameter.numel() for parameter in self._buckets[number]]
            means = torch.split(self._flat[number].div_(self._comm.Get_size()), sizes)
            for parameter, mean in zip(self._buckets[number], means, strict=True):
                assert parameter.grad is not None, "its hook has run"
                parameter.grad.copy_(mean.view_as(parameter.grad))
            self._missing[number] = len(self._buckets[number])

    def close(self) -> None:
        self._ready.put(None)
        self._thread.join()


@contextlib.contextmanager
def _open_mpi(task: TrainingTask, rank: int) -> Iterator[Choose]:
    subject = make_subject(task)
    sums = MpiSums(subject.model, int(task.bucket_cap_mb * (1 << 20)))
    steps = load_steps(subject, rank, task.num_workers)
    optimizer = make_optimizer(task, subject.model)
    loop = TrainingLoop(subject, subject.model, optimizer, steps, wait_for_sums=sums.wait)
    try:
        yield lambda _: loop
    finally:
        sums.close()


SIDES = {"plain": _open_plain, "ddp": _open_ddp, "openmpi": _open_mpi, "pliant": _open_pliant}


def preload() -> None:
    """Import what every side needs, before ranks are forked."""
    import pliant

    torch.optim.SGD(nn.Linear(1, 1).parameters())  # the first optimizer of a process loads much of torch
    assert pliant.join is not None, "loads what is behind it"


@contextlib.contextmanager
def opened(values: Mapping[str, object], rank: int) -> Iterator[Opened]:
    """Open the side of a TrainingTask; the program of `pliant_repro.worker`."""
    task = TrainingTask(**cast("dict[str, Any]", values))
    torch.set_num_threads(1)
    if task.strict:
        determinism.pin("D1", task.device)
    trace.begin(rank)
    with SIDES[task.side](task, rank) as choose:
        num_bytes = choose({}).subject.num_bytes
        facts = {"device": training_probes.device_facts(task.device), "settings": training_probes.kernel_settings()}
        yield {"num_bytes": num_bytes, **facts}, lambda command: carry_out(choose, task, command)
    trace.write(rank)


# --- commands ---


def carry_out(choose: Choose, task: TrainingTask, command: Command) -> dict[str, object]:
    """Carry out one command of the controller, and return the answer."""
    options = cast("Mapping[str, Any]", command.get("options", {}))
    cuda = task.device == "cuda"
    match command["do"]:
        case "run":
            lead = cast(int, command.get("lead", task.lead))
            found = run_window(choose(options), cast(int, command["iterations"]), lead, cuda=cuda)
            if cuda and not command.get("keep_memory"):
                torch.cuda.empty_cache()  # for the contenders whose turn is next
            return found
        case "cores":
            pin_threads(cast("list[int]", command["cores"]))
            return {"cores": sorted(os.sched_getaffinity(0))}
        case "overlap":
            loop = choose(options)
            for _ in range(cast(int, command["iterations"])):
                loop.step()
            return {"overlapped": loop.num_overlapped(), "steps": loop.num_steps}
        case "digests":
            return training_probes.digest_steps(choose(options), cast(int, command["iterations"]))
        case "memory":
            return training_probes.peak_memory(choose(options), cast(int, command["iterations"]), cuda=cuda)
        case "profile":
            steps, save_as = cast(int, command["iterations"]), str(command.get("save_as", ""))
            return training_probes.profile_steps(choose(options), steps, cuda=cuda, save_as=save_as)
        case "count":
            counters = Path("/proc/thread-self/net/dev").read_text()
            return {"tx_bytes": sent_bytes(counters, os.environ["GLOO_SOCKET_IFNAME"])}
        case "hash":
            loop = choose(options)
            return {"hash": digest_of(loop.subject.model), "steps": loop.num_steps}
        case "layers":
            return {"layers": layer_times(choose(options), rounds=7)}
        case other:
            raise AssertionError(f"unknown command {other!r}")


def run_window(loop: TrainingLoop, iterations: int, lead: int, *, cuda: bool = False) -> dict[str, object]:
    """Train one window.

    `marks_s` are the moments at which the timed steps began and the last one ended, by the monotonic clock that all
    processes of a host share. `compute_s` is how long this thread ran, or was ready to, in a step.
    """
    cpu_begun_s, begun_s, before = time.process_time(), _thread_running_s(), loop.stats()
    marks_s: list[float] = []
    for number in range(lead + iterations):
        if number >= lead:
            if cuda and not marks_s:
                torch.cuda.synchronize()
            marks_s.append(time.monotonic())
        loop.step()
    if cuda:
        torch.cuda.synchronize()
    marks_s.append(time.monotonic())
    compute_s = (_thread_running_s() - begun_s) / (lead + iterations)
    loop.subject.model.state_dict()  # waits for updates that are still under way
    cpu_s = (time.process_time() - cpu_begun_s) / (lead + iterations)
    costs = {"wall_s": [(marks_s[-1] - marks_s[0]) / iterations], "cpu_s": [cpu_s], "compute_s": compute_s}
    return {"marks_s": marks_s, **costs, "losses": loop.take_losses(), "before": before, "after": loop.stats()}


def sent_bytes(counters: str, iface: str) -> int:
    """Return what `iface` has sent so far, by the text of /proc/net/dev; 0 if there is no such interface."""
    for line in counters.splitlines():
        name, colon, rest = line.partition(":")
        if colon and name.strip() == iface:
            return int(rest.split()[8])
    return 0


def running_s(schedstat: str) -> float:
    """Return the seconds that a thread has run or was ready to run, by the text of its schedstat."""
    ran_ns, ready_ns, _ = schedstat.split()
    return (int(ran_ns) + int(ready_ns)) / 1e9


def _thread_running_s() -> float:
    return running_s(Path("/proc/thread-self/schedstat").read_text())


def layer_times(loop: TrainingLoop, rounds: int) -> list[list[float]]:
    """Return forward seconds, backward seconds and bytes of each module that owns parameters, in the order of their use.

    The times are coarse: a module's forward lasts until the next one begins; its backward lasts from the gradient before until
    its own is complete. They are medians of `rounds` steps. A parameter that two modules share counts where it is used first.
    """
    starts: dict[str, float] = {}
    ready: dict[str, float] = {}
    owners: dict[str, list[nn.Parameter]] = {}
    seen: set[int] = set()
    handles = []
    for name, module in loop.subject.model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        if own:
            owners[name] = own
            note = lambda *_, key=name: starts.setdefault(key, time.perf_counter()) and None  # noqa: E731
            handles.append(module.register_forward_pre_hook(note))
            handles += [p.register_post_accumulate_grad_hook(lambda _, key=name: _renew(ready, key)) for p in own]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in owners}
    for _ in range(rounds):
        starts.clear()
        ready.clear()
        loop.step()
        for name, pair in durations(starts, ready).items():
            samples[name].append(pair)
    for handle in handles:
        handle.remove()
    used = [name for name in starts if samples[name]]
    sizes = {name: float(sum(p.numel() * p.element_size() for p in owners[name])) for name in used}
    return [[*(sorted(each)[rounds // 2] for each in zip(*samples[name], strict=True)), sizes[name]] for name in used]


def _renew(moments: dict[str, float], key: str) -> None:
    moments.pop(key, None)
    moments[key] = time.perf_counter()


def durations(starts: dict[str, float], ready: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return (forward, backward) seconds of each module, from when forwards began and when gradients were complete."""
    forward, backward = list(starts.items()), list(ready.items())
    # The loss lies between the last forward and the first gradient: a third of that counts as forward, as everywhere.
    turn_s = forward[-1][1] + (backward[0][1] - forward[-1][1]) / 3
    ends = [at_s for _, at_s in forward[1:]] + [turn_s]
    forward_s = {name: end_s - at_s for (name, at_s), end_s in zip(forward, ends, strict=True)}
    begins = [turn_s] + [at_s for _, at_s in backward[:-1]]
    backward_s = {name: at_s - begin_s for (name, at_s), begin_s in zip(backward, begins, strict=True)}
    return {name: (forward_s[name], backward_s.get(name, 0.0)) for name in forward_s}
