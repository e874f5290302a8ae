"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels, most to train on, the rest held out.

Without torch. Importing scikit-learn takes a second or two, which newcomers to a job shall not spend: whoever starts
the job saves the images once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pliant.errors import ConfigError

NUM_TRAIN = 1536
BATCH_SIZE = 32
"""Of one replica."""
Images = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Images with pixels from 0 to 1, and what they show."""


def num_steps(epochs: int, replicas: int) -> int:
    """Steps that all replicas do together."""
    return epochs * -(-NUM_TRAIN // (replicas * BATCH_SIZE))


def from_scikit_learn() -> Images:
    """All images, in their order."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            "the images come with scikit-learn, which is not installed: pip install 'pliant[experiments]'"
        ) from None
    digits = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)


def save(images: Images, path: Path) -> None:
    np.savez(path, images=images[0], labels=images[1])


def load(path: Path) -> Images:
    with np.load(path, allow_pickle=False) as file:
        return file["images"], file["labels"]
