"""Durations as people write them: `90s`, `1m30s`, `250ms`, or plain seconds.

Pure text in, seconds out, and back. Nothing here reads a clock.
"""

from __future__ import annotations

import math
import re

from pliant.errors import ConfigError

_UNIT_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(d|h|ms|us|µs|ns|m|s)")


def parse_duration(text: str, flag: str = "duration") -> float:
    """Return `text` in seconds; it is in Go's form (`1m30s`), which may have days (`30d`), or a number of seconds.

    Raises:
        ConfigError: it is neither, or negative, or not finite.
    """
    bare = text.strip()
    parts = _PART.findall(bare)
    if parts and "".join(number + unit for number, unit in parts) == bare:
        return sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    try:
        seconds = float(bare)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ConfigError(f"{flag} {text!r} is not a duration: use 90s, 1m30s, 2d, 250ms, or seconds such as 90")
    return seconds


def format_duration(seconds: float) -> str:
    """Return `seconds` in Go's form with one decimal: `1m56.6s`, `1h0m3.2s`, `0.4s`."""
    tenths = round(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 10:.1f}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def span_text(seconds: float) -> str:
    """Return a length of time in its two largest units, such as 3m12s."""
    whole = max(0, int(seconds))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((place for place, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return "".join(f"{count}{unit}" for count, unit in parts[first : first + 2])


def duration_text(seconds: float) -> str:
    """Return a length of time; if it is shorter than a minute, with three digits, such as 1.25 s or 40 ms."""
    return span_text(seconds) if seconds >= 60 else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
