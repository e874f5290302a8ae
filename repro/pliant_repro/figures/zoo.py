"""The workloads of EasyScale's table 1, each with synthetic data, in a size for a machine with a few cores or as published.

    tiny    a step in milliseconds: for --quick and for tests
    small   the published depth, narrow and with small inputs: the default on CPUs
    paper   the published sizes: for a GPU

ShuffleNetV2, ResNet-50, VGG19, a Swin-like transformer, NeuMF, and encoders like BERT and ELECTRA with a head for
spans of text. YOLOv3 is left out. Nothing in here knows how it is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from pliant_repro.figures.figures import SCALES, check_model, check_scale

SEED = 1234
POOL = 256
"""Different samples in a data set; longer ones repeat them, each time augmented anew."""
Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """What a training script has made before its loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Samples
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor]
    bucket_cap_mb: float | None
    """As DDP's; small models need small buckets to have several of them."""


def build(name: str, scale: str, num_batches: int, device: torch.device, batch_size: int = 0) -> Workload:
    """The workload with fixed initial parameters and so many batches; `batch_size` 0 means its usual one."""
    make, at = WORKLOADS[check_model(name)], SCALES.index(check_scale(scale))
    torch.manual_seed(SEED)
    model, data, loss, usual = make(at)
    data.length = num_batches * (batch_size or usual)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    cap = {"tiny": 0.02, "small": 0.5}.get(scale)
    return Workload(model, optimizer, data, batch_size or usual, loss, cap)


# --- data ---


class Samples(Dataset[Sample]):
    """A pool of samples, repeated to any length."""

    length = POOL

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(SEED)

    def __len__(self) -> int:
        return self.length


class Pictures(Samples):
    """Random images with labels, mirrored and made noisy at random whenever they are read."""

    def __init__(self, side: int, classes: int) -> None:
        super().__init__()
        self._images = torch.rand(POOL, 3, side, side, generator=self._random)
        self._labels = torch.randint(0, classes, (POOL,), generator=self._random)

    def __getitem__(self, index: int) -> Sample:
        image = self._images[index % POOL]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.05 * torch.randn(image.shape), self._labels[index % POOL]


class Passages(Samples):
    """Random word numbers, and where the answer to the question begins and ends in them."""

    def __init__(self, num_words: int, num_positions: int) -> None:
        super().__init__()
        self._words = torch.randint(0, num_words, (POOL, num_positions), generator=self._random)
        self._spans = torch.randint(0, num_positions, (POOL, 2), generator=self._random)

    def __getitem__(self, index: int) -> Sample:
        return self._words[index % POOL], self._spans[index % POOL]


class Ratings(Samples):
    """Pairs of a user and an item, and whether the user liked it."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        pairs = [torch.randint(0, count, (POOL,), generator=self._random) for count in (users, items)]
        self._pairs = torch.stack(pairs, 1)
        self._liked = torch.randint(0, 2, (POOL,), generator=self._random).float()

    def __getitem__(self, index: int) -> Sample:
        return self._pairs[index % POOL], self._liked[index % POOL]


Made = tuple[nn.Module, Samples, Callable[[Tensor, Tensor], Tensor], int]


# --- convolutional models ---


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """He et al. 2015: 1x1, 3x3, 1x1 with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv(inputs, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU(), *_conv(width, 4 * width, 1)
        )
        changes = stride != 1 or inputs != 4 * width
        self.shortcut = nn.Sequential(*_conv(inputs, 4 * width, 1, stride)) if changes else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.body(inputs) + self.shortcut(inputs))


def resnet50(width: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [*_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def vgg19(width: int, hidden: int, classes: int, pooled: int) -> nn.Module:
    """Simonyan and Zisserman 2014, configuration E."""
    layers: list[nn.Module] = []
    inputs = 3
    for factor, depth in ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, factor * width, 3, padding=1), nn.ReLU()]
            inputs = factor * width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(pooled), nn.Flatten(), nn.Linear(inputs * pooled * pooled, hidden), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)
    )


class ShuffleUnit(nn.Module):
    """Ma et al. 2018, figure 3 (c) and (d): half of the channels pass, then all are shuffled."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._stride, half = stride, outputs // 2
        own = inputs if stride == 2 else half
        self.left = nn.Sequential()
        if stride == 2:
            self.left.extend([*_conv(inputs, inputs, 3, 2, inputs), *_conv(inputs, half, 1), nn.ReLU()])
        self.right = nn.Sequential(
            *_conv(own, half, 1), nn.ReLU(), *_conv(half, half, 3, stride, half), *_conv(half, half, 1), nn.ReLU()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = (inputs, inputs) if self._stride == 2 else inputs.chunk(2, 1)
        return F.channel_shuffle(torch.cat((self.left(left), self.right(right)), 1), 2)


def shufflenetv2(first: int, width: int, last: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [*_conv(3, first, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = first
    for stage, units in enumerate((4, 8, 4)):
        for unit in range(units):
            layers.append(ShuffleUnit(inputs, width << stage, 1 if unit else 2))
            inputs = width << stage
    layers += [*_conv(inputs, last, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*layers)


# --- transformers ---


class SpanFinder(nn.Module):
    """An encoder of words with two outputs at each: whether the answer begins, and ends, there. As BERT on SQuAD;
    with `embedded` other than `width`, the embeddings are projected, as in ELECTRA. The places are the classes."""

    def __init__(self, num_words: int, positions: int, width: int, depth: int, embedded: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, embedded)
        self.positions = nn.Parameter(0.02 * torch.randn(positions, embedded))
        self.project = nn.Linear(embedded, width) if embedded != width else nn.Identity()
        heads = max(2, width // 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.project(self.words(words) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        return cast(Tensor, self.head(hidden))


class WindowBlock(nn.Module):
    """Attention within square windows, every second block with the windows moved by half (Liu et al. 2021). What
    Swin masks at the borders attends around them here."""

    def __init__(self, width: int, window: int, *, moved: bool) -> None:
        super().__init__()
        self._window, self._move = window, window // 2 if moved else 0
        self.layer = nn.TransformerEncoderLayer(
            width, max(1, width // 32), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, inputs: Tensor) -> Tensor:
        batch, height, breadth, width = inputs.shape
        size = self._window
        moved = inputs.roll((-self._move, -self._move), (1, 2))
        windows = moved.view(batch, height // size, size, breadth // size, size, width).transpose(2, 3)
        seen = self.layer(windows.reshape(-1, size * size, width))
        back = seen.view(batch, height // size, breadth // size, size, size, width).transpose(2, 3)
        return cast(Tensor, back.reshape(inputs.shape).roll((self._move, self._move), (1, 2)))


class Merge(nn.Module):
    """Four neighbours become one place with twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        corners = [inputs[:, down::2, right::2] for down in (0, 1) for right in (0, 1)]
        return cast(Tensor, self.body(torch.cat(corners, -1)))


class Swin(nn.Module):
    def __init__(self, width: int, depths: tuple[int, ...], patch: int, window: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        layers: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            if stage:
                layers.append(Merge(width << stage - 1))
            layers += [WindowBlock(width << stage, window, moved=bool(block % 2)) for block in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width << len(depths) - 1)
        self.head = nn.Linear(width << len(depths) - 1, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(self.patches(images).permute(0, 2, 3, 1))
        return cast(Tensor, self.head(self.norm(hidden).mean((1, 2))))


# --- recommendation ---


class NeuMF(nn.Module):
    """He et al. 2017: a product of embeddings beside a perceptron over others."""

    def __init__(self, users: int, items: int, factors: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        half = layers[0] // 2
        self.product = nn.ModuleList(nn.Embedding(count, factors) for count in (users, items))
        self.joined = nn.ModuleList(nn.Embedding(count, half) for count in (users, items))
        steps = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(layers)]
        self.perceptron = nn.Sequential(*(layer for pair in steps for layer in pair))
        self.head = nn.Linear(factors + layers[-1], 1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        product = self.product[0](user) * self.product[1](item)
        joined = self.perceptron(torch.cat((self.joined[0](user), self.joined[1](item)), 1))
        return cast(Tensor, self.head(torch.cat((product, joined), 1)).squeeze(1))


# --- by name; sizes are (tiny, small, paper) ---


def _pictures(model: nn.Module, at: int, batch: tuple[int, int, int]) -> Made:
    side, classes = ((32, 10), (32, 10), (224, 1000))[at]
    return model, Pictures(side, classes), F.cross_entropy, batch[at]


def _resnet50(at: int) -> Made:
    return _pictures(resnet50(*((4, 10), (16, 10), (64, 1000))[at]), at, (4, 8, 32))


def _vgg19(at: int) -> Made:
    return _pictures(vgg19(*((4, 32, 10, 1), (16, 256, 10, 1), (64, 4096, 1000, 7))[at]), at, (4, 8, 32))


def _shufflenetv2(at: int) -> Made:
    sizes = ((8, 16, 64, 10), (24, 48, 256, 10), (24, 116, 1024, 1000))
    return _pictures(shufflenetv2(*sizes[at]), at, (4, 16, 128))


def _swin(at: int) -> Made:
    sizes = ((32, (1, 1), 4, 4, 10), (32, (2, 2, 2), 2, 4, 10), (96, (2, 2, 6, 2), 4, 7, 1000))
    return _pictures(Swin(*sizes[at]), at, (4, 8, 32))


def _encoder(at: int, sizes: tuple[tuple[int, int, int, int, int], ...]) -> Made:
    num_words, positions = sizes[at][:2]
    return SpanFinder(*sizes[at]), Passages(num_words, positions), F.cross_entropy, (4, 4, 8)[at]


def _bert(at: int) -> Made:
    return _encoder(at, ((200, 16, 32, 2, 32), (4000, 64, 128, 4, 128), (30522, 384, 768, 12, 768)))


def _electra(at: int) -> Made:
    return _encoder(at, ((200, 16, 32, 2, 16), (4000, 64, 128, 4, 64), (30522, 384, 768, 12, 128)))


def _neumf(at: int) -> Made:
    users, items, factors = ((100, 50, 8), (6000, 3700, 8), (138493, 26744, 64))[at]
    layers = ((16, 8), (64, 32, 16, 8), (256, 256, 128, 64))[at]
    model = NeuMF(users, items, factors, layers)
    return model, Ratings(users, items), F.binary_cross_entropy_with_logits, (16, 256, 1024)[at]


WORKLOADS: dict[str, Callable[[int], Made]] = {
    "shufflenetv2": _shufflenetv2,
    "resnet50": _resnet50,
    "vgg19": _vgg19,
    "neumf": _neumf,
    "bert": _bert,
    "electra": _electra,
    "swin": _swin,
}
