"""The `pliant doctor` command: what this machine can do, and what in a model stands in the way of exactness."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pliant.errors import ConfigError
from pliant.lab import machine

if TYPE_CHECKING:
    from torch import nn

    from pliant.train.slicing import Obstacle

WIDTH = 160
"""Of a table that no terminal shows."""

OPTIONAL = {
    "torchvision": "ResNet and its data sets in the benches",
    "sklearn": "the digits of `pliant demo`",
    "matplotlib": "figures",
    "mpi4py": "Open MPI as a peer in `pliant bench allreduce`",
    "ray": "jobs on a Ray cluster (`pliant run --on ray`)",
    "flwr": "Flower as a peer",
    "safetensors": "reading checkpoints in other programs",
}
PIP_NAMES = {"sklearn": "scikit-learn"}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("doctor")(doctor)


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:FUNCTION]", help="A function that returns the model to look at.")
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", help="Check the order of the sum for so many.")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Everything, as one object.")] = None,
) -> None:
    """Say what this machine can do, or which modules of a model stand in the way of bitwise equal training.

    Exit code 1: something necessary is missing, or the model cannot be time-sliced.
    """
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: at least 1")
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if target is None:
        healthy, report = _examine_machine(replicas, console)
    else:
        healthy, report = _examine_model(target, replicas, console)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {json_file} cannot be written: {error.strerror}") from None
    raise typer.Exit(0 if healthy else 1)


@dataclass(frozen=True, slots=True)
class Symptom:
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    necessary: bool = True


def _examine_machine(replicas: int, console: Console) -> tuple[bool, dict[str, object]]:
    symptoms = []
    for symptom in (*_software(), *_kernel(), *_exactness(replicas), *_extras()):
        symptoms.append(symptom)
        answer = "yes" if symptom.ok else "NO" if symptom.necessary else "no"
        remedy = f" -> {symptom.remedy}" if symptom.remedy and not symptom.ok else ""
        console.print(f"{symptom.what}: {answer}  ({symptom.found}){remedy}", markup=False, soft_wrap=True)
    healthy = all(symptom.ok or not symptom.necessary for symptom in symptoms)
    return healthy, {"ok": healthy, "machine": [asdict(symptom) for symptom in symptoms]}


def _software() -> Iterator[Symptom]:
    import torch

    yield Symptom("python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")
    yield Symptom("torch", True, str(torch.__version__))
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Symptom(
        "CUDA",
        bool(devices),
        ", ".join(devices) or ("no GPU" if torch.version.cuda else "torch was built without it"),
        "training runs on the CPU; install a CUDA build of torch for GPUs",
        necessary=False,
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Symptom("cores", True, f"{len(os.sched_getaffinity(0))}, memory {memory / 2**30:.1f} GiB")


def _kernel() -> Iterator[Symptom]:
    yield _tried("memfd", _try_memfd, "shared memory between workers", "Linux 3.17 or newer is needed")
    yield _tried("abstract sockets", _try_abstract_socket, "workers of one host meet there", "Linux is needed")
    problems = machine.check()
    yield Symptom("lab", not problems, "; ".join(problems) or "root, with network namespaces", necessary=False)


def _tried(what: str, attempt: Callable[[], None], use: str, remedy: str) -> Symptom:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        return Symptom(what, False, str(error), remedy)
    return Symptom(what, True, use)


def _try_memfd() -> None:
    os.close(os.memfd_create("pliant-doctor", os.MFD_CLOEXEC))


def _try_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract address


def _exactness(replicas: int) -> Iterator[Symptom]:
    from pliant.train import determinism

    folded = determinism.self_check(replicas, thorough=True)
    yield Symptom("D0", True, "the same machines give the same bits")
    yield Symptom("D1", folded.ok, folded.detail, "use a torch whose all-reduce is gloo's ring")
    mine = determinism.fingerprint()
    machine = f"{mine.cpu_model}, {mine.cpu_isa}; torch uses {mine.cpu_capability}, {mine.num_threads} threads"
    yield Symptom("D2", folded.ok, f"with pliant run --determinism D2 ({machine})", "needs D1")


def _extras() -> Iterator[Symptom]:
    mpirun = shutil.which("mpirun")
    yield Symptom("mpirun", mpirun is not None, mpirun or "not found", "apt-get install openmpi-bin", necessary=False)
    for module, use in OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        yield Symptom(module, there, use, f"pip install {PIP_NAMES.get(module, module)}", necessary=False)


def _examine_model(target: str, replicas: int, console: Console) -> tuple[bool, dict[str, object]]:
    from pliant.train import determinism, slicing

    model = _built(target)
    found = {
        "time-slicing": slicing.obstacles(model),
        "D1 on GPUs": slicing.nondeterministic(model),
        "D2 on GPUs of several kinds": slicing.hetero(model),
    }
    folded = determinism.self_check(replicas)
    if any(found.values()):
        console.print(_table(found))
    sliceable, repeatable, portable = (not each for each in found.values())
    exact = sliceable and folded.ok
    verdicts = {
        "time-slicing": sliceable,
        "D1": exact,
        "D1 on GPUs": exact and repeatable,
        "D2": exact,
        "D2 on GPUs of several kinds": exact and repeatable and portable,
    }
    for what, ok in verdicts.items():
        reason = "" if ok or not sliceable or folded.ok else f" ({folded.detail})"
        console.print(f"{what}: {'yes' if ok else 'no'}{reason}", markup=False, soft_wrap=True)
    return sliceable, {
        "ok": sliceable,
        "model": target,
        "verdicts": verdicts,
        "self_check": asdict(folded),
        "obstacles": {what: [asdict(each) for each in obstacles] for what, obstacles in found.items()},
    }


def _table(found: dict[str, list[Obstacle]]) -> Table:
    """One row for all modules with the same trouble: a ResNet has its convolutions fifty times."""
    table = Table("in the way of", "module", "type", "why", "remedy")
    for what, obstacles in found.items():
        rows: dict[tuple[str, str, str], list[str]] = {}
        for each in obstacles:
            rows.setdefault((each.type, each.why, each.remedy), []).append(each.module or "(the model)")
        for (kind, why, remedy), names in rows.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            table.add_row(what, names[0] + more, kind, why, remedy)
    return table


def _built(target: str) -> nn.Module:
    """The model that FILE.py:FUNCTION returns; raises ConfigError with one line about whatever goes wrong."""
    from torch import nn

    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ConfigError(f"{target!r} is not FILE.py:FUNCTION: name a file and a function that returns the model")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"there is no file {file}: name one with a function that returns the model")
    # A name of its own: the file may be called like a module of Python's.
    spec = importlib.util.spec_from_file_location(f"doctor_of_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` would
    with _user_code(f"{file} cannot be imported"):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{file} has no function {name}: it has {', '.join(_functions(module)) or 'none at all'}")
    with _user_code(f"{name}() of {file} failed"):
        model = function()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name}() of {file} returned a {type(model).__name__}: it must return a torch.nn.Module")
    return model


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Whatever the user's code raises becomes one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{what}: {type(error).__name__}: {first}") from None


def _functions(module: object) -> list[str]:
    own = getattr(module, "__name__", "")
    return [name for name, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == own]
