"""The models of the experiments and the networks of the benches, and CIFAR-10."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pliant_repro import zoo
from pliant_repro.figures.questions import import_transformers
from pliant_repro.profiles import TRAINED, tensor_sizes

from pliant import torchvision_import
from pliant.errors import ConfigError

needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Networks of the benches


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("gpt2", 124_475_904),
        ("vit", 22_049_896),
        ("lstm", 28_401_100),
    ],
)
def test_networks_have_their_published_sizes(name: str, num_parameters: int) -> None:
    with torch.device("meta"):
        model = zoo.NETWORKS[name].make()
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(sizes) == num_parameters
    if name == "resnet50":
        assert sizes == tensor_sizes(name)


def batch_for(name: str) -> Any:
    chosen = zoo.network(name)
    return zoo.ReadyBatches(chosen.kind, chosen.size, 100, classes=chosen.classes).__getitems__([0, 1])


@pytest.mark.parametrize("name", ["resnet18", "transformer", "small"])
def test_networks_begin_alike_everywhere(name: str) -> None:
    with torch.no_grad():
        first, second = (zoo.compute_loss(zoo.build(name).eval(), *batch_for(name)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("small", "sgd"), ("small", "adam"), ("small", "adamw"), ("gpt2-tiny", "adamw"), ("vit-tiny", "adamw"),
     ("lstm-tiny", "sgd"), ("resnet50-tiny", "sgd")],
)  # fmt: skip
def test_networks_learn(name: str, kind: str) -> None:
    model, batch = zoo.build(name).eval(), batch_for(name)  # without chance
    optimizer = zoo.make_optimizer(kind, model)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = zoo.compute_loss(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_an_unknown_network_lists_the_known_ones() -> None:
    assert set(zoo.NETWORKS) == set(TRAINED)
    with pytest.raises(ConfigError, match=", ".join(TRAINED)):
        zoo.network("resnet19")


def test_gpt2_does_not_see_later_words() -> None:
    model = zoo.build("gpt2-tiny").eval()
    words = torch.randint(0, 128, (1, 16), generator=torch.Generator().manual_seed(0))
    other = words.clone()
    other[0, 9:] = (other[0, 9:] + 1) % 128
    with torch.no_grad():
        before, after = model(words), model(other)
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9:], after[9:])


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


@needs_torchvision
def test_cifar_is_refused_where_its_files_are_not_the_published_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cifar-10-python\.tar\.gz"):
        zoo.cifar10(str(tmp_path), train=True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": [], b"labels": []}))
    with pytest.raises(ConfigError, match="damaged"):
        zoo.cifar10(str(tmp_path), train=True)


@needs_torchvision
def test_images_of_cifar_are_normalised_and_varied_by_torchs_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    def load(self: Any, root: str, train: bool, transform: Any) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
        self.targets, self.transform, self.target_transform = [3, 1, 4, 1], transform, None

    monkeypatch.setattr(datasets.CIFAR10, "__init__", load)
    plain, varied = (zoo.cifar10(str(tmp_path), train=train) for train in (False, True))
    image, label = plain[0]
    assert (image.shape, label) == ((3, 32, 32), 3)
    assert -2.5 < image.min() < 0 < image.max() < 2.5
    torch.manual_seed(1)
    first = [varied[0][0] for _ in range(4)]
    torch.manual_seed(1)
    assert all(torch.equal(varied[0][0], image) for image in first)
    assert not torch.equal(first[0], first[1])
