"""Copies of a sampler or an iterable dataset, one for each replica, and the state that such a copy carries along.

A DDP rank has its own sampler and its own iterable dataset. Here each replica gets a copy of the object that the program
has given, or what the program's function of the replica returns. The state of a copy at the start of an epoch is what its
attributes hold: numbers, strings and random generators, also those of objects inside of it. Together with the random
state of the replica it is enough to build the copy again on another worker, and to draw from it what was drawn before.

What must be rebuilt without drawing again has a `state_dict`, by the conventions of torchdata's StatefulDataLoader.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import pickle
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset

from pliant.errors import ConfigError, TrainError
from pliant.train import state_tree

Record = dict[str, Any]
_PLAIN = (type(None), bool, int, float, str, bytes)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_WITHOUT_STATE = (type, FunctionType, MethodType, ModuleType, torch.Tensor, torch.nn.Module, np.ndarray)
_MAX_ITEMS = 64
"""Longer lists are data; shorter ones may hold samplers or generators."""
_MAX_OBJECTS = 10_000
"""Where the search for random generators ends."""
_MAX_TEXT = 1024
"""Longer strings are data."""
_SAMPLED_BYTES = 4096
"""How much of each tensor a checksum covers."""


def is_function_of_replica(thing: Any) -> bool:
    """Return whether the program has given a function of the replica, instead of an object to copy."""
    return callable(thing) and not isinstance(thing, type) and not hasattr(thing, "__iter__") and not is_map(thing)


def is_map(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset)


def copy_for(replica: int, thing: Any, shared: Any, what: str) -> Any:
    """Return the copy of `thing` for a replica. What refers to `shared`, the dataset of a sampler, still does.

    Raises:
        ConfigError: it cannot be copied.
    """
    if is_function_of_replica(thing):
        return thing(replica)
    try:
        return copy.deepcopy(thing, {id(shared): shared})
    except Exception as error:
        raise ConfigError(
            f"{what} {type(thing).__name__} cannot be copied for each replica ({type(error).__name__}: {error}): give a "
            f"function of the replica that makes it, such as {what}=lambda replica: {type(thing).__name__}(...)"
        ) from error


def set_epoch_of(thing: Any, epoch: int) -> None:
    """Call `set_epoch` of a sampler or dataset, and of the sampler inside of a batch sampler, where they have one."""
    for each in (thing, getattr(thing, "sampler", None)):
        if each is not None and hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


# --- the state of a copy ---


def save_attributes(thing: Any, shared: Any = None) -> Record:
    """Return the numbers, strings and generators' states among the attributes of `thing` and the objects inside of it."""
    return {path: _saved(value) for path, _, _, value in _attributes(thing, shared)}


def load_attributes(thing: Any, saved: Record, shared: Any = None) -> None:
    """Give `thing` the attributes that `save_attributes` returned."""
    for path, owner, name, value in list(_attributes(thing, shared)):
        if path not in saved:
            continue
        if isinstance(value, _GENERATORS):
            _load_generator(value, saved[path])
        elif isinstance(owner, dict):
            owner[name] = saved[path]
        else:
            object.__setattr__(owner, name, saved[path])


class GivenChanges:
    """What the program does to the object that it has given, or with `set_epoch`, is done to the replicas' copies."""

    def __init__(self, given: Any, shared: Any = None) -> None:
        """`given` is the program's own object, which is never iterated, or a function of the replica."""
        self._given = None if is_function_of_replica(given) else given
        self._shared = shared
        self._seen = self._attributes()
        self._changes: Record = {}
        self.epoch: int | None = None
        """The last call of `set_epoch`."""
        self._called: int | None = None
        self._epoch_now: int | None = None

    def set_epoch(self, epoch: int, copies: Sequence[Any]) -> None:
        self.epoch = self._called = epoch
        for each in copies:
            set_epoch_of(each, epoch)

    def begin_epoch(self, copies: Sequence[Any]) -> None:
        """Give the copies the numbers and strings that the program has changed in its object since the last epoch."""
        before, self._seen = self._seen, self._attributes()
        self._changes = {
            path: value
            for path, value in self._seen.items()
            if type(value) in _PLAIN and (path not in before or before[path] != value)
        }
        self._epoch_now, self._called = self._called, None
        for each in copies if self._changes else ():
            load_attributes(each, self._changes, self._shared)

    def apply_to(self, copy: Any) -> None:
        """Do to a copy what the program has done since the last epoch: the copy was built as that epoch has left it."""
        load_attributes(copy, self._changes, self._shared)
        if self._epoch_now is not None:
            set_epoch_of(copy, self._epoch_now)

    def _attributes(self) -> Record:
        return {} if self._given is None else save_attributes(self._given, self._shared)


def _attributes(thing: Any, shared: Any, prefix: str = "", seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the path, owner, name and value of everything that `save_attributes` saves."""
    seen = {id(shared)} if seen is None else seen
    seen.add(id(thing))
    items: list[tuple[Any, Any]] = []
    if isinstance(thing, dict):
        items = list(thing.items()) if len(thing) <= _MAX_ITEMS else []
    elif isinstance(thing, (list, tuple)):
        items = [each for each in enumerate(thing) if type(each[1]) not in _PLAIN] if len(thing) <= _MAX_ITEMS else []
    elif hasattr(thing, "__dict__"):
        items = list(vars(thing).items())
    for name, value in items:
        path = f"{prefix}{name}"
        if type(value) in _PLAIN:
            if not isinstance(value, (str, bytes)) or len(value) <= _MAX_TEXT:
                yield path, thing, name, value
        elif id(value) in seen or isinstance(value, _WITHOUT_STATE):
            continue
        elif isinstance(value, _GENERATORS):
            seen.add(id(value))
            yield path, thing, name, value
        else:
            yield from _attributes(value, shared, f"{path}.", seen)


def _saved(value: Any) -> Any:
    match value:
        case torch.Generator():
            return value.get_state()
        case random.Random():
            return value.getstate()
        case np.random.Generator():
            return value.bit_generator.state
        case np.random.RandomState():
            return value.get_state(legacy=False)
    return value


def _load_generator(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)


class OwnGenerators:
    """Notices a map-style dataset or a collate function that draws from random generators of its own.

    All replicas of a worker share them, but every DDP rank has its own, and so has each of its loader workers.
    """

    def __init__(self, **things: Any) -> None:
        self._things, self._is_new = things, True
        self._states = self._read()

    def check(self) -> None:
        """Raise TrainError if one of them has drawn since the last call."""
        if not self._states and not self._is_new:
            return
        before, self._states, self._is_new = self._states, self._read(), False
        for path, state in self._states.items():
            if before.get(path, state) != state:
                raise TrainError(
                    f"{path} is a random generator of the dataset's own, and a batch has drawn from it: the replicas of a worker "
                    "share it, so their batches would depend on the workers. Draw from the generators of torch, NumPy or Python "
                    "(torch.rand, np.random.rand, random.random), which each replica has for itself, or make one for each "
                    "sample: np.random.default_rng((seed, index))"
                )

    def _read(self) -> dict[str, bytes]:
        return {path: pickle.dumps(_saved(found)) for path, found in _generators(self._things).items()}


def _generators(things: Any) -> dict[str, Any]:
    """Return the random generators in `things`, in their attributes, and in what their functions refer to."""
    found: dict[str, Any] = {}
    shared = {id(torch.default_generator), id(random.random.__self__), id(np.random.rand.__self__)}  # type: ignore[attr-defined]
    left, seen = [("", things)], set(shared)
    while left and len(seen) < _MAX_OBJECTS:
        path, value = left.pop()
        if id(value) in seen or type(value) in _PLAIN:
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            found[path] = value
        else:
            left += [(f"{path}.{name}" if path else f"{name}", each) for name, each in _parts_of(value)]
    return found


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the named parts of a value in which a random generator may be."""
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, (list, tuple)):
        return list(enumerate(value)) if len(value) <= _MAX_ITEMS else []
    if isinstance(value, FunctionType):
        with contextlib.suppress(ValueError):  # a variable without a value
            own = inspect.getclosurevars(value)
            generators = [each for each in own.globals.items() if isinstance(each[1], _GENERATORS)]
            return [*own.nonlocals.items(), *generators]
        return []
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__)]
    if isinstance(value, _WITHOUT_STATE) or not hasattr(value, "__dict__"):
        return []
    methods = (getattr(type(value), name, None) for name in ("__getitem__", "__getitems__", "__call__"))
    return [*vars(value).items(), *((each.__name__, each) for each in methods if isinstance(each, FunctionType))]


def has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


# --- records ---


_LENGTH = struct.Struct("<I")


def pack_record(record: Record, what: str = "state") -> bytes:
    """Return a record as bytes, without pickle. Raises TrainError, which names `what`, if it holds other objects than
    tensors, arrays, numbers, strings, and containers of them."""
    skeleton, tensors = state_tree.flatten(record, what)
    hosts = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
    head = json.dumps([skeleton, state_tree.describe_tensors(hosts)]).encode()
    parts = [host.reshape(-1).view(torch.uint8).numpy().tobytes() for host in hosts]
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


def unpack_record(data: bytes) -> Record:
    """Return the record that `pack_record` was given."""
    (length,) = _LENGTH.unpack_from(data)
    skeleton, described = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    place, tensors = _LENGTH.size + length, []
    for name, shape in described:
        tensor = torch.empty(shape, dtype=state_tree.dtype_of(name))
        raw = bytearray(data[place : place + tensor.nbytes])
        if raw:
            tensor = torch.frombuffer(raw, dtype=tensor.dtype).reshape(shape)
        place += tensor.nbytes
        tensors.append(tensor)
    return cast(Record, state_tree.unflatten(skeleton, tensors))


# --- checksums ---


def checksum_of(data: Any, before: int) -> int:
    """Return `before`, continued with a checksum of a batch: of its plain values, and the beginnings of its tensors."""
    if isinstance(data, torch.Tensor):
        if data.device.type != "cpu" or data.is_sparse:
            return before
        few = data.detach().reshape(-1)[: max(1, _SAMPLED_BYTES // max(1, data.element_size()))].contiguous()
        return zlib.crc32(few.view(torch.uint8).numpy().tobytes(), zlib.crc32(repr(tuple(data.shape)).encode(), before))
    if isinstance(data, np.ndarray):
        few_items = data.reshape(-1)[:_SAMPLED_BYTES].tobytes() if data.dtype.kind != "O" else b""
        return zlib.crc32(few_items[:_SAMPLED_BYTES], before)
    if isinstance(data, dict):
        return checksum_of(list(data.items()), before)
    if isinstance(data, (list, tuple)):
        for each in data:
            before = checksum_of(each, before)
        return before
    return zlib.crc32(repr(data).encode(), before) if type(data) in _PLAIN else before


def drifted(what: str, replica: int, count: int, remedy: str) -> TrainError:
    """Return the error for a copy that did not draw again what it had drawn before."""
    return TrainError(
        f"{what} of replica {replica} cannot be continued here: what it gave in the first {count} batches of the epoch "
        f"came out different when it was repeated. It depends on something that does not repeat, or that this worker does "
        f"not have. {remedy}"
    )
