"""What monitors a job was asked to run, as text and as values."""

from __future__ import annotations

from collections.abc import Mapping

from pliant.errors import ConfigError

MONITORS = ("noise_scale", "variance")


def check_monitors(monitors: Mapping[str, int]) -> dict[str, int]:
    """The monitors with their intervals, if there are such."""
    for name, interval in monitors.items():
        if name not in MONITORS:
            raise ConfigError(f"monitor {name!r} is not known: use {' or '.join(MONITORS)}")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"monitor {name}={interval!r}: use the number of steps between measurements, 1 or more")
    return dict(monitors)


def parse_monitors(text: str) -> dict[str, int]:
    """`noise_scale=1,variance=8`; without a number, every step."""
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, interval = part.partition("=")
        if interval and not interval.isdigit():
            raise ConfigError(f"--monitor {part!r}: write NAME=STEPS, such as noise_scale=1,variance=8")
        found[name.replace("-", "_")] = int(interval or 1)
    return check_monitors(found)
