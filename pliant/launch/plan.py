"""From the flags of `pliant run` to a launch plan: which host this is, what runs where, and what each worker is told.

`RunOptions` are the flags as checked values. The rest are pure functions of the options and of what the machine has
(`Machine`): no socket is opened and no process started here. `runner` carries the plan out. Torch is not imported: a runner
must start at once.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit

from pliant.adapt.monitors import parse_monitors
from pliant.adapt.policy import maths_decisions
from pliant.adapt.registry import check as check_policy
from pliant.child import JOB_MARK
from pliant.cluster import DEFAULT_RUNNER_PORT, Host, PortRange, View, Worker, check_port, place
from pliant.errors import CapacityError, ConfigError
from pliant.identity import WorkerSettings, WorkerSpec, format_schedule, format_verify
from pliant.json_text import parse_json
from pliant.launch.addresses import LOOPBACK, choose_self, interfaces, nic_addresses, resolve, resolve_hosts
from pliant.machine import is_local
from pliant.process_priority import warm_up_environ

LEVELS = ("D0", "D1", "D2")
"""Levels of determinism: equal bits for an equal number of workers, for any number, and on machines of other kinds."""


def check_order(name: str) -> str:
    """Return `name`, the order of a job; empty leaves it to the program. Raise ConfigError if there is no such order."""
    from pliant.comm.order import EXACT_ORDERS

    if name and name not in EXACT_ORDERS:
        raise ConfigError(f"--order {name!r} is not known: use one of {', '.join(EXACT_ORDERS)}")
    return name


def check_strategy(name: str) -> str:
    """Return `name` in capital letters; raise ConfigError with the known names if there is no such strategy."""
    from pliant.comm.topology import STRATEGIES

    if name.upper() not in STRATEGIES:
        raise ConfigError(f"-strategy {name!r} is not known: use one of {', '.join(STRATEGIES)}")
    return name.upper()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(WorkerSettings):
    """The flags of `pliant run` as values; a wrong one raises ConfigError when this is made.

    Docstrings say what the help of the flag (`cli.run.RunArguments`) does not.
    """

    program: tuple[str, ...]
    """The program and its arguments, as typed."""
    np: int = 1
    hosts: tuple[Host, ...] = ()
    """The machines, from -H or -hostfile; empty means this machine only, with enough slots."""
    self_host: str = ""
    nic: str = ""
    port_range: PortRange = field(default_factory=PortRange)
    timeout_s: float = 0.0
    grace_s: float = 10.0
    rendezvous_timeout_s: float = 300.0
    logdir: str = ""
    show_output: bool = True
    quiet: bool = False
    allow_nvlink: bool = False
    port: int = DEFAULT_RUNNER_PORT
    debug_port: int = 0
    """Where to serve the runner's state; 0 means not at all."""
    delay_s: float = 0.0
    """Wait this long before starting anything."""
    start_time_s: float = 0.0
    """When the job began, as Unix time, for the workers to know."""
    secret_file: str = ""
    watch: bool = False
    keep: bool = False
    """In watch mode, stay after the local workers have finished."""
    max_restarts: int = 100
    independent: bool = False
    """In watch mode, workers do not train together: each is replaced when it crashes, and the job is over when all ended."""
    plain: bool = False
    """The program is no training: it may end without `pliant.join`."""
    warm: bool | None = None
    """Whether workers are forked from a warm process; None: where some may be started later to train, or for a check."""
    config_server: str = ""
    builtin_config_port: int = 0
    """Where to run a config server inside this runner; 0 means a free port, where one is needed."""
    init_version: int = 0
    """The first view's number; below 0, start no workers and wait to be added."""
    state_file: str = ""
    """Where to write the config server's address and the workers' processes, for a scheduler to read; empty: nowhere."""
    slot_devices: str = ""
    """A file with the CUDA device of each slot, read whenever a worker starts; empty: slots take the devices in turn."""

    def __post_init__(self) -> None:
        if not self.program:
            raise ConfigError("no program to run: write it after the flags, as in `pliant run -np 4 train.py`")
        if self.program == ("-m",):
            raise ConfigError("-m needs a module, as in `pliant run -np 4 -m package.train`")
        if self.np < 1:
            raise ConfigError(f"-np {self.np}: use 1 or more workers")
        if self.heartbeat_timeout_s <= 0:
            raise ConfigError(f"--heartbeat-timeout {self.heartbeat_timeout_s:g}: use a time above 0, such as 10s")
        check_port(self.port, "-port")
        self._check_training()
        if self.resize_schedule:
            object.__setattr__(self, "watch", True)
        for port, flag in ((self.debug_port, "-debug-port"), (self.builtin_config_port, "-builtin-config-port")):
            if port:
                check_port(port, flag)
        if self.init_version < 0 and not (self.watch and self.config_server):
            raise ConfigError(
                f"-init-version {self.init_version} waits until a config server lists this host: add -w -config-server URL"
            )
        if self.keep and not self.watch:
            raise ConfigError("-k keeps a runner that watches its job (-w) alive after the job: add -w")
        if self.independent and not self.watch:
            raise ConfigError("--independent replaces workers one by one, as a watching runner does: add -w")
        if self.config_server and self.builtin_config_port and not self.follows_builtin:
            raise ConfigError(
                f"-config-server {self.config_server} and -builtin-config-port {self.builtin_config_port} are two "
                "config servers: give one of them, or the same port"
            )
        object.__setattr__(self, "strategy", check_strategy(self.strategy))

    def _check_training(self) -> None:
        for count, flag in ((self.checkpoint_every, "--checkpoint-every"), (self.max_restarts, "--max-restarts")):
            if count < 0:
                raise ConfigError(f"{flag} {count}: use 0 or more")
        if self.determinism and self.determinism not in LEVELS:
            raise ConfigError(f"--determinism {self.determinism!r} is not known: use one of {', '.join(LEVELS)}")
        check_order(self.order)
        parse_monitors(self.adapting.get("monitor", ""))
        for policy in self.adapting.get("policy", "").splitlines():
            check_policy(policy)
        replay = self.adapting.get("replay", "")
        if replay and not Path(replay).is_file():
            raise ConfigError(f"--replay {replay}: there is no such file; give a record that `--record` has written")
        if replay:
            maths_decisions(replay)
        if not self.checkpoint_dir:
            needs = "needs a directory for checkpoints: add --checkpoint-dir DIR"
            if self.resume:
                raise ConfigError(f"--resume {self.resume} {needs}")
            if self.checkpoint_every:
                raise ConfigError(f"--checkpoint-every {self.checkpoint_every} {needs}")

    @property
    def asks_for_help(self) -> bool:
        """Whether the program is only asked what its own arguments are."""
        return bool({"-h", "--help"}.intersection(self.program[1:]))

    @property
    def is_plain(self) -> bool:
        """Whether the program may end without `pliant.join`: it is no training, or is only asked for its help."""
        return self.plain or self.asks_for_help

    @property
    def forks_workers(self) -> bool:
        """Whether workers are forked from a warm process, where their program allows that."""
        if self.warm is not None:
            return self.warm
        return self.check is not None or (self.watch and not self.is_plain)

    @property
    def follows_builtin(self) -> bool:
        """Whether the head runner of this job also runs its config server."""
        if not self.config_server:
            return self.watch or self.builtin_config_port > 0
        # KungFu's commands give both flags, and mean one server.
        try:
            return self.builtin_config_port > 0 and urlsplit(self.config_server).port == self.builtin_config_port
        except ValueError:
            return False


# --- devices ---


def device_files() -> tuple[str, ...]:
    """Return the names in /dev; none where there is no such directory."""
    try:
        return tuple(os.listdir("/dev"))
    except OSError:
        return ()


def visible_devices(environ: Mapping[str, str], files: Iterable[str]) -> tuple[str, ...]:
    """Return the devices that workers may use, as CUDA_VISIBLE_DEVICES would name them.

    A list that the user has set is taken as it is (it may hold UUIDs); otherwise one device per
    /dev/nvidia<number>. Empty means that there is no device to hand out.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        listed = [word.strip() for word in wanted.split(",")]
        # CUDA itself stops at the first invalid entry, so that "0,-1,1" means "0".
        ends = next((i for i, word in enumerate(listed) if word in ("", "-1")), len(listed))
        return tuple(listed[:ends])
    num_devices = sum(1 for name in files if re.fullmatch(r"nvidia\d+", name))
    return tuple(map(str, range(num_devices)))


def device_of_slot(file: str, slot: int) -> str | None:
    """Return the device of `slot` in the JSON list in `file`, which a scheduler changes as it gives devices to jobs.

    "" hides all devices; None, and a list that is too short, leave the environment as it is.
    """
    try:
        with open(file) as text:
            listed = parse_json(text.read())
        return listed[slot] if isinstance(listed[slot], str) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def device_environ(slot: int, devices: Sequence[str], *, allow_nvlink: bool) -> dict[str, str]:
    """Return the variables that give `slot` its device; slots beyond the devices share them round-robin.

    With `allow_nvlink` CUDA_VISIBLE_DEVICES stays as it is, since NCCL reaches over NVLink only
    devices that the process can see; the worker then picks by PLIANT_CUDA_VISIBLE_DEVICES.
    """
    if not devices:
        return {}
    device = devices[slot % len(devices)]
    mine = {"PLIANT_CUDA_VISIBLE_DEVICES": device}
    return mine if allow_nvlink else {**mine, "CUDA_VISIBLE_DEVICES": device}


# --- the plan ---


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan depends on: processors, network interfaces, environment and devices of this machine."""

    num_cpus: int = 1
    nics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    device_files: tuple[str, ...] = ()
    has_avx2: bool = True
    resolve: Callable[[str], str] = resolve
    is_local: Callable[[str], bool] = is_local

    @classmethod
    def this(cls) -> Machine:
        """Return the machine that this process runs on."""
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
    """What this runner will do; made before any port is bound."""

    options: RunOptions
    command: tuple[str, ...]
    """The command that every worker executes."""
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
        """The flags that must be the same for all runners of a job, with their values."""
        return {
            "-np": self.options.np,
            "-H": [f"{host.address}:{host.slots}" for host in self.hosts],
            "-strategy": self.options.strategy,
            "-w": self.options.watch,
            "--determinism": self.options.determinism,
            "--order": self.options.order,
            "--allow": list(self.options.allow),
            "--verify": format_verify(self.options.verify),
            "--resize-schedule": format_schedule(self.options.resize_schedule),
        }

    def common_environ(self, environ: Mapping[str, str], mark: str) -> dict[str, str]:
        """Return what the environments of all workers of this host have in common: the runner's own, and the job's mark."""
        return {
            "PYTHONUNBUFFERED": "1",
            **self.pins,
            **environ,
            "PLIANT_JOB_START": repr(self.options.start_time_s),
            JOB_MARK: mark,
        }

    def make_spec(
        self,
        worker: Worker,
        view: View,
        secret: bytes,
        config_server: str = "",
        listen_fd: int | None = None,
        board_fd: int | None = None,
        *,
        board_slot: int = 0,
        shadow: bool = False,
    ) -> WorkerSpec:
        """Return what `worker` must know of its job."""
        return WorkerSpec(
            worker=worker,
            view=view,
            secret=secret,
            config_server=config_server,
            listen_fd=listen_fd,
            board_fd=board_fd,
            board_slot=board_slot,
            elastic=self.options.watch,
            shadow=shadow,
            **self.options.settings(),
        )

    def worker_environ(self, environ: Mapping[str, str], spec: WorkerSpec, *, slot: int, mark: str) -> dict[str, str]:
        """Return the whole environment of one worker: the common one, who it is, and its device."""
        slot_devices = self.options.slot_devices
        given = device_of_slot(slot_devices, slot) if slot_devices else None
        devices = self.devices if given is None else (given,)
        return {
            **self.common_environ(environ, mark),
            **spec.to_environ(),
            **device_environ(slot, devices, allow_nvlink=self.options.allow_nvlink),
            **(warm_up_environ() if spec.shadow else {}),
            "PLIANT_LOCAL_RANK": str(slot),
        }


def find_command(program: Sequence[str], search_path: str | None = None) -> tuple[str, ...]:
    """Return the command of every worker: `-m MODULE` and a `.py` file get this Python, else it must be executable.

    Raises:
        ConfigError: there is no such program, or it cannot be executed.
    """
    first, *arguments = program
    if first == "-m":
        _check_module(arguments[0])
        return (sys.executable, *program)
    if first.endswith(".py") and os.path.isfile(first):
        return (sys.executable, first, *arguments)
    if shutil.which(first, path=search_path):
        return (first, *arguments)
    if os.path.isdir(first):
        raise ConfigError(f"program {first!r} is a directory: give a script or an executable")
    if first.endswith((".yml", ".yaml")) and os.path.exists(first):
        raise ConfigError(f"program {first!r} looks like a job file: `pliant run -f {first}` reads it")
    if os.path.exists(first):
        raise ConfigError(f"program {first!r} is not executable: `chmod +x {first}`, or name its interpreter before it")
    where = f"in {Path.cwd()}" if "/" in first or first.endswith(".py") else "on PATH"
    raise ConfigError(f"program {first!r} does not exist {where}: check the name, and that flags stand before it")


def _check_module(name: str) -> None:
    """Raise ConfigError if Python would not find the package of this module. Nothing is imported for that."""
    top = name.partition(".")[0]
    is_ours = top in sys.stdlib_module_names or PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None
    if not is_ours:
        raise ConfigError(
            f"-m {name}: there is no module {top!r} in {Path.cwd()}, nor is one installed: check the name, or run it from the "
            "folder that holds it"
        )


def make_plan(options: RunOptions, machine: Machine) -> LaunchPlan:
    """Return the plan of this runner.

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
        shared = f"{num_local} workers share {len(devices)} CUDA devices of {self_host}"
        warnings.append(f"{shared}, and compete for them; with {len(devices)} workers there, each has its own")
    return LaunchPlan(
        options=options,
        command=command,
        self_host=self_host,
        hosts=hosts,
        num_local=num_local,
        devices=devices,
        pins=_pins(machine, options.determinism),
        warnings=tuple(warnings),
    )


def _pins(machine: Machine, level: str) -> dict[str, str]:
    """Return variables that libraries read when they are loaded: with that of cuBLAS, matrix products have one order; under
    D2, torch's libraries choose the same kernels on every machine. The program may choose another level than D0, too."""
    cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if level != "D2":
        return cublas if level != "D0" else {}
    return {
        "ATEN_CPU_CAPABILITY": "avx2" if machine.has_avx2 else "default",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **cublas,
    }


MOST_PER_CPU = 64
"""Without -H, more workers than this for each processor are taken for a mistake."""


def _default_hosts(options: RunOptions, machine: Machine, asked: str) -> tuple[Host, ...]:
    """Return the hosts of a job without -H: this machine alone, with a slot for each worker."""
    address = asked or (nic_addresses(options.nic, machine.nics)[0] if options.nic else LOOPBACK)
    if options.np > MOST_PER_CPU * machine.num_cpus:
        raise CapacityError(
            f"-np {options.np}: so many workers would bring a machine with {machine.num_cpus} processors to a halt; use "
            f"fewer, or insist with -H {address}:{options.np}"
        )
    # How many a watched job will be asked to have is not known.
    most = min(len(options.port_range), MOST_PER_CPU * machine.num_cpus) if options.watch else machine.num_cpus
    return (Host(address, max(most, options.np)),)


def first_view(plan: LaunchPlan, ports: Mapping[str, Sequence[int]]) -> View:
    """Return the view that the job starts with, once the ports of every host are known.

    Raises:
        CapacityError: a host reported fewer ports than it has workers.
    """
    workers = place(plan.hosts, plan.options.np, ports)
    if len(workers) < plan.options.np:
        raise CapacityError(f"the hosts bound {len(workers)} ports for {plan.options.np} workers: widen -port-range")
    return View(max(0, plan.options.init_version), workers, plan.runners)


def describe(plan: LaunchPlan, machine: Machine) -> list[str]:
    """Return the lines that the runner shows at its start, unless -q: arguments, interfaces, relevant variables."""
    lines = [f"command: {' '.join(plan.command)}"]
    lines.append(f"np {plan.options.np} on {','.join(f'{host.address}:{host.slots}' for host in plan.hosts)}")
    lines.append(f"this host: {plan.self_host}, {plan.num_local} workers, strategy {plan.options.strategy}")
    lines.extend(f"nic {name}: {' '.join(found)}" for name, found in machine.nics.items() if found)
    lines.append(f"CUDA devices: {','.join(plan.devices) or 'none'}")
    shown = ("CUDA_", "NCCL_", "PLIANT_", "OMP_")
    lines.extend(
        f"{name}={value}"
        for name, value in sorted(machine.environ.items())
        if name.startswith(shown) and not any(word in name for word in ("SECRET", "TOKEN", "KEY"))
    )
    return lines
