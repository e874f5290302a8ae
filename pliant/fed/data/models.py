"""Models for clients, by name: small ones of our own, and torchvision's.

All are made for the shape of the samples and the number of classes. Our own, except `cnn-bn`, have no buffers and draw no
random numbers while they train, so many clients can be trained as one computation.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.errors import ConfigError
from pliant.fed.data.names import FLAT, IMAGES, MODELS, TEXTS, THEIRS, check_model
from pliant.fed.data.user_functions import call_function, is_function_name, user_code_errors
from pliant.torchvision_import import import_torchvision

OWN = "it is called with the number of classes: return a torch.nn.Module"


def make_model(name: str, num_classes: int, sample: Tensor) -> nn.Module:
    """Create a model with random parameters from torch's generator, for samples like `sample` (without a batch dimension)."""
    if is_function_name(name):
        made = call_function(name, "model", OWN, num_classes)
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model {name!r} gave {type(made).__name__}: {OWN}")
        return made
    check(name, sample)
    if name in THEIRS:
        return _theirs(name, num_classes, sample.shape[0])
    if name in IMAGES:
        return ConvNet(sample, num_classes, normed=name == "cnn-bn")
    if name in TEXTS:
        return CharLSTM(num_classes) if name == "lstm" else CharTransformer(num_classes, sample.shape[0])
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(sample.numel(), num_classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(sample.numel(), 128), nn.ReLU(), nn.Linear(128, num_classes))


def check(name: str, sample: Tensor) -> None:
    """Raises ConfigError if the name is unknown, or the model does not fit samples like this one."""
    check_model(name)
    fit: tuple[str, ...]
    if not sample.is_floating_point():
        kind, fit = "text", TEXTS
    elif sample.dim() == 3:
        kind, fit = "images", tuple(each for each in MODELS if each not in TEXTS)
    else:
        kind, fit = f"samples of shape {list(sample.shape)}", FLAT
    if name not in fit:
        raise ConfigError(f"model {name!r} is not for {kind}: use {', '.join(fit)}, or module:function")


def try_out(name: str, module: nn.Module, num_classes: int, sample: Tensor) -> None:
    """Run a user's model on one sample, so that a wrong shape is reported before the first round."""
    with torch.no_grad(), user_code_errors(f"model {name!r} cannot be given a batch of shape {[1, *sample.shape]}"):
        scores = module.eval()(sample.unsqueeze(0))
    if not isinstance(scores, Tensor) or scores.dim() < 2 or scores.shape[-1] < num_classes:
        told = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError(f"model {name!r} gives {told} for one sample: give a score for each of {num_classes} classes")


class ConvNet(nn.Module):
    """Two 5 x 5 convolutions with pooling and three linear layers; 45,226 parameters for 1 x 28 x 28 and 10 classes."""

    def __init__(self, sample: Tensor, num_classes: int, *, normed: bool = False) -> None:
        super().__init__()
        around = 0 if min(sample.shape[1:]) >= 16 else 2  # without padding, nothing would be left of small images
        self.conv1 = nn.Conv2d(sample.shape[0], 8, 5, padding=around)
        self.norm1 = nn.BatchNorm2d(8) if normed else nn.Identity()
        self.conv2 = nn.Conv2d(8, 16, 5, padding=around)
        self.norm2 = nn.BatchNorm2d(16) if normed else nn.Identity()
        height, width = ((((side + 2 * around - 4) // 2) + 2 * around - 4) // 2 for side in sample.shape[1:])
        if height < 1 or width < 1:
            raise ConfigError(f"images of {list(sample.shape)} are too small for a cnn: use mlp or logistic")
        self.hidden = nn.Linear(16 * height * width, 128)
        self.middle = nn.Linear(128, 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        first = F.relu(F.max_pool2d(self.norm1(self.conv1(images)), 2))
        second = F.relu(F.max_pool2d(self.norm2(self.conv2(first)), 2))
        return cast(Tensor, self.head(F.relu(self.middle(F.relu(self.hidden(second.flatten(1)))))))


class CharLSTM(nn.Module):
    """Predicts the next character after each character of a text, with an LSTM."""

    def __init__(self, num_classes: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, codes: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.lstm(self.embedding(codes))[0]))


class CharTransformer(nn.Module):
    """Predicts the next character after each character of a text, with two blocks of causal attention."""

    def __init__(self, num_classes: int, length: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, codes: Tensor) -> Tensor:
        hidden = self.embedding(codes) + self.places[: codes.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return cast(Tensor, self.head(self.norm(hidden)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.norm1(hidden))
        return hidden + cast(Tensor, self.down(F.gelu(self.up(self.norm2(hidden)))))

    def _attention(self, hidden: Tensor) -> Tensor:
        num, length, width = hidden.shape
        query, key, value = (
            each.reshape(num, length, self._heads, -1).transpose(1, 2) for each in self.mixed(hidden).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self._heads)
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        return cast(Tensor, self.out((weights @ value).transpose(1, 2).reshape(num, length, width)))


def _theirs(name: str, num_classes: int, channels: int) -> nn.Module:
    model = cast(nn.Module, getattr(import_torchvision().models, name)(weights=None, num_classes=num_classes))
    if channels == 3:
        return model
    # The first convolution is replaced for images with another number of channels, such as spectrograms with one.
    path, first = next((path, each) for path, each in model.named_modules() if isinstance(each, nn.Conv2d))
    size, stride, padding = (cast(tuple[int, int], each) for each in (first.kernel_size, first.stride, first.padding))
    parent, _, last = path.rpartition(".")
    fresh = nn.Conv2d(channels, first.out_channels, size, stride, padding, bias=first.bias is not None)
    setattr(model.get_submodule(parent), last, fresh)
    return model
