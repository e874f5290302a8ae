"""The layers of the models that P3 was measured with: how many parameters each has, and its share of the work.

A paced net (`bench.paced`) trains one parameter per layer and only waits where the model would compute, so all that
matters of a model is here: the sizes of its layers, in the order of the forward pass, and for how long each is
computed. The sizes are computed from the architectures. The time of a step is the one at which P3's published curves
flatten out (Jayarajan et al. 2019, figure 7: one P4000, batch 32), a third of it forward; the layers share it by their
multiply-adds. No torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pliant.adapt.limits import Layer
from pliant.errors import ConfigError

PUBLISHED_BATCH = 32
FORWARD_SHARE = 1 / 3
"""Backward computes two products per weight, by the inputs and by the weight; forward computes one."""
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer: a convolution with its normalisation, a matrix with its bias, a recurrent cell, ..."""

    name: str
    num_parameters: int
    macs: int
    """Multiply-adds of one sample in the forward pass."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A model as a schedule sees it."""

    name: str
    layers: tuple[LayerShape, ...]
    compute_s: float
    """Of one step, forward and backward, with nothing to wait for."""
    batch: int
    """Samples per node and step."""
    scale: float
    """The published numbers of parameters were divided by this; divide the bandwidth by it to get the published r."""

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return self.num_parameters * BYTES_PER_PARAMETER


def profile(name: str, *, batch: int = PUBLISHED_BATCH) -> Profile:
    """The model of that name, at its published size.

    Raises:
        ConfigError: there is none, with the names there are; or a batch of nothing.
    """
    if name not in PROFILES:
        raise ConfigError(f"--model {name!r}: use one of {', '.join(PROFILES)}")
    return with_batch(PROFILES[name], batch)


def with_batch(profile: Profile, batch: int) -> Profile:
    """The same model with another number of samples per step, which take their time one by one.

    Raises:
        ConfigError: a batch of nothing.
    """
    if batch < 1:
        raise ConfigError(f"batch={batch}: use 1 or more")
    return dataclasses.replace(profile, batch=batch, compute_s=profile.compute_s * batch / profile.batch)


def scaled(profile: Profile, kappa: float | None = None) -> Profile:
    """The model with `kappa` times fewer parameters in each layer, but at least 1, and the same times.

    Without `kappa` it is the one of SCALES, which brings the model to the rates that one machine can shape.

    Raises:
        ConfigError: not a positive number.
    """
    if kappa is None:
        kappa = SCALES.get(profile.name, 1.0)
    if not (kappa > 0 and math.isfinite(kappa)):
        raise ConfigError(f"kappa={kappa}: use a positive number, such as 10 for a tenth of the parameters")
    layers = tuple(
        dataclasses.replace(layer, num_parameters=max(1, round(layer.num_parameters / kappa)))
        for layer in profile.layers
    )
    return dataclasses.replace(profile, layers=layers, scale=profile.scale * kappa)


def layers_of(profile: Profile) -> list[Layer]:
    """The model's layers with their times, as `pliant.perf` wants them."""
    macs = sum(layer.macs for layer in profile.layers)
    return [
        Layer(
            forward_s=profile.compute_s * FORWARD_SHARE * layer.macs / macs,
            backward_s=profile.compute_s * (1 - FORWARD_SHARE) * layer.macs / macs,
            num_bytes=layer.num_parameters * BYTES_PER_PARAMETER,
        )
        for layer in profile.layers
    ]


def _conv(name: str, inputs: int, outputs: int, kernel: tuple[int, int], size: int, *, biases: int = 2) -> LayerShape:
    """A convolution to `size` x `size` points, with scale and shift per channel, or with just a bias (`biases` 1)."""
    weights = inputs * outputs * kernel[0] * kernel[1]
    return LayerShape(name, weights + biases * outputs, weights * size * size)


def _linear(name: str, inputs: int, outputs: int, *, times: int = 1, bias: bool = True) -> LayerShape:
    """A matrix that is used `times` times per sample."""
    weights = inputs * outputs
    return LayerShape(name, weights + bias * outputs, weights * times)


def _resnet50() -> Iterator[LayerShape]:
    """He et al. 2015, table 1, 224x224; the stride is in the 3x3 convolution, as in every implementation since."""
    yield _conv("conv1", 3, 64, (7, 7), 112)
    inputs = 64
    size = 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            name, outputs = f"conv{stage + 2}_{block + 1}", 4 * width
            before = size
            if stage > 0 and block == 0:
                size //= 2
            yield _conv(f"{name}.reduce", inputs, width, (1, 1), before)
            yield _conv(f"{name}.conv", width, width, (3, 3), size)
            yield _conv(f"{name}.expand", width, outputs, (1, 1), size)
            if block == 0:  # the shortcut changes the number of channels
                yield _conv(f"{name}.shortcut", inputs, outputs, (1, 1), size)
            inputs = outputs
    yield _linear("fc", inputs, 1000)


def _vgg19() -> Iterator[LayerShape]:
    """Simonyan and Zisserman 2014, configuration E, 224x224."""
    inputs = 3
    for stage, (width, count) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))):
        for number in range(count):
            yield _conv(f"conv{stage + 1}_{number + 1}", inputs, width, (3, 3), 224 >> stage, biases=1)
            inputs = width
    yield _linear("fc6", inputs * 7 * 7, 4096)
    yield _linear("fc7", 4096, 4096)
    yield _linear("fc8", 4096, 1000)


def _inception_v3() -> Iterator[LayerShape]:
    """Szegedy et al. 2015, 299x299, without the auxiliary classifier, branch after branch."""
    yield _conv("conv1", 3, 32, (3, 3), 149)
    yield _conv("conv2", 32, 32, (3, 3), 147)
    yield _conv("conv3", 32, 64, (3, 3), 147)
    yield _conv("conv4", 64, 80, (1, 1), 73)
    yield _conv("conv5", 80, 192, (3, 3), 71)
    for number, (inputs, pooled) in enumerate(((192, 32), (256, 64), (288, 64))):
        yield from _inception_a(f"a{number + 1}", inputs, pooled)
    yield from _inception_b("b", 288)
    for number, width in enumerate((128, 160, 160, 192)):
        yield from _inception_c(f"c{number + 1}", 768, width)
    yield from _inception_d("d", 768)
    for number, inputs in enumerate((1280, 2048)):
        yield from _inception_e(f"e{number + 1}", inputs)
    yield _linear("fc", 2048, 1000)


def _chain(name: str, inputs: int, size: int, *steps: tuple[int, tuple[int, int]]) -> Iterator[LayerShape]:
    """Convolutions (output channels, kernel) one after the other."""
    for number, (outputs, kernel) in enumerate(steps):
        yield _conv(f"{name}.{number + 1}", inputs, outputs, kernel, size)
        inputs = outputs


def _inception_a(name: str, inputs: int, pooled: int) -> Iterator[LayerShape]:
    yield from _chain(f"{name}.one", inputs, 35, (64, (1, 1)))
    yield from _chain(f"{name}.five", inputs, 35, (48, (1, 1)), (64, (5, 5)))
    yield from _chain(f"{name}.double", inputs, 35, (64, (1, 1)), (96, (3, 3)), (96, (3, 3)))
    yield from _chain(f"{name}.pool", inputs, 35, (pooled, (1, 1)))


def _inception_b(name: str, inputs: int) -> Iterator[LayerShape]:
    yield from _chain(f"{name}.three", inputs, 17, (384, (3, 3)))
    yield from _chain(f"{name}.double", inputs, 35, (64, (1, 1)), (96, (3, 3)))
    yield _conv(f"{name}.double.3", 96, 96, (3, 3), 17)


def _inception_c(name: str, inputs: int, width: int) -> Iterator[LayerShape]:
    row, column = (1, 7), (7, 1)
    yield from _chain(f"{name}.one", inputs, 17, (192, (1, 1)))
    yield from _chain(f"{name}.seven", inputs, 17, (width, (1, 1)), (width, row), (192, column))
    double = ((width, (1, 1)), (width, column), (width, row), (width, column), (192, row))
    yield from _chain(f"{name}.double", inputs, 17, *double)
    yield from _chain(f"{name}.pool", inputs, 17, (192, (1, 1)))


def _inception_d(name: str, inputs: int) -> Iterator[LayerShape]:
    yield from _chain(f"{name}.three", inputs, 17, (192, (1, 1)))
    yield _conv(f"{name}.three.2", 192, 320, (3, 3), 8)
    yield from _chain(f"{name}.seven", inputs, 17, (192, (1, 1)), (192, (1, 7)), (192, (7, 1)))
    yield _conv(f"{name}.seven.4", 192, 192, (3, 3), 8)


def _inception_e(name: str, inputs: int) -> Iterator[LayerShape]:
    yield from _chain(f"{name}.one", inputs, 8, (320, (1, 1)))
    yield from _chain(f"{name}.three", inputs, 8, (384, (1, 1)))
    yield from _fork(f"{name}.three")
    yield from _chain(f"{name}.double", inputs, 8, (448, (1, 1)), (384, (3, 3)))
    yield from _fork(f"{name}.double")
    yield from _chain(f"{name}.pool", inputs, 8, (192, (1, 1)))


def _fork(name: str) -> Iterator[LayerShape]:
    yield _conv(f"{name}.row", 384, 384, (1, 3), 8)
    yield _conv(f"{name}.column", 384, 384, (3, 1), 8)


def _mobilenet_v2() -> Iterator[LayerShape]:
    """Sandler et al. 2018, table 2, 224x224: expand, convolve each channel by itself, project."""
    yield _conv("conv1", 3, 32, (3, 3), 112)
    inputs, size = 32, 112
    blocks = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for stage, (factor, outputs, count, stride) in enumerate(blocks):
        for block in range(count):
            name, width = f"block{stage + 1}_{block + 1}", factor * inputs
            if factor > 1:
                yield _conv(f"{name}.expand", inputs, width, (1, 1), size)
            size //= stride if block == 0 else 1
            yield LayerShape(f"{name}.depthwise", 9 * width + 2 * width, 9 * width * size * size)
            yield _conv(f"{name}.project", width, outputs, (1, 1), size)
            inputs = outputs
    yield _conv("conv2", inputs, 1280, (1, 1), size)
    yield _linear("fc", 1280, 1000)


def _sockeye() -> Iterator[LayerShape]:
    """Like Sockeye's LSTM with attention, two layers on either side, 512 wide, on IWSLT15 English to Vietnamese.

    The vocabularies are those of the prepared corpus. The total, 28 million, agrees with the published throughput at
    1 Gbit/s, where only the traffic counts. The length of a sentence is assumed: it only shapes the layers' shares.
    """
    width, source_words, target_words, length = 512, 17_191, 7_709, 25
    yield LayerShape("source_embedding", source_words * width, width * length)
    for direction in ("forward", "backward"):
        yield _lstm(f"encoder1.{direction}", width, width // 2, length)
    yield _lstm("encoder2", width, width, length)
    yield _linear("decoder_start", width, 4 * width)
    yield LayerShape("target_embedding", target_words * width, width * length)
    yield _linear("attention.source", width, width, times=length, bias=False)
    yield _lstm("decoder1", 2 * width, width, length)
    yield _lstm("decoder2", width, width, length)
    query = _linear("attention.query", width, width, times=length, bias=False)
    scores = 2 * width * length * length  # of each target word with each source word, and their weighted sum
    yield LayerShape(query.name, query.num_parameters + width, query.macs + scores)
    yield _linear("hidden", 2 * width, width, times=length)
    yield _linear("output", width, target_words, times=length)


def _lstm(name: str, inputs: int, width: int, length: int) -> LayerShape:
    weights = 4 * width * (inputs + width)
    return LayerShape(name, weights + 8 * width, weights * length)


SCALES = {"resnet50": 10.0, "inception-v3": 10.0, "vgg": 40.0, "sockeye": 10.0, "mobilenet-v2": 2.0}
"""Published Gbit/s become hundreds of Mbit/s, which one machine can shape for several nodes."""
PROFILES = {
    name: Profile(name, tuple(layers), compute_s, PUBLISHED_BATCH, scale=1.0)
    for name, layers, compute_s in (
        ("resnet50", _resnet50(), 0.318),
        ("inception-v3", _inception_v3(), 0.455),
        ("vgg", _vgg19(), 0.581),
        ("sockeye", _sockeye(), 0.19),
        ("mobilenet-v2", _mobilenet_v2(), 0.16),  # none of P3's: assumed to be twice as fast as ResNet-50
    )
}
