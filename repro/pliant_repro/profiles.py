"""Models described without torch: layer sizes, multiply-adds and step times, and the names of everything that can be trained.

A `Profile` describes a model as a communication schedule sees it: the sizes of its tensors in the order of the forward pass,
and how long each layer is computed. Sizes follow from the architectures. Step times are those at which P3's published curves
flatten out (Jayarajan et al. 2019, figure 7: one P4000, batch 32); a third of a step is the forward pass, and layers share the
time in proportion to their multiply-adds. `pliant_repro.zoo` builds the networks that compute for real.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pliant.errors import ConfigError
from pliant_repro.scaling_model import Layer

TRAINED = (
    "resnet18", "transformer", "resnet50", "resnet20", "small", "gpt2", "vit", "lstm", "lstm-dropout",
    "gpt2-tiny", "vit-tiny", "lstm-tiny", "lstm-dropout-tiny", "resnet50-tiny",
)  # fmt: skip
"""Networks of `zoo` that `pliant bench` trains."""
WORKLOADS = ("shufflenetv2", "resnet50", "vgg19", "neumf", "bert", "electra", "swin")
"""Workloads of `zoo` from EasyScale's table 1."""
WORKLOAD_SCALES = ("tiny", "small", "paper")
"""Sizes of a workload: steps of milliseconds; the published depth, narrow and with small inputs; as published."""
PUBLISHED_BATCH = 32
FORWARD_SHARE = 1 / 3
"""Backward computes two products per weight, by the inputs and by the weight; forward computes one."""
BYTES_PER_PARAMETER = 4


def check_trained(model: str) -> None:
    """Raise ConfigError, listing the known names, unless `pliant bench` can train `model`."""
    if model not in TRAINED:
        raise ConfigError(f"--model {model!r}: use one of {', '.join(TRAINED)}")


# --- profiles ---


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer: a convolution with its normalisation, a matrix with its bias, a recurrent cell, ..."""

    name: str
    tensors: tuple[int, ...]
    """Number of elements of each parameter tensor."""
    macs: int
    """Multiply-adds of one sample in the forward pass."""

    @property
    def num_parameters(self) -> int:
        return sum(self.tensors)


@dataclass(frozen=True, slots=True)
class Profile:
    """A model as a communication schedule sees it."""

    name: str
    layers: tuple[LayerShape, ...]
    compute_s: float
    """Seconds of one step, forward and backward, with nothing to wait for."""
    batch: int
    """Samples per node and step."""
    scale: float
    """The published numbers of parameters were divided by this; divide the bandwidth by it to keep the published ratio."""

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return self.num_parameters * BYTES_PER_PARAMETER


def profile(name: str, *, batch: int = PUBLISHED_BATCH) -> Profile:
    """Return the profile `name` at its published size; its time is in proportion to the number of samples per step.

    Raises:
        ConfigError: the name is not known, or the batch is smaller than 1.
    """
    if name not in PROFILES:
        raise ConfigError(f"--model {name!r}: use one of {', '.join(PROFILES)}")
    if batch < 1:
        raise ConfigError(f"batch={batch}: use 1 or more")
    found = PROFILES[name]
    return dataclasses.replace(found, batch=batch, compute_s=found.compute_s * batch / found.batch)


def scaled(profile: Profile, kappa: float | None = None) -> Profile:
    """Return `profile` with `kappa` times fewer parameters in each layer (at least 1) and the same times.

    The default `kappa` is the model's entry in SCALES, which brings it to rates that one machine can shape.

    Raises:
        ConfigError: `kappa` is not a positive number.
    """
    if kappa is None:
        kappa = SCALES.get(profile.name, 1.0)
    if not (kappa > 0 and math.isfinite(kappa)):
        raise ConfigError(f"kappa={kappa}: use a positive number, such as 10 for a tenth of the parameters")
    layers = tuple(
        dataclasses.replace(layer, tensors=(max(1, round(layer.num_parameters / kappa)),)) for layer in profile.layers
    )
    return dataclasses.replace(profile, layers=layers, scale=profile.scale * kappa)


def layers_of(profile: Profile) -> list[Layer]:
    """Return the layers with their times, in the form that `pliant_repro.scaling_model` takes."""
    macs = sum(layer.macs for layer in profile.layers)
    return [
        Layer(
            forward_s=profile.compute_s * FORWARD_SHARE * layer.macs / macs,
            backward_s=profile.compute_s * (1 - FORWARD_SHARE) * layer.macs / macs,
            num_bytes=layer.num_parameters * BYTES_PER_PARAMETER,
        )
        for layer in profile.layers
    ]


# --- architectures ---


def _conv(name: str, inputs: int, outputs: int, kernel: tuple[int, int], size: int, *, vectors: int = 2) -> LayerShape:
    """A convolution to `size` x `size` points with a scale and a shift per channel, or with a bias only (`vectors=1`)."""
    weights = inputs * outputs * kernel[0] * kernel[1]
    return LayerShape(name, (weights, *[outputs] * vectors), weights * size * size)


def _linear(name: str, inputs: int, outputs: int, *, times: int = 1, bias: bool = True) -> LayerShape:
    """A matrix that is used `times` times per sample."""
    weights = inputs * outputs
    return LayerShape(name, (weights, outputs) if bias else (weights,), weights * times)


def _resnet50() -> Iterator[LayerShape]:
    """He et al. 2015, table 1, 224x224; the stride is in the 3x3 convolution, as in every implementation since."""
    yield _conv("conv1", 3, 64, (7, 7), 112)
    inputs, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            name, outputs, before = f"conv{stage + 2}_{block + 1}", 4 * width, size
            if stage > 0 and block == 0:
                size //= 2
            yield _conv(f"{name}.reduce", inputs, width, (1, 1), before)
            yield _conv(f"{name}.conv", width, width, (3, 3), size)
            yield _conv(f"{name}.expand", width, outputs, (1, 1), size)
            if block == 0:  # the shortcut changes the number of channels
                yield _conv(f"{name}.shortcut", inputs, outputs, (1, 1), size)
            inputs = outputs
    yield _linear("fc", inputs, 1000)


def _vgg(*depths: int) -> Iterator[LayerShape]:
    """Simonyan and Zisserman 2014, 224x224: so many convolutions in each of the five stages."""
    inputs = 3
    for stage, (width, depth) in enumerate(zip((64, 128, 256, 512, 512), depths, strict=True)):
        for number in range(depth):
            yield _conv(f"conv{stage + 1}_{number + 1}", inputs, width, (3, 3), 224 >> stage, vectors=1)
            inputs = width
    yield _linear("fc6", inputs * 7 * 7, 4096)
    yield _linear("fc7", 4096, 4096)
    yield _linear("fc8", 4096, 1000)


Step = tuple[int, tuple[int, int]]


def _chain(name: str, inputs: int, size: int, *steps: Step) -> Iterator[LayerShape]:
    """Convolutions (output channels, kernel) one after the other."""
    for number, (outputs, kernel) in enumerate(steps):
        yield _conv(f"{name}.{number + 1}", inputs, outputs, kernel, size)
        inputs = outputs


def _inception_v3() -> Iterator[LayerShape]:
    """Szegedy et al. 2015, 299x299, without the auxiliary classifier, branch after branch."""
    one, three, row, column = (1, 1), (3, 3), (1, 7), (7, 1)
    for number, (inputs, outputs, kernel, size) in enumerate(
        ((3, 32, three, 149), (32, 32, three, 147), (32, 64, three, 147), (64, 80, one, 73), (80, 192, three, 71))
    ):
        yield _conv(f"conv{number + 1}", inputs, outputs, kernel, size)
    for number, (inputs, pooled) in enumerate(((192, 32), (256, 64), (288, 64))):
        name = f"a{number + 1}"
        yield from _chain(f"{name}.one", inputs, 35, (64, one))
        yield from _chain(f"{name}.five", inputs, 35, (48, one), (64, (5, 5)))
        yield from _chain(f"{name}.double", inputs, 35, (64, one), (96, three), (96, three))
        yield from _chain(f"{name}.pool", inputs, 35, (pooled, one))
    yield from _chain("b.three", 288, 17, (384, three))
    yield from _chain("b.double", 288, 35, (64, one), (96, three))
    yield _conv("b.double.3", 96, 96, three, 17)
    for number, width in enumerate((128, 160, 160, 192)):
        name = f"c{number + 1}"
        yield from _chain(f"{name}.one", 768, 17, (192, one))
        yield from _chain(f"{name}.seven", 768, 17, (width, one), (width, row), (192, column))
        double: tuple[Step, ...] = ((width, one), (width, column), (width, row), (width, column), (192, row))
        yield from _chain(f"{name}.double", 768, 17, *double)
        yield from _chain(f"{name}.pool", 768, 17, (192, one))
    yield from _chain("d.three", 768, 17, (192, one))
    yield _conv("d.three.2", 192, 320, three, 8)
    yield from _chain("d.seven", 768, 17, (192, one), (192, row), (192, column))
    yield _conv("d.seven.4", 192, 192, three, 8)
    for number, inputs in enumerate((1280, 2048)):
        name = f"e{number + 1}"
        yield from _chain(f"{name}.one", inputs, 8, (320, one))
        for branch, steps in (("three", ((384, one),)), ("double", ((448, one), (384, three)))):
            yield from _chain(f"{name}.{branch}", inputs, 8, *steps)
            yield _conv(f"{name}.{branch}.row", 384, 384, (1, 3), 8)
            yield _conv(f"{name}.{branch}.column", 384, 384, (3, 1), 8)
        yield from _chain(f"{name}.pool", inputs, 8, (192, one))
    yield _linear("fc", 2048, 1000)


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
            yield LayerShape(f"{name}.depthwise", (9 * width, width, width), 9 * width * size * size)
            yield _conv(f"{name}.project", width, outputs, (1, 1), size)
            inputs = outputs
    yield _conv("conv2", inputs, 1280, (1, 1), size)
    yield _linear("fc", 1280, 1000)


def _lstm(name: str, inputs: int, width: int, length: int) -> LayerShape:
    weights = 4 * width * (inputs + width)
    return LayerShape(name, (weights, 8 * width), weights * length)


def _sockeye() -> Iterator[LayerShape]:
    """A model like Sockeye's LSTM with attention: two layers on either side, 512 wide, IWSLT15 English to Vietnamese.

    The vocabularies are those of the prepared corpus. The total, 28 million, agrees with the published throughput at
    1 Gbit/s, where only the traffic counts. The length of a sentence is assumed: it only changes the layers' shares.
    """
    width, source_words, target_words, length = 512, 17_191, 7_709, 25
    yield LayerShape("source_embedding", (source_words * width,), width * length)
    for direction in ("forward", "backward"):
        yield _lstm(f"encoder1.{direction}", width, width // 2, length)
    yield _lstm("encoder2", width, width, length)
    yield _linear("decoder_start", width, 4 * width)
    yield LayerShape("target_embedding", (target_words * width,), width * length)
    yield _linear("attention.source", width, width, times=length, bias=False)
    yield _lstm("decoder1", 2 * width, width, length)
    yield _lstm("decoder2", width, width, length)
    query = _linear("attention.query", width, width, times=length, bias=False)
    scores = 2 * width * length * length  # each target word with each source word, and their weighted sum
    yield LayerShape(query.name, (*query.tensors, width), query.macs + scores)
    yield _linear("hidden", 2 * width, width, times=length)
    yield _linear("output", width, target_words, times=length)


def _bert() -> Iterator[LayerShape]:
    """Devlin et al. 2018, BERT-base uncased: embeddings, 12 layers, pooler. Only its tensors are used."""
    hidden, feed_forward = 768, 3072
    yield LayerShape("embeddings", (30522 * hidden, 512 * hidden, 2 * hidden, hidden, hidden), 0)
    for number in range(12):
        for part in ("query", "key", "value", "output"):
            yield _linear(f"layer{number}.{part}", hidden, hidden)
        yield LayerShape(f"layer{number}.norm1", (hidden, hidden), 0)
        yield _linear(f"layer{number}.up", hidden, feed_forward)
        yield _linear(f"layer{number}.down", feed_forward, hidden)
        yield LayerShape(f"layer{number}.norm2", (hidden, hidden), 0)
    yield _linear("pooler", hidden, hidden)


SCALES = {"resnet50": 10.0, "inception-v3": 10.0, "vgg": 40.0, "sockeye": 10.0, "mobilenet-v2": 2.0}
"""With these, published Gbit/s become hundreds of Mbit/s, which one machine can shape for several nodes."""
PROFILES = {
    name: Profile(name, tuple(layers), compute_s, PUBLISHED_BATCH, scale=1.0)
    for name, layers, compute_s in (
        ("resnet50", _resnet50(), 0.318),
        ("inception-v3", _inception_v3(), 0.455),
        ("vgg", _vgg(2, 2, 4, 4, 4), 0.581),
        ("sockeye", _sockeye(), 0.19),
        ("mobilenet-v2", _mobilenet_v2(), 0.16),  # not in P3: assumed to be twice as fast as ResNet-50
    )
}


# --- tensor sizes for `pliant bench allreduce` ---

MODELS: dict[str, Callable[[], Iterator[LayerShape]]] = {
    "resnet50": _resnet50,
    "vgg16": lambda: _vgg(2, 2, 3, 3, 3),
    "bert": _bert,
    "slp": lambda: iter([_linear("slp", 784, 10)]),  # one layer on MNIST: the small end, where only latency counts
}


def tensor_sizes(model: str) -> list[int]:
    """Return the number of elements of each parameter tensor of a model of MODELS.

    Raises:
        ConfigError: the model is not known.
    """
    if model not in MODELS:
        raise ConfigError(f"--model {model!r}: use one of {', '.join(MODELS)}")
    return [size for layer in MODELS[model]() for size in layer.tensors]
