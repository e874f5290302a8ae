"""A config server whose provider gets the machines: sizes are its business, and so are devices."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from serving import TWO, serving

from pliant.errors import CapacityError, ClusterCleared, ConfigError, NoView, StaleView


class Notes:
    """A provider that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def resize(self, size: int) -> None:
        if size > 4:
            raise CapacityError(f"size {size}: there is room for 4")
        self.asked.append(size)

    def set_devices(self, devices: Mapping[str, int]) -> None:
        self.asked.append(dict(devices))

    def occupied_devices(self) -> dict[str, int]:
        return {"t4": 2}

    def drop_unwanted(self) -> None:
        self.asked.append("drop")


def test_a_size_goes_to_the_provider_and_the_view_stays() -> None:
    provider = Notes()
    with serving(provider=provider) as (_, client):
        with pytest.raises(NoView):
            client.resize(3)
        put = client.put(TWO)
        assert client.resize(3) == put
        assert client.get() == put
        with pytest.raises(StaleView):
            client.resize(2, expected=put.number - 1)
        with pytest.raises(CapacityError, match="there is room for 4"):
            client.resize(5)
        assert provider.asked == [3]


def test_stopping_needs_nobody_who_caters() -> None:
    provider = Notes()
    with serving(provider=provider) as (_, client):
        client.put(TWO)
        assert client.resize(0).workers == ()
        with pytest.raises(ClusterCleared):
            client.resize(1)
        assert provider.asked == []


def test_devices_are_asked_for_told_and_cleared() -> None:
    provider = Notes()
    with serving(provider=provider, token="secret") as (_, client):
        client.set_devices({"t4": 1, "cpu": 2})
        assert client.occupied_devices() == {"t4": 2}
        client.drop_unwanted()
        assert provider.asked == [{"t4": 1, "cpu": 2}, "drop"]
        with pytest.raises(ConfigError, match="names no devices"):
            client.set_devices({"t4": -1})


def test_without_a_provider_there_are_no_devices() -> None:
    with serving() as (_, client), pytest.raises(ConfigError):
        client.occupied_devices()
