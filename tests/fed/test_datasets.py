"""Readers against small files written here, and against the real data where they are installed."""

from __future__ import annotations

import gzip
import math
import struct
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pliant.errors import ConfigError
from pliant.fed.data.datasets import (
    DEBIAN,
    fashion_mnist,
    image_folder,
    mel_filters,
    read_idx,
    read_wave,
    spectrogram,
    speech_commands,
    text_by_author,
    text_by_role,
)
from pliant.fed.data.partition import natural
from pliant.fed.tables import ClientMap


def idx(values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def mnist_like(folder: Path, *, packed: bool) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    chance = np.random.default_rng(0)
    parts = {
        "train-images-idx3-ubyte": chance.integers(0, 256, (12, 28, 28)).astype(np.uint8),
        "train-labels-idx1-ubyte": (np.arange(12) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": chance.integers(0, 256, (4, 28, 28)).astype(np.uint8),
        "t10k-labels-idx1-ubyte": np.array([9, 0, 3, 3], dtype=np.uint8),
    }
    for name, values in parts.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))
    return parts


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_in_their_shape_and_normalised(tmp_path: Path, packed: bool) -> None:
    parts = mnist_like(tmp_path, packed=packed)
    train, test = fashion_mnist(tmp_path)
    pixels = parts["train-images-idx3-ubyte"] / 255
    expected = (parts["t10k-images-idx3-ubyte"] / 255 - pixels.mean()) / pixels.std()
    assert test.inputs([0, 1, 2, 3]).shape == (4, 1, 28, 28)
    np.testing.assert_allclose(test.inputs([3, 1]).squeeze(1), expected[[3, 1]], atol=1e-5)
    assert test.labels.tolist() == [9, 0, 3, 3]
    assert train.data.mean().item() == pytest.approx(0, abs=1e-5)
    assert train.data.std().item() == pytest.approx(1, abs=1e-3)
    assert (len(train), train.classes[9], train.clients) == (12, "ankle boot", ())


def test_debians_fashion_mnist() -> None:
    if not DEBIAN.is_dir():
        pytest.skip("no Fashion-MNIST: apt install dataset-fashion-mnist")
    _, test = fashion_mnist()
    assert test.data.shape == (10_000, 1, 28, 28)
    assert Counter(test.labels.tolist()) == dict.fromkeys(range(10), 1000)
    assert test.inputs(np.array([5])).mean().item() == pytest.approx(test.data[5].mean().item())
    # Its published statistics: mean 0.2860 and deviation 0.3530 of the training pixels; black is their quotient.
    assert test.data.min().item() == pytest.approx(-0.2860 / 0.3530, abs=1e-3)


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (10, 6)) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: the extra `examples`")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, colour).save(path)


def test_a_folder_of_images_by_class(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "b.png", (255, 0, 0))
    picture(tmp_path / "cat" / "a.png", (0, 255, 0))
    picture(tmp_path / "dog" / "deep" / "c.png", (0, 0, 255))
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    found = image_folder(tmp_path)
    assert [path.name for path in found.paths] == ["a.png", "b.png", "c.png"]
    assert (found.labels.tolist(), found.classes) == ([0, 0, 1], ("cat", "dog"))
    pixels = found.inputs([2, 0])
    assert pixels.shape == (2, 3, 64, 64)
    assert pixels[0].amax(dim=(1, 2)).tolist() == [-1, -1, 1]
    assert pixels[1].amin(dim=(1, 2)).tolist() == [-1, 1, -1]
    owned = image_folder(tmp_path, ClientMap(("dog/deep/c.png", "cat/a"), ("u9", "u4")))
    assert (owned.labels.tolist(), owned.clients) == ([1, 0], ("u9", "u4"))


def test_openimages_map_says_whose_and_which_class(tmp_path: Path) -> None:
    for name in ("x1", "x2", "x10"):
        picture(tmp_path / "train" / f"{name}.png", (9, 9, 9))
    mapped = ClientMap(
        ("train/x1", "train/x2.png", "train/gone", "train/x10"), ("7", "7", "8", "9"), ("10", "2", "0", "2")
    )
    found = image_folder(tmp_path, mapped)
    assert found.clients == ("7", "7", "9")
    assert (found.classes, found.labels.tolist()) == (("2", "10"), [1, 0, 0])  # by number, not by letter
    assert natural(found.clients).sizes.tolist() == [2, 1]


def tone(path: Path, hertz: float, *, rate: int = 16_000, seconds: float = 0.7, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = (12_000 * np.sin(2 * math.pi * hertz * np.arange(int(rate * seconds) * channels) / rate)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.tobytes())


def test_speech_commands_by_speaker(tmp_path: Path) -> None:
    for word, speaker, number in (("yes", "ann", 0), ("yes", "bob", 0), ("no", "ann", 1), ("no", "eve", 0)):
        tone(tmp_path / word / f"{speaker}_nohash_{number}.wav", 440)
    tone(tmp_path / "_background_noise_" / "hum.wav", 50)
    (tmp_path / "testing_list.txt").write_text("no/eve_nohash_0.wav\n")
    train, test = speech_commands(tmp_path)
    assert train.classes == test.classes == ("no", "yes")
    assert (train.clients, train.labels.tolist()) == (("ann", "ann", "bob"), [0, 1, 1])
    assert (test.clients, test.labels.tolist()) == (("eve",), [0])
    assert train.inputs([0, 2]).shape == (2, 1, 32, 32)
    (tmp_path / "testing_list.txt").unlink()
    for number in range(60):
        tone(tmp_path / "up" / f"s{number}_nohash_0.wav", 440, seconds=0.01)
    train, test = speech_commands(tmp_path)
    assert len(train) + len(test) == 64
    assert not set(train.clients) & set(test.clients)
    assert 1 <= len(test) <= 20


def test_a_tone_lies_in_its_mel_band_and_silence_after_it(tmp_path: Path) -> None:
    tone(tmp_path / "a.wav", 1000, seconds=0.5)
    sound, rate = read_wave(tmp_path / "a.wav")
    assert sound.abs().max().item() == pytest.approx(12_000 / 32_768, abs=1e-3)
    picture_ = spectrogram(sound, rate)[0]
    band = int(mel_filters(rate)[:, round(1000 / (rate / 1024))].argmax())
    assert set(picture_[:, :14].argmax(dim=0).tolist()) == {band}
    assert picture_[:, 20:].max() < picture_[band, :14].min()
    assert picture_.mean().item() == pytest.approx(0, abs=1e-4)
    assert torch.isfinite(spectrogram(torch.zeros(16_000), 16_000)).all()
    # Neighbouring triangles sum to one between the first and the last peak.
    inside = mel_filters(rate).sum(dim=0)[10:470]
    assert inside.min().item() == pytest.approx(1, abs=1e-4)


PLAY = "ANN:\nTo be or not\nto be.\n\nBOB:\nYes, yes.\n\nANN:\nWell.\n\nExeunt\n\nALL TOGETHER:\nHo!\n"


def test_roles_are_clients_and_labels_are_the_next_characters(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(PLAY)
    train, test = text_by_role(tmp_path / "play.txt", length=5, test_part=0.34)
    said = "To be or not\nto be.\nWell."
    assert Counter(train.clients) == {"ANN": 3, "BOB": 1}
    assert Counter(test.clients) == {"ANN": 1}, "the last part of what a role says"

    def text(codes: torch.Tensor) -> str:
        return "".join(train.classes[code] for code in codes.tolist())

    own = [i for i, client in enumerate(train.clients) if client == "ANN"]
    for place, sample in enumerate(own):
        assert text(train.inputs([sample])[0]) == said[5 * place : 5 * place + 5]
        assert text(train.labels[sample]) == said[5 * place + 1 : 5 * place + 6]
    assert text(test.inputs([0])[0]) == said[15:20]


def test_rare_characters_share_a_number(tmp_path: Path) -> None:
    strange = "".join(chr(0x4E00 + i) for i in range(200))
    (tmp_path / "play.txt").write_text(f"ANN:\n{'ab' * 50}{strange}\n")
    train, _ = text_by_role(tmp_path / "play.txt", length=10, test_part=0)
    assert len(train.classes) == 128
    assert int(train.data.max()) < 128
    assert (train.data == 0).any()


def test_authors_of_posts_are_clients(tmp_path: Path) -> None:
    (tmp_path / "reddit.csv").write_text('author,body\nu1,"hello, you"\nu2,abcdef\nu1,again\nu3,\n')
    train, test = text_by_author(tmp_path / "reddit.csv", length=4, test_part=0)
    assert Counter(train.clients) == {"u1": 3, "u2": 1}
    assert len(test) == 0
    assert test.data.shape == (0, 4)


def test_shakespeares_roles(fed_data: Path) -> None:
    train, test = text_by_role(fed_data / "tinyshakespeare.txt")
    roles = natural(train.clients)
    assert 250 <= len(roles) <= 297  # of 297, those that say 81 characters
    assert int((roles.sizes * 80 >= 1800).sum()) == pytest.approx(99, abs=8)  # of what they say, nine tenths are here
    assert len(train.classes) == 66
    assert 0.05 < len(test) / len(train) < 0.12


def test_mistakes_are_named(tmp_path: Path) -> None:
    for name, data in (
        ("short.gz", gzip.compress(idx(np.zeros((3, 2), np.uint8)))[:-9]),
        ("cut", idx(np.zeros((3, 2), np.uint8))[:-1]),
        ("other", b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00\x00\x00\x00"),
        ("words.csv", b"a,b\n1,2\n"),
        ("plain.txt", b"nothing is said here\n"),
        ("binary", b"\xff\xfe\x00"),
    ):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "play.txt").write_text(PLAY)
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    picture(tmp_path / "flat" / "lonely.png", (1, 2, 3))
    (tmp_path / "bad" / "cat").mkdir(parents=True)
    (tmp_path / "bad" / "cat" / "x.png").write_bytes(b"no image")
    tone(tmp_path / "stereo.wav", 440, channels=2, seconds=0.01)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: fashion_mnist(tmp_path / "none"), "apt install dataset-fashion-mnist"),
        (lambda: fashion_mnist(tmp_path / "empty"), "four such files"),
        (lambda: read_idx(tmp_path / "short.gz"), "short.gz"),
        (lambda: read_idx(tmp_path / "cut"), r"5 bytes for the shape \[3, 2\]"),
        (lambda: read_idx(tmp_path / "other"), "begins with 00 00 0d 01"),
        (lambda: image_folder(tmp_path / "empty"), "no images"),
        (lambda: image_folder(tmp_path / "flat"), "lonely.png lies in no class's folder"),
        (lambda: image_folder(tmp_path / "bad", ClientMap(("q",), ("1",), ("0",))), "none of the map's samples"),
        (lambda: image_folder(tmp_path / "bad").inputs([0]), "x.png"),
        (lambda: speech_commands(tmp_path / "empty"), "nohash"),
        (lambda: read_wave(tmp_path / "stereo.wav"), "2 channels of 16 bits"),
        (lambda: read_wave(tmp_path / "binary"), "WAV"),
        (lambda: text_by_role(tmp_path / "plain.txt"), "nobody speaks"),
        (lambda: text_by_role(tmp_path / "binary"), "text file"),
        (lambda: text_by_role(tmp_path / "play.txt", length=500), "nobody has 501 characters"),
        (lambda: text_by_author(tmp_path / "words.csv"), "a, b; posts have author and text"),
    ]
    for call, words in cases:
        with pytest.raises(ConfigError, match=words):
            call()
    mnist_like(tmp_path / "empty", packed=False)
    (tmp_path / "empty" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
    with pytest.raises(ConfigError, match=r"t10k has images \[4, 28, 28\] and labels \[3\]"):
        fashion_mnist(tmp_path / "empty")
