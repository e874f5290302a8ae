"""What `pliant run` was asked for: its flags as checked values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pliant.adapt.monitors import parse_monitors
from pliant.adapt.policy import maths_decisions
from pliant.adapt.registry import check as check_policy
from pliant.cluster import DEFAULT_RUNNER_PORT, Host, PortRange, check_port
from pliant.errors import ConfigError
from pliant.identity import DEFAULT_STRATEGY

LEVELS = ("D0", "D1", "D2")
"""Equal bits for an equal number of workers; for any number of them; and on machines of other kinds, too."""


def check_strategy(name: str) -> str:
    """`name` in the spelling of `comm.graph`; raises ConfigError with the names there are."""
    from pliant.comm.topology import STRATEGIES

    if name.upper() not in STRATEGIES:
        raise ConfigError(f"-strategy {name!r} is not known: use one of {', '.join(STRATEGIES)}")
    return name.upper()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The flags of `pliant run`; a wrong value raises ConfigError when this is made."""

    program: tuple[str, ...]
    """The program and its arguments, as typed."""
    np: int = 1
    """Workers in the whole job, over all hosts."""
    hosts: tuple[Host, ...] = ()
    """The machines, from -H or -hostfile; empty means this machine only, with enough slots."""
    self_host: str = ""
    """Which of the hosts this machine is."""
    nic: str = ""
    """The interface whose address says which host this is."""
    port_range: PortRange = field(default_factory=PortRange)
    """Where workers listen."""
    strategy: str = DEFAULT_STRATEGY
    """The topology that collectives start with."""
    timeout_s: float = 0.0
    """End the job after this long; 0 means never."""
    grace_s: float = 10.0
    """Time between SIGTERM and SIGKILL."""
    rendezvous_timeout_s: float = 300.0
    """How long the runners of several hosts wait for each other."""
    heartbeat_timeout_s: float = 10.0
    """Workers hold a peer for lost after this much silence."""
    logdir: str = ""
    """Where each worker's output is also written; empty means nowhere."""
    show_output: bool = True
    """Whether workers' output is shown."""
    quiet: bool = False
    """Whether the dump of arguments, interfaces and environment is left out."""
    allow_nvlink: bool = False
    """Leave CUDA_VISIBLE_DEVICES alone."""
    port: int = DEFAULT_RUNNER_PORT
    """Where the first host's runner meets the others."""
    debug_port: int = 0
    """Where to serve the runner's state; 0 means not at all."""
    delay_s: float = 0.0
    """Wait this long before starting anything."""
    secret_file: str = ""
    """File with the job's secret."""
    watch: bool = False
    """Follow the config server: start and stop workers as the view says."""
    keep: bool = False
    """In watch mode, stay after the local workers have finished."""
    copies: int = 1
    """On how many other workers each replica's context is kept."""
    determinism: str = ""
    """D0, D1 or D2; empty leaves it to the program."""
    checkpoint_dir: str = ""
    """Where checkpoints go, as an absolute path; empty means none."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 means only when the program asks."""
    resume: str = ""
    """`auto`, a checkpoint's path, or empty: what training begins with."""
    resize_schedule: tuple[tuple[int, int], ...] = ()
    """(step, number of workers): what the job asks for by itself; such a job is watched."""
    adapting: Mapping[str, str] = field(default_factory=dict)
    """Monitors, policies, record, replay, metrics and tensorboard, as typed; empty ones are left out."""
    max_restarts: int = 100
    """In watch mode, how many crashed workers this runner replaces."""
    warm: bool = True
    """In watch mode, fork the workers of a Python program from a process that has imported torch."""
    independent: bool = False
    """In watch mode, workers are independent copies of a program that never calls `pliant.join`: each is replaced by itself."""
    config_server: str = ""
    """URL of the config server to follow."""
    builtin_config_port: int = 0
    """Where to run a config server inside this runner; 0 means a free port, where one is needed."""
    init_version: int = 0
    """The first view's number; below 0, start no workers and wait to be added."""
    state_file: str = ""
    """Where to write the config server's address and the workers' processes, for a scheduler to read; empty: nowhere."""
    slot_devices: str = ""
    """A file with the CUDA device of each slot, read whenever a worker starts; empty: slots take the devices in turn."""
    start_time_s: float = 0.0
    """When the job began, as Unix time, for the workers to know."""

    def __post_init__(self) -> None:
        if not self.program:
            raise ConfigError("no program to run: write it after the flags, as in `pliant run -np 4 train.py`")
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
                f"-init-version {self.init_version} waits to be added by a config server: add -w -config-server URL"
            )
        if self.keep and not self.watch:
            raise ConfigError("-k keeps a watching runner alive: add -w")
        if self.config_server and self.builtin_config_port and not self.follows_builtin:
            raise ConfigError(
                f"-config-server {self.config_server} and -builtin-config-port {self.builtin_config_port} are two "
                "config servers: give one of them, or the same port"
            )
        object.__setattr__(self, "strategy", check_strategy(self.strategy))

    def _check_training(self) -> None:
        for count, flag in (
            (self.copies, "--copies"),
            (self.checkpoint_every, "--checkpoint-every"),
            (self.max_restarts, "--max-restarts"),
        ):
            if count < 0:
                raise ConfigError(f"{flag} {count}: use 0 or more")
        if self.determinism and self.determinism not in LEVELS:
            raise ConfigError(f"--determinism {self.determinism!r} is not known: use one of {', '.join(LEVELS)}")
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
    def follows_builtin(self) -> bool:
        """Whether the config server of this job is run by its head."""
        if not self.config_server:
            return self.watch or self.builtin_config_port > 0
        # KungFu's commands give both flags, and mean one server.
        try:
            return self.builtin_config_port > 0 and urlsplit(self.config_server).port == self.builtin_config_port
        except ValueError:
            return False
