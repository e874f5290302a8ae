"""From flags to a launch plan: which host this is, who runs where, and what each worker is told.

Pure functions of the options and of what the machine has (`Machine`); no socket is opened and no
process started here. `runner` carries the plan out.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pliant.cluster import Host, View, Worker, place
from pliant.errors import CapacityError, ConfigError
from pliant.identity import WorkerSpec, format_schedule
from pliant.launch.addresses import LOOPBACK, choose_self, interfaces, is_local, nic_addresses, resolve, resolve_hosts
from pliant.launch.devices import device_environ, device_files, device_of_slot, visible_devices
from pliant.launch.guardian import MARK
from pliant.launch.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan must know about this machine; tests make one from plain values."""

    num_cpus: int = 1
    nics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    device_files: tuple[str, ...] = ()
    has_avx2: bool = True
    resolve: Callable[[str], str] = resolve
    is_local: Callable[[str], bool] = is_local

    @classmethod
    def this(cls) -> Machine:
        """The machine that this process runs on."""
        return cls(
            num_cpus=len(os.sched_getaffinity(0)),
            nics=interfaces(),
            environ=dict(os.environ),
            device_files=device_files(),
            has_avx2=_has_avx2(),
        )


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """What this runner will do, before any port is bound."""

    options: RunOptions
    command: tuple[str, ...]
    """What every worker executes."""
    self_host: str
    """The address of this host, as it stands in `hosts`."""
    hosts: tuple[Host, ...]
    """All hosts, names resolved; the first one's runner is the head of the job."""
    num_local: int
    """Workers that this runner starts at first."""
    devices: tuple[str, ...]
    """CUDA devices for the workers of this host."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Variables for all workers, where the user has not set them."""
    warnings: tuple[str, ...] = ()

    @property
    def runners(self) -> tuple[Worker, ...]:
        return tuple(Worker(host.address, self.options.port) for host in self.hosts)

    @property
    def head(self) -> Worker:
        """The runner that the others report to."""
        return self.runners[0]

    @property
    def is_head(self) -> bool:
        return self.head.host == self.self_host

    @property
    def agreement(self) -> dict[str, object]:
        """What the runners of a job must have been started with alike."""
        return {
            "-np": self.options.np,
            "-H": [f"{host.address}:{host.slots}" for host in self.hosts],
            "-strategy": self.options.strategy,
            "-w": self.options.watch,
            "--determinism": self.options.determinism,
            "--copies": self.options.copies,
            "--resize-schedule": format_schedule(self.options.resize_schedule),
        }


def find_command(program: Sequence[str], search_path: str | None = None) -> tuple[str, ...]:
    """The command of every worker: a `.py` file gets this Python, anything else must be executable.

    Raises:
        ConfigError: there is no such program, or it cannot be executed.
    """
    first, *arguments = program
    if first.endswith(".py") and os.path.isfile(first):
        return (sys.executable, first, *arguments)
    if shutil.which(first, path=search_path):
        return (first, *arguments)
    if os.path.isdir(first):
        raise ConfigError(f"program {first!r} is a directory: give a script or an executable")
    if os.path.exists(first):
        raise ConfigError(f"program {first!r} is not executable: `chmod +x {first}`, or name its interpreter before it")
    where = f"in {Path.cwd()}" if "/" in first or first.endswith(".py") else "on PATH"
    raise ConfigError(f"program {first!r} does not exist {where}: check the name, and that flags stand before it")


def make_plan(options: RunOptions, machine: Machine) -> LaunchPlan:
    """What this runner has to do.

    Raises:
        ConfigError, CapacityError: with what was asked, what there is, and which flag helps.
    """
    command = find_command(options.program, machine.environ.get("PATH"))
    asked = machine.resolve(options.self_host) if options.self_host else ""
    hosts = resolve_hosts(options.hosts or _default_hosts(options, machine, asked), machine.resolve)
    self_host = choose_self(hosts, asked=asked, nic=options.nic, nics=machine.nics, local=machine.is_local)
    workers = place(hosts, options.np, options.port_range)  # for its checks: the ports are not known yet
    num_local = sum(1 for worker in workers if worker.host == self_host)
    devices = visible_devices(machine.environ, machine.device_files)
    warnings = []
    if devices and num_local > len(devices):
        warnings.append(f"{num_local} workers share {len(devices)} CUDA devices of {self_host}")
    return LaunchPlan(
        options=options,
        command=command,
        self_host=self_host,
        hosts=hosts,
        num_local=num_local,
        devices=devices,
        pins=_pins(machine) if options.determinism == "D2" else {},
        warnings=tuple(warnings),
    )


def _pins(machine: Machine) -> dict[str, str]:
    """What makes torch's libraries choose the same kernels on every machine; they read it when they are loaded."""
    return {
        "ATEN_CPU_CAPABILITY": "avx2" if machine.has_avx2 else "default",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def _default_hosts(options: RunOptions, machine: Machine, asked: str) -> tuple[Host, ...]:
    """Without -H: this machine alone, with room for all workers (they share cores if they must)."""
    address = asked or (nic_addresses(options.nic, machine.nics)[0] if options.nic else LOOPBACK)
    # How many a watched job will be asked to have is not known; only its ports are.
    most = len(options.port_range) if options.watch else machine.num_cpus
    return (Host(address, max(most, options.np)),)


def first_view(plan: LaunchPlan, ports: Mapping[str, Sequence[int]]) -> View:
    """The view that the job starts with, once the ports of every host are known.

    Raises:
        CapacityError: a host reported fewer ports than it has workers.
    """
    workers = place(plan.hosts, plan.options.np, ports)
    if len(workers) < plan.options.np:
        raise CapacityError(f"the hosts bound {len(workers)} ports for {plan.options.np} workers: widen -port-range")
    return View(max(0, plan.options.init_version), workers, plan.runners)


def common_environ(plan: LaunchPlan, environ: Mapping[str, str], mark: str) -> dict[str, str]:
    """What the environments of all workers of this host have in common: the runner's own, and which job it is."""
    return {
        "PYTHONUNBUFFERED": "1",
        **plan.pins,
        **environ,
        "PLIANT_JOB_START": repr(plan.options.start_time_s),
        MARK: mark,
    }


def make_spec(
    plan: LaunchPlan,
    worker: Worker,
    view: View,
    *,
    secret: bytes,
    config_server: str = "",
    listen_fd: int | None = None,
) -> WorkerSpec:
    """What `worker` must know of its job."""
    options = plan.options
    return WorkerSpec(
        worker=worker,
        view=view,
        secret=secret,
        strategy=options.strategy,
        config_server=config_server,
        listen_fd=listen_fd,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        elastic=options.watch,
        copies=options.copies,
        determinism=options.determinism,
        checkpoint_dir=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
        resize_schedule=options.resize_schedule,
        adapting=options.adapting,
    )


def worker_environ(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    spec: WorkerSpec,
    *,
    slot: int,
    mark: str,
) -> dict[str, str]:
    """The whole environment of one worker: the common one, and who it is."""
    return {
        **common_environ(plan, environ, mark),
        **spec.to_environ(),
        **_devices_for(plan, slot),
        "PLIANT_LOCAL_RANK": str(slot),
    }


def _devices_for(plan: LaunchPlan, slot: int) -> dict[str, str]:
    options = plan.options
    given = device_of_slot(options.slot_devices, slot) if options.slot_devices else None
    devices = plan.devices if given is None else (given,)
    return device_environ(slot, devices, allow_nvlink=options.allow_nvlink)


def log_name(worker: Worker, version: int | None, stream: str) -> str:
    """The file of `-logdir` for a worker's stream; `version` is given in watch mode."""
    label = worker.label if version is None else f"{worker.label}@{version}"
    return f"{label}.{stream}.log"


def describe(plan: LaunchPlan, machine: Machine) -> list[str]:
    """What the runner says at its start, unless -q: arguments, interfaces, the environment that matters."""
    told = [f"command: {' '.join(plan.command)}"]
    told.append(f"np {plan.options.np} on {','.join(f'{host.address}:{host.slots}' for host in plan.hosts)}")
    told.append(f"this host: {plan.self_host}, {plan.num_local} workers, strategy {plan.options.strategy}")
    told.extend(f"nic {name}: {' '.join(found)}" for name, found in machine.nics.items() if found)
    told.append(f"CUDA devices: {','.join(plan.devices) or 'none'}")
    shown = ("CUDA_", "NCCL_", "PLIANT_", "OMP_")
    told.extend(
        f"{name}={value}"
        for name, value in sorted(machine.environ.items())
        if name.startswith(shown) and not any(word in name for word in ("SECRET", "TOKEN", "KEY"))
    )
    return told
