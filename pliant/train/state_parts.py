"""The parts of a job's state, each with a name that its user knows, and checksums of them.

The guard compares checksums between workers, and `pliant check` compares digests between runs. Both go through the same
list of parts, so both name the same things.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from pliant.train.context import RNG_BYTES
from pliant.train.replicas import Tensors

if TYPE_CHECKING:
    from pliant.train.job_state import JobState

LARGE_BYTES = 1 << 18
"""Smaller tensors on the CPU are put together before they are summed up."""
GROUP_BYTES = 1 << 26
"""At most about so many bytes are put together."""
SHA256 = "sha256:"
MAX_SHOWN = 60
"""Longer numbers and texts are given as digests."""
_ROW_WORDS = 64
_ROW_BYTES = 8 * _ROW_WORDS
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""An odd number with well mixed bits, as a signed integer of 64 bits."""


class StatePart(NamedTuple):
    """A part of the state: a tensor, a number or text, or bytes."""

    kind: str
    """parameter, buffer, optimizer, tracked, random or data."""
    name: str
    value: Any


def parts_of(state: JobState, buffers: Tensors) -> Iterator[StatePart]:
    """Yield all parts in a fixed order. `buffers` are those of replica 0."""
    names: dict[int, str] = {}
    for number, model in enumerate(state.models):
        prefix = f"model {number} " if len(state.models) > 1 else ""
        for name, parameter in model.named_parameters():
            names[id(parameter)] = prefix + name
            yield StatePart("parameter", prefix + name, parameter)
    for name, buffer in zip(state.buffers.names, buffers, strict=False):
        yield StatePart("buffer", name, buffer)
    for number, optimizer in enumerate(state.optimizers):
        which = type(optimizer).__name__ + (f" {number}" if len(state.optimizers) > 1 else "")
        yield from _optimizer_parts(which, optimizer, names)
    for name, thing in state.tracked.items():
        for path, value in _leaves(thing.state_dict(), ()):
            yield StatePart("tracked", " ".join((name, *path)), value)
    replicas, adaptation = state.replicas, state.adaptation
    if adaptation.is_active:
        yield StatePart("tracked", "the batch size that a policy has set", adaptation.batch_size)
        yield StatePart("tracked", "the learning rate factor that a policy has set", adaptation.learning_rate_factor)
    for replica, context in enumerate(replicas.contexts):
        data = context.to_bytes(replicas.num_loader_workers)
        yield StatePart("random", f"the random state of replica {replica}", data[:RNG_BYTES])
        yield StatePart("data", f"the data position of replica {replica}", data[RNG_BYTES:])


def _optimizer_parts(which: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[StatePart]:
    """Yield the parts of an optimizer, by the names of its parameters."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        for path, value in _leaves(optimizer.state_dict(), ()):
            yield StatePart("optimizer", f"{' '.join(path)} ({which})", value)
        return
    several = len(optimizer.param_groups) > 1
    for number, group in enumerate(optimizer.param_groups):
        of_group = f" of parameter group {number} ({which})" if several else f" ({which})"
        for key in sorted(group):
            if key != "params":
                yield from _value_parts(key, of_group, group[key])
        for place, parameter in enumerate(group["params"]):
            values = optimizer.state.get(parameter)
            if values:
                of_parameter = f" of {names.get(id(parameter), f'parameter {place}')} ({which})"
                for key in _sorted_keys(values):
                    yield from _value_parts(key, of_parameter, values[key])


def _value_parts(key: Any, of: str, value: Any) -> Iterator[StatePart]:
    """Yield the parts of one value of an optimizer's state."""
    if isinstance(value, torch.Tensor):
        yield StatePart("optimizer", f"{key}{of}", value)
        return
    for path, leaf in _leaves(value, (str(key),)):
        yield StatePart("optimizer", " ".join(path) + of, leaf)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield tensors, numbers and texts of a nested state, each with the keys that lead to it. Skip everything else."""
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str | bytes | complex):
        yield path, value.item() if isinstance(value, np.generic) else value
    elif isinstance(value, dict):
        for key in _sorted_keys(value):
            yield from _leaves(value[key], (*path, str(key)))
    elif isinstance(value, list | tuple | deque):
        for place, each in enumerate(value):
            yield from _leaves(each, (*path, str(place)))
    elif isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, value)))
    elif isinstance(value, np.generic):
        yield path, value.item()
    elif isinstance(value, np.ndarray):
        yield path, value.tobytes()
    elif isinstance(value, Mapping):
        yield from _leaves(dict(value), path)


def _sorted_keys(value: dict[Any, Any]) -> list[Any]:
    """Return the keys in a fixed order: two workers may have filled the same dictionary in different orders."""
    try:
        return sorted(value)
    except TypeError:  # keys of several types
        return sorted(value, key=lambda key: (type(key).__name__, str(key)))


# --- checksums ---


def checksum_of(parts: Iterable[StatePart]) -> int:
    """Return one checksum of 64 bits of all parts; never 0. Tensors are summed up where they are, and each device is
    asked once for its result."""
    data: list[bytes] = []
    devices: dict[torch.device, _DeviceSums] = {}
    with torch.no_grad():
        for _, _, value in parts:
            if isinstance(value, torch.Tensor):
                sums = devices.get(value.device)
                if sums is None:
                    sums = devices[value.device] = _DeviceSums(value.device)
                sums.add(value)
            else:
                found = _bytes_of(value)
                data += (b"%d:" % len(found), found)
        for sums in devices.values():
            data += (number.to_bytes(8, "little", signed=True) for number in sums.read())
    digest = hashlib.blake2b(b"".join(data), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class _DeviceSums:
    """Sums of the tensors on one device. Small ones are put together first: each sum costs some calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Calls are what a GPU waits for; a CPU waits for its memory.
        self._large_bytes = LARGE_BYTES if device.type == "cpu" else GROUP_BYTES
        self._group: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._group_bytes = 0
        self._sums: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        num_bytes = tensor.nbytes
        if num_bytes >= self._large_bytes:
            self._sums.append(_fold(tensor.contiguous().view(-1).view(torch.uint8)))
            return
        self._group[tensor.dtype].append(tensor if tensor.ndim == 1 else tensor.reshape(-1))
        self._group_bytes += num_bytes
        if self._group_bytes >= GROUP_BYTES:
            self._fold_group()

    def _fold_group(self) -> None:
        if self._group_bytes:
            together = [torch.cat(tensors).view(torch.uint8) for tensors in self._group.values()]
            together.append(_zeros(-self._group_bytes % _ROW_BYTES, self._device))
            self._sums.append(_fold(torch.cat(together)))
        self._group.clear()
        self._group_bytes = 0

    def read(self) -> list[int]:
        """Return the sums."""
        self._fold_group()
        return cast(list[int], torch.stack(self._sums).tolist()) if self._sums else []


def digests_of(parts: Iterable[StatePart]) -> dict[str, str]:
    """Return a digest of each part by its name: SHA-256, but a number or a short text stands for itself."""
    found = {}
    for part in parts:
        value = part.value
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous().view(-1)
            value = bytes(value.view(torch.uint8).numpy()) if value.numel() else b""
        if isinstance(value, bytes) or len(repr(value)) > MAX_SHOWN:
            found[part.name] = SHA256 + hashlib.sha256(_bytes_of(value)).hexdigest()
        else:
            found[part.name] = repr(value)
    return found


def _bytes_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else repr(value).encode()


def _fold(data: torch.Tensor) -> torch.Tensor:
    """Return a checksum of bytes, on their device.

    Their words of 64 bits fill the rows of a matrix. Each row is summed, and the sums are added with odd weights. These
    are sums of integers that wrap around: no order of summation changes them, and one flipped bit always does.
    """
    if data.storage_offset() % 8:
        data = data.clone()  # only aligned bytes can be read as words
    num_rows, rest = divmod(data.numel(), _ROW_BYTES)
    whole = data[: num_rows * _ROW_BYTES].view(torch.int64).view(num_rows, _ROW_WORDS)
    total = (whole.sum(1) * _weights(num_rows, data.device)).sum()
    if rest:
        last = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=data.device)
        last[:rest] = data[-rest:]
        total = total * 3 + (last.view(torch.int64) * _weights(_ROW_WORDS, data.device)).sum()
    return total


@functools.cache
def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


_known_weights: dict[torch.device, torch.Tensor] = {}


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return so many odd numbers."""
    known = _known_weights.get(device)
    if known is None or len(known) < count:
        room = max(count, 2 * len(known) if known is not None else 1 << 12)
        known = _known_weights[device] = torch.arange(1, 2 * room, 2, device=device) * _ODD
    return known[:count]
