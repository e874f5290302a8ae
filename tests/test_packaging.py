"""What is released: the wheels of both packages, built without a network, their metadata, and the files of a repository."""

from __future__ import annotations

import ast
import configparser
import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECTS = {"pliant": ROOT, "pliant_repro": ROOT / "repro"}
BUILD = "from setuptools import build_meta; build_meta.build_wheel('.')"
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
PAPERS = {"KungFu": 2020, "Priority": 2019, "EasyScale": 2023, "Oort": 2021}


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())
    return found


def distribution(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower()


# --- the wheels ---


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("needs setuptools 77 or newer: pip install -c constraints.txt '.[test]'")
    built = {}
    for package, folder in PROJECTS.items():
        # A copy: a build leaves files beside the source, and takes in those that an earlier one has left.
        place = tmp_path_factory.mktemp(package)
        shutil.copytree(folder / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(folder / name, place / name)
        done = subprocess.run([sys.executable, "-c", BUILD], cwd=place, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        [wheel] = place.glob("*.whl")
        assert wheel.name.endswith("-py3-none-any.whl")
        built[package] = zipfile.ZipFile(wheel)
    return built


def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@pytest.mark.parametrize("package", PROJECTS)
def test_a_wheel_holds_the_package_and_nothing_else(wheels: dict[str, zipfile.ZipFile], package: str) -> None:
    folder, names = PROJECTS[package], set(wheels[package].namelist())
    files = {path for path in (folder / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {path.relative_to(folder).as_posix() for path in files}
    assert f"{package}/py.typed" in inside
    about = {name.partition(".dist-info/")[2] for name in names - inside}
    assert about == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    [license] = [name for name in names if name.endswith("licenses/LICENSE")]
    assert wheels[package].read(license) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PROJECTS)
def test_entry_points_are_functions_of_the_wheel(wheels: dict[str, zipfile.ZipFile], package: str) -> None:
    wheel = wheels[package]
    [name] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    targets = [target for section in points.sections() for target in points[section].values()]
    assert targets
    for target in targets:
        module, _, function = target.partition(":")
        tree = ast.parse(wheel.read(f"{module.replace('.', '/')}.py"))
        assert function in [each.name for each in tree.body if isinstance(each, ast.FunctionDef)], target


def test_the_metadata_says_what_an_index_shows(wheels: dict[str, zipfile.ZipFile]) -> None:
    ours, repro = metadata(wheels["pliant"]), metadata(wheels["pliant_repro"])
    for about in (ours, repro):
        assert (about["License-Expression"], about["Description-Content-Type"]) == ("Apache-2.0", "text/markdown")
        assert about.get_payload()
        assert about["Summary"].endswith(".")
        least = about["Requires-Python"].removeprefix(">=")
        minors = [each.rpartition(" ")[2] for each in about.get_all("Classifier", []) if re.search(r":: 3\.\d+$", each)]
        assert minors[0] == least, "the oldest Python is one that was tried"
        assert not {"Author", "Author-email", "Home-page"} & set(about.keys())
    assert ours["Version"] == repro["Version"]
    assert f"pliant=={ours['Version']}" in repro.get_all("Requires-Dist", [])


# --- what is declared ---


def test_what_the_docs_install_is_an_extra() -> None:
    extras = project(ROOT)["project"]["optional-dependencies"]
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "pliant").rglob("*.py"),
        *(ROOT / "repro").rglob("*.py"),
    ]
    pages += (ROOT / "examples").rglob("*.*")
    named = {
        name
        for page in pages
        if page.suffix in (".md", ".py", ".toml")
        for names in re.findall(r"(?:pliant|'\.)\[([a-z]+(?:,[a-z]+)*)\]", page.read_text())
        for name in names.split(",")
    }
    assert {"flower", "ray", "examples"} <= named
    assert named <= set(extras)


def test_the_extra_flower_installs_what_its_example_imports() -> None:
    folder = ROOT / "examples" / "flower"
    imported = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    needed = {DISTRIBUTIONS.get(name, name) for name in imported - sys.stdlib_module_names}
    ours = project(ROOT)["project"]
    installed = {distribution(each) for each in [*ours["dependencies"], *ours["optional-dependencies"]["flower"]]}
    assert "scikit-learn" in needed
    assert needed - {"pliant", "federated_digits"} <= installed
    assert project(folder)["project"]["dependencies"] == []


# --- the files of a repository ---


def test_the_citation_names_the_four_papers() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(found)
    assert found["license"] == project(ROOT)["project"]["license"]
    years = {paper["title"].partition(":")[0].partition("-")[0]: paper["year"] for paper in found["references"]}
    assert years == PAPERS
    for paper in found["references"]:
        assert {"type", "authors", "collection-title"} <= set(paper)


def test_forms_of_issues_ask_for_what_they_show() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for path in forms:
        form = yaml.safe_load(path.read_text())
        if path.stem == "config":
            assert form == {"blank_issues_enabled": True}
            continue
        assert {"name", "description", "body"} <= set(form)
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))
        assert all(field["attributes"]["label"] for field in form["body"])


def test_vulnerabilities_are_reported_where_nobody_else_reads_it() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "private vulnerability reporting" in text
    assert "docs/security.md" in text
    assert not re.search(r"\S@\S|https?://", text), "an address that may not exist"
