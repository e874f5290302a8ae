"""`TYPE=NUMBER,...` on the command line."""

from __future__ import annotations

from pliant.errors import ConfigError


def numbers(text: str, flag: str) -> dict[str, float]:
    """From `v100=3.1,t4=1`; nothing from nothing."""
    found: dict[str, float] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"{flag} {part!r}: use TYPE=NUMBER, as in v100=3.1,t4=1") from None
    return found


def counts(text: str, flag: str) -> dict[str, int]:
    """From `v100=2,t4=1`."""
    found = numbers(text, flag)
    for name, value in found.items():
        if value < 0 or value != int(value):
            raise ConfigError(f"{flag} {name}={value:g}: use a whole number of devices")
    return {name: int(value) for name, value in found.items()}
