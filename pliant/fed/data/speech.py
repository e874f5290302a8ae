"""Speech Commands: a folder for each word, a file for each utterance; its natural clients are the speakers."""

from __future__ import annotations

import wave
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.errors import ConfigError
from pliant.fed.data.datasets import Numbers

BANDS = 32
FRAMES = 32
WINDOW = 1024
NOT_THERE = "{}: no WORD/SPEAKER_nohash_N.wav there; give the folder of Speech Commands"


@dataclass(frozen=True, slots=True)
class SpeechFiles:
    """Utterances, decoded when they are asked for: logarithms of 32 mel bands in 32 frames, each of mean 0 and deviation 1."""

    paths: tuple[Path, ...]
    labels: Tensor
    classes: tuple[str, ...]
    clients: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def inputs(self, samples: Numbers) -> Tensor:
        return torch.stack([spectrogram(*read_wave(self.paths[int(i)])) for i in samples])


def speech_commands(folder: Path) -> tuple[SpeechFiles, SpeechFiles]:
    """What to train and to test with: files that testing_list.txt names are for testing.

    Without that list a tenth of the speakers is, by a hash of their names. The test's speakers never train.

    Raises:
        ConfigError: no such files.
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
    """The samples of a mono file of 16 bits, in -1 .. 1, and how many there are in a second."""
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
    """The first second as 1 x 32 x 32: shorter sounds are followed by silence."""
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
    """Triangles, equally wide on the mel scale, from 20 Hz to half the rate: bands x frequencies."""
    top, bottom = (2595 * np.log10(1 + hertz / 700) for hertz in (rate / 2, 20.0))
    edges = 700 * (10 ** (np.linspace(bottom, top, BANDS + 2) / 2595) - 1)
    at = np.linspace(0, rate / 2, WINDOW // 2 + 1)
    rising = (at - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - at) / np.diff(edges)[1:, None]
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling)).astype(np.float32))
