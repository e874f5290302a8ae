"""Data sets that a user has, read as they are: Fashion-MNIST, folders of images, Speech Commands, text by who wrote it.

Nothing is downloaded. A data set gives labels, the natural client of each sample where there is one, and the inputs of
any samples as one tensor; small ones lie in memory, files are decoded when asked for.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.errors import ConfigError
from pliant.fed.tables import ClientMap, read_rows

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts it."""
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
IMAGES_OF, LABELS_OF = "-images-idx3-ubyte", "-labels-idx1-ubyte"
NO_DIGITS = "digits come with scikit-learn: pip install 'pliant[experiments]'"
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
Numbers = Sequence[int] | NDArray[np.int64]


class Samples(Protocol):
    """What training and partitions need of a data set."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def clients(self) -> tuple[str, ...]:
        """Whose each sample is by nature; empty where nobody knows."""
        ...

    def inputs(self, samples: Numbers) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """Samples that lie in memory, all of one shape."""

    data: Tensor
    """The inputs; the first dimension counts the samples."""
    labels: Tensor
    """Of each sample, its class: its place in `classes`."""
    classes: tuple[str, ...]
    """Their names."""
    clients: tuple[str, ...] = ()
    """Of each sample, whose it is, for natural partitions; empty: nobody's."""

    def __len__(self) -> int:
        return len(self.data)

    def inputs(self, samples: Numbers) -> Tensor:
        return self.data[torch.as_tensor(np.asarray(samples, dtype=np.int64))]


def fashion_mnist(folder: Path | None = None) -> tuple[InMemory, InMemory]:
    """60,000 images to train with and 10,000 to test with, 1 x 28 x 28, of mean 0 and deviation 1 over the former.

    Raises:
        ConfigError: its four files are not there, or damaged.
    """
    where, files = folder or DEBIAN, fashion_files(folder)
    raw = {part: (read_idx(files[part + IMAGES_OF]), read_idx(files[part + LABELS_OF])) for part in ("train", "t10k")}
    for part, (images, labels) in raw.items():
        if images.ndim != 3 or labels.shape != images.shape[:1] or not len(labels) or int(labels.max()) >= len(FASHION):
            raise ConfigError(
                f"{where}: {part} has images {list(images.shape)} and labels {list(labels.shape)}: not Fashion-MNIST"
            )
    mean, deviation = _moments(raw["train"][0])

    def ready(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> InMemory:
        data = torch.from_numpy(images).to(torch.float32).div_(255).sub_(mean).div_(deviation)
        return InMemory(data.unsqueeze(1), torch.from_numpy(labels).to(torch.int64), FASHION)

    return ready(*raw["train"]), ready(*raw["t10k"])


def _moments(images: NDArray[np.uint8]) -> tuple[float, float]:
    """Of pixels in 0 .. 1, from how often each of the 256 values occurs: exact, and without a copy in float64."""
    often = sum(np.bincount(images[i : i + 1024].ravel(), minlength=256) for i in range(0, len(images), 1024))
    values = np.arange(256) / 255
    mean = float((often * values).sum() / images.size)
    return mean, float(np.sqrt((often * (values - mean) ** 2).sum() / images.size)) or 1.0


def fashion_files(folder: Path | None = None) -> dict[str, Path]:
    """Its four files, by their names as published.

    Raises:
        ConfigError: one is not there.
    """
    where = folder or DEBIAN
    if not where.is_dir():
        raise ConfigError(f"{where}: no Fashion-MNIST there; apt install dataset-fashion-mnist, or give its folder")
    return {part + kind: _idx_file(where, part + kind) for part in ("train", "t10k") for kind in (IMAGES_OF, LABELS_OF)}


def _idx_file(folder: Path, name: str) -> Path:
    names = (f"{name}.gz", name, name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz")
    for path in (folder / each for each in names):
        if path.is_file():
            return path
    raise ConfigError(f"{folder}: no {name}(.gz) there; Fashion-MNIST has four such files")


def idx_length(path: Path) -> int:
    """How many entries such a file has, by its head.

    Raises:
        ConfigError: it is none.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            head = file.read(8)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {error}; give a file in idx format") from None
    if len(head) < 8 or head[:3] != b"\x00\x00\x08":
        raise ConfigError(f"{path}: begins with {head[:4].hex(' ')}, but idx files of bytes begin with 00 00 08")
    return int.from_bytes(head[4:], "big")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file in the idx format of MNIST, packed or not, in its shape.

    Raises:
        ConfigError: it is none, or damaged.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {error}; give a file in idx format") from None
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or len(data) < 4 + 4 * data[3]:
        raise ConfigError(f"{path}: begins with {data[:4].hex(' ')}, but idx files of bytes begin with 00 00 08")
    shape = tuple(np.frombuffer(data, ">u4", data[3], 4).tolist())
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if len(body) != int(np.prod(shape, dtype=np.int64)):
        raise ConfigError(f"{path}: {len(body)} bytes for the shape {list(shape)}: it is cut off, or damaged")
    return body.reshape(shape).copy()


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Images that are decoded when they are asked for: 3 x side x side, in -1 .. 1."""

    paths: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()
    side: int = 64
    note: str = ""

    def __len__(self) -> int:
        return len(self.paths)

    def inputs(self, samples: Numbers) -> Tensor:
        return torch.stack([_decoded(self.paths[int(i)], self.side) for i in samples])


def image_folder(folder: Path, mapped: ClientMap | None = None, *, side: int = 64) -> ImageFiles:
    """Images in one folder for each class; or wherever a client map with labels (OpenImage's) says, under `folder`.

    Names in a map are paths under the folder, with or without the ending.

    Raises:
        ConfigError: there are no images, or none of those in the map.
    """
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES) if folder.is_dir() else []
    if not found:
        raise ConfigError(
            f"{folder}: no images ({' '.join(IMAGES)}) there; give a folder with one folder for each class"
        )
    if mapped is None or not mapped.labels:
        kinds = [path.relative_to(folder).parts[0] if path.parent != folder else "" for path in found]
        if "" in kinds:
            raise ConfigError(
                f"{folder}: {found[kinds.index('')].name} lies in no class's folder; move it, or give a map with labels"
            )
        names, owners = found, tuple[str, ...]()
        if mapped is not None:
            names, kinds, owners = _claimed(folder, found, mapped, dict(zip(found, kinds, strict=True)))
        return _images(names, kinds, owners, side, "")
    names, kinds, owners = _claimed(folder, found, mapped, None)
    missing = len(mapped.samples) - len(names)
    note = f"{missing} of the map's {len(mapped.samples)} samples have no file" if missing else ""
    return _images(names, kinds, owners, side, note)


def _claimed(
    folder: Path, found: list[Path], mapped: ClientMap, kinds: Mapping[Path, str] | None
) -> tuple[list[Path], list[str], tuple[str, ...]]:
    at = {
        key: path
        for path in found
        for key in (str(path.relative_to(folder).with_suffix("")), str(path.relative_to(folder)))
    }
    taken: list[tuple[Path, str, str]] = []
    for number, (sample, client) in enumerate(zip(mapped.samples, mapped.clients, strict=True)):
        if sample in at:
            path = at[sample]
            taken.append((path, kinds[path] if kinds else mapped.labels[number], client))
    if not taken:
        raise ConfigError(
            f"{folder}: none of the map's samples (as {mapped.samples[0]!r}) is there; is it the map of other data?"
        )
    paths, labels, owners = zip(*taken, strict=True)
    return list(paths), list(labels), owners


def _images(paths: list[Path], kinds: list[str], owners: tuple[str, ...], side: int, note: str) -> ImageFiles:
    classes, labels = _numbered(kinds)
    return ImageFiles(tuple(paths), labels, classes, owners, side, note)


def _numbered(kinds: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    numeric = all(kind.isdecimal() for kind in kinds)
    classes = sorted(set(kinds), key=lambda kind: (int(kind) if numeric else 0, kind))
    place = {kind: number for number, kind in enumerate(classes)}
    return tuple(classes), torch.tensor([place[kind] for kind in kinds])


def _decoded(path: Path, side: int) -> Tensor:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ConfigError("images need Pillow: pip install 'pliant[experiments]'") from None
    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (side, side))
    except OSError as error:
        raise ConfigError(f"{path}: {error}; remove it, or give it again") from None
    pixels = torch.from_numpy(np.asarray(square, dtype=np.uint8).copy())
    return pixels.permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1)


def text_by_role(path: Path, *, length: int = 80, test_part: float = 0.1) -> tuple[InMemory, InMemory]:
    """A play: blocks between empty lines, each begun by its speaker's name and a colon; a client is a role.

    A sample is `length` characters, its label the same ones shifted by one. The last part of what each role says is for testing.

    Raises:
        ConfigError: nobody speaks in it.
    """
    spoken: dict[str, list[str]] = {}
    for block in _text(path).replace("\r\n", "\n").split("\n\n"):
        head, _, said = block.strip("\n").partition("\n")
        if head.endswith(":") and said:
            spoken.setdefault(head[:-1], []).append(said)
    if not spoken:
        raise ConfigError(f"{path}: nobody speaks in it; roles are lines that end with a colon, after an empty line")
    return _texts(path, {role: "\n".join(lines) for role, lines in spoken.items()}, length, test_part)


def text_by_author(path: Path, *, length: int = 80, test_part: float = 0.1) -> tuple[InMemory, InMemory]:
    """Posts (Reddit, StackOverflow): a CSV with an author and a text in each row; a client is an author.

    The columns may be called author, user, client_id or OwnerUserId, and text, body, title or tokens.
    """
    rows = read_rows(path)
    who = next((name for name in ("author", "client_id", "user", "user_id", "OwnerUserId") if name in rows[0]), "")
    what = next((name for name in ("text", "body", "Body", "tokens", "title") if name in rows[0]), "")
    if not who or not what:
        raise ConfigError(f"{path}: its columns are {', '.join(rows[0])}; posts have author and text")
    written: dict[str, list[str]] = {}
    for row in rows:
        if row[what]:
            written.setdefault(row[who], []).append(row[what])
    return _texts(path, {author: "\n".join(posts) for author, posts in written.items()}, length, test_part)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; give a text file") from None


VOCABULARY = 128
"""The most frequent characters have numbers of their own; all others share number 0."""


def _texts(path: Path, texts: Mapping[str, str], length: int, test_part: float) -> tuple[InMemory, InMemory]:
    if length < 1 or not 0 <= test_part < 1:
        raise ConfigError(f"length={length}, test_part={test_part}: use 1 or more, and 0 to less than 1")
    often = Counter[str]()
    for text in texts.values():
        often.update(text)
    kept = sorted(letter for letter, _ in sorted(often.items(), key=lambda item: (-item[1], item[0]))[: VOCABULARY - 1])
    numbers = {letter: number for number, letter in enumerate(kept, 1)}
    train: list[tuple[str, list[int]]] = []
    test: list[tuple[str, list[int]]] = []
    for client, text in texts.items():
        codes = [numbers.get(letter, 0) for letter in text]
        windows = [codes[i : i + length + 1] for i in range(0, len(codes) - length, length)]
        cut = len(windows) - int(len(windows) * test_part)
        train += [(client, window) for window in windows[:cut]]
        test += [(client, window) for window in windows[cut:]]
    if not train:
        raise ConfigError(f"{path}: nobody has {length + 1} characters in it; use a smaller length")
    classes = ("other", *kept)
    return _windows(train, length, classes), _windows(test, length, classes)


def _windows(samples: Iterable[tuple[str, list[int]]], length: int, classes: tuple[str, ...]) -> InMemory:
    listed = list(samples)
    codes = torch.tensor([window for _, window in listed], dtype=torch.int64).reshape(len(listed), length + 1)
    return InMemory(
        codes[:, :-1].contiguous(), codes[:, 1:].contiguous(), classes, tuple(client for client, _ in listed)
    )
