"""The context of a replica: everything its next turn depends on, besides model and optimizer.

That is its random state, its position in the data, and buffers of its own. Model and optimizer are the same on all replicas
at a step's boundary and exist once per worker. A context is restored before the replica's turn, captured after its
backward, and small enough to be copied to all other workers with every step.

`capture_rng` and `restore_rng` run at every switch and must cost microseconds. Python's and NumPy's own functions walk
through the state word by word, so the words are copied where they lie: NumPy's bit generator publishes its address; the
place in Python's `Random`, and of the spare normal deviate in NumPy's `RandomState`, is searched once, with values that we
put there. If it is not found, their own functions are used.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pliant.errors import ConfigError, TrainError

if TYPE_CHECKING:
    from pliant.train.sampling import LoaderOptions


_TWISTER_WORDS = 624
_PYTHON = struct.Struct(f"<{_TWISTER_WORDS + 1}I")
"""The words of a Mersenne twister and the position in them."""
_PYTHON_VERSION = 3
_POSITION = 4
"""The size of the position, which Python keeps before the words and NumPy after them."""
_NUMPY_BYTES = (_TWISTER_WORDS + 1) * 4
"""The words and the position."""
_TORCH_BYTES = 5056
_CUDA_BYTES = 16
_RECORD = struct.Struct(f"<{_PYTHON.size}s?d{_NUMPY_BYTES}s?d{_TORCH_BYTES}s?{_CUDA_BYTES}s")
_SPARE = struct.Struct("ixxxxd")
"""Whether NumPy has a spare normal deviate, and which. Its Box-Muller makes two at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """Everything that the next random numbers of a process depend on."""

    python: tuple[bytes, float | None]
    """The twister's words and position, and the spare normal deviate if there is one."""
    numpy: tuple[bytes, bool, float]
    """The twister's words and position, whether there is a spare normal deviate, and which."""
    torch: Tensor
    """As returned by `torch.get_rng_state`."""
    cuda: Tensor | None = None
    """The state of one device's generator."""

    def to_bytes(self) -> bytes:
        """Return the states in `RNG_BYTES` bytes."""
        words, gauss = self.python
        words_np, spare, deviate = self.numpy
        own = self.torch.numpy().tobytes()
        cuda = b"" if self.cuda is None else self.cuda.numpy().tobytes()
        if len(own) != _TORCH_BYTES or len(cuda) not in (0, _CUDA_BYTES):
            raise TrainError(
                f"torch {torch.__version__} has random states of {len(own)} and {len(cuda)} bytes, which pliant does not know: "
                "use a tested version (constraints.txt)"
            )
        return _RECORD.pack(
            words,
            gauss is not None,
            gauss or 0.0,
            words_np,
            spare,
            deviate,
            own,
            self.cuda is not None,
            cuda,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> RngState:
        """Read what `to_bytes` returned.

        Raises:
            ConfigError: `data` has another size, or is damaged.
        """
        if len(data) != RNG_BYTES:
            raise ConfigError(
                f"{len(data)} bytes are no random state, which has {RNG_BYTES}: use the pliant that wrote them"
            )
        words, has_gauss, gauss, words_np, spare, deviate, torch_state, has_cuda, cuda = _RECORD.unpack(data)
        for twister in (words, words_np):
            # The generators take the position unchecked, and would read beyond their memory.
            if not 0 <= (position := int.from_bytes(twister[-_POSITION:], "little", signed=True)) <= _TWISTER_WORDS:
                raise ConfigError(f"a random state at word {position} of {_TWISTER_WORDS}: its bytes are damaged")
        return cls(
            python=(words, gauss if has_gauss else None),
            numpy=(words_np, spare, deviate),
            torch=_bytes_tensor(torch_state),
            cuda=_bytes_tensor(cuda) if has_cuda else None,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RngState) or (self.cuda is None) != (other.cuda is None):
            return False
        same = self.python == other.python and self.numpy == other.numpy and torch.equal(self.torch, other.torch)
        return same and (self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda))

    def __hash__(self) -> int:
        return hash(self.to_bytes())


RNG_BYTES = _RECORD.size
"""The size of every random state in bytes."""


def capture_rng(device: torch.device | None = None) -> RngState:
    """Return the state of this process's generators, with that of the CUDA `device` if one is given."""
    cuda = torch.cuda.get_rng_state(device) if device is not None and _is_cuda(device) else None
    return RngState(_python().get(), _numpy().get(), torch.default_generator.get_state(), cuda)


def restore_rng(state: RngState, device: torch.device | None = None) -> None:
    """Give this process's generators that state; a CUDA state goes to `device`, or to the current one."""
    _python().set(state.python)
    _numpy().set(state.numpy)
    torch.default_generator.set_state(state.torch)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, torch.device("cuda") if device is None else device)


def seeded_rng(seed: int, device: torch.device | None = None) -> RngState:
    """Return the state after seeding all generators with `seed`; theirs stays as it is."""
    present = capture_rng(device)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    state = capture_rng(device)
    restore_rng(present, device)
    return state


@functools.cache  # torch formats the type of a device at every call, which is noticeable in a switch
def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _PythonGlobal:
    """Python's global generator, read and written in place."""

    def __init__(self) -> None:
        # The functions of `random` are bound methods of the one global Random.
        self._random: Any = random.getstate.__self__  # type: ignore[attr-defined]
        version = random.getstate()[0]
        if version != _PYTHON_VERSION:
            raise TrainError(
                f"Python's random state has version {version}, not {_PYTHON_VERSION}: use an older Python, such as 3.11"
            )
        place = self._find_words()
        self._memory: Any = None if place is None else (ctypes.c_char * _PYTHON.size).from_address(place)

    def get(self) -> tuple[bytes, float | None]:
        if self._memory is None:
            _, words, gauss = random.getstate()
            return _PYTHON.pack(*words), gauss
        raw = self._memory.raw
        return raw[_POSITION:] + raw[:_POSITION], self._random.gauss_next

    def set(self, state: tuple[bytes, float | None]) -> None:
        words, gauss = state
        if self._memory is None:
            random.setstate((_PYTHON_VERSION, _PYTHON.unpack(words), gauss))
            return
        self._memory.raw = words[-_POSITION:] + words[:-_POSITION]
        self._random.gauss_next = gauss

    def _find_words(self) -> int | None:
        """Return the address of position and words in the Random; None if this Python keeps them elsewhere."""
        before = random.getstate()
        memory = (ctypes.c_char * _random.Random.__basicsize__).from_address(id(self._random))
        places = set(range(0, len(memory) - _PYTHON.size + 1, 4))
        try:
            for seed in (1, 2):
                random.seed(seed)
                random.random()  # another position
                words = _PYTHON.pack(*random.getstate()[1])
                there, raw = words[-_POSITION:] + words[:-_POSITION], memory.raw
                places = {at for at in places if raw[at : at + _PYTHON.size] == there}
        finally:
            random.setstate(before)
        return id(self._random) + places.pop() if len(places) == 1 else None


@functools.cache
def _python() -> _PythonGlobal:
    return _PythonGlobal()


class _NumpyGlobal:
    """NumPy's global generator, read and written in place."""

    def __init__(self) -> None:
        # The functions of `np.random` are bound methods of the one global RandomState.
        self._state: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
        self._generator: Any = None
        self._words: Any = None
        place = self._find_spare()
        self._spare: Any = None if place is None else (ctypes.c_char * _SPARE.size).from_address(place)

    def get(self) -> tuple[bytes, bool, float]:
        self._attach()
        if self._spare is None:
            _, keys, position, spare, deviate = self._state.get_state()
            return keys.tobytes() + struct.pack("i", position), bool(spare), deviate
        spare, deviate = _SPARE.unpack(self._spare.raw)
        return self._words.raw, bool(spare), deviate

    def set(self, state: tuple[bytes, bool, float]) -> None:
        words, spare, deviate = state
        self._attach()
        if self._spare is None:
            keys = np.frombuffer(words, dtype=np.uint32, count=_TWISTER_WORDS)
            self._state.set_state(
                ("MT19937", keys, struct.unpack_from("i", words, _TWISTER_WORDS * 4)[0], int(spare), deviate)
            )
            return
        self._words.raw = words
        self._spare.raw = _SPARE.pack(spare, deviate)

    def _attach(self) -> None:
        """Follow `np.random.set_bit_generator`."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is self._generator:
            return
        if not isinstance(generator, np.random.MT19937):
            raise TrainError(
                f"numpy's global generator is a {type(generator).__name__}, but only MT19937, its default, can be "
                "switched between replicas: drop the call of np.random.set_bit_generator"
            )
        self._generator = generator
        self._words = (ctypes.c_char * _NUMPY_BYTES).from_address(generator.ctypes.state_address)

    def _find_spare(self) -> int | None:
        """Return the address of the spare deviate in the RandomState; None if this NumPy keeps it elsewhere."""
        self._attach()
        before = self._state.get_state()
        memory = (ctypes.c_char * type(self._state).__basicsize__).from_address(id(self._state))
        places = set(range(0, len(memory) - _SPARE.size + 1, 4))
        try:
            for spare, deviate in ((1, 0.8414709848), (0, 0.0), (1, -1.1752011936)):
                self._state.set_state((*before[:3], spare, deviate))
                raw = memory.raw
                places = {at for at in places if _SPARE.unpack_from(raw, at) == (spare, deviate)}
            _, keys, position, *_ = before
            if self._words.raw != keys.tobytes() + struct.pack("i", position):
                return None
        finally:
            self._state.set_state(before)
        return id(self._state) + places.pop() if len(places) == 1 else None


@functools.cache
def _numpy() -> _NumpyGlobal:
    return _NumpyGlobal()


# --- the position in the data ---


_POSITION_HEADER = struct.Struct("<qqq?qIqqI")
_FIRST_HEADER = struct.Struct("<qqq?q")
"""The header in version 0.1, which had no own data."""
_WORKER_STATE = struct.Struct(f"<?{RNG_BYTES}s")


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Where one replica stands in its data."""

    epoch: int = 0
    batch: int = 0
    """The next batch to take."""
    consumed: int = 0
    """Samples of the epoch that were used before it was dealt to the present number of replicas."""
    base_seed: int | None = None
    """The seed of the loader workers' random states; None if it is not drawn yet."""
    workers: tuple[bytes | None, ...] = ()
    """The random state (`RngState.to_bytes`) of each loader worker after its last taken batch; None: as seeded."""
    checksum: int = 0
    """Own data: a checksum of the indices drawn or the batches taken in the epoch. Whoever builds the replica's copy
    again must come to the same."""
    order: int | None = None
    """Dealt data: the epoch whose order of samples is used, where the program has set one (`set_epoch`). With `left`, that
    of the epoch that is over."""
    left: int | None = None
    """The number of batches that were taken in the last epoch, where this one depends on it: with persistent loader workers,
    which go on from there, and with own data, where `extra` tells about that epoch."""
    seeds: int = 0
    """How many base seeds were drawn from a `generator` of the loader's own."""
    extra: bytes = b""
    """Own data: the state from which the replica's sampler or stream can be built again (a record of
    `replica_copies`). It does not travel in `to_bytes`, because its size varies."""

    def next_epoch(self, options: LoaderOptions) -> DataPosition:
        """Return the beginning of the epoch after this one."""
        kept = options.persistent_workers
        base_seed, workers = (self.base_seed, self.workers) if kept else (None, ())
        begin = DataPosition(self.epoch + 1, base_seed=base_seed, workers=workers, seeds=self.seeds)
        left = self.batch if self.left is None else self.left
        if options.is_dealt and base_seed is not None:
            order = self.epoch if self.order is None else self.order
            return replace(begin, left=left, order=order)
        if not self.extra or (options.stream and options.num_workers and not kept):
            return begin
        return replace(begin, checksum=self.checksum, left=left, extra=self.extra)

    def is_same(self, other: DataPosition, num_workers: int) -> bool:
        """Return whether the other position is the same, whether or not loader workers without a state are listed."""
        ours, theirs = (fill_states(each.workers, num_workers) for each in (self, other))
        return ours == theirs and replace(self, workers=()) == replace(other, workers=())

    @staticmethod
    def size(num_workers: int) -> int:
        """Return the size in bytes of a position with this many loader workers."""
        return _POSITION_HEADER.size + num_workers * _WORKER_STATE.size

    def to_bytes(self, num_workers: int) -> bytes:
        drawn = self.base_seed is not None
        order, left = (-1 if number is None else number for number in (self.order, self.left))
        begun = self.epoch, self.batch, self.consumed, drawn, self.base_seed or 0
        parts = [_POSITION_HEADER.pack(*begun, self.checksum, order, left, self.seeds)]
        for state in fill_states(self.workers, num_workers):
            parts.append(_WORKER_STATE.pack(state is not None, state or b""))
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> DataPosition:
        """Read what `to_bytes` returned.

        Raises:
            ConfigError: `data` has a size that no position has.
        """
        num_workers, rest = divmod(len(data) - _POSITION_HEADER.size, _WORKER_STATE.size)
        if rest or num_workers < 0:
            raise ConfigError(f"{len(data)} bytes are no stream position: use the pliant that wrote them")
        epoch, batch, consumed, drawn, base_seed, checksum, order, left, seeds = _POSITION_HEADER.unpack_from(data)
        states = _WORKER_STATE.iter_unpack(data[_POSITION_HEADER.size :])
        workers = tuple(state if known else None for known, state in states)
        order, left = (None if number < 0 else number for number in (order, left))
        return cls(epoch, batch, consumed, base_seed if drawn else None, workers, checksum, order, left, seeds)


def fill_states(workers: Sequence[bytes | None], num_workers: int) -> list[bytes | None]:
    """Return the states of all loader workers; missing ones are as seeded."""
    if len(workers) > num_workers:
        raise ConfigError(
            f"num_workers={num_workers}, but the job began this epoch with {len(workers)} loader processes: use "
            f"num_workers={len(workers)}, as in the run that wrote the checkpoint"
        )
    return [*workers, *[None] * (num_workers - len(workers))]


# --- the context ---


def upgrade_context(data: bytes) -> bytes:
    """Return the context of a checkpoint of version 0.1 as `ReplicaContext.to_bytes` writes it now."""
    cut = RNG_BYTES + _FIRST_HEADER.size
    epoch, _, _, is_drawn, _ = _FIRST_HEADER.unpack_from(data, RNG_BYTES)
    fresh = DataPosition(seeds=epoch + is_drawn).to_bytes(0)[_FIRST_HEADER.size :]
    return data[:cut] + fresh + data[cut:]


class ReplicaContext:
    """The random state, data position and buffers of a replica. A context that came as bytes is parsed when it is
    needed: most are only kept for other workers."""

    __slots__ = ("_data", "_extra", "_num_loaders", "_parts")

    def __init__(self, random: RngState, stream: DataPosition, buffers: bytes = b"") -> None:
        self._parts: tuple[RngState, DataPosition, bytes] | None = (random, stream, buffers)
        self._extra = stream.extra
        self._data: bytes | None = None
        self._num_loaders = 0

    @property
    def random(self) -> RngState:
        return self._read()[0]

    @property
    def stream(self) -> DataPosition:
        """Where its data stand."""
        return self._read()[1]

    @property
    def buffers(self) -> bytes:
        """Its own buffers with `sync_buffers=False`; else all replicas begin with those of replica 0."""
        return self._read()[2]

    @property
    def extra(self) -> bytes:
        """The part of its data position that is not in `to_bytes`."""
        return self._extra

    def at(self, stream: DataPosition) -> ReplicaContext:
        """Return the same context at another position in its data."""
        return ReplicaContext(self.random, stream, self.buffers)

    def with_random(self, random: RngState) -> ReplicaContext:
        """Return the same context with another random state."""
        return ReplicaContext(random, self.stream, self.buffers)

    def _read(self) -> tuple[RngState, DataPosition, bytes]:
        if self._parts is None:
            assert self._data is not None, "one or the other is there"
            data, cut = self._data, RNG_BYTES + DataPosition.size(self._num_loaders)
            random, stream = RngState.from_bytes(data[:RNG_BYTES]), DataPosition.from_bytes(data[RNG_BYTES:cut])
            self._parts = random, replace(stream, extra=self._extra), data[cut:]
        return self._parts

    def to_bytes(self, num_loader_workers: int) -> bytes:
        if self._data is None or self._num_loaders != num_loader_workers:
            random, stream, buffers = self._read()
            self._data = random.to_bytes() + stream.to_bytes(num_loader_workers) + buffers
            self._num_loaders = num_loader_workers
        return self._data

    @classmethod
    def from_bytes(cls, data: bytes, num_loader_workers: int, extra: bytes = b"") -> ReplicaContext:
        context = cls.__new__(cls)
        context._data, context._num_loaders, context._parts, context._extra = data, num_loader_workers, None, extra
        return context
