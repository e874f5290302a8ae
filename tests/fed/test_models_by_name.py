"""Models that are asked for by name: what each takes and gives, and names that do not exist."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from pliant.errors import ConfigError
from pliant.fed.data import models
from pliant.fed.data.models import make_model

SMALL, IMAGE, COLOURS = torch.zeros(1, 8, 8), torch.zeros(1, 28, 28), torch.zeros(3, 32, 32)
TEXT = torch.zeros(20, dtype=torch.int64)


@pytest.mark.parametrize("name", ["cnn", "cnn-bn", "mlp", "logistic"])
@pytest.mark.parametrize("sample", [SMALL, IMAGE, COLOURS], ids=["digits", "mnist", "colours"])
def test_images_of_any_size_become_scores(name: str, sample: torch.Tensor) -> None:
    assert make_model(name, 7, sample)(torch.randn(2, *sample.shape)).shape == (2, 7)


def test_the_small_cnn_has_the_parameters_that_it_says() -> None:
    assert sum(each.numel() for each in make_model("cnn", 10, IMAGE).parameters()) == 45_226
    assert not list(make_model("cnn", 10, IMAGE).buffers())
    assert list(make_model("cnn-bn", 10, IMAGE).buffers())


@pytest.mark.parametrize("name", models.TEXTS)
def test_texts_become_scores_of_each_next_character(name: str) -> None:
    model = make_model(name, 30, TEXT)
    codes = torch.randint(0, 30, (2, 20))
    before = model(codes)
    assert before.shape == (2, 20, 30)
    changed = codes.clone()
    changed[:, 12:] = 0
    torch.testing.assert_close(model(changed)[:, :12], before[:, :12])  # what comes later is not looked at


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="needs torchvision: the extra `experiments`"
)
@pytest.mark.parametrize("name", ["shufflenet_v2_x2_0", "resnet18"])
@pytest.mark.parametrize("channels", [1, 3])
def test_torchvisions_models_take_any_number_of_channels(name: str, channels: int) -> None:
    model = make_model(name, 35, torch.zeros(channels, 32, 32)).eval()
    assert model(torch.zeros(1, channels, 32, 32)).shape == (1, 35)


def module_of(classes: int) -> nn.Module:
    return nn.Linear(3, classes)


def no_module(classes: int) -> int:
    return classes


def test_models_of_the_users_own() -> None:
    assert make_model(f"{__name__}:module_of", 4, torch.zeros(3))(torch.zeros(1, 3)).shape == (1, 4)
    with pytest.raises(ConfigError, match="return a torch.nn.Module"):
        make_model(f"{__name__}:no_module", 4, SMALL)


@pytest.mark.parametrize(
    ("name", "sample", "said"),
    [
        ("vgg", IMAGE, "'vgg' is unknown"),
        ("cnn", TEXT, "is not for text: use lstm"),
        ("lstm", IMAGE, "is not for images: use cnn, cnn-bn, mlp, logistic, resnet18"),
        ("resnet18", torch.zeros(64), "is not for samples of shape .64.: use mlp, logistic, or"),
        ("cnn", torch.zeros(1, 2, 9), "too small for a cnn"),
    ],
)
def test_what_does_not_fit_is_named(name: str, sample: torch.Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_model(name, 10, sample)
