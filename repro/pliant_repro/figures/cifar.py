"""CIFAR-10 from its published files, the Python version's pickles or the binary version's records; nothing is downloaded.

A pickle may name any function to be called when it is read. The reader here knows three names, those of a NumPy
array's parts, and has stand-ins of its own for them: whatever a file says, nothing but this module's code runs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from pliant.errors import ConfigError

PIXELS = 3 * 32 * 32
TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
FOLDERS = ("", "cifar-10-batches-py", "cifar-10-batches-bin")
WHERE = "https://www.cs.toronto.edu/~kriz/cifar.html has it: unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz"
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training images' channels."""


class Cifar10(Dataset[tuple[Tensor, Tensor]]):
    """Normalised images of 3 x 32 x 32 and their labels, 0 to 9.

    With `augment`, each reading moves the image by up to 4 pixels and mirrors every second one, by torch's generator.
    """

    about = "CIFAR-10"

    def __init__(self, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], *, augment: bool = False) -> None:
        self._images = torch.from_numpy(images.reshape(-1, 3, 32, 32))
        self._labels = torch.from_numpy(labels.astype(np.int64))
        self._mean = torch.tensor(MEAN)[:, None, None]
        self._scale = 1.0 / torch.tensor(DEVIATION)[:, None, None]
        self._augment = augment

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = (self._images[index].float() / 255.0 - self._mean) * self._scale
        if self._augment:
            down, right, mirrored = (int(torch.randint(0, most, ())) for most in (9, 9, 2))
            image = F.pad(image, (4, 4, 4, 4))[:, down : down + 32, right : right + 32]
            image = image.flip(-1) if mirrored else image
        return image, self._labels[index]


def cifar10(path: str | Path, *, train: bool = True, augment: bool = False) -> Cifar10:
    """The training or test images under `path`: the unpacked directory, or the one that it was unpacked in.

    Raises:
        ConfigError: they are not there, or are not CIFAR-10; says which file, and where to get them.
    """
    names = TRAINING if train else TEST
    for folder in (Path(path) / inner for inner in FOLDERS):
        for suffix, read in (("", _read_pickle), (".bin", _read_binary)):
            files = [folder / f"{name}{suffix}" for name in names]
            if files[0].is_file():
                parts = [read(file) for file in files]
                return Cifar10(
                    np.concatenate([images for images, _ in parts]),
                    np.concatenate([labels for _, labels in parts]),
                    augment=augment,
                )
    raise ConfigError(f"{path}: there is no {names[0]} (nor {names[0]}.bin) of CIFAR-10; {WHERE}")


def _read_binary(file: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Records of one byte for the label and 3072 for the image."""
    raw = np.frombuffer(_bytes_of(file), np.uint8)
    if not len(raw) or len(raw) % (PIXELS + 1):
        raise ConfigError(f"{file} has {len(raw)} bytes, no multiple of {PIXELS + 1}: not a file of CIFAR-10; {WHERE}")
    records = raw.reshape(-1, PIXELS + 1)
    return _checked(file, records[:, 1:].copy(), records[:, 0])


def _read_pickle(file: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A dictionary of the pixels, an array, and the labels, a list."""
    try:
        content = _Reader(io.BytesIO(_bytes_of(file)), encoding="bytes").load()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}; {WHERE}") from None
    except Exception as error:  # whatever a broken pickle makes of our stand-ins
        raise ConfigError(f"{file} is no pickle of CIFAR-10 ({error!r:.80}); {WHERE}") from None
    content = content if isinstance(content, Mapping) else {}
    data, labels = content.get(b"data"), content.get(b"labels")
    if not isinstance(data, _Array) or not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ConfigError(f"{file} lacks `data` (an array) or `labels` (a list of numbers); {WHERE}")
    pixels = data.bytes()
    if len(pixels) != PIXELS * len(labels) or not labels:
        raise ConfigError(f"{file} has {len(labels)} labels, but {len(pixels)} bytes of pixels; {WHERE}")
    return _checked(file, pixels.reshape(len(labels), PIXELS).copy(), np.array(labels))


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; {WHERE}") from None


def _checked(
    file: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    if labels.min() < 0 or labels.max() > 9:
        raise ConfigError(f"{file} has the label {labels.max()}: CIFAR-10's are 0 to 9; {WHERE}")
    return images, labels


class _Array:
    """Stands for a NumPy array in a pickle: what it was given as its state."""

    def __init__(self, *_: object) -> None:
        self._raw: object = b""

    def __setstate__(self, state: object) -> None:
        # (version, shape, dtype, is in Fortran's order, bytes)
        if isinstance(state, tuple) and len(state) == 5 and not state[3]:
            self._raw = state[4]

    def bytes(self) -> np.ndarray[Any, Any]:
        """The elements, which are single bytes in CIFAR-10."""
        raw = self._raw.encode("latin-1") if isinstance(self._raw, str) else self._raw
        return np.frombuffer(raw if isinstance(raw, bytes) else b"", np.uint8)


class _Type:
    """Stands for a NumPy dtype in a pickle."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _make_array(*_: object) -> _Array:
    return _Array()


def _encode(text: object, *_: object) -> bytes:
    """How Python 3 writes bytes in the pickles that Python 2 reads."""
    return text.encode("latin-1") if isinstance(text, str) else b""


class _Reader(pickle.Unpickler):
    _KNOWN: Mapping[tuple[str, str], Any] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Type,
        ("numpy.core.multiarray", "_reconstruct"): _make_array,
        ("numpy._core.multiarray", "_reconstruct"): _make_array,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        known = self._KNOWN.get((module, name))
        if known is None:
            raise ConfigError(f"this pickle wants to call {module}.{name}, which CIFAR-10 has no need of: not read")
        return known
