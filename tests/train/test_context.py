"""The random state of a replica is a value: taken, put back, and sent as bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pliant.errors import ConfigError
from pliant.train.context import RNG_BYTES, DataPosition, RngState, _numpy, _python, capture_rng, restore_rng

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


def test_states_travel_as_bytes_of_one_size() -> None:
    np.random.randn(), random.gauss(0, 1), torch.randn(3)
    state = capture_rng()
    drawn = (random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist(), np.random.rand(700).tolist())
    assert capture_rng() != state
    restore_rng(RngState.from_bytes(state.to_bytes()))
    assert drawn == (random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist(), np.random.rand(700).tolist())
    assert len(state.to_bytes()) == RNG_BYTES
    with pytest.raises(ConfigError, match="no random state"):
        RngState.from_bytes(b"short")
    stream = DataPosition(3, 4, 5, 2**63 - 1, (state.to_bytes(), None))
    assert DataPosition.from_bytes(stream.to_bytes(2)) == stream
    assert len(DataPosition().to_bytes(2)) == len(stream.to_bytes(2))
    with pytest.raises(ConfigError, match="no stream"):
        DataPosition.from_bytes(b"short")


@pytest.mark.parametrize("place", [625 * 4, 625 * 4 + 1 + 8 + 625 * 4], ids=["python's", "numpy's"])
@pytest.mark.parametrize("position", [625, -1])
def test_a_position_beyond_the_words_is_refused(place: int, position: int) -> None:
    data = bytearray(capture_rng().to_bytes())
    data[place - 4 : place] = position.to_bytes(4, "little", signed=True)
    with pytest.raises(ConfigError, match=f"at word {position} of 624"):
        RngState.from_bytes(bytes(data))


def test_python_is_switched_in_place_and_by_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    python = _python()
    assert python._memory is not None
    random.seed(5)
    random.gauss(0, 1)
    state, told = capture_rng(), random.getstate()
    drawn = [random.gauss(0, 1), *(random.random() for _ in range(700))]
    restore_rng(state)
    assert random.getstate() == told
    monkeypatch.setattr(python, "_memory", None)
    assert capture_rng() == state
    random.seed(6)
    restore_rng(state)
    assert random.getstate() == told
    assert [random.gauss(0, 1), *(random.random() for _ in range(700))] == drawn


def test_numpy_is_switched_without_its_private_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.randn()
    state = capture_rng()
    drawn = np.random.randn(5).tolist()
    monkeypatch.setattr(_numpy(), "_spare", None)
    restore_rng(state)
    assert capture_rng() == state
    assert np.random.randn(5).tolist() == drawn
