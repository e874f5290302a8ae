"""Numbers on the command line: whole ones, and `TYPE=NUMBER,...`.

They are taken as text and read here where click would answer a wrong one in words of its own.
"""

from __future__ import annotations

import math
import re

from pliant.errors import ConfigError


def whole(text: str, flag: str, example: int = 4) -> int:
    """A whole number, maybe below 0: what it may be is for whoever takes it to say."""
    if re.fullmatch(r"-?[0-9]{1,18}", text.strip()) is None:
        raise ConfigError(f"{flag} {text!r} is not a whole number: write digits, such as {example}")
    return int(text)


def check_time(seconds: float, flag: str) -> None:
    """Refuse what no clock can wait for."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{flag} {seconds:g}: use seconds above 0, such as 60")


def numbers(text: str, flag: str, example: str = "v100=3.1,t4=1") -> dict[str, float]:
    """From `v100=3.1,t4=1`; nothing from nothing."""
    found: dict[str, float] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name.strip() or not math.isfinite(number):
            raise ConfigError(f"{flag} {part!r}: use TYPE=NUMBER, as in {example}")
        found[name.strip()] = number
    return found


def counts(text: str, flag: str) -> dict[str, int]:
    """From `v100=2,t4=1`."""
    found = numbers(text, flag, "cpu=4")
    for name, value in found.items():
        if value < 0 or value != int(value):
            raise ConfigError(f"{flag} {name}={value:g}: use a whole number of devices")
    return {name: int(value) for name, value in found.items()}
