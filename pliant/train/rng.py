"""The random state of one replica: python's, numpy's and torch's global generators, as one value.

A worker hosts several replicas in turn and gives each the generators that it would have had in a process
of its own, so `capture` and `restore` run at every switch and must cost microseconds. Whoever wants
another way to draw numbers (a `Generator` object of the user's) must carry it himself.

The own functions of python and numpy walk through the state word by word, which would be half of a switch. The words
are therefore copied where they lie: numpy's bit generator publishes its address; in python's `Random`, and for the
spare normal deviate in numpy's `RandomState`, the place is looked for once, with values that we put there. Where it is
not found, their own functions are used.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pliant.errors import ConfigError, TrainError

_TWISTER_WORDS = 624
_PYTHON = struct.Struct(f"<{_TWISTER_WORDS + 1}I")
"""The words of a Mersenne twister and the position in them."""
_PYTHON_VERSION = 3
_POSITION = 4
"""Bytes of the position, which python keeps before its words, and numpy behind them."""
_NUMPY_BYTES = (_TWISTER_WORDS + 1) * 4
"""As many words, and the position."""
_TORCH_BYTES = 5056
_CUDA_BYTES = 16
_RECORD = struct.Struct(f"<{_PYTHON.size}s?d{_NUMPY_BYTES}s?d{_TORCH_BYTES}s?{_CUDA_BYTES}s")
_SPARE = struct.Struct("ixxxxd")
"""Whether numpy has a normal deviate to spare, and which: its `Box-Muller` makes two at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """All that the next random numbers of a process depend on."""

    python: tuple[bytes, float | None]
    """The twister's words and position, and the spare normal deviate, if there is one."""
    numpy: tuple[bytes, bool, float]
    """The twister's words and position, whether a normal deviate is spare, and which."""
    torch: Tensor
    """As `torch.get_rng_state` gives it."""
    cuda: Tensor | None = None
    """The state of one device's generator."""

    def to_bytes(self) -> bytes:
        """These states in `SIZE` bytes."""
        words, gauss = self.python
        if self.torch.numel() != _TORCH_BYTES:
            raise TrainError(f"a random state of {self.torch.numel()} bytes: this version of torch is not supported")
        words_np, spare, deviate = self.numpy
        cuda = b"" if self.cuda is None else _tensor_bytes(self.cuda)
        if len(cuda) not in (0, _CUDA_BYTES):
            raise TrainError(f"a CUDA random state of {len(cuda)} bytes: this version of torch is not supported")
        return _RECORD.pack(
            words,
            gauss is not None,
            gauss or 0.0,
            words_np,
            spare,
            deviate,
            _tensor_bytes(self.torch),
            self.cuda is not None,
            cuda,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> RngState:
        """What `to_bytes` wrote.

        Raises:
            ConfigError: `data` has another size, or is damaged.
        """
        if len(data) != SIZE:
            raise ConfigError(f"{len(data)} bytes are no random state, which has {SIZE}: written by another version?")
        words, has_gauss, gauss, words_np, spare, deviate, torch_state, has_cuda, cuda = _RECORD.unpack(data)
        for twister in (words, words_np):
            # The generators take it as it is, and would read beyond their memory.
            if not 0 <= (position := int.from_bytes(twister[-_POSITION:], "little", signed=True)) <= _TWISTER_WORDS:
                raise ConfigError(f"a random state at word {position} of {_TWISTER_WORDS}: its bytes are damaged")
        return cls(
            python=(words, gauss if has_gauss else None),
            numpy=(words_np, spare, deviate),
            torch=_bytes_tensor(torch_state),
            cuda=_bytes_tensor(cuda) if has_cuda else None,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RngState) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())


SIZE = _RECORD.size
"""Bytes of any random state."""


def capture(device: torch.device | None = None) -> RngState:
    """The state of this process's generators, with that of the CUDA `device` if one is given."""
    cuda = torch.cuda.get_rng_state(device) if device is not None and _is_cuda(device) else None
    return RngState(_python().get(), _numpy().get(), torch.default_generator.get_state(), cuda)


def restore(state: RngState, device: torch.device | None = None) -> None:
    """Give this process's generators that state; a CUDA state goes to `device`, or else to the current one."""
    _python().set(state.python)
    _numpy().set(state.numpy)
    torch.default_generator.set_state(state.torch)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, torch.device("cuda") if device is None else device)


def seeded(seed: int, device: torch.device | None = None) -> RngState:
    """The state after seeding all generators with `seed`; theirs stays as it is."""
    present = capture(device)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    state = capture(device)
    restore(present, device)
    return state


@functools.cache  # torch writes a device's type to a stream at every call, which is seen in a switch
def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _tensor_bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _PythonGlobal:
    """python's global generator, read and written in place."""

    def __init__(self) -> None:
        # The functions of `random` are bound methods of the one global Random.
        self._random: Any = random.getstate.__self__  # type: ignore[attr-defined]
        version = random.getstate()[0]
        if version != _PYTHON_VERSION:
            raise TrainError(f"python's random state has form {version}: this version of python is not supported")
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
        """The address of position and words in the Random, or None if this python keeps them otherwise."""
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
    """numpy's global generator, read and written in place."""

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
        """The address of the spare deviate in the RandomState, or None if this numpy keeps it elsewhere."""
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
