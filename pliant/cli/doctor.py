"""The `pliant doctor` command: examines this machine, or a model for what prevents exact training."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pliant.cli.output import JsonFile, check_writable, is_stdout, option, print_table, save_json, show_waiting
from pliant.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pliant.train.obstacles import Obstacle
    from pliant.train.trial import Price


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:FUNCTION]", help="A function that returns the model to look at.")
    ] = None,
    device: Annotated[
        str,
        option(
            "--device", "cpu|cuda", "Run steps of the model there: FUNCTION returns (model, batch) or (model, step)."
        ),
    ] = "",
    replicas: Annotated[int, option("--replicas", "", "Check the order of the sum for so many.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Check this machine, or find the modules of a model that prevent bitwise equal training.

    ok: it works; warn: some commands do not work; missing: nothing works. The remedy is after ->.
    With --device, steps of the model are run (forward and backward): operators without a deterministic kernel are listed with
    the modules that call them, and the time of a step with free and with strict kernels. A step(model) returns the loss.
    Exit code 1: something is missing, the model cannot be time-sliced, or an operator has no deterministic kernel.
    """
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas}: use 1 or more")
    if device and target is None:
        raise ConfigError(f"--device {device} runs a model: name it as FILE.py:FUNCTION")
    check_writable(json_file)
    if target is None:
        healthy, report = _examine_machine(replicas, quiet=is_stdout(json_file))
    else:
        healthy, report = _examine_model(target, replicas, device, quiet=is_stdout(json_file))
    save_json(report, json_file)
    if not healthy:
        raise typer.Exit(1)


def _examine_machine(replicas: int, *, quiet: bool) -> tuple[bool, dict[str, object]]:
    from pliant.cli.doctor_machine import Finding, examine

    found: list[Finding] = []
    with show_waiting("looking at this machine") as say:
        for finding in examine(replicas):
            say(f"looked at {finding.what}")
            found.append(finding)
    healthy = not any(each.state == "missing" for each in found)
    if not quiet:
        rows = [(each.state, each.what, each.found + (f"\n-> {each.remedy}" if each.remedy else "")) for each in found]
        print_table(("state", "what", "found"), rows)
    return healthy, {"ok": healthy, "machine": [asdict(each) for each in found]}


def _examine_model(target: str, replicas: int, device: str, *, quiet: bool) -> tuple[bool, dict[str, object]]:
    aside = contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext()
    with show_waiting(f"looking at {target}"), aside:  # a user's module may print
        from pliant.train import determinism, obstacles

        on = _device(device) if device else None
        model, given = _built(target)
        found = {
            "time-slicing": obstacles.obstacles(model),
            "D1 on GPUs": obstacles.nondeterministic(model),
            "D2 on GPUs of several kinds": obstacles.hetero(model),
        }
        folded = determinism.self_check(replicas)
        price = None
        if on is not None:
            run_on = "D1 on GPUs" if on.type == "cuda" else "strict kernels on the CPU"
            found[run_on], price = _run(model, given, on, target)
    sliceable, repeatable, portable = (not found[each] for each in list(found)[:3])
    exact = sliceable and folded.ok
    verdicts = {
        "time-slicing": sliceable,
        "D1": exact,
        "D1 on GPUs": exact and repeatable,
        "D2": exact,
        "D2 on GPUs of several kinds": exact and repeatable and portable,
    }
    if on is not None and on.type == "cpu":
        verdicts[run_on] = not found[run_on]
    healthy = sliceable and (on is None or not found[run_on])
    if not quiet:
        _print_model(found, verdicts, "" if folded.ok or not sliceable else f" ({folded.detail})")
        if price is not None:
            ratio = price.strict_ms / price.free_ms
            print(f"a step on {price.device} (forward and backward): ", end="")
            print(f"{price.free_ms:.1f} ms free, {price.strict_ms:.1f} ms strict ({ratio:.2f} times)")
    return healthy, {
        "ok": healthy,
        "model": target,
        "verdicts": verdicts,
        "self_check": asdict(folded),
        "obstacles": {what: [asdict(each) for each in obstacles] for what, obstacles in found.items()},
        **({"price": asdict(price)} if price is not None else {}),
    }


def _device(name: str) -> torch.device:
    """Return the device, prepared for steps in strict mode."""
    import torch

    from pliant.train import determinism

    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch {torch.__version__} finds no GPU here; `pliant doctor` says more")
    if device.type == "cuda":
        asked = os.environ.get(determinism.CUBLAS_CONFIG)
        os.environ[determinism.CUBLAS_CONFIG] = determinism.cublas_workspace(asked, cuda_in_use=False)
    return device


def _run(model: nn.Module, given: object, device: torch.device, target: str) -> tuple[list[Obstacle], Price]:
    """Run steps of the model; return the operators without deterministic kernels, and the price of determinism."""
    from pliant.train import trial
    from pliant.train.obstacles import Obstacle

    if given is None:
        raise ConfigError(
            f"--device {device} needs a batch: let the function of {target} return `model, batch`, or `model, step`, where "
            "step(model) returns the loss"
        )
    with _user_code(f"a step of {target} on {device} failed"):
        model.to(device)
        compute = trial.make_loss(given, device)
        operators = trial.find_operators(model, compute)
        price = trial.measure_price(model, compute, device, operators)
    found = [
        Obstacle(
            each.module if each.type else "(the program)",
            each.type,
            f"{each.operator} ({each.direction}) has no deterministic kernel on {device.type}",
            f'use another operator, determinism="D0", or allow=["{each.operator}"] (bits not promised)',
        )
        for each in operators
    ]
    return found, price


def _print_model(found: dict[str, list[Obstacle]], verdicts: dict[str, bool], reason: str) -> None:
    if any(found.values()):
        print_table(("in the way of", "module", "type", "why"), _rows(found))
    for what, ok in verdicts.items():
        print(f"{what}: {'yes' if ok else f'no{reason}'}")


def _rows(found: dict[str, list[Obstacle]]) -> list[tuple[str, ...]]:
    """Return one row for all modules that have the same obstacle."""
    rows: list[tuple[str, ...]] = []
    for what, obstacles in found.items():
        modules: dict[tuple[str, str, str], list[str]] = {}
        for each in obstacles:
            modules.setdefault((each.type, each.why, each.remedy), []).append(each.module or "(the model)")
        for (kind, why, remedy), names in modules.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            rows.append((what, names[0] + more, kind, f"{why}\n-> {remedy}"))
    return rows


def _built(target: str) -> tuple[nn.Module, object]:
    """Return what FILE.py:FUNCTION makes: the model, and what steps need if it returns that, too; else None. Any failure
    becomes a ConfigError of one line."""
    from torch import nn

    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ConfigError(f"{target!r} is not FILE.py:FUNCTION: name a file and a function that returns the model")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"there is no file {file}: name one with a function that returns the model")
    # Another name than the file's, which may be that of a standard module.
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
        made = function()
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name}() of {file} returned a {type(model).__name__}: it must return a torch.nn.Module")
    return model, given


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """Turn what the user's code raises into one line."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"{what}: {type(error).__name__}: {first}") from None


def _functions(module: object) -> list[str]:
    own = getattr(module, "__name__", "")
    return [name for name, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == own]
