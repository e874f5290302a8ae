"""The `pliant remote-install` command: pliant on every host of a list, over ssh, all at once.

What is installed is a wheel built from this checkout, or whatever `--spec` names. One ssh per host: it makes the virtual
environment where there is none, takes the wheel from its standard input, installs it, and says the version.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pliant.cli.output import option, parse_int, show_progress, show_waiting
from pliant.cli.run import read_hosts
from pliant.cluster import Host
from pliant.errors import ConfigError, LaunchError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "pliant")
VENV = "~/.pliant-venv"
MAX_AT_ONCE = 32


def remote_install(
    hostfile: Annotated[str, option("-hostfile --hostfile", "FILE", "One host per line.")] = "",
    hosts: Annotated[str, option("-H --hosts", "HOST,...", "The hosts as a list.")] = "",
    user: Annotated[str, option("-u --user", "USER", "User on the hosts.")] = "",
    venv: Annotated[str, option("--venv", "PATH", "Virtual environment there, made if it is missing.")] = VENV,
    python: Annotated[str, option("--python", "NAME", "Python that makes it.")] = "python3",
    spec: Annotated[
        str, option("--spec", "SPEC", "What pip installs, such as the URL of a wheel; default: this checkout.")
    ] = "",
    pip_args: Annotated[
        str, option("--pip-args", "ARGS", "Further arguments of pip install, such as '--index-url URL'.")
    ] = "",
    timeout: Annotated[str, option("--timeout", "SECONDS", "Time limit for each host.")] = "1800",
    dry_run: Annotated[bool, option("--dry-run", "", "Print the commands, and do nothing.")] = False,
) -> None:
    """Install pliant on every host over ssh; then `pliant run --ssh --remote-python PATH/bin/python` uses it."""
    from pliant.launch.ssh import ssh_command

    listed = read_hosts(hosts, hostfile)
    if not listed:
        raise ConfigError("remote-install needs to know the hosts: give -hostfile FILE or -H HOST,...")
    limit_s = parse_int(timeout, "--timeout")
    with tempfile.TemporaryDirectory(prefix="pliant-wheel-") as folder:
        with show_waiting("building the wheel"):
            wheel = None if spec else (Path(folder) / _wheel_name() if dry_run else build_wheel(Path(folder)))
        script = install_script(
            venv, python, spec or (wheel.name if wheel else ""), is_file=not spec, pip_args=pip_args
        )
        commands = {host: ssh_command(host, user, script, os.environ) for host in listed}
        if dry_run:
            for command in commands.values():
                print(shlex.join(command) + (f" < {wheel.name}" if wheel else ""))
            return
        with ThreadPoolExecutor(MAX_AT_ONCE, "install") as pool, show_progress() as progress:
            content = wheel.read_bytes() if wheel else b""
            futures = [pool.submit(_install, host, command, content, limit_s) for host, command in commands.items()]
            done = itertools.count(1)
            for future in futures:
                future.add_done_callback(lambda _: _show_done(progress, next(done), len(futures)))
            # One line per host, in the order of the list.
            results = [_print_result(future.result(), venv) for future in futures]
    if not all(results):
        raise typer.Exit(1)


def install_script(venv: str, python: str, what: str, *, is_file: bool, pip_args: str) -> str:
    """Return the command line for the remote shell."""
    from pliant.launch.ssh import shell_path

    place = shell_path(venv)
    try:
        more = "".join(f" {shlex.quote(word)}" for word in shlex.split(pip_args))
    except ValueError as error:
        raise ConfigError(f"--pip-args {pip_args!r}: {error}; quote it as for a shell") from None
    steps = [f"[ -x {place}/bin/python ] || {shlex.quote(python)} -m venv {place}"]
    target = shlex.quote(what)
    if is_file:
        target = f"{place}/{target}"
        steps.append(f"cat > {target}")
    pip = f"{place}/bin/python -m pip install -q --disable-pip-version-check{more}"
    if is_file:
        # The same version may be there with other code in it, which pip alone would leave.
        there = f"ls -d {place}/lib/python*/site-packages/pliant-*.dist-info >/dev/null 2>&1"
        steps.append(f"if {there}; then {pip} --force-reinstall --no-deps {target} >&2; fi")
    steps.append(f"{pip} {target} >&2")
    if is_file:
        steps.append(f"rm -f {target}")
    steps.append(f"{place}/bin/python -c 'from importlib.metadata import version; print(version(\"pliant\"))'")
    return "set -e; " + "; ".join(steps)


def _wheel_name() -> str:
    from importlib.metadata import version

    return f"pliant-{version('pliant')}-py3-none-any.whl"


def build_wheel(folder: Path) -> Path:
    """Build a wheel of this checkout. A copy is built, because leftovers of an earlier build must not come along."""
    if not (ROOT / "pyproject.toml").is_file():
        raise ConfigError(f"{ROOT} is no checkout of pliant to build from: name what to install with --spec")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    if _has_setuptools():
        command.append("--no-build-isolation")
    built = subprocess.run([*command, "-w", str(folder), str(source)], capture_output=True, text=True)
    found = list(folder.glob("pliant-*.whl"))
    if built.returncode != 0 or not found:
        last = next(iter(reversed(built.stderr.strip().splitlines())), "no reason given")
        raise LaunchError(f"the wheel could not be built: {last}; --spec names another thing to install")
    return found[0]


def _has_setuptools() -> bool:
    """Return whether the installed setuptools can build the wheel; otherwise pip fetches one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except (PackageNotFoundError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class _Result:
    host: str
    version: str
    """Empty where it failed."""
    why: str
    took_s: float


def _install(host: Host, command: list[str], content: bytes, limit_s: float) -> _Result:
    begun_s = time.monotonic()
    why = version = ""
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=limit_s, start_new_session=True)
        last = next(iter(reversed(done.stderr.decode(errors="replace").strip().splitlines())), "no reason given")
        if done.returncode == 0:
            version = done.stdout.decode(errors="replace").strip()
        else:
            why = f"cannot be reached over ssh ({last})" if done.returncode == 255 else f"failed: {last}"
    except subprocess.TimeoutExpired:
        why = f"not done within {limit_s:g} s"
    except OSError as error:
        why = f"{command[0]}: {error.strerror}"
    return _Result(host.public, version, why, time.monotonic() - begun_s)


def _show_done(progress: Callable[[str, float], None], done: int, total: int) -> None:
    progress(f"{done} of {total} hosts are done", done / total)


def _print_result(result: _Result, venv: str) -> bool:
    if result.version:
        print(f"{result.host}: pliant {result.version} in {venv}, took {result.took_s:.1f}s", flush=True)
    else:
        print(f"{result.host}: {result.why}", flush=True)
    return bool(result.version)
