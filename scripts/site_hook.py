"""What mkdocs cannot do alone: pages from files outside of docs/, links to files of the repository, and a list of modules.

README.md is the site's first page. A file of the repository that some page links to becomes a page of the site, so that the
site is whole by itself and every link can be followed without a network. What a module owns is said by its own first line.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BORROWED = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "repro/results/README.md",
}
"""Pages that are written elsewhere in the repository."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".toml": "toml", "": "text"}


def on_files(files: Files, config: Any) -> Files:
    """Take in the borrowed pages, and whatever in the repository is linked to."""
    linked: set[str] = set()
    for page, source in BORROWED.items():
        files.append(File.generated(config, page, content=_relinked((ROOT / source).read_text(), source, linked)))
    files.append(File.generated(config, "modules.md", content=modules()))
    for file in list(files.documentation_pages()):
        if file.src_uri not in (*BORROWED, "modules.md"):
            _relinked(file.content_string, f"docs/{file.src_uri}", linked)
    for path in sorted(linked):
        files.append(File.generated(config, _page_of(path), content=_shown(path)))
    return files


def modules() -> str:
    """The page that says of every module what it owns, folder by folder."""
    lines = [
        "# Every module",
        "",
        "By its own first line. How they stand on each other: [the house](design.md#the-house).",
        "",
    ]
    for folder in sorted({path.parent for path in (ROOT / "pliant").rglob("*.py")}):
        lines += [f"## {folder.relative_to(ROOT)}", ""]
        for path in sorted(folder.glob("*.py"), key=lambda path: (path.stem != "__init__", path.stem)):
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            lines += [first, ""] if path.stem == "__init__" else [f"- `{path.name}`: {first}"]
        lines.append("")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of a page in docs/ that leave it."""
    name = page.file.src_uri
    if name in BORROWED or name == "modules.md" or name.startswith("source/"):
        return markdown
    return _relinked(markdown, f"docs/{name}", set())


def _relinked(markdown: str, source: str, linked: set[str]) -> str:
    """`markdown`, which lies at `source`, with links as the site has them; what else must be taken in goes to `linked`."""
    here = "index.md" if source in BORROWED.values() else posixpath.relpath(source, "docs")

    def relink(found: re.Match[str]) -> str:
        target, hash_, anchor = found[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        to = _home_of(path, linked)
        return f"{found[1]}{posixpath.relpath(to, posixpath.dirname(here) or '.')}{hash_}{anchor}{found[3]}"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(relink, part) for part in parts)


def _home_of(path: str, linked: set[str]) -> str:
    """Where on the site that file of the repository is found."""
    for page, source in BORROWED.items():
        if path == source:
            return page
    if path.startswith("docs/") or not (ROOT / path).exists():
        return posixpath.relpath(path, "docs")  # mkdocs complains about those that are not there
    linked.add(path)
    return _page_of(path)


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _shown(path: str) -> str:
    """A file, or the names in a folder, as a page."""
    file = ROOT / path
    title = f"---\nsearch:\n  exclude: true\nhide: [navigation]\n---\n\n# {path}\n\n"
    if file.is_dir():
        names = sorted(
            f"{each.name}/" if each.is_dir() else each.name for each in os.scandir(file) if each.name[0] not in "._"
        )
        return title + "\n".join(f"- `{name}`" for name in names)
    return f"{title}~~~~~{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n~~~~~\n"
