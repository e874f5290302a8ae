"""Data sets that the user has: Fashion-MNIST, folders of images, Speech Commands, texts by author, and module:function.

Nothing is downloaded. Small data sets lie in memory; image and sound files are decoded when they are used.
"""

from __future__ import annotations

import gzip
import wave
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.errors import ConfigError
from pliant.fed.data.task import InMemory, Numbers, Samples
from pliant.fed.data.user_functions import call_function, find_function, user_code_errors
from pliant.fed.tables import ClientMap, read_rows

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
IMAGES_OF, LABELS_OF = "-images-idx3-ubyte", "-labels-idx1-ubyte"
NO_DIGITS = "digits come with scikit-learn: pip install 'pliant[examples]'"
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
SIDE = 64
"""Height and width that images are scaled to."""


def fashion_mnist(folder: Path | None = None) -> tuple[InMemory, InMemory]:
    """Read 60,000 training and 10,000 test images, 1 x 28 x 28, with mean 0 and deviation 1 over the former."""
    where, files = folder or DEBIAN, fashion_files(folder)
    raw = {part: (read_idx(files[part + IMAGES_OF]), read_idx(files[part + LABELS_OF])) for part in ("train", "t10k")}
    for part, (images, labels) in raw.items():
        if images.ndim != 3 or labels.shape != images.shape[:1] or not len(labels) or int(labels.max()) >= len(FASHION):
            shapes = f"images {list(images.shape)} and labels {list(labels.shape)}"
            raise ConfigError(f"{where}: {part} has {shapes}: not Fashion-MNIST")
    mean, deviation = _moments(raw["train"][0])

    def ready(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> InMemory:
        data = torch.from_numpy(images).to(torch.float32).div_(255).sub_(mean).div_(deviation)
        return InMemory(data.unsqueeze(1), torch.from_numpy(labels).to(torch.int64), FASHION)

    return ready(*raw["train"]), ready(*raw["t10k"])


def _moments(images: NDArray[np.uint8]) -> tuple[float, float]:
    """Return mean and deviation of pixels in 0..1 from a histogram of the 256 values: exact, and without a copy in float64."""
    often = sum(np.bincount(images[i : i + 1024].ravel(), minlength=256) for i in range(0, len(images), 1024))
    values = np.arange(256) / 255
    mean = float((often * values).sum() / images.size)
    return mean, float(np.sqrt((often * (values - mean) ** 2).sum() / images.size)) or 1.0


def fashion_files(folder: Path | None = None) -> dict[str, Path]:
    """Return the four files of Fashion-MNIST by their published names."""
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


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a file in MNIST's idx format, compressed or not, as an array."""
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
    """Images that are decoded when they are used: 3 x 64 x 64, in -1..1."""

    paths: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]
    clients: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def inputs(self, samples: Numbers) -> Tensor:
        return torch.stack([_decode_image(self.paths[int(i)]) for i in samples])


def image_folder(folder: Path, mapped: ClientMap | None = None) -> ImageFiles:
    """Find images in one folder per class, or as a client map with labels (OpenImage's) says.

    Names in a map are paths under `folder`, with or without the suffix.
    """
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES) if folder.is_dir() else []
    if not found:
        kinds = " ".join(IMAGES)
        raise ConfigError(f"{folder}: no images ({kinds}) there; give a folder with one folder for each class")
    owners: tuple[str, ...] = ()
    if mapped is not None and mapped.labels:
        found, kinds_of, owners = _match_map(folder, found, mapped, None)
    else:
        kinds_of = [path.relative_to(folder).parts[0] if path.parent != folder else "" for path in found]
        if "" in kinds_of:
            stray = found[kinds_of.index("")].name
            raise ConfigError(f"{folder}: {stray} lies in no class's folder; move it, or give a map with labels")
        if mapped is not None:
            found, kinds_of, owners = _match_map(folder, found, mapped, dict(zip(found, kinds_of, strict=True)))
    classes, labels = _number_classes(kinds_of)
    return ImageFiles(tuple(found), labels, classes, owners)


def _match_map(
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
        raise ConfigError(f"{folder}: none of the map's samples (as {mapped.samples[0]!r}) is there; give its own map")
    paths, labels, owners = zip(*taken, strict=True)
    return list(paths), list(labels), owners


def _number_classes(kinds: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    numeric = all(kind.isdecimal() for kind in kinds)
    classes = sorted(set(kinds), key=lambda kind: (int(kind) if numeric else 0, kind))
    place = {kind: number for number, kind in enumerate(classes)}
    return tuple(classes), torch.tensor([place[kind] for kind in kinds])


def _decode_image(path: Path) -> Tensor:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ConfigError("images need Pillow: pip install 'pliant[examples]'") from None
    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (SIDE, SIDE))
    except OSError as error:
        raise ConfigError(f"{path}: {error}; remove it, or give it again") from None
    pixels = torch.from_numpy(np.asarray(square, dtype=np.uint8).copy())
    return pixels.permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1)


def text_by_role(path: Path, *, length: int = 80, test_part: float = 0.1) -> tuple[InMemory, InMemory]:
    """Read a play: blocks between empty lines that begin with the speaker's name and a colon. Each role is a client.

    A sample is `length` characters, its label the same characters shifted by one. The last part of each role is for testing.
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
    """Read posts (Reddit, StackOverflow): a CSV with an author and a text in each row. Each author is a client.

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
"""Size of the alphabet: the most frequent characters; all others share number 0."""


def _texts(path: Path, texts: Mapping[str, str], length: int, test_part: float) -> tuple[InMemory, InMemory]:
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


BANDS = 32
FRAMES = 32
WINDOW = 1024
NOT_THERE = "{}: no WORD/SPEAKER_nohash_N.wav there; give the folder of Speech Commands"


@dataclass(frozen=True, slots=True)
class SpeechFiles:
    """Utterances that are decoded when they are used: logarithms of 32 mel bands in 32 frames, with mean 0 and deviation 1."""

    paths: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]
    clients: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def inputs(self, samples: Numbers) -> Tensor:
        return torch.stack([spectrogram(*read_wave(self.paths[int(i)])) for i in samples])


def speech_commands(folder: Path) -> tuple[SpeechFiles, SpeechFiles]:
    """Find training and test utterances: the files that testing_list.txt names are for testing.

    Without that list, a tenth of the speakers is for testing, by a hash of their names. No speaker is in both.
    """
    found = sorted(folder.glob("*/*_nohash_*.wav")) if folder.is_dir() else []
    if not found:
        raise ConfigError(NOT_THERE.format(folder))
    speakers = [path.name.partition("_nohash_")[0] for path in found]
    words = tuple(sorted({path.parent.name for path in found}))
    place = {word: number for number, word in enumerate(words)}
    listed = folder / "testing_list.txt"
    if listed.is_file():
        names = set(listed.read_text().split())
        testing = [f"{path.parent.name}/{path.name}" in names for path in found]
    else:
        testing = [zlib.crc32(speaker.encode()) % 10 == 0 for speaker in speakers]

    def those(wanted: bool) -> SpeechFiles:
        kept = [i for i, tests in enumerate(testing) if tests is wanted]
        labels = torch.tensor([place[found[i].parent.name] for i in kept], dtype=torch.int64)
        return SpeechFiles(tuple(found[i] for i in kept), labels, words, tuple(speakers[i] for i in kept))

    return those(False), those(True)


def read_wave(path: Path) -> tuple[Tensor, int]:
    """Read a mono WAV file of 16 bits: samples in -1..1, and the sample rate."""
    try:
        with wave.open(str(path), "rb") as file:
            kind = (file.getnchannels(), file.getsampwidth())
            rate, raw = file.getframerate(), file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(f"{path}: {error}; give a WAV file") from None
    if kind != (1, 2):
        raise ConfigError(f"{path}: {kind[0]} channels of {8 * kind[1]} bits; Speech Commands has 1 of 16")
    return torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.float32) / 32768), rate


def spectrogram(sound: Tensor, rate: int) -> Tensor:
    """Return the first second of a sound as 1 x 32 x 32; shorter sounds are padded with silence."""
    hop = rate // FRAMES
    second = torch.zeros(hop * (FRAMES - 1) + WINDOW)
    kept = sound[: min(rate, len(second))]
    second[: len(kept)] = kept
    power = (
        torch.stft(second, WINDOW, hop, window=torch.hann_window(WINDOW), center=False, return_complex=True)
        .abs()
        .square()
    )
    bands = torch.log(mel_filters(rate) @ power + 1e-6)
    deviation = bands.std()
    return ((bands - bands.mean()) / (deviation if deviation > 0 else 1.0)).unsqueeze(0)


@lru_cache(maxsize=8)
def mel_filters(rate: int) -> Tensor:
    """Return triangular filters of equal width on the mel scale, from 20 Hz to half the rate: bands x frequencies."""
    top, bottom = (2595 * np.log10(1 + hertz / 700) for hertz in (rate / 2, 20.0))
    edges = 700 * (10 ** (np.linspace(bottom, top, BANDS + 2) / 2595) - 1)
    at = np.linspace(0, rate / 2, WINDOW // 2 + 1)
    rising = (at - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - at) / np.diff(edges)[1:, None]
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling)).astype(np.float32))


PARTS = ("labels", "classes", "clients", "inputs")
"""Attributes of the `Samples` protocol."""
MOST_CLASSES = 1_000_000
TAKES = "it is called with nothing"
TAKES_PATH = "it is called with data.path"
RETURNS = "return training and test samples, each (inputs, labels) or an InMemory"


def samples_from_function(kind: str, path: str) -> tuple[Samples, Samples]:
    """Call the user's `module:function`, with the path if there is one, and check the samples that it returns."""
    what = f"data.kind {kind!r}"
    made = call_function(kind, "data.kind", *_contract(path))
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ConfigError(f"{what} gave {_shape(made)}: {RETURNS}")
    with user_code_errors(f"{what} gave samples that cannot be used"):
        if all(_is_pair(each) for each in made):
            return _wrap_pairs(what, made)
        return _check_samples(what, "train", made[0]), _check_samples(what, "test", made[1])


def check_function(kind: str, path: str) -> None:
    """Check that the function exists and can be called so, without calling it; raises ConfigError."""
    find_function(kind, "data.kind", *_contract(path))


def _contract(path: str) -> tuple[str, ...]:
    """Return the contract for messages, and the arguments of the function."""
    return (f"{TAKES_PATH}: {RETURNS}", path) if path else (f"{TAKES}: {RETURNS}",)


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple | list) and len(given) == 2 and not isinstance(given[0], str)


def _wrap_pairs(what: str, made: Sequence[Any]) -> tuple[InMemory, InMemory]:
    inputs = [_inputs(what, each[0]) for each in made]
    raw = [np.asarray(each[1].cpu() if isinstance(each[1], Tensor) else each[1]) for each in made]
    if any(each.dtype.kind in "US" for each in raw):
        names = sorted({str(name) for each in raw for name in each.ravel().tolist()})
        place = {name: number for number, name in enumerate(names)}
        raw = [np.array([place[str(name)] for name in each.ravel().tolist()]).reshape(each.shape) for each in raw]
        labels, classes = [_labels(what, each) for each in raw], tuple(names)
    else:
        labels = [_labels(what, each) for each in raw]
        most = max((int(each.max()) for each in labels if each.numel()), default=-1)
        if most >= MOST_CLASSES:
            raise ConfigError(f"{what}: a label is {most}: number the classes from 0")
        classes = tuple(str(number) for number in range(most + 1))
    for part, data, told in zip(("train", "test"), inputs, labels, strict=True):
        if len(data) != len(told):
            raise ConfigError(f"{what}: {part} has {len(data)} inputs and {len(told)} labels: give one for each")
    return InMemory(inputs[0], labels[0], classes), InMemory(inputs[1], labels[1], classes)


def _inputs(what: str, given: Any) -> Tensor:
    found = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    if found.dim() < 2:
        raise ConfigError(f"{what}: inputs of shape {list(found.shape)}: the first dimension counts the samples")
    if found.dtype == torch.uint8:
        return found.float() / 255  # pixels, scaled as usual
    if found.dtype in (torch.int16, torch.int32, torch.int64):
        return found.long()  # codes of a text
    return found.float()


def _labels(what: str, given: Any) -> Tensor:
    if given.dtype.kind not in "iufb" or given.ndim not in (1, 2):
        raise ConfigError(
            f"{what}: labels of type {given.dtype} and shape {list(given.shape)}: give a number or name for each sample"
        )
    whole = given.astype(np.int64)
    if not np.array_equal(whole, given) or (whole < 0).any():
        wrong = given.ravel()[np.flatnonzero((whole != given) | (whole < 0))[0]]
        raise ConfigError(f"{what}: a label is {wrong}: number the classes from 0")
    return torch.from_numpy(whole)


def _check_samples(what: str, part: str, given: Any) -> Samples:
    if missing := [name for name in PARTS if not hasattr(given, name)]:
        raise ConfigError(f"{what}: its {part} samples are {_shape(given)}, without {missing[0]!r}: {RETURNS}")
    labels, num_classes = given.labels, len(given.classes)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() not in (1, 2):
        raise ConfigError(f"{what}: its {part} labels are {_shape(labels)}: give a tensor of whole numbers")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ConfigError(
            f"{what}: its {part} labels are {int(labels.min())} to {int(labels.max())}, and there are {num_classes} "
            "classes: number them from 0, with a name for each"
        )
    if given.clients and len(given.clients) != len(labels):
        raise ConfigError(f"{what}: {part} has {len(given.clients)} clients for {len(labels)} labels: one for each")
    if len(labels) and not isinstance(given.inputs([0]), Tensor):
        raise ConfigError(f"{what}: inputs([0]) of its {part} samples gives no tensor: return one of these samples")
    return cast(Samples, given)


def _shape(value: object) -> str:
    """Describe a value in a word or two."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
    return type(value).__name__
