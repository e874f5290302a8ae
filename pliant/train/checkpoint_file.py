"""One checkpoint as one safetensors file.

Any safetensors reader can read the tensors by name, and nothing in the file can run code. The metadata holds the JSON
skeleton of the state, the type and shape of each tensor, and a SHA-256 of everything else in the file. The contexts of
the replicas are tensors of bytes. `checkpoint` decides which files there are and which to keep.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from pliant.errors import CheckpointError, TrainError, reason
from pliant.files import PRIVATE_MODE, hold_lock, is_locked
from pliant.train import state_tree

FORMAT = "2"
FORMAT_0_1 = "1"
"""Version 0.1 put the SHA-256 of all bytes before it into the last 32 bytes of the file."""
FORMAT_KEY = "pliant.checkpoint"
DIGEST_KEY = "pliant.sha256"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
TEMPORARY = ".pliant-writing"
_BLOCK_BYTES = 1 << 22
_RESERVED = "pliant."
_CONTEXT = "pliant.context."
# The types that all safetensors readers know. Others are stored as bytes, and restored by the metadata.
_STORABLE = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip


@dataclass
class Checkpoint:
    """The whole state of a job between two steps."""

    step: int
    """Steps committed so far."""
    epoch: int
    num_replicas: int
    meta: dict[str, object] = field(default_factory=dict)
    """Values that JSON can hold, such as torch's version."""
    state: object = None
    """A tree of tensors and plain values, as `state_tree` takes it."""
    contexts: list[bytes] = field(default_factory=list)
    """The context of each replica."""


class CheckpointImage:
    """A checkpoint that is ready to be written: its tensors in host memory, and its metadata."""

    def __init__(self, checkpoint: Checkpoint, into: Sequence[torch.Tensor] | None) -> None:
        """Copy the tensors, into the memory of `into` where the shapes fit. If `into` is None, borrow them instead."""
        skeleton, tensors = state_tree.flatten(checkpoint.state)
        if into is None:
            self.tensors = [tensor.cpu().contiguous() for tensor in tensors]
        else:
            self.tensors = _copy_to_host(tensors, into)
        found = state_tree.tensor_names(skeleton, len(tensors))
        names = [f"{name}#{i}" if name.startswith(_RESERVED) else name for i, name in enumerate(found)]
        specs = state_tree.describe_tensors(self.tensors)
        self._contents = {name: _storable(tensor) for name, tensor in zip(names, self.tensors, strict=True)}
        for replica, context in enumerate(checkpoint.contexts):
            data = bytearray(context)
            self._contents[f"{_CONTEXT}{replica}"] = (
                torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            )
        self._metadata = {
            "format": "pt",
            FORMAT_KEY: FORMAT,
            "step": str(checkpoint.step),
            "epoch": str(checkpoint.epoch),
            "num_replicas": str(checkpoint.num_replicas),
            "meta": _to_json(checkpoint.meta),
            "skeleton": skeleton,
            "tensors": json.dumps([[name, *spec] for name, spec in zip(names, specs, strict=True)]),
        }
        header_bytes = len(json.dumps(self._metadata)) + sum(len(name) + 100 for name in self._contents)
        if header_bytes > MAX_HEADER_BYTES:
            raise TrainError(
                f"the state without its tensors takes {header_bytes} bytes as JSON, more than the {MAX_HEADER_BYTES} of a "
                "safetensors header: keep large data in tensors"
            )
        self.nbytes = header_bytes + sum(tensor.nbytes for tensor in self._contents.values())

    def write(self, path: Path) -> None:
        """Write the file atomically: under its name there is the old content or the new content, never a part.

        Raises:
            OSError: it could not be written; nothing is left behind.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        metadata = {**self._metadata, DIGEST_KEY: _digest(self._metadata, self._contents)}
        specs = {
            name: TensorSpec(
                dtype=state_tree.dtype_name(tensor.dtype),
                shape=tensor.shape,
                data_ptr=tensor.data_ptr(),
                data_len=tensor.nbytes,
            )
            for name, tensor in self._contents.items()
        }
        with _temporary_folder(path) as folder:
            written = folder / path.name
            try:
                serialize_file(specs, written, metadata)
            except SafetensorError as error:
                raise _as_os_error(error) from None
            written.chmod(PRIVATE_MODE)  # versions of the library differ; it may hold samples of the data
            _sync_to_disk(written)
            written.replace(path)
        _sync_to_disk(path.parent)  # the new name, too, must survive a power cut


def verify(path: Path) -> None:
    """Raise CheckpointError unless the file is a complete checkpoint whose digest is right."""
    with _opened(path) as file:
        metadata = _checked_metadata(file, path)
        _check_digest(path, metadata, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def read_step(path: Path) -> int:
    """Return the step of a checkpoint without a look at its tensors; raise CheckpointError if it is none."""
    with _opened(path) as file:
        return int(_checked_metadata(file, path)["step"])


def read_run(path: Path) -> str:
    """Return the id of the run that wrote a checkpoint, empty if it has none; raise CheckpointError if it is no checkpoint."""
    with _opened(path) as file:
        metadata = _checked_metadata(file, path)
    try:
        return str(json.loads(metadata["meta"]).get("run", ""))
    except (KeyError, ValueError, AttributeError):
        raise CheckpointError(f"{path} is damaged: its metadata has no meta") from None


def read(path: Path) -> Checkpoint:
    """Read a checkpoint; its tensors are on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or no checkpoint of this version or the last.
    """
    with _opened(path) as file:
        metadata = _checked_metadata(file, path)
        # Cloned, because the library maps the file: the memory would keep a file that was removed on the disk.
        contents = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    _check_digest(path, metadata, contents)
    try:
        listed: list[tuple[str, str, list[int]]] = json.loads(metadata["tensors"])
        tensors = [contents.pop(name).view(state_tree.dtype_of(dtype)).view(shape) for name, dtype, shape in listed]
        num_contexts = sum(name.startswith(_CONTEXT) for name in contents)
        return Checkpoint(
            step=int(metadata["step"]),
            epoch=int(metadata["epoch"]),
            num_replicas=int(metadata["num_replicas"]),
            meta=json.loads(metadata["meta"]),
            state=state_tree.unflatten(metadata["skeleton"], tensors),
            contexts=[contents[f"{_CONTEXT}{replica}"].numpy().tobytes() for replica in range(num_contexts)],
        )
    except (ValueError, TypeError, KeyError, RuntimeError):
        raise CheckpointError(f"{path} is damaged: its metadata does not describe its tensors") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading; every failure to read it becomes a CheckpointError."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except OSError as error:
        why = reason(error).removesuffix(f": {path}")
        raise CheckpointError(f"{path} cannot be read ({why}): name a checkpoint that exists") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no checkpoint, or it is torn or damaged ({error})") from None


def _checked_metadata(file: Any, path: Path) -> dict[str, str]:
    metadata: dict[str, str] = file.metadata() or {}
    if FORMAT_KEY not in metadata:
        raise CheckpointError(
            f"{path} is no checkpoint of pliant: a safetensors file needs {FORMAT_KEY} in its metadata"
        )
    if metadata[FORMAT_KEY] not in (FORMAT, FORMAT_0_1):
        raise CheckpointError(
            f"{path} has format {metadata[FORMAT_KEY]!r}, this pliant reads {FORMAT_0_1!r} and {FORMAT!r}: use the pliant "
            "that wrote it"
        )
    if not metadata.get("step", "").isdecimal():
        raise CheckpointError(f"{path} is damaged: its metadata has no step")
    return metadata


def _digest(metadata: Mapping[str, str], contents: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the metadata and of all tensors with their names, types and shapes."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(contents.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_digest(path: Path, metadata: dict[str, str], contents: Mapping[str, torch.Tensor]) -> None:
    if metadata[FORMAT_KEY] == FORMAT_0_1:
        is_right = _has_digest_0_1(path)
    else:
        is_right = metadata.pop(DIGEST_KEY, "") == _digest(metadata, contents)
    if not is_right:
        raise CheckpointError(f"{path} is damaged: its content does not have the SHA-256 it was written with")


def _has_digest_0_1(path: Path) -> bool:
    digest = hashlib.sha256()
    left = path.stat().st_size - digest.digest_size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
        return file.read() == digest.digest()


def _copy_to_host(tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensors to host memory. A tensor at the same place in `into` that fits is overwritten: fresh memory costs
    more than the copy, and pinned memory much more."""
    copies = []
    for index, tensor in enumerate(tensors):
        room = into[index] if index < len(into) else None
        if room is None or room.dtype != tensor.dtype or room.shape != tensor.shape:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.append(room.copy_(tensor, non_blocking=True))
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or its bytes if safetensors does not know its type."""
    return tensor if tensor.dtype in _STORABLE else tensor.reshape(-1).view(torch.uint8)


def _to_json(meta: dict[str, object]) -> str:
    try:
        return json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TrainError(
            f"the meta of a checkpoint must be what JSON can hold: {error}; put it into the state"
        ) from None


def _as_os_error(error: SafetensorError) -> OSError:
    """Return the OSError that the library reports as text, such as "No space left on device (os error 28)"."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` for a file that is being written. A lock beside it shows that its writer is alive."""
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    lock = folder.with_name(f"{folder.name}.lock")
    refusal = f"another process writes {path} ({lock} is locked): give each job a checkpoint directory of its own"
    with hold_lock(lock, CheckpointError(refusal), wait_s=10.0):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _remove_leftovers(directory: Path) -> None:
    """Remove what dead writers have left behind."""
    for lock in directory.glob(f".*{TEMPORARY}.lock"):
        if not is_locked(lock):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
