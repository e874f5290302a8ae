"""Every command that a page or an example shows is read by the real command line, and some are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from pliant_repro.figures.catalog import FIGURES
from typer.testing import CliRunner

from pliant.cli import main
from pliant.cli.run import RunArguments
from pliant.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("repro/**/README.md")])
FENCE = re.compile(r"^```(?!python|diff|yaml|toml).*?^```", re.MULTILINE | re.DOTALL)
OPERATORS = set("();<>|&")
SOURCES = re.compile(r"(examples|benchmarks|scripts|tests)/[\w/.-]*\w")
RUN = ("plan", "reproduce --list")
"""Commands that begin so are run as well: they need nothing, and take no time."""


@dataclass(frozen=True)
class Typed:
    """What a page says can be typed."""

    words: tuple[str, ...]
    """What follows `pliant`."""
    is_whole: bool = True
    """If false, it is named in a sentence: values may be missing, or stand for others."""

    def __str__(self) -> str:
        return " ".join(("pliant", *self.words))


# --- what can be typed ---


def typed(text: str) -> list[Typed]:
    """Return all commands of a page: after a $, at the beginning of lines of a block, and in backticks."""
    text = text.replace("\\\n", " ")
    blocks = "\n".join([*FENCE.findall(text), *re.findall(r"^    +\S.*$", text, re.MULTILINE)])
    lines = re.findall(r"^(?:    )?\$ (.+)", text, re.MULTILINE) + re.findall(r"^ *(pliant .+)", blocks, re.MULTILINE)
    whole = [Typed(words, "[OPTIONS]" not in words) for line in dict.fromkeys(lines) for words in commands(line)]
    named = re.findall(r"`(pliant [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [*whole, *(Typed(words, is_whole=False) for line in named for words in commands(line.replace("\\|", "|")))]


def commands(line: str) -> list[tuple[str, ...]]:
    """Return the words after each `pliant` of a shell's line."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    reader.commenters = ""  # a # within a word is part of it
    words, found = [], []
    for word in reader:
        if word.startswith("#"):
            break
        words.append(word)
    for place, word in enumerate(words):
        if word.rpartition("/")[2] == "pliant":
            after = words[place + 1 :]
            ends = [index for index, each in enumerate(after) if set(each) <= OPERATORS]
            found.append(tuple(after[: ends[0]] if ends else after))
        elif "pliant " in word:
            found += commands(word)
    return found


def test_commands_are_found_wherever_a_shell_has_them() -> None:
    assert commands('name=$(pliant submit job.yml) && pliant logs -f "$name" > log') == [
        ("submit", "job.yml"),
        ("logs", "-f", "$name"),
    ]
    assert commands("pliant stop $(pliant list -q)") == [("stop", "$"), ("list", "-q")]
    assert commands("ssh a '~/.pliant-venv/bin/pliant resize 2'   # on the first host: pliant top") == [("resize", "2")]
    page = "`pliant run -w` and\n\n    $ pliant run \\\n        train.py &\n    pliant list  # all\n\n```\npliant top\n```\n"
    assert [str(each) for each in typed(page)] == [
        "pliant run train.py",
        "pliant top",
        "pliant list",
        "pliant run -w",
    ]


# --- the command line reads them ---


def _walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, (*path, name))


COMMANDS = dict(_walk(typer.main.get_command(main.build())))


def refusal(command: Typed) -> str:
    """Return why the real command line would not take this; empty if it would. Nothing is run."""
    words = list(command.words)
    if not command.is_whole:
        words = [word for word in words if word[0] not in "[]" and word != "..."]
    path: tuple[str, ...] = ()
    while words and (*path, words[0]) in COMMANDS:
        path = (*path, words.pop(0))
    given = COMMANDS[path]
    if hasattr(given, "commands"):
        is_open = not command.is_whole and (not words or words[0].isupper())
        return "" if is_open or (words and words[0].startswith("-")) else "there is no such command"
    try:
        parsed = given.make_context("pliant", words).params
        if path == ("run",) and command.is_whole:
            own = RunArguments.__dataclass_fields__
            RunArguments(**{name: parsed[name] for name in own}).to_options(parsed["program"] or ())
    except typer.Exit:
        return ""  # -h
    except main.Misuse as error:
        said = error.format_message()
        is_unfinished = not command.is_whole and not re.search("No such|unexpected extra", said)
        return "" if is_unfinished else said
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with what the pages take for granted."""
    for name in ("examples", "benchmarks", "scripts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("job.yml", "train.py"):
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    (tmp_path / "run.jsonl").write_text('{"kind": "start", "step": 0, "time_s": 1.0}\n')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in PAGES])
def test_the_command_line_takes_what_a_page_shows(page: str, at_home: None) -> None:
    found = typed((ROOT / page).read_text())
    refused = {str(each): said for each in found if (said := refusal(each))}
    assert not refused
    for each in found:
        if each.words[:1] == ("reproduce",) and each.is_whole:
            assert {word for word in each.words[1:] if "-fig" in word or word.startswith("oort")} <= set(FIGURES)


def test_the_command_line_takes_what_examples_show(at_home: None) -> None:
    lines = [
        line
        for path in (ROOT / "examples").rglob("*.*")
        if path.suffix in (".py", ".yml")
        for line in re.findall(r"^(?:#.*: |[# ]*)(pliant [a-z].+)", path.read_text(), re.MULTILINE)
    ]
    found = [Typed(words) for line in lines for words in commands(line)]
    assert len(found) > 15
    assert not {str(each): said for each in found if (said := refusal(each))}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run -np two train.py", "-np 'two'"),
        ("run --nope train.py", "No such option"),
        ("run --order backwards train.py", "backwards"),
        ("resize", "Missing argument"),
        ("resize 2 3", "unexpected extra argument"),
        ("plan --replicas many --speed a=1", "not a valid integer"),
        ("bench nothing", "no such command"),
        ("lst", "no such command"),
    ],
)
def test_what_is_wrong_would_be_found(line: str, said: str) -> None:
    assert said in refusal(Typed(tuple(line.split())))


def test_files_that_commands_name_are_there() -> None:
    named = {
        found[0]
        for path in PAGES
        for line in re.findall(r"^(?:    )?\$ (.+)", path.read_text(), re.MULTILINE)
        for found in SOURCES.finditer(line)
    }
    assert len(named) > 15
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_targets_of_make_are_there() -> None:
    named = {name for path in PAGES for name in re.findall(r"(?:`|\$ )make (\w+)", path.read_text())}
    assert named <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# --- some are run ---


def test_commands_that_take_no_time_do_what_they_say(at_home: None) -> None:
    lines = {str(each): each for path in PAGES for each in typed(path.read_text()) if each.is_whole}
    cheap = [each for line, each in lines.items() if line.removeprefix("pliant ").startswith(RUN)]
    assert len(cheap) >= 2
    app = main.build()
    for each in cheap:
        done = CliRunner().invoke(app, list(each.words))
        assert done.exit_code == 0, f"{each}: {done.output}"
        assert len(done.output.splitlines()) > 2, each
