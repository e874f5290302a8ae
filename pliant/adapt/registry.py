"""Policies by name, as `--policy` takes them: NAME, NAME:key=value,... or module:Class[:key=value,...]."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pliant.adapt.policy import Policy
from pliant.errors import ConfigError
from pliant.own_class import load_class

NAMES: Mapping[str, str] = {
    "grow-batch-size": "pliant.adapt.batch_size:GrowBatchSize",
    "kungfu-batch-size": "pliant.adapt.batch_size:KungFuBatchSize",
    "scheduled-batch-size": "pliant.adapt.batch_size:ScheduledBatchSize",
    "scheduled-size": "pliant.adapt.size:ScheduledSize",
    "provision": "pliant.adapt.size:Provision",
    "interference": "pliant.adapt.interference:Interference",
    "goodput": "pliant.adapt.goodput_policy:Goodput",
}


def parse(text: str) -> Policy:
    """Make the policy that `text` names, with the options it gives.

    Schedules are written as `scheduled-size:10=2,20=4`: STEP=SIZE where other policies have key=value.

    Raises:
        ConfigError: there is no such policy, or it has no such option; the message lists those that exist.
    """
    place, options = _split(text.strip())
    made = load_class(place, Policy, flag=f"--policy {text}", remedy="derive it from pliant.Policy")
    signature = inspect.signature(made)
    try:
        hints = typing.get_type_hints(made.__init__)
    except NameError:  # an annotation names something that exists for type checkers only
        hints = {}
    schedule: dict[int, int] = {}
    given: dict[str, Any] = {}
    for option in filter(None, (each.strip() for each in options.split(","))):
        key, equals, value = (word.strip() for word in option.partition("="))
        if "schedule" in signature.parameters and key.isdecimal() and value.isdecimal():
            schedule[int(key)] = int(value)
        elif not equals or key not in signature.parameters or key == "schedule":
            raise ConfigError(f"--policy {text}: {option!r} is no option of it: there are {_list_options(signature)}")
        else:
            given[key] = _convert(text, key, value, hints.get(key))
    if "schedule" in signature.parameters:
        given["schedule"] = schedule
    try:
        return made(**given)
    except ConfigError as error:
        raise ConfigError(f"--policy {text}: {error}") from None
    except Exception as error:  # the user's own code
        raise ConfigError(f"--policy {text}: {type(error).__name__}: {error}") from error


def check(text: str) -> None:
    """Check the options of a built-in policy before a job is started. Only workers import a user's own class.

    Raises:
        ConfigError: see `parse`.
    """
    if _split(text.strip())[0] in NAMES.values():
        parse(text)


def _split(text: str) -> tuple[str, str]:
    """Return module:Class, and the options."""
    name, _, rest = text.partition(":")
    if name in NAMES:
        return NAMES[name], rest
    kind, _, options = rest.partition(":")
    if not kind or "=" in kind or not name.replace(".", "_").isidentifier() or not kind.isidentifier():
        raise ConfigError(f"--policy {text}: there is no {name!r}; use {', '.join(NAMES)}, or module:Class")
    return f"{name}:{kind}", options


def _list_options(signature: inspect.Signature) -> str:
    names = ["STEP=SIZE" if name == "schedule" else name for name in signature.parameters]
    return ", ".join(names) or "none"


def _convert(text: str, key: str, value: str, hint: Any) -> Any:
    """Convert an option by the constructor's annotation. Without one, try int and float, then keep the text."""
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError  # 60 ms, and few jobs have options

    if hint is None:
        hint = Annotated[int | float | str, Field(union_mode="left_to_right")]
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_strings(value)
    except ValidationError:
        kind = getattr(hint, "__name__", str(hint))
        raise ConfigError(f"--policy {text}: {key}={value}: use a value of type {kind}") from None
