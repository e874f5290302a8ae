"""The networks and data sets that benches and figures train, by name.

Small networks of `pliant bench` (`network`), the workloads of EasyScale's table 1 in three sizes (`workload`), torchvision's
image models under the names of KungFu's artifact (`vision_model`), and CIFAR-10 (`cifar10`). Other data are synthetic, and the
same in every process. Layers, their order and their initial values follow the papers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from pliant.errors import ConfigError
from pliant.torchvision_import import import_torchvision
from pliant_repro.profiles import TRAINED, WORKLOAD_SCALES, WORKLOADS, check_trained

SEED = 1234
"""Seed of a workload's initial parameters and of its data."""
POOL = 64
"""Number of distinct samples; a data set of any length repeats them."""
NUM_CLASSES, NUM_WORDS = 1000, 32_000
Sample = tuple[Tensor, Tensor]
Kind = Literal["images", "text", "spans", "ratings"]
Loss = Callable[[Tensor, Tensor], Tensor]


# --- synthetic data ---


def _pool(kind: Kind, size: int, classes: int, generator: torch.Generator) -> Sample:
    """Inputs and targets of all distinct samples; what `size` and `classes` mean depends on `kind`."""

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, (POOL, *shape), generator=generator)

    if kind == "images":  # of size x size pixels
        return torch.randn(POOL, 3, size, size, generator=generator), draw(classes)
    if kind == "text":  # of `size` words out of `classes`, and the next word at each position
        words = draw(classes, size + 1)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()
    if kind == "spans":  # of `size` words out of `classes`, and the first and last position of an answer
        return draw(classes, size), draw(size, 2)
    return torch.stack([draw(size), draw(classes)], 1), draw(2).float()  # (user, item), and whether the user likes it


class Samples(Dataset[Sample]):
    """A data set of `length` synthetic samples, made of a pool of POOL that lies on `device`.

    With `augment`, every reading mirrors an image at random and adds noise, by torch's generator.
    """

    def __init__(
        self,
        kind: Kind,
        size: int,
        length: int,
        device: torch.device | str = "cpu",
        *,
        classes: int = 0,
        seed: int = 0,
        augment: bool = False,
    ) -> None:
        classes = classes or (NUM_CLASSES if kind == "images" else NUM_WORDS)
        inputs, targets = _pool(kind, size, classes, torch.Generator().manual_seed(seed))
        self._inputs, self._targets = inputs.to(device), targets.to(device)
        self._length, self._augment = length, augment

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        inputs, target = self._inputs[index % POOL], self._targets[index % POOL]
        if self._augment:
            inputs = inputs.flip(-1) if torch.rand(()) < 0.5 else inputs
            inputs = inputs + 0.05 * torch.randn(inputs.shape)
        return inputs, target


class ReadyBatches(Samples):
    """Samples that come as whole batches out of the pool, so that training is measured and not the making of batches.

    Give `as_is` to the loader as its collate_fn.
    """

    def __getitems__(self, indices: list[int]) -> Sample:
        begin = indices[0] % max(1, POOL - len(indices) + 1)
        return self._inputs[begin : begin + len(indices)], self._targets[begin : begin + len(indices)]


class BatchList:
    """A data set of ready batches of any type, one per index; a list of indices gives the first one's batch."""

    def __init__(self, batches: Sequence[Any], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._batches[index % len(self._batches)]

    def __getitems__(self, indices: list[int]) -> Any:
        return self[indices[0]]


def as_is(batch: Any) -> Any:
    """Collate nothing: the data set gives whole batches."""
    return batch


# --- convolutional networks ---


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def _init_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class PadShortcut(nn.Module):
    """He et al. 2015, option A, which has no parameters: every second pixel, and zeros for channels that are new."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self._stride, self._pad = stride, (new_channels // 2, new_channels - new_channels // 2)

    def forward(self, images: Tensor) -> Tensor:
        return F.pad(images[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, *self._pad))


class ResidualBlock(nn.Module):
    """Convolutions (output channels, kernel, stride) beside a shortcut."""

    def __init__(self, inputs: int, convolutions: Sequence[tuple[int, int, int]], *, padded: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = inputs
        for outputs, kernel, stride in convolutions:
            if layers:
                layers.append(nn.ReLU(inplace=True))
            layers += _conv_bn(width, outputs, kernel, stride)
            width = outputs
        self.body = nn.Sequential(*layers)
        stride = max(stride for _, _, stride in convolutions)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != width or stride > 1:
            projection = _conv_bn(inputs, width, 1, stride) if not padded else [PadShortcut(stride, width - inputs)]
            self.shortcut = nn.Sequential(*projection)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.shortcut(images), inplace=True)


class ResNet(nn.Module):
    """He et al. 2015, table 1; takes images of 32x32 and more."""

    def __init__(self, blocks: Sequence[int], *, bottleneck: bool, width: int = 64, classes: int = NUM_CLASSES) -> None:
        super().__init__()
        stem = [*_conv_bn(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]
        self.stem = nn.Sequential(*stem)
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            wide = width << stage
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                if bottleneck:
                    convolutions = [(wide, 1, 1), (wide, 3, stride), (4 * wide, 1, 1)]
                else:
                    convolutions = [(wide, 3, stride), (wide, 3, 1)]
                stages.append(ResidualBlock(inputs, convolutions))
                inputs = convolutions[-1][0]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        _init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.stages(self.stem(images)).mean((2, 3))))


class CifarResNet(nn.Module):
    """He et al. 2015, section 4.2, for 32x32 images: 6n + 2 layers in three stages of `width`, 2 and 4 times as many channels."""

    def __init__(self, depth: int = 56, classes: int = 10, width: int = 16, *, padded: bool = True) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigError(f"a ResNet for CIFAR has 6n + 2 layers, such as 20, 32 or 56; not {depth}")
        stages: list[nn.Module] = [*_conv_bn(3, width, 3), nn.ReLU(inplace=True)]
        inputs = width
        for stage in range(3):
            for number in range((depth - 2) // 6):
                stride = 2 if stage and not number else 1
                stages.append(
                    ResidualBlock(inputs, [(width << stage, 3, stride), (width << stage, 3, 1)], padded=padded)
                )
                inputs = width << stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        _init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.stages(images).mean((2, 3))))


class SmallNet(nn.Module):
    """Convolutions, BatchNorm and dropout, small enough to compare every bit after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv_bn(3, 16, 3), nn.ReLU(), *_conv_bn(16, 32, 3, 2), nn.ReLU(), nn.Dropout(0.25))
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, NUM_CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(images).mean((2, 3))))


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
    layers += [nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


class ShuffleUnit(nn.Module):
    """Ma et al. 2018, figure 3 (c) and (d): half of the channels pass, then all are shuffled."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._stride, half = stride, outputs // 2
        own = inputs if stride == 2 else half
        self.left = nn.Sequential()
        if stride == 2:
            self.left.extend([*_conv_bn(inputs, inputs, 3, 2, inputs), *_conv_bn(inputs, half, 1), nn.ReLU()])
        deep = [*_conv_bn(own, half, 1), nn.ReLU(), *_conv_bn(half, half, 3, stride, half)]
        self.right = nn.Sequential(*deep, *_conv_bn(half, half, 1), nn.ReLU())

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = (inputs, inputs) if self._stride == 2 else inputs.chunk(2, 1)
        return F.channel_shuffle(torch.cat((self.left(left), self.right(right)), 1), 2)


def shufflenetv2(first: int, width: int, last: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [*_conv_bn(3, first, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = first
    for stage, units in enumerate((4, 8, 4)):
        for unit in range(units):
            layers.append(ShuffleUnit(inputs, width << stage, 1 if unit else 2))
            inputs = width << stage
    layers += [*_conv_bn(inputs, last, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*layers)


# --- transformers and recommendation ---


class LanguageModel(nn.Module):
    """A small decoder-only transformer whose embedding and head hold most of its parameters."""

    def __init__(self, width: int = 256, num_layers: int = 4, max_length: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.positions = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        hidden = self.words(words) + self.positions.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return cast(Tensor, self.head(self.norm(hidden)).flatten(0, 1))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block with PyTorch's fused attention."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self._heads, self._dropout, self._causal = heads, dropout, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        mixed = self.queries_keys_values(self.norm1(hidden)).view(batch, length, 3, self._heads, width // self._heads)
        queries, keys, values = mixed.permute(2, 0, 3, 1, 4)
        dropout = self._dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=self._causal)
        hidden = hidden + self.dropout(self.project(seen.transpose(1, 2).reshape(hidden.shape)))
        return hidden + cast(Tensor, self.dropout(self.mlp(self.norm2(hidden))))


def _init_transformer(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class GPT2(nn.Module):
    """Radford et al. 2019: learned positions, pre-norm blocks, and a head that shares its weights with the embedding."""

    def __init__(
        self, num_words: int = 50304, length: int = 1024, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(num_words, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, 0.1, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        _init_transformer(self)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.dropout(self.words(words) + self.positions.weight[: words.shape[1]])
        return F.linear(self.norm(self.blocks(hidden)), self.words.weight).flatten(0, 1)


class ViT(nn.Module):
    """Dosovitskiy et al. 2020, with the mean of all positions before the head."""

    def __init__(self, pixels: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((pixels // patch) ** 2, width))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, 0.1, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        _init_transformer(self)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.dropout(self.patches(images).flatten(2).transpose(1, 2) + self.positions)
        return cast(Tensor, self.head(self.norm(self.blocks(hidden)).mean(1)))


class LSTMLanguageModel(nn.Module):
    """Zaremba et al. 2014, with a head that shares its weights with the embedding.

    `between` is the dropout that cuDNN itself applies between the layers, with a random state of its own.
    """

    def __init__(self, num_words: int, width: int, depth: int = 2, between: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.dropout = nn.Dropout(0.2)
        self.layers = nn.LSTM(width, width, depth, batch_first=True, dropout=between)
        nn.init.normal_(self.words.weight, std=0.05)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.layers(self.dropout(self.words(words)))
        return F.linear(self.dropout(hidden), self.words.weight).flatten(0, 1)


class SpanFinder(nn.Module):
    """A word encoder with two outputs per position: whether an answer begins, and ends, there. Like BERT on SQuAD.

    With `embedded` other than `width`, the embeddings are projected, as in ELECTRA.
    """

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
    """Attention within square windows (Liu et al. 2021); `moved` shifts the windows by half.

    Where Swin masks positions at the borders, they attend around them here.
    """

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


class PatchMerge(nn.Module):
    """Merge four neighbours into one position with twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        corners = [inputs[:, down::2, right::2] for down in (0, 1) for right in (0, 1)]
        return cast(Tensor, self.body(torch.cat(corners, -1)))


class Swin(nn.Module):
    """A hierarchical transformer on image patches, like Swin."""

    def __init__(self, width: int, depths: tuple[int, ...], patch: int, window: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        layers: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            if stage:
                layers.append(PatchMerge(width << stage - 1))
            layers += [WindowBlock(width << stage, window, moved=bool(block % 2)) for block in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width << len(depths) - 1)
        self.head = nn.Linear(width << len(depths) - 1, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(self.patches(images).permute(0, 2, 3, 1))
        return cast(Tensor, self.head(self.norm(hidden).mean((1, 2))))


class NeuMF(nn.Module):
    """He et al. 2017: a product of embeddings beside a perceptron over other embeddings."""

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


# --- by name ---


@dataclass(frozen=True, slots=True)
class Network:
    """A recipe: how to make a network, and the data that it is trained on."""

    make: Callable[[], nn.Module]
    kind: Kind
    size: int
    """Pixels of an image's side, words of a text, or users who rate."""
    batch: int
    optimizer: str = "sgd"
    classes: int = 0
    """Classes of an image, different words, or items to rate; 0 means NUM_CLASSES or NUM_WORDS."""


NETWORKS = {
    "resnet18": Network(lambda: ResNet((2, 2, 2, 2), bottleneck=False), "images", 32, 16),
    "resnet20": Network(lambda: CifarResNet(20, NUM_CLASSES, padded=False), "images", 32, 32),
    "resnet50": Network(lambda: ResNet((3, 4, 6, 3), bottleneck=True), "images", 224, 32),
    "transformer": Network(LanguageModel, "text", 32, 2, "adamw"),
    "small": Network(SmallNet, "images", 16, 4, "adam"),
    "gpt2": Network(GPT2, "text", 1024, 8, "adamw", 50304),
    "gpt2-tiny": Network(partial(GPT2, 128, 16, 32, 2, 2), "text", 16, 2, "adamw", 128),
    "vit": Network(partial(ViT, 224, 16, 384, 12, 6, NUM_CLASSES), "images", 224, 32, "adamw"),
    "vit-tiny": Network(partial(ViT, 16, 4, 32, 2, 2, 10), "images", 16, 2, "adamw", 10),
    "lstm": Network(partial(LSTMLanguageModel, 33278, 650), "text", 64, 32, "sgd", 33278),
    "lstm-tiny": Network(partial(LSTMLanguageModel, 128, 32), "text", 8, 2, "sgd", 128),
    "lstm-dropout": Network(partial(LSTMLanguageModel, 33278, 650, between=0.2), "text", 64, 32, "sgd", 33278),
    "lstm-dropout-tiny": Network(partial(LSTMLanguageModel, 128, 32, between=0.2), "text", 8, 2, "sgd", 128),
    "resnet50-tiny": Network(
        partial(ResNet, (1, 1, 1, 1), bottleneck=True, width=8, classes=10), "images", 32, 4, "sgd", 10
    ),
}
assert set(NETWORKS) == set(TRAINED), "profiles.TRAINED lists these networks"


def network(name: str) -> Network:
    """Return the network of `pliant bench` with that name.

    Raises:
        ConfigError: there is none; the message lists the known names.
    """
    check_trained(name)
    return NETWORKS[name]


def build(name: str, device: torch.device | str = "cpu", seed: int = 1) -> nn.Module:
    """Build the network with the same initial values in every process."""
    torch.manual_seed(seed)
    return network(name).make().to(device)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make SGD with momentum, Adam or AdamW, with settings that keep synthetic training finite."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-4)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    raise ConfigError(f"optimizer {name!r}: use one of sgd, adam, adamw")


def compute_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of an image's class, or of each next word."""
    return F.cross_entropy(model(inputs), targets.flatten())


def _picture_net(at: int, batch: tuple[int, int, int], make: Callable[[], nn.Module]) -> Network:
    size, classes = ((32, 10), (32, 10), (224, 1000))[at]
    return Network(make, "images", size, batch[at], classes=classes)


def _span_net(at: int, *sizes: tuple[int, int, int, int, int]) -> Network:
    return Network(lambda: SpanFinder(*sizes[at]), "spans", sizes[at][1], (4, 4, 8)[at], classes=sizes[at][0])


def _workload_network(name: str, at: int) -> Network:
    """The network of a workload; `at` is the index of its scale in WORKLOAD_SCALES."""
    if name == "shufflenetv2":
        shuffle = ((8, 16, 64, 10), (24, 48, 256, 10), (24, 116, 1024, 1000))[at]
        return _picture_net(at, (4, 16, 128), lambda: shufflenetv2(*shuffle))
    if name == "resnet50":
        width, classes = ((4, 10), (16, 10), (64, 1000))[at]
        make = partial(ResNet, (3, 4, 6, 3), bottleneck=True, width=width, classes=classes)
        return _picture_net(at, (4, 8, 32), make)
    if name == "vgg19":
        vgg = ((4, 32, 10, 1), (16, 256, 10, 1), (64, 4096, 1000, 7))[at]
        return _picture_net(at, (4, 8, 32), lambda: vgg19(*vgg))
    if name == "swin":
        swin = ((32, (1, 1), 4, 4, 10), (32, (2, 2, 2), 2, 4, 10), (96, (2, 2, 6, 2), 4, 7, 1000))[at]
        return _picture_net(at, (4, 8, 32), lambda: Swin(*swin))
    if name == "bert":
        return _span_net(at, (200, 16, 32, 2, 32), (4000, 64, 128, 4, 128), (30522, 384, 768, 12, 768))
    if name == "electra":
        return _span_net(at, (200, 16, 32, 2, 16), (4000, 64, 128, 4, 64), (30522, 384, 768, 12, 128))
    users, items, factors = ((100, 50, 8), (6000, 3700, 8), (138493, 26744, 64))[at]
    layers = ((16, 8), (64, 32, 16, 8), (256, 256, 128, 64))[at]
    make_neumf = partial(NeuMF, users, items, factors, layers)
    return Network(make_neumf, "ratings", users, (16, 256, 1024)[at], classes=items)


@dataclass(kw_only=True, slots=True)
class Workload:
    """Everything that a training script makes before its loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    batch_size: int
    loss: Loss = F.cross_entropy
    bucket_cap_mb: float | None = None
    """DDP's bucket size: small models need small buckets to have several of them."""
    loading: dict[str, Any] = field(default_factory=dict)
    """More arguments of the DataLoader."""
    held_out: Sample | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    fixed: Callable[[int, int], Sample] | None = None
    """Returns the batch of (step, replica) where the data set only counts."""


def workload(name: str, scale: str, num_batches: int, device: torch.device | str, batch_size: int = 0) -> Workload:
    """Build a workload of EasyScale's table 1 with fixed initial parameters; `batch_size` 0 means its usual one.

    Raises:
        ConfigError: the name or the scale is not known.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"model {name!r} is not in the zoo: use one of {', '.join(WORKLOADS)}")
    if scale not in WORKLOAD_SCALES:
        raise ConfigError(f"scale {scale!r} is not known: use one of {', '.join(WORKLOAD_SCALES)}")
    chosen = _workload_network(name, WORKLOAD_SCALES.index(scale))
    torch.manual_seed(SEED)
    model = chosen.make().to(device)
    batch_size = batch_size or chosen.batch
    length, images = num_batches * batch_size, chosen.kind == "images"
    dataset = Samples(chosen.kind, chosen.size, length, classes=chosen.classes, seed=SEED, augment=images)
    loss: Loss = F.binary_cross_entropy_with_logits if chosen.kind == "ratings" else F.cross_entropy
    cap = {"tiny": 0.02, "small": 0.5}.get(scale)
    return Workload(
        model=model, optimizer=make_optimizer("sgd", model), dataset=dataset, batch_size=batch_size, loss=loss,
        bucket_cap_mb=cap,
    )  # fmt: skip


# --- torchvision's models, under the names of KungFu's artifact ---

VISION_MODELS = {
    "ResNet18": "resnet18", "ResNet34": "resnet34", "ResNet50": "resnet50", "ResNet101": "resnet101",
    "ResNet152": "resnet152", "VGG16": "vgg16", "VGG19": "vgg19", "MobileNetV2": "mobilenet_v2",
    "MobileNetV3Small": "mobilenet_v3_small", "MobileNetV3Large": "mobilenet_v3_large", "InceptionV3": "inception_v3",
    "DenseNet121": "densenet121", "DenseNet169": "densenet169", "DenseNet201": "densenet201",
    "EfficientNetB0": "efficientnet_b0", "ShuffleNetV2": "shufflenet_v2_x1_0", "AlexNet": "alexnet", "ResNet56": "",
}  # fmt: skip
"""Keras' names and torchvision's. ResNet56 is He et al.'s network for CIFAR, which torchvision lacks."""


def model_name(asked: str) -> str:
    """Return `asked` in the spelling of VISION_MODELS, whatever its case, dashes and underscores.

    Raises:
        ConfigError: the model is not known; the message lists the known ones.
    """

    def bare(name: str) -> str:
        return name.lower().replace("_", "").replace("-", "")

    for name, theirs in VISION_MODELS.items():
        if bare(asked) in (bare(name), bare(theirs) or None):
            return name
    raise ConfigError(f"model {asked!r} is not known: use one of {', '.join(VISION_MODELS)}")


def image_size(name: str) -> int:
    """Return the side of the images that the model was published for."""
    return {"ResNet56": 32, "InceptionV3": 299}.get(model_name(name), 224)


def num_classes(name: str) -> int:
    """Return the number of classes that the model was published for: ImageNet's, or CIFAR-10's."""
    return 10 if model_name(name) == "ResNet56" else 1000


def vision_model(name: str, classes: int = 0) -> nn.Module:
    """Build the model with random parameters by torch's generator; `classes` 0 means as published.

    Its output is the logits alone, also where the published model has further ones for training (InceptionV3).
    """
    known = model_name(name)
    outputs = classes or num_classes(known)
    if known == "ResNet56":
        return CifarResNet(56, outputs)
    make = getattr(import_torchvision().models, VISION_MODELS[known])
    if known == "InceptionV3":
        # torchvision's default, a truncated normal, takes half a minute and changes no measured time.
        make = partial(make, aux_logits=False, init_weights=False)
    return cast(nn.Module, make(weights=None, num_classes=outputs))


# --- CIFAR-10 from its published files ---


def cifar10(folder: str, *, train: bool) -> Any:
    """Return torchvision's CIFAR-10 out of `folder`, normalised; the images to train on are moved and mirrored.

    Raises:
        ConfigError: the published files are not there, or are damaged.
    """
    import_torchvision()
    from torchvision import datasets, transforms  # type: ignore[import-untyped]

    varied = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if train else []
    normalised = [transforms.ToTensor(), transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
    try:
        return datasets.CIFAR10(folder, train=train, transform=transforms.Compose([*varied, *normalised]))
    except RuntimeError as error:
        where = "unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz there"
        raise ConfigError(f"--data {folder}: CIFAR-10 is not there, or damaged ({error}); {where}") from None
