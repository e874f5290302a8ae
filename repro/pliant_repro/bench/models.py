"""The gradients of well-known models, as numbers of elements per tensor, computed from their architectures.

No torch and no weights: an all-reduce only sees how many tensors there are and how long each is.
The order is that of the parameters, first layer first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from pliant.errors import ConfigError, reason


def _conv(inputs: int, outputs: int, kernel: int) -> int:
    return inputs * outputs * kernel * kernel


def _batch_norm(channels: int) -> Iterator[int]:
    yield from (channels, channels)


def _linear(inputs: int, outputs: int) -> Iterator[int]:
    yield from (inputs * outputs, outputs)


def resnet50() -> Iterator[int]:
    """He et al. 2015, table 1: bottlenecks of 3, 4, 6, 3 blocks; 1000 classes."""
    yield _conv(3, 64, 7)
    yield from _batch_norm(64)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            for source, target, kernel in ((inputs, width, 1), (width, width, 3), (width, outputs, 1)):
                yield _conv(source, target, kernel)
                yield from _batch_norm(target)
            if block == 0:  # the shortcut changes the number of channels
                yield _conv(inputs, outputs, 1)
                yield from _batch_norm(outputs)
            inputs = outputs
    yield from _linear(inputs, 1000)


def vgg16() -> Iterator[int]:
    """Simonyan and Zisserman 2014, configuration D; 224x224 images, 1000 classes."""
    inputs = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            yield from (_conv(inputs, width, 3), width)
            inputs = width
    yield from _linear(512 * 7 * 7, 4096)
    yield from _linear(4096, 4096)
    yield from _linear(4096, 1000)


def bert() -> Iterator[int]:
    """Devlin et al. 2018, BERT-base uncased: embeddings, 12 layers, pooler."""
    hidden, feed_forward = 768, 3072
    yield from (30522 * hidden, 512 * hidden, 2 * hidden)
    yield from (hidden, hidden)
    for _ in range(12):
        for _ in range(4):  # query, key, value, output
            yield from _linear(hidden, hidden)
        yield from (hidden, hidden)
        yield from _linear(hidden, feed_forward)
        yield from _linear(feed_forward, hidden)
        yield from (hidden, hidden)
    yield from _linear(hidden, hidden)


def slp() -> Iterator[int]:
    """One linear layer on MNIST: the small end, where latency is all."""
    yield from _linear(784, 10)


TRAINED = ("resnet18", "transformer", "resnet50", "resnet20", "small")
"""Those that `bench.networks` can train; named here for whoever does not want to load torch."""
MODELS: dict[str, Callable[[], Iterator[int]]] = {"resnet50": resnet50, "vgg16": vgg16, "bert": bert, "slp": slp}


def check_trained(model: str) -> None:
    """Raises ConfigError, with the names there are, if no such network can be trained."""
    if model not in TRAINED:
        raise ConfigError(f"--model {model!r}: use one of {', '.join(TRAINED)}")


def tensor_sizes(model: str) -> list[int]:
    """The numbers of elements of the model's tensors; `model` is a name of MODELS or a file.

    Raises:
        ConfigError: neither, or the file is damaged.
    """
    if model in MODELS:
        return list(MODELS[model]())
    path = Path(model)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(MODELS)
        raise ConfigError(
            f"--model {model}: no such model ({names}), and not a file that can be read: {reason(error)}"
        ) from None
    return parse_sizes(text, f"--model {model}")


def parse_sizes(text: str, name: str) -> list[int]:
    """A JSON list of shapes or sizes, or one size per line (`#` starts a comment).

    Raises:
        ConfigError: another form, or not one tensor.
    """
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name} is not JSON: {error}; use a list such as [[64, 3, 7, 7], 64]") from None
    else:
        lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
        items = [int(line) if line.isdecimal() else line for line in lines if line]
    if not items:
        raise ConfigError(f"{name} lists no tensor: use a JSON list such as [[64, 3, 7, 7], 64], or one size per line")
    return [_num_elements(item, name) for item in items]


def _num_elements(item: object, name: str) -> int:
    shape = item if isinstance(item, list) else [item]
    sizes = [size for size in shape if isinstance(size, int) and not isinstance(size, bool) and size > 0]
    if len(sizes) != len(shape):
        raise ConfigError(
            f"{name}: {item!r} is neither a size nor a shape; use positive numbers such as 64 or [64, 3, 7, 7]"
        )
    return math.prod(sizes)
