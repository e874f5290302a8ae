"""Rates of links: parsing, formatting, and the arguments of the kernel's token bucket."""

from __future__ import annotations

import re

from pliant.errors import ConfigError

QUEUE_S = 0.015
"""Length of a shaped link's queue."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str) -> int | None:
    """Parse `1gbit`, `100mbit`, `2.5gbit` or `500kbit` as bits per second; `none` is None, no limit.

    Raises:
        ConfigError: the text has another form, or is outside 8kbit to 100gbit.
    """
    lowered = text.strip().lower()
    if lowered == "none":
        return None
    matched = _RATE.fullmatch(lowered)
    if matched is None:
        raise ConfigError(f"rate {text!r} not understood: use 1gbit, 100mbit, 2.5gbit, 500kbit or none")
    bits_per_s = round(float(matched[1]) * _UNITS[matched[2]])
    if not 8_000 <= bits_per_s <= 100 * 10**9:
        raise ConfigError(f"rate {text!r} is outside 8kbit to 100gbit; `none` means no limit")
    return bits_per_s


def format_rate(bits_per_s: int | None) -> str:
    """Return the shortest text that `parse_rate` reads back."""
    if bits_per_s is None:
        return "none"
    for letter, unit in reversed(_UNITS.items()):
        if bits_per_s >= unit:
            return f"{bits_per_s / unit:.10g}{letter}bit"
    return f"{bits_per_s / 1000:.10g}kbit"


def shaper(bits_per_s: int) -> list[str]:
    """Return the arguments of `tc qdisc replace dev X root` that hold a device to this rate.

    A burst of 128 KB lets whole GSO packets (64 KB) through unsplit at 100 Mbit/s and above. It is never less than 1 ms of
    traffic, so that a late timer costs no rate, and at low rates not more than 10 ms. The queue is some milliseconds, given in
    bytes: a long one would hide priorities; a short one drops the last packets of a burst, and TCP then waits for 200 ms.
    """
    bytes_per_s = bits_per_s / 8
    burst = max(4096, min(128 << 10, bytes_per_s * 0.010), bytes_per_s * 0.001)
    limit = max(32 << 10, 2 * burst, bytes_per_s * QUEUE_S)
    return ["tbf", "rate", f"{bits_per_s}bit", "burst", f"{burst:.0f}", "limit", f"{limit:.0f}"]
