"""The networks that benches train, and their data: ResNets, a transformer with a large embedding, a small net.

Written out here so that a bench needs nothing but torch. The layers, their order and their first values are those of
the papers (and of torchvision), so the numbers of parameters and of gradients are the known ones. All data are
synthetic and the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.errors import ConfigError
from pliant_repro.bench.models import check_trained

NUM_CLASSES = 1000
POOL = 64
"""Distinct samples; a dataset of any length repeats them."""


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """A residual block: convolutions (output channels, kernel, stride) beside a shortcut."""

    def __init__(self, inputs: int, convolutions: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = inputs
        for outputs, kernel, stride in convolutions:
            if layers:
                layers.append(nn.ReLU(inplace=True))
            layers += _conv_bn(width, outputs, kernel, stride)
            width = outputs
        total_stride = max(stride for _, _, stride in convolutions)
        self.body = nn.Sequential(*layers)
        changes = inputs != width or total_stride > 1
        self.shortcut = nn.Sequential(*_conv_bn(inputs, width, 1, total_stride)) if changes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.shortcut(images), inplace=True)


class ResNet(nn.Module):
    """He et al. 2015, table 1, for ImageNet's 1000 classes; takes images of 32x32 and more."""

    def __init__(self, blocks: Sequence[int], *, bottleneck: bool) -> None:
        super().__init__()
        stem = [*_conv_bn(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]
        self.stem = nn.Sequential(*stem)
        stages: list[nn.Module] = []
        inputs = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                if bottleneck:
                    convolutions = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
                else:
                    convolutions = [(width, 3, stride), (width, 3, 1)]
                stages.append(Block(inputs, convolutions))
                inputs = convolutions[-1][0]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, NUM_CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return found


class CifarResNet(nn.Module):
    """He et al. 2015, section 4.2: the ResNet-20 for images of 32x32, with as many classes as our data have."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        stages: list[nn.Module] = [*_conv_bn(3, 16, 3), nn.ReLU(inplace=True)]
        inputs = 16
        for stage in range(3):
            width = 16 << stage
            for number in range(blocks):
                stages.append(Block(inputs, [(width, 3, 2 if stage > 0 and number == 0 else 1), (width, 3, 1)]))
                inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.stages(images).mean((2, 3)))
        return found


class Transformer(nn.Module):
    """A small decoder-only language model whose embedding and head hold most of its parameters."""

    def __init__(self, num_words: int = 32_000, width: int = 256, num_layers: int = 4, max_length: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.places = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        hidden = self.words(words) + self.places.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        found: Tensor = self.head(self.norm(hidden)).flatten(0, 1)
        return found


class SmallNet(nn.Module):
    """Convolutions, BatchNorm and dropout, small enough to look at every bit after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv_bn(3, 16, 3), nn.ReLU(), *_conv_bn(16, 32, 3, 2), nn.ReLU(), nn.Dropout(0.25))
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, NUM_CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(images).mean((2, 3)))
        return found


@dataclass(frozen=True, slots=True)
class Network:
    """How to make a network, and what it is trained on."""

    make: Callable[[], nn.Module]
    kind: str
    """`images` of size x size, or `text` of so many words."""
    size: int
    batch: int
    """For measurements on a processor."""
    optimizer: str


NETWORKS = {
    "resnet18": Network(lambda: ResNet((2, 2, 2, 2), bottleneck=False), "images", 32, 16, "sgd"),
    "resnet20": Network(CifarResNet, "images", 32, 32, "sgd"),
    "resnet50": Network(lambda: ResNet((3, 4, 6, 3), bottleneck=True), "images", 224, 32, "sgd"),
    "transformer": Network(Transformer, "text", 32, 2, "adamw"),
    "small": Network(SmallNet, "images", 16, 4, "adam"),
}
OPTIMIZERS = ("sgd", "adam", "adamw")


def network(name: str) -> Network:
    """The network of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    check_trained(name)
    return NETWORKS[name]


def build(name: str, device: torch.device | str = "cpu", seed: int = 1) -> nn.Module:
    """The network with the same first values in every process."""
    torch.manual_seed(seed)
    return network(name).make().to(device)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, Adam or AdamW, with settings that keep synthetic training finite."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-4)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    raise ConfigError(f"optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}")


class Samples:
    """A map-style dataset of `length` samples, made of a pool of `POOL` that lies on `device`."""

    def __init__(self, kind: str, size: int, length: int, device: torch.device | str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self._length = length
        if kind == "images":
            inputs = torch.randn(POOL, 3, size, size, generator=generator)
            targets = torch.randint(0, NUM_CLASSES, (POOL,), generator=generator)
        else:
            words = torch.randint(0, 32_000, (POOL, size + 1), generator=generator)
            inputs, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        self._inputs, self._targets = inputs.to(device), targets.to(device)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = index % POOL
        return self._inputs[place], self._targets[place]


class ReadyBatches(Samples):
    """The same, asked for whole batches, which lie ready in the pool: what is measured is training, not the making of
    batches. Give `as_it_is` as the loader's collate_fn."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        begin = indices[0] % max(1, POOL - len(indices) + 1)
        return self._inputs[begin : begin + len(indices)], self._targets[begin : begin + len(indices)]


def as_it_is(batch: Any) -> Any:
    """Collate what `ReadyBatches` gives."""
    return batch


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy: of the image's class, or of each next word."""
    return F.cross_entropy(model(inputs), targets.flatten())
