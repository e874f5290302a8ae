"""Measures the product's source tree: sizes by package, the deepest import chain, class names that occur twice.

Run it as `python scripts/house.py [ROOT]`. `tests/test_layers.py` imports the functions and asserts on what they return.
Imports inside functions count like those at the top of a file; imports under `if TYPE_CHECKING` do not count.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path


def modules(package: Path) -> dict[str, Path]:
    """Return every module of `package` by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        words = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


def imports_of(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the names of the modules in `known` that the file imports."""
    found = set()
    for node in _runtime_nodes(_parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
    return found & set(known)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below `node`, without the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _runtime_nodes(child)


def deepest_chain(package: Path) -> list[str]:
    """Return the longest chain of imports: each module imports the one after it.

    Raises:
        ValueError: modules import each other in a circle.
    """
    known = modules(package)
    # The front door loads its names lazily and stands above everything.
    graph = {
        name: imports_of(path, known) - {name, package.name} for name, path in known.items() if name != package.name
    }

    chains: dict[str, list[str]] = {}

    def below(name: str, above: tuple[str, ...] = ()) -> list[str]:
        if name in above:
            raise ValueError(f"an import cycle: {' > '.join((*above, name))}")
        if name not in chains:
            deeper = [below(each, (*above, name)) for each in sorted(graph[name])]
            chains[name] = [name, *max(deeper, key=len, default=[])]
        return chains[name]

    return max((below(name) for name in graph), key=len)


def repeated_classes(package: Path) -> dict[str, list[str]]:
    """Return the names that more than one module gives to a class, with those modules."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name, path in modules(package).items():
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(name)
    return {name: found for name, found in sorted(owners.items()) if len(set(found)) > 1}


def sizes(package: Path) -> dict[str, tuple[int, int]]:
    """Return the number of files and lines of each direct part of `package`; `.` stands for the files in it."""
    counted: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        part = parts[0] if len(parts) > 1 else "."
        files, lines = counted[part]
        counted[part] = files + 1, lines + len(path.read_text().splitlines())
    return dict(sorted(counted.items()))


def main() -> None:
    """Print the sizes, the deepest chain and the repeated class names of the product and of the package beside it."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    for package in (root / "pliant", root / "repro" / "pliant_repro"):
        counted = sizes(package)
        for part, (files, lines) in counted.items():
            print(f"{part:14} {files:4} files {lines:6} lines")
        print(
            f"{package.name:14} {sum(f for f, _ in counted.values()):4} files {sum(n for _, n in counted.values()):6} lines"
        )
        try:
            chain = deepest_chain(package)
            print(f"deepest import chain, {len(chain)} modules: {' > '.join(chain)}")
        except ValueError as error:
            print(error)
        for name, owners in repeated_classes(package).items():
            print(f"class {name}: {', '.join(owners)}")
        print()


if __name__ == "__main__":
    main()
