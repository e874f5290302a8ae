"""What runs of figures have left in a folder: NAME.json (the result), and NAME.run.json, which says how the run went.

A run that was interrupted has no such word, and counts as not run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from pliant.errors import ConfigError
from pliant.machine import Json
from pliant_repro.figures import figures
from pliant_repro.figures.facts import FACTS
from pliant_repro.figures.figures import Options

HOLDS, DOES_NOT_HOLD, UNJUDGED, FAILED, SKIPPED, NEVER = (
    "holds",
    "does not hold",
    "not judged",
    "failed",
    "skipped",
    "never",
)
PARTS = "parts"
"""A folder where long figures leave what is done of them; figures share it."""
FINISHED = (HOLDS, DOES_NOT_HOLD, UNJUDGED)
OUTCOMES = (*FINISHED, FAILED, SKIPPED, NEVER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How the last run of a figure went."""

    outcome: str
    why: str = ""
    """Of a failure, or why it was not run at all."""
    took_s: float = 0.0
    whole: bool = True
    """Whether it found nothing done already by an interrupted run, or by another figure; else its time says little."""
    ended_s: float = field(default_factory=time.time)
    command: str = ""
    options: Json = field(default_factory=dict)
    version: str = ""
    sources: str = ""
    """A digest of the package's sources: the version says less while they are worked on."""

    @classmethod
    def of(
        cls,
        options: Options,
        outcome: str,
        *,
        why: str = "",
        took_s: float = 0.0,
        command: str = "",
        whole: bool = True,
    ) -> Run:
        """A run that ends now."""
        return cls(
            outcome=outcome, why=why, took_s=took_s, command=command, options=options.to_json(), version=version(), whole=whole,
            sources=sources(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a figure from a folder."""

    name: str
    outcome: str
    why: str = ""
    run: Run | None = None
    result: Json | None = None
    path: Path | None = None
    """Where the result lies; None: there is none."""

    @property
    def usual(self) -> tuple[float, str]:
        """Seconds in default size, and where that is from: here, or kept (2 cores)."""
        if (
            self.run is not None
            and self.outcome in FINISHED
            and self.run.took_s
            and self.run.whole
            and is_usual(self.run.options)
        ):
            return self.run.took_s, "here"
        return FACTS[self.name].usual_s, "kept"


def is_usual(args: Json) -> bool:
    """Whether these are the options of the default size."""
    device = args.get("device")
    return device in ("cpu", "cuda") and args == Options(device=str(device)).to_json()


def version() -> str:
    try:
        return importlib.metadata.version("pliant")
    except importlib.metadata.PackageNotFoundError:
        return ""


def sources() -> str:
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def result_path(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def run_path(out: Path, name: str) -> Path:
    return out / f"{name}.run.json"


def has_parts(out: Path, name: str) -> bool:
    """Whether a run of this figure would find parts that are done."""
    return FACTS[name].parts and any((out / PARTS).glob("*.json"))


def forget_parts(out: Path) -> None:
    for path in (out / PARTS).glob("*.json"):
        path.unlink(missing_ok=True)


def begin(out: Path, name: str) -> None:
    """Take back what an earlier run has said, so that an interrupted one cannot be taken for finished."""
    run_path(out, name).unlink(missing_ok=True)


def write(out: Path, name: str, run: Run) -> None:
    """Whole or not at all."""
    path = run_path(out, name)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(run), indent=1) + "\n")
    draft.replace(path)


def read(out: Path, name: str) -> Run | None:
    """How the last run went; None: there was none, or what it wrote is damaged."""
    try:
        said = json.loads(run_path(out, name).read_text())
        run = Run(**{each.name: said[each.name] for each in fields(Run)})
        well_formed = run.outcome in OUTCOMES and isinstance(run.options, dict)
        return (
            run if well_formed and all(isinstance(each, (int, float)) for each in (run.took_s, run.ended_s)) else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def outcome_of(result: Json) -> str:
    """Of a whole result: a run that is too short for the figure's claim says so with `judged`."""
    if not result["ok"]:
        return DOES_NOT_HOLD
    return UNJUDGED if result.get("judged") is False else HOLDS


def standing(out: Path, name: str) -> Standing:
    """The last run and its result; a result that cannot be read is a failure that says so."""
    run, path = read(out, name), result_path(out, name)
    if run is not None and run.outcome not in FINISHED:
        return Standing(name, run.outcome, run.why, run)
    if not path.exists():
        return Standing(name, NEVER)
    try:
        result = figures.load(path, name)
        if not isinstance(result.get("ok"), bool) or not isinstance(result.get("remarks"), list):
            raise ConfigError(f"{path} is no whole result: run `pliant reproduce {name}` again")
    except ConfigError as error:
        return Standing(name, FAILED, str(error), run, None, path)
    return Standing(name, outcome_of(result), "", run, result, path)


def is_done(out: Path, name: str, options: Options) -> bool:
    """Whether there is a finished result of these options and this version."""
    found = standing(out, name)
    return (
        found.outcome in FINISHED
        and found.run is not None
        and found.run.options == options.to_json()
        and found.run.version == version()
    )
