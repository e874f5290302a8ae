"""YAML files that people write: their values, and the line of each, so that a mistake can be pointed at.

Plain data only: no tags, one document, no key twice. What the values mean is for others to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml

from pliant.errors import ConfigError, reason

MAX_FILE_BYTES = 1 << 20
PLAIN = "tag:yaml.org,2002:"
KINDS = frozenset({"str", "int", "float", "bool", "null", "timestamp", "seq", "map"})


class Page:
    """A YAML file whose outermost value is a mapping with text as keys."""

    def __init__(self, path: Path, root: yaml.MappingNode) -> None:
        self.path = path
        self._root = root
        self._under: dict[str, yaml.Node] = {str(key.value): value for key, value in root.value}

    @classmethod
    def read(cls, path: Path) -> Page:
        """The page at `path`.

        Raises:
            ConfigError: it cannot be read, is not YAML, or not of this form; with the line where that is known.
        """
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes: no such file was written by hand")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {reason(error)}; give a YAML file") from None
        return cls(path, _parsed(path, text))

    @property
    def keys(self) -> Collection[str]:
        """The outermost keys, in the file's order."""
        return self._under.keys()

    def values(self, texts: Collection[str] = ()) -> dict[str, object]:
        """What the file says, without the keys that it says nothing of (`key:`).

        Under the keys in `texts` scalars stay as they are written: YAML makes 8 of 010, and False of no.
        """
        return {
            name: _as_written(value) if name in texts else _built(value)
            for name, value in self._under.items()
            if value.tag != f"{PLAIN}null"
        }

    def line(self, place: Sequence[str | int]) -> int:
        """The line of what is at `place`, such as ("args", 1), counted from 1; of what is nearest, if that is not there."""
        node: yaml.Node = self._root
        line = node.start_mark.line
        for step in place:
            if (below := _below(node, step)) is None:
                break
            line, node = below
        return int(line) + 1

    def refusal(self, mistakes: Mapping[tuple[str | int, ...], str]) -> ConfigError:
        """One line per mistake, in the file's order."""
        found = sorted((self.line(place), text) for place, text in mistakes.items())
        return ConfigError("\n".join(f"{self.path}:{line}: {text}" for line, text in found))


def _parsed(path: Path, text: str) -> yaml.MappingNode:
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        why = " ".join(part for part in (error.problem, error.context) if part)
        hint = "; indent with spaces, YAML takes no tabs" if "'\\t'" in why else ""
        hint = hint or (
            "; is a bracket or a quote not closed?" if "<stream end>" in why or "end of stream" in why else ""
        )
        raise ConfigError(f"{where}: not YAML: {why}{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a file that people write") from None
    if not isinstance(root, yaml.MappingNode):
        what = "is empty" if root is None else "is no mapping"
        raise ConfigError(f"{path} {what}: write lines such as `key: value`")
    _check(path, root, set())
    return root


def _check(path: Path, node: yaml.Node, seen: set[int]) -> None:
    """Refuse what is not plain data. Shared lists and mappings are refused too: they may be endless."""
    where = f"{path}:{node.start_mark.line + 1}"
    if not node.tag.startswith(PLAIN) or node.tag[len(PLAIN) :] not in KINDS:
        raise ConfigError(
            f"{where}: {node.tag.removeprefix(PLAIN)!r} is no plain value: write text, numbers, lists and mappings"
        )
    if isinstance(node, yaml.ScalarNode):
        return
    if id(node) in seen:
        raise ConfigError(f"{where}: a list or mapping is used twice by &name and *name: write it out")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(path, item, seen)
        return
    named: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key is a list or a mapping: use text")
        if key.value in named:
            raise ConfigError(f"{path}:{key.start_mark.line + 1}: {key.value} is given twice")
        named.add(key.value)
        _check(path, value, seen)


def _as_written(node: yaml.Node) -> object:
    """The value of `node` with all scalars as text."""
    if isinstance(node, yaml.SequenceNode):
        return [_as_written(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _as_written(value) for key, value in node.value}
    return str(node.value)


def _built(node: yaml.Node) -> object:
    """The value of `node`; keys are text."""
    if isinstance(node, yaml.SequenceNode):
        return [_built(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _built(value) for key, value in node.value}
    if node.tag in (PLAIN + "str", PLAIN + "timestamp"):
        return str(node.value)
    return yaml.SafeLoader("").construct_object(node)


def _below(node: yaml.Node, step: str | int) -> tuple[int, yaml.Node] | None:
    """What `step` leads to, and its line, which for an item of a mapping is its key's."""
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        item = node.value[step]
        return item.start_mark.line, item
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark.line, value
    return None
