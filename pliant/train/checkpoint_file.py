"""One checkpoint as the bytes of one file, and back."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from pliant.errors import CheckpointError, TrainError
from pliant.train import state_tree

FORMAT = "1"

FORMAT_KEY = "pliant.checkpoint"

BLOCK_BYTES = 1 << 22
"""Summed and written at once: small enough to stay in the cache between the two."""

MAX_HEADER_BYTES = 100_000_000
"""As the safetensors format has it."""

DIGEST_BYTES = 32

TEMPORARY = ".pliant-writing"

_OURS = "pliant."

_CONTEXT = "pliant.context."

_DIGEST = "pliant.sha256"

# The types that all readers of the format know. Others are stored as bytes; we restore them by our own list.
_FORMAT_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass
class Checkpoint:
    """A job between two steps."""

    step: int
    """Global steps that are done."""
    epoch: int
    num_replicas: int
    meta: dict[str, object] = field(default_factory=dict)
    """Whatever JSON can hold: torch's version, the fingerprint, the layout of the buckets, ..."""
    state: object = None
    """A tree of tensors and plain values, as `tree` takes it."""
    contexts: list[bytes] = field(default_factory=list)
    """One for each replica."""


class Image:
    """A checkpoint ready to be written: its header, and its data in the order of the file."""

    def __init__(self, checkpoint: Checkpoint, into: Sequence[torch.Tensor] | None) -> None:
        """Copies the tensors, where their shapes fit to the memory of `into`; without a list they are only borrowed."""
        skeleton, tensors = state_tree.flatten(checkpoint.state)
        if into is None:
            self.tensors = [tensor.cpu().contiguous() for tensor in tensors]
        else:
            self.tensors = host_copies(tensors, into)
        specs = state_tree.describe_tensors(self.tensors)
        names = [f"{name}#{i}" if name.startswith(_OURS) else name
                 for i, name in enumerate(state_tree.tensor_names(skeleton, len(specs)))]  # fmt: skip
        # The largest elements first, so that each tensor lies on a multiple of its element's size.
        order = sorted(range(len(specs)), key=lambda i: -self.tensors[i].itemsize)
        contents = [(names[i], *_stored_as(specs[i]), _memory(self.tensors[i])) for i in order]
        for replica, context in enumerate(checkpoint.contexts):
            contents.append((f"{_CONTEXT}{replica}", "U8", [len(context)], memoryview(context)))
        self.parts = [data for _, _, _, data in contents]
        contents.append((_DIGEST, "U8", [DIGEST_BYTES], memoryview(bytes(DIGEST_BYTES))))
        metadata = {
            "format": "pt",
            FORMAT_KEY: FORMAT,
            "step": str(checkpoint.step),
            "epoch": str(checkpoint.epoch),
            "num_replicas": str(checkpoint.num_replicas),
            "meta": _json(checkpoint.meta),
            "skeleton": skeleton,
            "tensors": json.dumps([[name, spec.dtype, spec.shape] for name, spec in zip(names, specs, strict=True)]),
        }
        header: dict[str, object] = {"__metadata__": metadata}
        offset = 0
        for name, dtype, shape, data in contents:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
            offset += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise TrainError(
                f"the state without its tensors takes {len(text)} bytes as JSON, more than the {MAX_HEADER_BYTES} of a "
                "safetensors header: keep large data in tensors"
            )
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + offset

    def write(self, path: Path) -> None:
        """Atomically: under its name there is the old file or the new one, whole. Raises OSError, leaving nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        temporary, file = _create(path)
        try:
            with file:
                digest = hashlib.sha256()
                for part in (memoryview(self.header), *self.parts):
                    for begin in range(0, len(part), BLOCK_BYTES):
                        digest.update(part[begin : begin + BLOCK_BYTES])
                        _write_all(file, part[begin : begin + BLOCK_BYTES])
                _write_all(file, memoryview(digest.digest()))
                os.fsync(file.fileno())
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name, too, must survive a power cut
        finally:
            os.close(directory)


def host_copies(tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors in host memory. A tensor of the same place in `into` that fits is overwritten: fresh
    memory costs more than the copy, and pinned memory much more."""
    copies = []
    for index, tensor in enumerate(tensors):
        room = into[index] if index < len(into) else None
        if room is None or room.dtype != tensor.dtype or room.shape != tensor.shape:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.append(room.copy_(tensor, non_blocking=True))
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


@dataclass(frozen=True)
class Header:
    """What the beginning of a file says about it. Nothing is yet known about the sum."""

    raw: bytes
    metadata: dict[str, str]
    offsets: dict[str, tuple[int, int]]
    """Where each tensor lies, behind the header; in the order of the file, without gaps."""

    @property
    def step(self) -> int:
        return int(self.metadata["step"])


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file, for reading; whatever is wrong with reading it becomes a CheckpointError."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def read_header(file: BinaryIO, path: Path) -> Header:
    """Raises CheckpointError if this is no checkpoint, or one of which some is missing."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} ({size} bytes) is no checkpoint, or was cut off in its header")
    raw = file.read(length)
    try:
        entries = json.loads(raw)
        metadata = entries.pop("__metadata__", {})
        if FORMAT_KEY not in metadata:
            raise CheckpointError(f"{path} is no checkpoint of pliant: a safetensors file needs {FORMAT_KEY} in it")
        spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
        offsets = {name: (int(begin), int(end)) for begin, end, name in spans}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is no checkpoint, or its header is damaged") from None
    if metadata[FORMAT_KEY] != FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata[FORMAT_KEY]!r}, this pliant reads {FORMAT!r}: use the pliant that wrote it"
        )
    position = 0
    for begin, end in offsets.values():
        if begin != position or end < begin:
            raise CheckpointError(f"{path} is damaged: the header does not cover the data")
        position = end
    if 8 + length + position != size:
        raise CheckpointError(f"{path} is torn: it has {size} of {8 + length + position} bytes")
    return Header(prefix + raw, metadata, offsets)


def verify(path: Path) -> None:
    """Raises CheckpointError unless the file is whole."""
    with opened(path) as file:
        header = read_header(file, path)
        digest = hashlib.sha256(header.raw)
        block = memoryview(bytearray(BLOCK_BYTES))
        left = max((end for _, end in header.offsets.values()), default=0) - DIGEST_BYTES
        while left > 0 and (got := file.readinto(block[: min(left, BLOCK_BYTES)])):  # type: ignore[attr-defined]
            digest.update(block[:got])
            left -= got
        _compare(file.read(DIGEST_BYTES), digest.digest(), path)


def read(path: Path) -> Checkpoint:
    """The checkpoint in this file; the sum is checked in the same pass."""
    with opened(path) as file:
        header = read_header(file, path)
        try:
            listed = json.loads(header.metadata["tensors"])
            specs = {
                name: state_tree.TensorSpec.from_json({"dtype": dtype, "shape": shape, "device": "cpu"})
                for name, dtype, shape in listed
            }
            meta = json.loads(header.metadata["meta"])
            step, epoch, num_replicas = (int(header.metadata[key]) for key in ("step", "epoch", "num_replicas"))
            skeleton = header.metadata["skeleton"]
            fits = all(header.offsets[name][1] - header.offsets[name][0] == spec.nbytes for name, spec in specs.items())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            fits = False
        if not fits:
            raise CheckpointError(f"{path} is damaged: the header does not describe the tensors")
        digest = hashlib.sha256(header.raw)
        contents: dict[str, torch.Tensor] = {}
        found = b""
        for name, (begin, end) in header.offsets.items():
            if name == _DIGEST:
                found = file.read(DIGEST_BYTES)
                break
            spec = specs.get(name) or state_tree.TensorSpec("uint8", (end - begin,), "cpu")
            contents[name] = spec.empty()
            _read_into(_memory(contents[name]), file, digest)
        _compare(found, digest.digest(), path)
    contexts = [name for name in contents if name.startswith(_CONTEXT) and name not in specs]
    return Checkpoint(
        step,
        epoch,
        num_replicas,
        meta=meta,
        state=state_tree.unflatten(skeleton, [contents[name] for name in specs]),
        contexts=[contents[f"{_CONTEXT}{replica}"].numpy().tobytes() for replica in range(len(contexts))],
    )


def _read_into(memory: memoryview, file: BinaryIO, digest: hashlib._Hash) -> None:
    for begin in range(0, len(memory), BLOCK_BYTES):
        block = memory[begin : begin + BLOCK_BYTES]
        file.readinto(block)  # type: ignore[attr-defined]
        digest.update(block)


def _compare(found: bytes, computed: bytes, path: Path) -> None:
    if found != computed:
        raise CheckpointError(f"{path} is damaged: its content does not have the SHA-256 it was written with")


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _stored_as(spec: state_tree.TensorSpec) -> tuple[str, list[int]]:
    if spec.dtype in _FORMAT_DTYPES:
        return _FORMAT_DTYPES[spec.dtype], list(spec.shape)
    return "U8", [spec.nbytes]


def _json(meta: dict[str, object]) -> str:
    try:
        return json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TrainError(
            f"the meta of a checkpoint must be what JSON can hold: {error}; put it into the state"
        ) from None


def _write_all(file: io.FileIO, block: memoryview) -> None:
    while block:
        block = block[file.write(block) :]


def _create(path: Path) -> tuple[Path, io.FileIO]:
    """A new temporary file beside `path`. Its lock tells others that its writer is alive, on any host."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
        file = temporary.open("xb", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.stat(temporary).st_ino == os.fstat(file.fileno()).st_ino:
                return temporary, file
        except FileNotFoundError:
            pass  # somebody took it for a leftover before it was locked
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        file.close()


def _remove_leftovers(directory: Path) -> None:
    """Remove the temporary files whose writers are dead."""
    for leftover in directory.glob(f".*{TEMPORARY}"):
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink(missing_ok=True)
