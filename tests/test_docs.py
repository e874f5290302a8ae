"""The docs say what is so: links lead somewhere, commands and names exist, and what is made from the code is not stale."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from command import command

import pliant
from pliant.comm.topology import STRATEGIES
from pliant.errors import ENDED_EXIT, REFUSED_EXIT
from pliant.launch.supervisor import TIMEOUT_EXIT

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("repro/**/README.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
sys.path.insert(0, str(ROOT / "scripts"))


# --- links ---


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page: str) -> None:
    """In the repository, as its readers see it: to files, and to headings by either way of naming them."""
    dead = []
    for target in LINK.findall(FENCE.sub("", (ROOT / page).read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and file.suffix == ".md" and not _has(file, anchor)):
            dead.append(target)
    assert not dead, f"{page}: dead links {dead}"


def _has(file: Path, anchor: str) -> bool:
    """Whether a heading has that anchor on the site and in a repository's view; names of the code have theirs on the site only."""
    text = FENCE.sub("", file.read_text())
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    shown = [re.sub(r"[`*]", "", heading).strip().lower() for heading in headings]
    on_site = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in shown}
    in_repository = {re.sub(r"[^\w\s-]", "", heading).replace(" ", "-") for heading in shown}
    return anchor in on_site & in_repository or f"::: {anchor}" in text


class Page(HTMLParser):
    """What a page of the site has, and what it points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in given}
        self.ids.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "script", "img", "iframe") and (values.get("src") or values.get("href")):
            self.loads.append(values.get("src") or values["href"])


@pytest.mark.timeout(180)
def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)],
        cwd=ROOT,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 20
    dead = [f"{path.relative_to(site)}: {link}" for path, page in pages.items() for link in _dead(path, page, pages)]
    assert not dead
    assert not [url for page in pages.values() for url in page.loads if "//" in url], "loaded from elsewhere"


def _dead(path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for link in [*page.links, *page.loads]:
        target, _, anchor = link.partition("#")
        if "//" in link or link.startswith(("mailto:", "javascript:")):
            continue
        there = Path(os.path.normpath(path.parent / unquote(target))) if target else path
        if not there.exists() or (anchor and there in pages and unquote(anchor) not in pages[there].ids):
            yield link


# --- what is made from the code, or says something about it ---


def test_the_command_reference_is_not_stale() -> None:
    import cli_reference

    assert cli_reference.PAGE.read_text() == cli_reference.page(), "run `python scripts/cli_reference.py`"


@pytest.mark.parametrize("page", ["README.md", "docs/first-five-minutes.md"])
def test_the_difference_from_ddp_is_that_of_the_examples(page: str) -> None:
    [shown] = re.findall(r"```diff\n(.*?)\n```", (ROOT / page).read_text(), re.DOTALL)
    for sign, name in (("-", "digits_ddp.py"), ("+", "digits.py")):
        program = (ROOT / "examples" / name).read_text()
        lines = [re.sub(r"  +#.*", "", line[1:]) for line in shown.splitlines() if line[0] in (sign, " ")]
        assert not [line for line in lines if line not in program], name


def test_every_example_is_on_its_page() -> None:
    linked = {target.removeprefix("../examples/") for target in LINK.findall((DOCS / "examples.md").read_text())}
    for entry in (ROOT / "examples").iterdir():
        assert entry.name in linked or entry.name.startswith((".", "_")), f"docs/examples.md does not name {entry.name}"


def test_every_test_that_a_page_names_is_there() -> None:
    named = {found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())}
    assert len(named) > 40, "the promises name their tests"
    missing = [f"{file}::{test}" for file, test in sorted(named) if not _is_test(ROOT / file, test)]
    assert not missing


def _is_test(file: Path, name: str) -> bool:
    if not file.exists():
        return False
    functions = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    return not name or name in functions


def test_the_tutorial_marks_what_has_changed() -> None:
    shown = re.findall(r'```python(?: hl_lines="([\d -]+)")?\n--8<-- "(\S+)"', (DOCS / "policies.md").read_text())
    assert len(shown) == 5
    before: list[str] | None = None
    for marked, name in shown:
        lines = (ROOT / name).read_text().splitlines()
        assert len(lines) < 120
        if before is not None:
            assert marked == _changed(before, lines), f"hl_lines of {name}"
        before = lines


def _changed(old: list[str], new: list[str]) -> str:
    runs = difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes()
    spans = [(begin + 1, end) for kind, _, _, begin, end in runs if kind in ("replace", "insert")]
    return " ".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in spans)


def test_names_of_the_code_are_there() -> None:
    """`pliant.x`, `job.x` and `engine.x` in the pages for those who come from elsewhere."""
    from pliant.comm.engine import Engine

    text = "".join(
        (DOCS / name).read_text()
        for name in ("coming-from.md", "choices.md", "elasticity.md", "exit-codes.md", "training.md")
    )
    text = re.sub(r"^-.*", "", text, flags=re.MULTILINE)  # in a diff, what is gone
    for name in set(re.findall(r"\bjob\.([a-z_]+)\b(?!\.yml)", text)) - {"yml"}:
        assert hasattr(pliant.Job, name), f"job.{name}"
    for name in set(re.findall(r"\bengine\.([a-z_]+)\(", text)):
        assert hasattr(Engine, name), f"engine.{name}"
    for name in set(re.findall(r"`pliant\.([\w.]+)", text)) - {*pliant.__all__, "safetensors"}:
        assert _is_there(ROOT / "pliant", name.split(".")), f"pliant.{name}"


def _is_there(place: Path, words: list[str]) -> bool:
    """Whether a module, or a name in one, is there; without an import, which may take seconds."""
    below = place / words[0]
    if below.is_dir() or below.with_suffix(".py").exists():
        return len(words) == 1 or _is_there(below, words[1:])
    module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names: list[str] = []
    for each in ast.parse(module.read_text()).body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            names.append(each.name)
        elif isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__":
            names += ast.literal_eval(each.value)
    return len(words) == 1 and words[0] in names


def test_kinds_of_a_federation_are_named_as_they_are() -> None:
    from pliant.fed.aggregation import AGGREGATORS
    from pliant.fed.selection.selectors import NAMES

    text = (DOCS / "coming-from.md").read_text()
    for kind, known in (("aggregator", AGGREGATORS), ("selector", NAMES)):
        [listed] = re.findall(rf"`{kind}:` ([^|;]+)", text)
        assert set(re.findall(r"[a-z][a-z-]+", listed)) <= set(known), kind


def test_lines_of_ports_are_as_listed() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|", (DOCS / "coming-from.md").read_text(), re.M
    )
    ports = ROOT / "tests" / "ports"
    assert {name for name, *_ in rows} == {path.stem.removesuffix("_ddp") for path in ports.glob("*_ddp.py")}
    for name, *counts in rows:
        old, new = _code_lines(ports / f"{name}_ddp.py"), _code_lines(ports / f"{name}.py")
        marks = [line[0] for line in difflib.ndiff(old, new)]
        assert [len(old), marks.count("-"), marks.count("+")] == list(map(int, counts)), name


def _code_lines(path: Path) -> list[str]:
    """Return the lines of a program without its docstring, indentation, blank lines and comments."""
    body = path.read_text().split('"""', 2)[2]
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_exit_codes_are_as_listed() -> None:
    text = (DOCS / "exit-codes.md").read_text()
    assert f"| {TIMEOUT_EXIT} |" in text
    assert all(f"| {code} |" in text for code in range(REFUSED_EXIT, ENDED_EXIT + 1))
    assert command("resize", "2", "--nope").exit_code == 2  # click's; ours are in tests/launch and tests/cli
    for words, code in ((("resize", "four"), 2), (("list", "--state", "/nowhere"), 1)):
        program = [sys.executable, "-c", "from pliant.cli.main import main; main()", *words]
        done = subprocess.run(
            program, capture_output=True, text=True, timeout=60, env={**os.environ, "PLIANT_SERVER": ""}
        )
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert done.stderr.startswith("pliant: ")


def test_every_strategy_is_explained() -> None:
    listed = re.findall(r"^\| `(\w+)` \| ", (DOCS / "choices.md").read_text(), re.MULTILINE)
    assert set(STRATEGIES) <= set(listed)
