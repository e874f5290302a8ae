"""Nested state as a JSON skeleton and a list of tensors, and back, without pickle.

State dicts of models, optimizers, schedulers and scalers are trees of containers and plain values with tensors as leaves.
`flatten` takes the tensors out in a fixed order and writes the rest as JSON. So state can be sent between workers and
kept in files, and nothing that is read can run code. Anything that is neither a tensor nor plain is refused, with the
path to it.

In the JSON text None, bool, int, finite float, str and list stand for themselves. Everything else is an object with one
key, the tag of its kind.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from pliant.errors import CheckpointError, TrainError

MAX_DEPTH = 100
"""The most nested containers; deeper nesting is taken for a mistake."""
LARGE_ARRAY_BYTES = 1 << 14
"""A NumPy array of this size or more becomes a tensor; a smaller one (such as a generator's state) is in the text."""
REMEDY = (
    "use only tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of them, and rebuild everything else "
    "in the program"
)
_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple, Counter, OrderedDict)
}
_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def describe_tensors(tensors: Iterable[torch.Tensor]) -> list[tuple[str, list[int]]]:
    """Return the type and shape of each tensor, as JSON can hold them."""
    return [(dtype_name(each.dtype), list(each.shape)) for each in tensors]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    try:
        return _DTYPES[name]
    except KeyError:
        raise CheckpointError(
            f"this torch ({torch.__version__}) has no type {name!r}: use the torch it came from"
        ) from None


def flatten(tree: object, what: str = "state") -> tuple[str, list[torch.Tensor]]:
    """Return the skeleton of `tree`, and its tensors as references to the same memory.

    A dense tensor in another memory order (channels_last) is listed as a contiguous permutation of itself, and tensors
    that share all memory are listed once; `unflatten` restores both. A tensor with gaps or overlaps is listed as it is.
    Raises TrainError for values that cannot be written; `what` is the name of the root in the message.
    """
    flattener = _Flattener()
    return json.dumps(flattener.encode(tree, what, 0), separators=(",", ":")), flattener.tensors


def unflatten(skeleton: str, tensors: Sequence[torch.Tensor]) -> object:
    """Return the tree again, with these tensors (not copies) as its leaves. OrderedDicts come back as dicts, except a
    module's state_dict with the versions of its submodules. Raises CheckpointError if the two do not fit."""
    try:
        return _decode(json.loads(skeleton), tensors)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"the structure of the state does not match its {len(tensors)} tensors ({type(error).__name__}: {error}): "
            "it is damaged, or was written by another version of pliant"
        ) from None


Place = tuple[str, tuple[int, ...]]
"""The name of a tensor's first place in a tree, and the order of its dimensions there (see `flatten`); empty if it is
contiguous."""


def places(skeleton: str) -> dict[int, Place]:
    """Return the place of each tensor, by its number."""
    found: dict[int, Place] = {}
    _name(json.loads(skeleton), "", found)
    return found


def tensor_names(skeleton: str, num_tensors: int) -> list[str]:
    """Return a unique name for each tensor, by its first place: `model.0.weight`, `optimizer.state.3.exp_avg`."""
    names = {index: name for index, (name, _) in places(skeleton).items()}
    taken: Counter[str] = Counter(names.values())
    found = [names.get(index, "") for index in range(num_tensors)]
    return [name if taken[name] == 1 and name else f"{name}#{index}" for index, name in enumerate(found)]


def _name(node: object, path: str, names: dict[int, Place]) -> None:
    match node:
        case {"t": int(index), **rest} | {"bigarray": [_, _, int(index)], **rest}:
            order = rest.get("order", ())
            names.setdefault(index, (path, tuple(order) if isinstance(order, list) else ()))
        case {"d": dict(items)} | {"defaultdict": [_, dict(items)]}:
            for key, item in items.items():
                _name(item, f"{path}.{key}" if path else key, names)
        case {"D": list(pairs)} | {"defaultdict": [_, list(pairs)]}:
            for key, item in pairs:
                _name(item, f"{path}.{key}" if path else f"{key}", names)
        case {"module": [state, _]}:
            _name(state, path, names)
        case list(items) | {"tuple": list(items)} | {"set": list(items)} | {"deque": [list(items), _]}:
            for index, item in enumerate(items):
                _name(item, f"{path}.{index}" if path else f"{index}", names)


class _Flattener:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._listed: dict[tuple[object, ...], int] = {}

    def encode(self, value: object, path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise TrainError(f"{path[:200]}...: nested more than {MAX_DEPTH} deep, or containing itself: {REMEDY}")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        # Exact types: np.float64 is a float, an IntEnum an int, and a named tuple a tuple, and none would come back as
        # itself.
        kind = type(value)
        if value is None or kind is bool or kind is int:
            return value
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return self._sequence(value, path, depth)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        encoded = _scalar(value)
        if encoded is None:
            raise TrainError(f"{path} is {_described(value)}, which cannot be kept without pickle: {REMEDY}")
        return encoded

    def _dict(self, value: dict[object, object], path: str, depth: int) -> object:
        kind = type(value)
        if kind in (dict, OrderedDict) and all(type(key) is str and _is_text(key) for key in value):
            pairs: object = {key: self.encode(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
            tag = "d"
        else:
            pairs = [
                [self._key(key, path), self.encode(item, f"{path}[{key!r}]", depth + 1)] for key, item in value.items()
            ]
            tag = "D"
        if kind is dict:
            return {tag: pairs}
        if kind is OrderedDict:
            versions = getattr(value, "_metadata", None)
            return (
                {tag: pairs}
                if versions is None
                else {"module": [{tag: pairs}, self.encode(versions, f"{path}._metadata", depth + 1)]}
            )
        if kind is Counter:
            return {"counter": pairs}
        if isinstance(value, defaultdict) and kind is defaultdict:
            factory = value.default_factory
            name = getattr(factory, "__name__", None)
            if factory is None or (name in _FACTORIES and _FACTORIES[name] is factory):
                return {"defaultdict": [name, pairs]}
            raise TrainError(
                f"{path} is a defaultdict whose default is made by {factory!r}, which cannot be kept without pickle: "
                f"use one of {', '.join(_FACTORIES)}"
            )
        raise TrainError(
            f"{path} is {_described(value)}, a dict of another kind, which would not come back: use a dict"
        )

    def _key(self, key: object, path: str) -> object:
        listed = len(self.tensors)
        encoded = self.encode(key, f"the key {key!r} of {path}", MAX_DEPTH - 10)
        if len(self.tensors) > listed:
            raise TrainError(f"a key of {path} is or holds a tensor: use its name or its index as the key")
        return encoded

    def _sequence(self, value: Iterable[object], path: str, depth: int) -> object:
        kind = type(value)
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if kind not in (list, tuple, set, frozenset, deque):
            raise TrainError(
                f"{path} is {_described(value)}, which would come back as another kind: use a list or a tuple"
            )
        items = [self.encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            items.sort(key=json.dumps)  # so that equal sets have equal skeletons
        if kind is list:
            return items
        return {"deque": [items, value.maxlen]} if isinstance(value, deque) else {kind.__name__: items}

    def _array(self, value: np.ndarray, path: str) -> object:
        if type(value) is not np.ndarray or value.dtype.kind not in "biufcSUmM":
            raise TrainError(f"{path} is a NumPy array of {value.dtype}, which cannot be kept without pickle: {REMEDY}")
        if value.nbytes < LARGE_ARRAY_BYTES:
            data = base64.b64encode(value.tobytes()).decode()
            return {"array": [value.dtype.str, list(value.shape), data]}
        raw = (
            torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            if not value.flags.writeable
            else torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        )
        self.tensors.append(raw)
        return {"bigarray": [value.dtype.str, list(value.shape), len(self.tensors) - 1]}

    def _tensor(self, value: torch.Tensor, path: str) -> object:
        if torch.nn.parameter.is_lazy(value):
            raise TrainError(f"{path} has no shape yet (a lazy module): run one batch through the model first")
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            what = "meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
            raise TrainError(f"{path} is a {what} tensor: only dense tensors in memory can be kept; use .to_dense()")
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise TrainError(f"{path} is {_described(value)}, which would come back as a plain tensor: {REMEDY}")
        value = value.detach().resolve_conj().resolve_neg()
        order = _memory_order(value)
        if order is not None:
            value = value.permute(order)
        same = (
            (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
            if value.numel()
            else (id(value),)
        )
        index = self._listed.setdefault(same, len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(value)
        return {"t": index} if order is None else {"t": index, "order": order}


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """Return the permutation that makes a dense tensor contiguous; None if it is contiguous already or has gaps."""
    if value.is_contiguous():
        return None
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
    return order if value.permute(order).is_contiguous() else None


def _is_text(value: str) -> bool:
    """Return False for lone surrogates, which would join on the way through JSON."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _scalar(value: object) -> object:
    """Encode a value that is no container; None if it cannot be encoded."""
    kind = type(value)
    match value:
        case str() if kind is str:
            return value if _is_text(value) else {"text": [ord(char) for char in value]}
        case float() if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        case complex() if kind is complex:
            return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
        case bytes() if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        case np.generic() if value.dtype.kind in "biufcSUmM":
            return {"scalar": [value.dtype.str, value.tobytes().hex()]}
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case torch.device():
            return {"device": str(value)}
    return None


def _described(value: object) -> str:
    kind = type(value)
    name = getattr(value, "__qualname__", None)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" {name!r}" if isinstance(name, str) else "")


def _decode(value: object, tensors: Sequence[torch.Tensor]) -> object:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "t" in value:
        tensor = tensors[_index(value["t"])]
        order = value.get("order")
        return tensor if order is None else tensor.permute([order.index(dim) for dim in range(len(order))])
    ((tag, content),) = value.items()
    return _DECODERS[tag](content, tensors)


def _index(value: object) -> int:
    if type(value) is not int or value < 0:
        raise IndexError(f"tensor {value!r}")
    return value


def _pairs(content: object, tensors: Sequence[torch.Tensor]) -> dict[object, object]:
    if isinstance(content, dict):
        return {key: _decode(item, tensors) for key, item in content.items()}
    if not isinstance(content, list):
        raise TypeError(f"{content!r} are not the pairs of a dict")
    return {_decode(key, tensors): _decode(item, tensors) for key, item in content}


def _module(content: list[object], tensors: Sequence[torch.Tensor]) -> object:
    state, versions = (_decode(part, tensors) for part in content)
    restored = OrderedDict(state)  # type: ignore[call-overload]
    restored._metadata = versions
    return restored


def _bigarray(content: tuple[str, list[int], int], tensors: Sequence[torch.Tensor]) -> object:
    dtype, shape, index = content
    return tensors[_index(index)].cpu().contiguous().numpy().view(np.dtype(dtype)).reshape(shape)


# Every decoder gets the content of its tag. What it raises on nonsense becomes a CheckpointError.
_DECODERS: dict[str, Callable[..., object]] = {
    "d": _pairs,
    "D": _pairs,
    "module": _module,
    "counter": lambda content, tensors: Counter(_pairs(content, tensors)),
    "defaultdict": lambda content, tensors: defaultdict(
        None if content[0] is None else _FACTORIES[content[0]], _pairs(content[1], tensors)
    ),
    "tuple": lambda content, tensors: tuple(_decode(item, tensors) for item in content),
    "set": lambda content, tensors: {_decode(item, tensors) for item in content},
    "frozenset": lambda content, tensors: frozenset(_decode(item, tensors) for item in content),
    "deque": lambda content, tensors: deque((_decode(item, tensors) for item in content[0]), content[1]),
    "size": lambda content, tensors: torch.Size(content),
    "text": lambda content, tensors: "".join(map(chr, content)),
    "float": lambda content, tensors: struct.unpack(">d", bytes.fromhex(content))[0],
    "complex": lambda content, tensors: complex(*struct.unpack(">dd", bytes.fromhex(content))),
    "bytes": lambda content, tensors: base64.b64decode(content, validate=True),
    "scalar": lambda content, tensors: np.frombuffer(bytes.fromhex(content[1]), np.dtype(content[0]))[0],
    "array": lambda content, tensors: (
        np.frombuffer(base64.b64decode(content[2], validate=True), np.dtype(content[0])).reshape(content[1]).copy()
    ),
    "bigarray": _bigarray,
    "dtype": lambda content, tensors: dtype_of(content),
    "device": lambda content, tensors: torch.device(content),
}
