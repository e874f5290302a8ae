"""Every command line of a page is read by the real command line, or run by a test that the ledger names."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import subprocess
import sys
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


def words_of(line: str) -> list[str]:
    """Return the words and operators of a shell's line, without its remark."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    reader.commenters = ""  # a # within a word is part of it
    return list(itertools.takewhile(lambda word: not word.startswith("#"), reader))


def commands(line: str) -> list[tuple[str, ...]]:
    """Return the words after each `pliant` of a shell's line."""
    words, found = words_of(line), []
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


# --- the ledger of all others ---

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
KINDS = {"python", "diff", "yaml", "toml", "text", "sh"}
"""What a block says it is. Each line of a `sh` block is typed; nothing else in a block is, except after `pliant`."""
ACTIVATED = "tests/test_typed_commands.py::test_make_makes_what_is_activated"
CONFIG_BY_CURL = "tests/test_curl_commands.py::test_the_config_server_answers_as_the_page_on_running_says"
JOBS_BY_CURL = "tests/test_curl_commands.py::test_the_job_server_answers_as_the_guide_of_the_cluster_says"
DEPLOYED = "tests/fed/test_flower_deployment.py::test_the_example_is_deployed_and_goes_on_after_its_server_was_killed"
FIVE_MINUTES = "tests/test_first_five_minutes.py::test_a_job_is_resized_and_robbed_of_a_worker_and_ends_with_the_hash_of_the_one_alone"
READ_BY_RAY = "tests/test_typed_commands.py::test_ray_takes_what_a_page_shows"
RUN_BY = {
    "make demo": "tests/repro/test_demo.py::test_resizes_and_a_kill_do_not_change_a_bit",
    "make docs": "tests/test_docs.py::test_the_site_is_whole_and_needs_no_network",
    "make test": "tests/test_typed_commands.py::test_targets_of_make_are_there",
    "make wheels": "tests/test_packaging.py::test_a_wheel_holds_the_package_and_nothing_else",
    "source .venv/bin/activate": ACTIVATED,
    ".venv/bin/pytest": ACTIVATED,
    "umask 077": "tests/test_typed_commands.py::test_python_takes_one_liners_of_a_page",
    "python -c": "tests/test_typed_commands.py::test_python_takes_one_liners_of_a_page",
    "python examples/digits.py": FIVE_MINUTES,
    "python examples/policies/": "tests/test_examples.py::test_the_tutorials_policies_that_look_at_the_noise",
    "torchrun --nproc-per-node 2 examples/digits_ddp.py": "tests/test_examples.py::test_digits_is_its_ddp_twin_on_any_number_of_workers",
    "torchrun --nproc-per-node 2 benchmarks/system/benchmark_ddp.py": "tests/repro/test_artifact_benchmarks.py::test_the_baseline_says_the_same_of_stock_ddp",
    "kill -9": FIVE_MINUTES,
    "pgrep -n -u $UID -f": FIVE_MINUTES,
    "kill $!": "tests/test_readme.py::test_each_command_works_in_order",
    "cat ~/.local/state/pliant/tokens/": CONFIG_BY_CURL,
    "curl -H $auth": CONFIG_BY_CURL,
    "curl -H Authorization: Bearer $TOKEN": JOBS_BY_CURL,
    "ssh a": "tests/launch/test_launch_ssh.py::test_this_checkout_is_installed_over_ssh_and_a_bad_host_is_named",
    "ray start": READ_BY_RAY,
    "ray job submit": READ_BY_RAY,
    "flwr run examples/flower local": "tests/fed/test_flower.py::test_the_example_learns",
    "flwr run examples/flower ours": DEPLOYED,
    "flwr supernode register": DEPLOYED,
    "flower-superlink": DEPLOYED,
    "flower-supernode": DEPLOYED,
    "ssh-keygen -t ecdsa": DEPLOYED,
}
"""What a command line begins with that is not one of pliant, and the test that runs it, or what it consists of."""


def others(text: str) -> list[str]:
    """Return all commands of a page, in `sh` blocks and after a $, that are not of pliant."""
    lines = re.findall(r"^ *\$ (.+)", text.replace("\\\n", " "), re.MULTILINE)
    lines += [line for kind, block in BLOCK.findall(text) if kind == "sh" for line in block.splitlines()]
    found = []
    for line in lines:
        quoted = re.findall(r'"[^"]*\$\((.+?)\)', line)  # else it is among the words
        for each in [re.sub(r" >+ *[^ ]+", "", line), *quoted]:
            for is_operator, run in itertools.groupby(
                words_of(each), key=lambda word: bool(word) and set(word) <= OPERATORS
            ):
                words = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), run))
                if words and not is_operator and words[0].rpartition("/")[2] != "pliant":
                    found.append(" ".join(words))
    return found


def covered_by(command: str) -> str:
    """Return the beginning in the ledger that fits best; empty if there is none."""
    return max((beginning for beginning in RUN_BY if command.startswith(beginning)), key=len, default="")


def test_the_ledger_would_notice_a_new_command() -> None:
    page = (
        "    $ A=1 pliant run train.py && reboot -f > log | pliant top\n```sh\nkill -9 $(pgrep -n -u $UID -f x)  # now\n```\n"
    )
    assert others(page) == ["reboot -f", "kill -9 $", "pgrep -n -u $UID -f x"]
    assert [covered_by(each) for each in others(page)] == ["", "kill -9", "pgrep -n -u $UID -f"]


def test_every_other_command_is_run_by_the_test_that_the_ledger_names() -> None:
    found = {(path.name, command) for path in PAGES for command in others(path.read_text())}
    assert not [f"{page}: {command}" for page, command in sorted(found) if not covered_by(command)], "name its test"
    assert set(RUN_BY) == {covered_by(command) for _, command in found}, "the ledger has commands that no page shows"
    for named in RUN_BY.values():
        file, _, test = named.partition("::")
        assert test in {each.name for each in ast.parse((ROOT / file).read_text()).body if hasattr(each, "name")}, named


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in PAGES])
def test_a_block_says_what_it_is(page: str) -> None:
    kinds = {kind.split(" ")[0] for kind, _ in BLOCK.findall((ROOT / page).read_text())}
    assert kinds <= KINDS


def test_make_makes_what_is_activated() -> None:
    made = (ROOT / "Makefile").read_text()
    assert re.search(r"^VENV +:= \.venv$", made, re.MULTILINE)
    assert "-m venv $(VENV)" in made


def test_python_takes_one_liners_of_a_page() -> None:
    shown = [
        shlex.split(line)
        for path in PAGES
        for line in re.findall(r'^    \$ (?:umask 077; )?python (-c "[^"]+")', path.read_text(), re.MULTILINE)
    ]
    assert shown
    for words in shown:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(done.stdout.strip()) > 20


@pytest.mark.filterwarnings("ignore")  # of ray's own modules
def test_ray_takes_what_a_page_shows() -> None:
    pytest.importorskip("ray")
    from ray.scripts.scripts import cli

    lines = [line for path in PAGES for line in others(path.read_text()) if line.startswith("ray ")]
    shown = [
        shlex.split(line)
        for path in PAGES
        for line in re.findall(r"^    \$ (ray .+?)(?:  #.*)?$", path.read_text(), re.M)
    ]
    assert len(shown) == len(lines) > 2
    for _, *words in shown:
        given = cli
        while words and words[0] in getattr(given, "commands", {}):
            given = given.commands[words.pop(0)]
        assert given is not cli
        given.make_context("ray", words)


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
