"""The models and data of the experiments: torchvision's and transformers' where they are, CIFAR-10 and SQuAD from files."""

from __future__ import annotations

import importlib.util
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pliant_repro import zoo
from pliant_repro.figures.questions import import_transformers

from pliant import torchvision_import
from pliant.errors import ConfigError

needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Image models


@pytest.mark.parametrize(
    ("asked", "known"),
    [("ResNet50", "ResNet50"), ("resnet50", "ResNet50"), ("MOBILENETV2", "MobileNetV2"), ("mobilenet_v2", "MobileNetV2"),
     ("vgg-16", "VGG16"), ("inception_v3", "InceptionV3"), ("ShuffleNetV2", "ShuffleNetV2"), ("resnet56", "ResNet56")],
)  # fmt: skip
def test_models_are_found_in_any_spelling(asked: str, known: str) -> None:
    assert zoo.model_name(asked) == known


@pytest.mark.parametrize("asked", ["", "ResNet51", "resnet"])
def test_an_unknown_model_is_answered_with_those_there_are(asked: str) -> None:
    with pytest.raises(ConfigError, match="ResNet50.*VGG16.*MobileNetV2") as caught:
        zoo.vision_model(asked)
    assert repr(asked) in str(caught.value)


def test_names_and_sizes_are_known_without_torchvision_and_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert zoo.image_size("InceptionV3") == 299
    assert zoo.num_classes("resnet56") == 10
    with pytest.raises(ConfigError, match=r"pliant\[examples\]"):
        zoo.vision_model("ResNet50")
    with pytest.raises(ConfigError, match=r"pip install transformers"):
        import_transformers()


@needs_torchvision
@pytest.mark.parametrize(("name", "parameters"), [("ResNet50", 25_557_032), ("MobileNetV2", 3_504_872)])
def test_torchvisions_models_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(each.numel() for each in zoo.vision_model(name).parameters()) == parameters


@needs_torchvision
def test_inception_answers_with_its_logits_alone_also_in_training() -> None:
    model = zoo.vision_model("InceptionV3", classes=7).train()
    assert model(torch.zeros(2, 3, 75, 75)).shape == (2, 7)


@needs_torchvision
def test_torchvision_may_be_imported_again() -> None:
    assert torchvision_import.import_torchvision() is torchvision_import.import_torchvision()


def test_operators_that_a_torch_has_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch for CUDA, whose torchvision brings them: declaring one twice would be an error."""
    library = torch.library.Library("pliant_test_ops", "DEF")
    library.define("nms" + torchvision_import.MISSING[0][1])
    monkeypatch.setattr(torch.ops, "torchvision", torch.ops.pliant_test_ops, raising=False)
    monkeypatch.setattr(torchvision_import, "MISSING", torchvision_import.MISSING[:1])
    monkeypatch.setattr(torch.library, "define", lambda *_: pytest.fail("declared what is there"))
    torchvision_import._declare_missing(tmp_path)


def test_resnet56_has_the_published_size_and_learns() -> None:
    model = zoo.CifarResNet()
    assert sum(each.numel() for each in model.parameters()) == 853_018
    torch.manual_seed(0)
    small = zoo.CifarResNet(8, width=4)
    images, labels = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(small(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with pytest.raises(ConfigError, match="6n"):
        zoo.CifarResNet(57)


# CIFAR-10


def images_and_labels(count: int = 4, seed: int = 0) -> tuple[np.ndarray[Any, Any], list[int]]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, zoo.PIXELS), dtype=np.uint8), [int(x) for x in random.integers(0, 10, count)]


def python2_pickle(images: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """As the published files are: written by Python 2, whose strings are bytes."""

    def word(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85" + word(b"b") + b"tR"
    kind = (
        b"cnumpy\ndtype\n(" + word(b"u1") + b"K\0K\1tR(K\3" + word(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    shape = b"(" + b"".join(b"J" + struct.pack("<i", each) for each in images.shape) + b"t"
    state = b"(K\1" + shape + kind + b"I00\n" + word(images.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + word(b"data") + array + state + word(b"labels") + numbers + b"u."


def write_all(folder: Path, names: tuple[str, ...], write: Any) -> list[int]:
    folder.mkdir(parents=True, exist_ok=True)
    labels = []
    for seed, name in enumerate(names):
        pixels, some = images_and_labels(seed=seed)
        write(folder, name, pixels, some)
        labels += some
    return labels


def write_python2(folder: Path, name: str, pixels: np.ndarray[Any, Any], labels: list[int]) -> None:
    (folder / name).write_bytes(python2_pickle(pixels, labels))


def write_python3(folder: Path, name: str, pixels: np.ndarray[Any, Any], labels: list[int]) -> None:
    (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2))


def write_binary(folder: Path, name: str, pixels: np.ndarray[Any, Any], labels: list[int]) -> None:
    records = np.concatenate((np.array(labels, np.uint8)[:, None], pixels), 1)
    (folder / f"{name}.bin").write_bytes(records.tobytes())


@pytest.mark.parametrize("write", [write_python2, write_python3, write_binary], ids=["python2", "python3", "binary"])
def test_cifar_is_read_in_each_of_its_forms(tmp_path: Path, write: Any) -> None:
    labels = write_all(tmp_path / "cifar-10-batches-py", zoo.TRAINING_FILES, write)
    write_all(tmp_path / "cifar-10-batches-py", zoo.TEST_FILES, write)
    data = zoo.cifar10(tmp_path)
    assert len(data) == len(labels) == 20
    assert [int(data[number][1]) for number in range(20)] == labels
    expected = images_and_labels(seed=1)[0][2].reshape(3, 32, 32) / 255.0
    image = data[6][0] * torch.tensor(zoo.CIFAR_DEVIATION)[:, None, None] + torch.tensor(zoo.CIFAR_MEAN)[:, None, None]
    assert torch.allclose(image, torch.from_numpy(expected).float(), atol=1e-6)
    assert len(zoo.cifar10(tmp_path / "cifar-10-batches-py", train=False)) == 4


def test_augmented_images_are_moved_and_mirrored_by_torchs_generator(tmp_path: Path) -> None:
    write_all(tmp_path, zoo.TRAINING_FILES, write_binary)
    data = zoo.cifar10(tmp_path, augment=True)
    torch.manual_seed(1)
    first = [data[0][0] for _ in range(4)]
    torch.manual_seed(1)
    assert all(torch.equal(data[0][0], image) for image in first)
    assert not torch.equal(first[0], first[1])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('pathlib').Path('evil-was-here').touch()",)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pickle.dumps(Evil()), "wants to call builtins.eval"),
        (pickle.dumps({b"data": Evil(), b"labels": [1]}, protocol=2), "wants to call"),
        (b"cnumpy\ndtype\n(cos\nsystem\ntR.", "wants to call os.system"),
        (b"\x80\x02}.", r"no file of CIFAR-10 \(KeyError"),
        (pickle.dumps([1, 2]), r"no file of CIFAR-10 \(TypeError"),
        (
            pickle.dumps({b"data": np.zeros(5, np.uint8), b"labels": [1]}, protocol=2),
            r"no file of CIFAR-10 \(ValueError",
        ),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, protocol=2), "labels from 0 to 9"),
        (b"not a pickle", "no file of CIFAR-10"),
        (b"", "no file of CIFAR-10"),
    ],
)
def test_a_file_that_is_not_cifar_is_refused_and_runs_nothing(
    content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ConfigError, match=why) as caught:
        zoo.cifar10(tmp_path)
    assert "data_batch_1" in str(caught.value)
    assert not (tmp_path / "evil-was-here").exists()


def test_missing_and_cut_files_of_cifar_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no data_batch_1"):
        zoo.cifar10(tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes(b"\0" * 3000)
    with pytest.raises(ConfigError, match=r"data_batch_1\.bin is no file of CIFAR-10"):
        zoo.cifar10(tmp_path)
    write_binary(tmp_path, "data_batch_1", *images_and_labels())
    with pytest.raises(ConfigError, match=r"data_batch_2\.bin"):
        zoo.cifar10(tmp_path)
