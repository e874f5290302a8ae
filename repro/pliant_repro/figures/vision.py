"""Image models by name, from torchvision; and ResNet-56 as He et al. have it for CIFAR, which torchvision lacks.

torchvision is imported by `torchvision_import`, which finds a way beside any torch.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from pliant.errors import ConfigError
from pliant.torchvision_import import import_torchvision

MODELS = {
    "ResNet18": "resnet18",
    "ResNet34": "resnet34",
    "ResNet50": "resnet50",
    "ResNet101": "resnet101",
    "ResNet152": "resnet152",
    "VGG16": "vgg16",
    "VGG19": "vgg19",
    "MobileNetV2": "mobilenet_v2",
    "MobileNetV3Small": "mobilenet_v3_small",
    "MobileNetV3Large": "mobilenet_v3_large",
    "InceptionV3": "inception_v3",
    "DenseNet121": "densenet121",
    "DenseNet169": "densenet169",
    "DenseNet201": "densenet201",
    "EfficientNetB0": "efficientnet_b0",
    "ShuffleNetV2": "shufflenet_v2_x1_0",
    "SqueezeNet": "squeezenet1_1",
    "AlexNet": "alexnet",
    "ResNet56": "",
}
"""Keras' names, as KungFu's benchmarks have them, and torchvision's."""
CIFAR = ("ResNet56",)
"""Of these: for 32 x 32 images of 10 classes."""


def model_name(asked: str) -> str:
    """`asked` in the spelling of MODELS, whatever its case, dashes and underscores; loads nothing.

    Raises:
        ConfigError: there is no such model; with those there are.
    """

    def bare(name: str) -> str:
        return name.lower().replace("_", "").replace("-", "")

    for name, theirs in MODELS.items():
        if bare(asked) in (bare(name), bare(theirs) or None):
            return name
    raise ConfigError(f"model {asked!r} is not known: use one of {', '.join(MODELS)}")


def image_size(name: str) -> int:
    """The side of the images that the model was published for."""
    known = model_name(name)
    return 32 if known in CIFAR else 299 if known == "InceptionV3" else 224


def num_classes(name: str) -> int:
    """Of the data that the model was published for: ImageNet's, or CIFAR-10's."""
    return 10 if model_name(name) in CIFAR else 1000


def vision_model(name: str, classes: int = 0) -> nn.Module:
    """The model with random parameters, by torch's generator; `classes` 0 means as published.

    Its output is the logits alone, also where the published model has further ones for training (InceptionV3).
    """
    known = model_name(name)
    outputs = classes or num_classes(known)
    if known == "ResNet56":
        return CifarResNet(56, outputs)
    make = getattr(import_torchvision().models, MODELS[known])
    if known == "InceptionV3":
        # The truncated normal that torchvision draws by default takes half a minute, and changes no time measured.
        make = partial(make, aux_logits=False, init_weights=False)
    return cast(nn.Module, make(weights=None, num_classes=outputs))


class CifarBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut that has no parameters (option A: every second pixel, zeros for
    channels that are new)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._stride, self._new = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(inputs)))))
        kept = inputs
        if self._stride > 1 or self._new:
            before = self._new // 2
            kept = F.pad(inputs[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, before, self._new - before))
        return F.relu(hidden + kept)


class CifarResNet(nn.Module):
    """He et al. 2015, section 4.2: 6n + 2 layers in three stages of 16, 32 and 64 channels; `width` scales these."""

    def __init__(self, depth: int = 56, classes: int = 10, width: int = 16, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigError(f"a ResNet for CIFAR has 6n + 2 layers, such as 20, 32 or 56; not {depth}")
        self.conv = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, inputs = [], width
        for stage in range(3):
            for number in range((depth - 2) // 6):
                blocks.append(CifarBlock(inputs, width << stage, 2 if stage and not number else 1))
                inputs = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.norm(self.conv(images))))
        return cast(Tensor, self.head(hidden.mean((2, 3))))
