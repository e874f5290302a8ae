"""YAML files that people write: their values, the line of each value, and readable messages for what is wrong in them.

`YamlSource` reads plain data only: no tags, one document, no key twice. `validation_messages` turns what a pydantic
model refuses into one sentence per mistake, and `YamlSource.error` puts the line number before each sentence.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pliant.errors import ConfigError, reason, refuse_file

MAX_FILE_BYTES = 1 << 16
"""Larger files are refused: nobody writes them by hand, and reading one would take seconds."""
MAX_OPEN_BRACKETS = 1000
NESTED = "nested too deeply for a file that people write"
KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to a value, such as ("args", 1)."""
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_TAG = "tag:yaml.org,2002:"
_PLAIN_TYPES = frozenset({"str", "int", "float", "bool", "null", "timestamp", "seq", "map"})
_TYPE_WORDS = {
    "int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false", "string": "text",
    "tuple": "a list, as in [a, b]", "dict": "a mapping, as in {a: b}", "model": "a mapping, as in {a: b}",
}  # fmt: skip
"""What to write instead, by how pydantic's error type begins."""


# --- the file ---


class YamlSource:
    """A YAML file whose outermost value is a mapping with text as keys."""

    def __init__(self, path: Path, root: yaml.MappingNode) -> None:
        self.path = path
        self._root = root
        self._under: dict[str, yaml.Node] = {str(key.value): value for key, value in root.value}

    @classmethod
    def read(cls, path: Path) -> YamlSource:
        """Read the file at `path`.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or not a mapping of plain values. The message names the
                line where it is known.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)  # no more: a device such as /dev/zero has no end
        except OSError as error:
            raise ConfigError(f"{path}: {reason(error)}; give a YAML file") from None
        if len(data) > MAX_FILE_BYTES:
            line = data.count(b"\n") + 1
            raise ConfigError(
                f"{path}:{line}: the file is larger than {MAX_FILE_BYTES} bytes: no such file was written by hand"
            )
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{path}:{line}: {reason(error)}; give a YAML file, in UTF-8") from None
        return cls(path, _parse(path, text))

    @property
    def keys(self) -> Collection[str]:
        """The outermost keys, in the file's order."""
        return self._under.keys()

    def values(self, texts: Collection[str] = ()) -> dict[str, object]:
        """Return the outermost values by key, without keys that have no value (`key:`).

        Scalars under the keys in `texts` stay as they are written: YAML would read 010 as 8, and no as False.
        """
        return {
            name: _text_value(value) if name in texts else _plain_value(value)
            for name, value in self._under.items()
            if value.tag != f"{_TAG}null"
        }

    def line(self, place: Sequence[str | int]) -> int:
        """Return the line of the value at `place`, counted from 1; of its nearest parent if there is no such value.

        Steps that the file does not have are passed over: options of a selector stand beside its kind.
        """
        node: yaml.Node = self._root
        line = node.start_mark.line
        for step in place:
            if (child := _child(node, step)) is not None:
                line, node = child
        return int(line) + 1

    def error(self, messages: Mapping[KeyPath, str]) -> ConfigError:
        """Return an error with one line per message, in the file's order, each with the file and its line number.

        Of very many mistakes the first are told, and the rest are counted.
        """
        found = sorted((self.line(place), text) for place, text in messages.items())
        return refuse_file([f"{self.path}:{line}: {text}" for line, text in found])


def _check_depth(path: Path, text: str) -> None:
    """Refuse brackets in brackets without end: the parser's time would grow with the square of their number."""
    depth = 0
    for number, line in enumerate(text.split("\n"), 1):
        depth += line.count("[") + line.count("{") - line.count("]") - line.count("}")
        if depth > MAX_OPEN_BRACKETS:
            raise ConfigError(f"{path}:{number}: {NESTED}")


def _parse(path: Path, text: str) -> yaml.MappingNode:
    _check_depth(path, text)
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        why = " ".join(part for part in (error.problem, error.context) if part)
        hint = "; indent with spaces, YAML takes no tabs" if "'\\t'" in why else ""
        if path.suffix == ".py":
            hint = "; this is a program: give a file that names it, with `program: " + path.name + "`"
        hint = hint or (
            "; is a bracket or a quote not closed?" if "<stream end>" in why or "end of stream" in why else ""
        )
        raise ConfigError(f"{where}: not YAML: {why}{hint}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow; it says where, but not the line
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise ConfigError(f"{path}:{line}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}:1: {NESTED}") from None
    if not isinstance(root, yaml.MappingNode):
        what = "the file is empty" if root is None else "this is no mapping"
        raise ConfigError(f"{path}:1: {what}: write lines such as `key: value`")
    if wrong := list(_not_plain(root, set())):
        raise refuse_file([f"{path}:{line}: {text}" for line, text in wrong])
    return root


def _not_plain(node: yaml.Node, seen: set[int]) -> Iterator[tuple[int, str]]:
    """Yield line and reason of all that is not plain data.

    Lists and mappings that are referred to twice are refused: they may be endless, or become so when they are written out.
    """
    line = node.start_mark.line + 1
    if not node.tag.startswith(_TAG) or node.tag[len(_TAG) :] not in _PLAIN_TYPES:
        yield line, f"{node.tag.removeprefix(_TAG)!r:.60} is no plain value: write text, numbers, lists and mappings"
    if isinstance(node, yaml.ScalarNode):
        return
    if id(node) in seen:
        yield line, "a list or mapping is used twice by &name and *name: write it out"
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _not_plain(item, seen)
        return
    named: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            yield line, "a key is a list or a mapping: use text"
        elif key.value in named:
            yield key.start_mark.line + 1, f"{key.value:.60} is given twice"
        else:
            named.add(key.value)
        yield from _not_plain(value, seen)


def _text_value(node: yaml.Node) -> object:
    """Return the value of `node` with all scalars as text."""
    if isinstance(node, yaml.SequenceNode):
        return [_text_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _text_value(value) for key, value in node.value}
    return str(node.value)


def _plain_value(node: yaml.Node) -> object:
    """Return the value of `node`; keys and dates are text."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain_value(value) for key, value in node.value}
    if node.tag in (_TAG + "str", _TAG + "timestamp"):
        return str(node.value)
    try:
        return yaml.SafeLoader("").construct_object(node)
    except ValueError:  # such as a number of thousands of digits, or 0x_: then it is text, and refused as such
        return str(node.value)


def _child(node: yaml.Node, step: str | int) -> tuple[int, yaml.Node] | None:
    """Return the line and the node of an item of `node`. The line of a mapping's item is that of its key."""
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        item = node.value[step]
        return item.start_mark.line, item
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line, value
    return None


# --- messages for what is wrong ---

Model = TypeVar("Model", bound=BaseModel)


class JointMistakes(ValueError):
    """Values that do not fit together: what is wrong with each key. A validator of a model raises it."""

    def __init__(self, messages: Mapping[KeyPath, str]) -> None:
        super().__init__("; ".join(messages.values()))
        self.messages = messages


def validate(
    model: type[Model],
    given: Mapping[str, object],
    *,
    stand_ins: Mapping[str, object] | None = None,
    examples: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> tuple[Model | None, dict[KeyPath, str]]:
    """Return the model of the given values, and a sentence for each mistake in them, by where it is.

    Values that are wrong are left out, so that what is wrong with the rest is found, too: the model has their defaults, or
    the `stand_ins` for them. It is None if it cannot be made. `examples` and `hidden` are those of `validation_messages`.
    """
    wrong: dict[KeyPath, str] = {}
    rest = dict(given)
    for _ in range(3):  # the values; whether they fit together; and without those that do not
        try:
            return model.model_validate(rest), wrong
        except ValidationError as error:
            found = validation_messages(error, model, examples=examples, hidden=hidden)
        for place, message in found.items():
            wrong.setdefault(place, message)
            rest = _without(rest, place)
            if len(place) == 1 and str(place[0]) in (stand_ins or {}):
                rest[str(place[0])] = (stand_ins or {})[str(place[0])]
    return None, wrong


def _without(given: Mapping[str, object], place: KeyPath) -> dict[str, object]:
    """Return the values without the one at `place`; a list is left out as a whole."""
    key, *below = place
    inner = given.get(str(key))
    if below and isinstance(inner, Mapping) and below[0] in inner:
        return {**given, str(key): _without(inner, tuple(below))}
    return {name: value for name, value in given.items() if name != key}


def validation_messages(
    error: ValidationError,
    model: type[BaseModel],
    *,
    examples: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> dict[KeyPath, str]:
    """Return one sentence for each of the user's mistakes, by where the mistake is.

    `examples` says what to add where a key is missing. `hidden` are keys that users do not write, and are not told of.
    """
    found: dict[KeyPath, str] = {}
    for detail in error.errors():
        # Not a mistake of its own: a default could not be computed, because a value before it is wrong.
        error_of_ours = detail.get("ctx", {}).get("error")
        if isinstance(error_of_ours, JointMistakes):
            for place, text in error_of_ours.messages.items():
                found.setdefault((*detail["loc"], *place), text)
        elif detail["type"] != "default_factory_not_called":
            found.setdefault(_place_of(detail), _describe(detail, model, examples or {}, hidden))
    return found


def _place_of(detail: ErrorDetails) -> KeyPath:
    if detail["type"] == "value_error" and not detail["loc"]:
        # A check of several values at once: its message begins with the key that it belongs to.
        return tuple(str(detail["ctx"]["error"]).split()[0].rstrip(":").split("."))
    return detail["loc"]


def _describe(
    detail: ErrorDetails, model: type[BaseModel], examples: Mapping[str, str], hidden: Collection[str]
) -> str:
    loc, given = detail["loc"], detail["input"]
    key = ".".join(str(step) for step in loc if step != "[key]")
    limits = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            known = [name for name in keys_under(model, loc[:-1]) if name not in hidden]
            return unknown_key_message(key, str(loc[-1]), known)
        case "missing":
            return f"{key} is missing: add {examples.get(key, key)}"
        case "value_error":
            return f"{key} {limits['error']}" if key else str(limits["error"])
        case "greater_than_equal" | "less_than_equal" | "greater_than" | "less_than":
            bound, side = next((limits[side], side) for side in ("ge", "le", "gt", "lt") if side in limits)
            words = {
                "ge": f"{bound} or more", "le": f"{bound} or less", "gt": f"more than {bound:g}", "lt": f"less than {bound:g}",
            }  # fmt: skip
            return f"{key} {given!r:.60}: use {words[side]}"
        case "literal_error":
            return f"{key} {given!r:.60} is not known: use {str(limits['expected']).replace(repr('') + ', ', '')}"
        case kind:
            wanted = next((word for begin, word in _TYPE_WORDS.items() if kind.startswith(begin)), detail["msg"])
            return f"{key} {given!r:.60}: use {wanted}"


def unknown_key_message(key: str, last: str, known: Collection[str]) -> str:
    """Return the message about a key that is none of `known`; `last` is its last part."""
    near = difflib.get_close_matches(last, known, 1)
    return f"unknown key {key!r}: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


def keys_under(model: type[BaseModel], place: KeyPath) -> list[str]:
    """Return the keys that `model` has at `place` within it; none where there is no model."""
    for step in place:
        field = model.model_fields.get(str(step))
        if field is None:
            return []
        types = [field.annotation, *get_args(field.annotation)]
        below = next((each for each in types if isinstance(each, type) and issubclass(each, BaseModel)), None)
        if below is None:
            return []
        model = below
    return list(model.model_fields)


# --- names of jobs ---


def name_error(name: str) -> str:
    """Return what is wrong with `name` as the name of a job; empty if nothing is."""
    if JOB_NAME.fullmatch(name):
        return ""
    return f"{name!r:.80}: use up to 64 letters, digits, . _ and -, beginning with a letter or digit"


def default_job_name(path: Path) -> str:
    """Return a name for the job of a file that gives none: the file's own, with the number 1."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem).strip('._-')[:58] or 'job'}-1"


def next_free_name(name: str, taken: Collection[str]) -> str:
    """Return `name` with the first number that makes it none of `taken`."""
    stem = name.rpartition("-")[0]
    return next(f"{stem}-{number}" for number in itertools.count(1) if f"{stem}-{number}" not in taken)
