"""The training programs of the acceptance tests, each written once: what stock DDP trains and what pliant trains.

`build(name)` makes model, optimizers and data from fixed seeds. `one_batch` is what a rank of DDP does with a batch, and
`one_step` is the body of a job's outer loop; both are made of the same parts, which do not know under whom they run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

SEED = 1234
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class Program:
    """What a training script has made before its loop."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    dataset: Any = field(default_factory=lambda: Images(50))
    loading: dict[str, Any] = field(default_factory=lambda: {"batch_size": 3})
    """Arguments of the loader, batch_size among them."""
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda *args: _classify(*args)
    wrapping: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 0.002})
    """Arguments that DDP and `job.wrap` share. About 2 KB: a few buckets for each of the small models."""
    seed: int | None = None
    """Replica r's generators are seeded with seed + r once the model is built; None: all replicas' alike."""
    clip: float | None = None
    accumulate: int = 1
    scheduler: Any = None
    scaler: Any = None
    sync_buffers: bool = True
    set_to_none: bool = True
    """How gradients are cleared."""
    clears_first: bool = False
    """Whether that happens before the forward, and not after the step."""
    look: Callable[[Program], float] | None = None
    """What the program looks at right after each step."""
    seen: float = 0.0
    """What it saw last: a factor of its next loss."""
    num_batches: int = 0
    """Batches that a rank of DDP has seen."""
    clears_every: int = 1
    """Gradients are cleared with every so many steps; until then each step adds to those of the step before."""
    passes: int = 1
    """Backwards of a step that are synchronised, each followed by an update."""
    is_passed_over: Callable[[int], bool] = lambda index: False
    """Which steps of an epoch are left by `continue`: their batches are loaded, and not used."""
    stops_at: int | None = None
    """The step of an epoch that is left by `break`."""
    is_skipped: Callable[[list[int]], bool] = lambda samples: False
    """Which batches contribute nothing; with DDP, zeros."""


Note = Callable[[float, list[int]], None]


def one_batch(
    program: Program, model: nn.Module, batch: Batch, no_sync: Callable[[], Any], note: Note, index: int = -1
) -> bool:
    """What a rank of DDP does with batch `index` of an epoch; returns whether a step is over."""
    if program.is_passed_over(index):
        return True
    number = program.num_batches
    program.num_batches += 1
    step, is_last = number // program.accumulate, (number + 1) % program.accumulate == 0
    if number % program.accumulate == 0:
        begin_step(program, step)
    for each in range(program.passes):
        with contextlib.nullcontext() if is_last else no_sync():
            loss = _loss(program, model, batch, note if each == 0 else note_nothing)
            if program.is_skipped(batch[0].tolist()):
                loss = 0.0 * torch.stack([parameter.sum() for parameter in model.parameters()]).sum()
            _backward(program, loss)
        if is_last:
            update(program, model)
    if is_last:
        end_step(program, step)
    return is_last


def one_step(program: Program, model: nn.Module, step: Any, no_sync: Callable[[], Any], note: Note) -> bool:
    """The body of a job's outer loop; returns whether it is to be left."""
    if step.index == program.stops_at:
        return True
    if program.is_passed_over(step.index):
        return False
    begin_step(program, step.number)
    for each in range(program.passes):
        for batch in step:
            one_turn(program, model, batch, no_sync, note if each == 0 else note_nothing, step.skip)
        update(program, model)
    end_step(program, step.number)
    return False


def one_turn(
    program: Program,
    model: nn.Module,
    batch: Batch,
    no_sync: Callable[[], Any],
    note: Note,
    skip: Callable[[], None],
) -> None:
    """The body of a job's inner loop. Its batch has the samples of all backwards that are accumulated."""
    size = program.loading["batch_size"] if program.accumulate > 1 else len(batch[0])  # policies may change it
    parts = list(zip(*(each.split(size) for each in batch), strict=True))
    for number, part in enumerate(parts, 1):
        with contextlib.nullcontext() if number == len(parts) else no_sync():
            loss = _loss(program, model, part, note)
            if program.is_skipped(part[0].tolist()):
                skip()
            else:
                _backward(program, loss)


def loading_of(program: Program) -> dict[str, Any]:
    """Arguments of a job's loader."""
    return {**program.loading, "batch_size": program.loading["batch_size"] * program.accumulate}


def note_nothing(loss: float, samples: list[int]) -> None:
    """Of a second pass."""


def _loss(program: Program, model: nn.Module, batch: Batch, note: Note) -> Tensor:
    """Notes the loss, and which samples it was computed from, before backward."""
    samples, inputs, targets = batch
    loss = program.loss(model, inputs, targets)
    if program.look is not None:
        loss = loss * (1 + 1e-3 * program.seen)
    note(loss.item(), samples.tolist())
    return loss


def _backward(program: Program, loss: Tensor) -> None:
    scaled = loss if program.scaler is None else program.scaler.scale(loss)
    scaled.backward()  # type: ignore[no-untyped-call]


def begin_step(program: Program, step: int) -> None:
    if program.clears_first and step % program.clears_every == 0:
        _clear(program)


def update(program: Program, model: nn.Module) -> None:
    """What follows the backwards of a pass."""
    scaler = program.scaler
    for optimizer in program.optimizers:
        if scaler is not None:
            scaler.unscale_(optimizer)
        if program.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler is not None:
        scaler.update()


def end_step(program: Program, step: int) -> None:
    if program.scheduler is not None:
        program.scheduler.step()
    if program.look is not None:
        program.seen = program.look(program)
    if not program.clears_first and (step + 1) % program.clears_every == 0:
        _clear(program)


def _clear(program: Program) -> None:
    for optimizer in program.optimizers:
        optimizer.zero_grad(set_to_none=program.set_to_none)


def digest(program: Program, buffers: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes of parameters, optimizer state, scheduler, scaler and these buffers."""
    digested = hashlib.sha256()
    for parameter in program.model.parameters():
        _digest_tensor(digested, parameter)
    for optimizer in program.optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            digested.update(repr(sorted(settings.items())).encode())
            for parameter in group["params"]:
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    digested.update(key.encode())
                    if isinstance(value, Tensor):
                        _digest_tensor(digested, value)
                    else:
                        digested.update(repr(value).encode())
    if program.scheduler is not None:
        digested.update(repr((program.scheduler.last_epoch, program.scheduler.get_last_lr())).encode())
    if program.scaler is not None:
        digested.update(repr(sorted(program.scaler.state_dict().items())).encode())
    for buffer in buffers:
        _digest_tensor(digested, buffer)
    return digested.hexdigest()


def _digest_tensor(digested: Any, tensor: Tensor) -> None:
    tensor = tensor.detach()
    digested.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digested.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def may_have_children() -> None:
    """In a process of a gang: allow loader processes, which Python denies to daemons, forked as in any script."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)


# --- data ---


class Images:
    """Small pictures, flipped, moved and made noisy by three random generators whenever they are read; or plain ones."""

    def __init__(self, length: int, *, plain: bool = False) -> None:
        self._plain = plain
        generator = torch.Generator().manual_seed(7)
        self._images = torch.rand(length, 1, 8, 8, generator=generator)
        self._labels = torch.randint(0, 10, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        image = self._images[index]
        if self._plain:
            return index, image, self._labels[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        down, right = np.random.randint(0, 3, size=2)
        padded = F.pad(image, (1, 1, 1, 1))
        image = padded[:, down : down + 8, right : right + 8]
        return index, image + 0.1 * torch.randn(image.shape), self._labels[index]


class Words:
    """Sequences of word numbers, each to be continued by one word; nothing random about reading them."""

    def __init__(self, length: int, num_words: int, num_steps: int) -> None:
        generator = torch.Generator().manual_seed(8)
        self._words = torch.randint(0, num_words, (length, num_steps + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self._words[index, :-1], self._words[index, 1:]


class ImageStream(IterableDataset[Any]):
    """Small pictures of a rank in an order that its generators and its number of epochs decide."""

    def __init__(self, rank: int, length: int = 12) -> None:
        self._images, self._rank, self._length, self.epochs = Images(50), rank, length, 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        info = get_worker_info()
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        order = [(self._rank * 16 + self.epochs + each) % 50 for each in range(worker, self._length, count)]
        random.shuffle(order)
        return PictureWalk(self._images, order)


class PictureWalk:
    """An iterator that draws from the global generators as it goes, with a state."""

    def __init__(self, images: Images, left: list[int]) -> None:
        self._images, self._left = images, left

    def __iter__(self) -> PictureWalk:
        return self

    def __next__(self) -> Any:
        if not self._left:
            raise StopIteration
        return self._images[self._left.pop(random.randrange(len(self._left)))]

    def state_dict(self) -> dict[str, Any]:
        return {"left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = list(state["left"])


class StatelessStream(ImageStream):
    """The same without a state."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


# --- models ---


class Centered(nn.Module):
    """Takes away a running mean: unlike BatchNorm in training, its output depends on its buffer."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs - self.mean
        with torch.no_grad():
            self.mean.lerp_(inputs.mean(0), 0.1)
        return outputs


def _conv_net(dropout: float = 0.25) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        Centered(256),
        nn.Dropout(dropout),
        nn.Linear(256, 10),
    )


class LanguageModel(nn.Module):
    def __init__(self, num_words: int = 40, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        self.lstm = nn.LSTM(width, 2 * width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(2 * width, num_words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, num_words: int = 40, width: int = 32, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, num_words, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class Backwards(nn.Module):
    """Uses its layers in the opposite of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 10), nn.Linear(32, 24), nn.Linear(64, 32)])

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1)
        for layer in reversed(self.layers):
            hidden = torch.tanh(layer(hidden))
        return hidden


class Branches(nn.Module):
    """Uses one branch or the other, as the input says, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 10) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(images.flatten(1)))
        return self.branches[int(images.sum() > images.numel() * 0.43)](hidden)  # type: ignore[no-any-return]


class Shifted(nn.Module):
    """Adds a parameter whose gradient shares its memory with the gradient that backward hands on to the layer below."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.shift = nn.Parameter(torch.zeros(4, 8))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(images.flatten(1)).mean(0)) + self.shift.view(-1)
        return self.head(hidden).expand(len(images), 10)  # type: ignore[no-any-return]


def _classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _continue_text(model: nn.Module, words: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())


# --- programs ---


def _conv(
    *,
    num_workers: int = 0,
    length: int = 50,
    batch_size: int = 3,
    change: Callable[[nn.Module], Any] = lambda model: None,
    plain: bool = False,
    **more: Any,
) -> Program:
    model = _conv_net()
    change(model)
    return Program(
        model=model,
        optimizers=[torch.optim.Adam(model.parameters(), lr=1e-3)],
        dataset=Images(length, plain=plain),
        loading={"batch_size": batch_size, "num_workers": num_workers},
        seed=SEED,
        **more,
    )


def _weighted() -> Program:
    """Each rank draws 12 of 50 pictures, with its own generators."""
    program = _conv()
    weights = torch.arange(1.0, 51.0)
    program.loading["sampler"] = torch.utils.data.WeightedRandomSampler(weights.tolist(), 12)
    return program


def _streaming(stream: Callable[[int], Any], num_workers: int) -> Program:
    program = _conv(num_workers=num_workers)
    program.dataset = stream
    return program


def _lstm() -> Program:
    model = LanguageModel()
    return Program(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)],
        dataset=Words(38, 40, 6),
        loading={"batch_size": 2, "drop_last": True},
        loss=_continue_text,
        wrapping={"bucket_cap_mb": 0.01},
    )


def _transformer(*, tied: bool = False, clip: float | None = 1.0) -> Program:
    model = Transformer(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Program(
        model=model,
        optimizers=[optimizer],
        dataset=Words(41, 40, 8),
        loading={"batch_size": 2},
        loss=_continue_text,
        wrapping={"bucket_cap_mb": 0.01},
        clip=clip,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=7),
    )


def _wide() -> Program:
    """With DDP's own bucket sizes: 1 MiB, then 25 MiB."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 10)
    )
    return Program(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
        dataset=Images(24),
        loading={"batch_size": 2},
        wrapping={},
        seed=SEED,
    )


def _scaled() -> Program:
    """With a gradient scaler whose scale is too large at first: steps are left out until it fits."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return Program(
        model=model,
        optimizers=[torch.optim.Adam(model.parameters(), lr=1e-2)],
        loss=lambda model, images, labels: 40 * _classify(model, images, labels),
        wrapping={"bucket_cap_mb": 0.004},
        clip=0.5,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2),
    )


def _two_optimizers() -> Program:
    program = _conv()
    layers = list(program.model)  # type: ignore[call-overload]
    early = [parameter for layer in layers[:5] for parameter in layer.parameters()]
    late = [parameter for layer in layers[5:] for parameter in layer.parameters()]
    program.optimizers = [torch.optim.Adam(early, lr=1e-3), torch.optim.SGD(late, lr=0.05, momentum=0.9)]
    return program


def _branches(**more: Any) -> Program:
    model = Branches()
    return Program(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
        wrapping={"find_unused_parameters": True, "bucket_cap_mb": 0.002},
        **more,
    )


def _shifted() -> Program:
    model = Shifted()
    return Program(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
        wrapping={"bucket_cap_mb": 0.0001},
    )


def _half() -> Program:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(torch.bfloat16)
    return Program(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
        loss=lambda model, images, labels: F.cross_entropy(model(images.bfloat16()).float(), labels),
    )


def _nesterov() -> Program:
    """Two groups with their own rates; what is registered last is used first; gradients are kept, and cleared first."""
    model = Backwards()
    groups = [
        {"params": model.layers[:2].parameters(), "weight_decay": 1e-2},
        {"params": model.layers[2].parameters(), "lr": 0.02},
    ]
    return Program(
        model=model,
        optimizers=[torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)],
        set_to_none=False,
        clears_first=True,
    )


def _looking(look: Callable[[Program], float]) -> Program:
    """Without buffers: those change between a step and the next forward."""
    program = _transformer(clip=None)
    program.look = look
    return program


def _saved(program: Program) -> float:
    """Of all that a checkpoint would have."""
    total = sum(float(value.double().abs().sum()) for value in program.model.state_dict().values())
    for optimizer in program.optimizers:
        for state in optimizer.state_dict()["state"].values():
            total += sum(float(value.double().abs().sum()) for value in state.values())
    return total


def _evaluated(program: Program) -> float:
    words = torch.arange(8).repeat(2, 1)
    program.model.eval()
    with torch.no_grad():
        loss = float(_continue_text(program.model, words, words.flip(1)))
    program.model.train()
    return loss


def _fade(program: Program) -> float:
    """Change a buffer in the body of the outer loop."""
    for module in program.model.modules():
        if isinstance(module, Centered):
            module.mean.mul_(0.5)
    return 0.0


def _dawdle(model: nn.Module) -> None:
    """Sleep now and then in backward, in every process at other moments."""
    chance = random.Random(os.getpid())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: time.sleep(chance.choice([0, 0, 0, 1e-4, 2e-3])))  # type: ignore[no-untyped-call]


def _channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _freeze(model: nn.Module) -> None:
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "conv": _conv,
    "conv-loaders": functools.partial(_conv, num_workers=2),
    "conv-long": functools.partial(_conv, length=200, batch_size=2),
    "lstm": _lstm,
    "transformer": _transformer,
    "wide": _wide,
    "accumulating": functools.partial(_conv, accumulate=2, clip=1.0, plain=True),
    "scaled": _scaled,
    "two-optimizers": _two_optimizers,
    "frozen": functools.partial(_conv, change=_freeze),
    "unused": _branches,
    "unused-accumulating": functools.partial(_branches, accumulate=2),
    "unused-kept": functools.partial(_branches, clears_every=2),
    "shifted": _shifted,
    "tied": functools.partial(_transformer, tied=True),
    "channels-last": functools.partial(_conv, change=_channels_last),
    "bfloat16": _half,
    "adamw": functools.partial(_transformer, clip=None),
    "accumulating-4": functools.partial(_conv, accumulate=4, length=72, batch_size=2, plain=True),
    "tied-unclipped": functools.partial(_transformer, tied=True, clip=None),
    "nesterov": _nesterov,
    "saving": functools.partial(_looking, _saved),
    "evaluating": functools.partial(_looking, _evaluated),
    "dawdling-long": functools.partial(_conv, length=200, batch_size=2, change=_dawdle),
    "dawdling": functools.partial(_conv, change=_dawdle),
    "own-buffers": functools.partial(_conv, sync_buffers=False),
    "fading": functools.partial(_conv, look=_fade),
    "kept-gradients": functools.partial(_conv, clears_every=2, set_to_none=False),
    "kept-and-cleared-first": functools.partial(_conv, clears_every=3, clears_first=True),
    "two-passes": functools.partial(_conv, passes=2),
    "skipping": functools.partial(_conv, is_skipped=lambda samples: min(samples) < 5),
    "leaving": functools.partial(_conv, is_passed_over=lambda index: index in (1, 3), stops_at=4),
}
OWN_DATA: Mapping[str, Callable[[], Program]] = {
    "weighted": _weighted,
    "stream-with-state": functools.partial(_streaming, lambda rank: ImageStream(rank), 0),
    "stream": functools.partial(_streaming, lambda rank: StatelessStream(rank), 2),
}
"""Programs in which each rank has a sampler or a stream of its own."""


def build(name: str) -> Program:
    """The program of that name, as every process of a job makes it."""
    seed_all(SEED)
    return {**PROGRAMS, **OWN_DATA}[name]()
