"""A lab: hosts as network namespaces on one bridge.

The bridge lives in a namespace of its own, so the machine's own network is never touched and the addresses (10.77.0.0/24)
exist only inside. A guardian process claims the name before anything else is made, and removes the lab when its owner ends,
even by `kill -9`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pliant.errors import ConfigError, LabError
from pliant_repro.lab import guardian
from pliant_repro.lab.namespaces import REMOVE_TIMEOUT_S, command, in_namespace, in_scratch_namespace, labs, remove
from pliant_repro.lab.rates import parse_rate, shaper

NETWORK = "10.77.0.0/24"
INTERFACE = "e0"
"""Name of every host's network interface."""
MAX_HOSTS = 200

_TCP_SETTINGS = Path("/proc/sys/net/ipv4")
_LAB_NAME = re.compile(r"[A-Za-z0-9_]{1,24}")

T = TypeVar("T")


def missing_for_lab() -> list[str]:
    """Return what keeps this machine from having a lab, each with its remedy; empty if nothing does."""
    found = []
    if os.geteuid() != 0:
        found.append("not root: network namespaces need it; sudo $(command -v pliant) lab up")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            found.append(
                f"`{tool}` not found: it is in iproute2, or /usr/sbin is not on PATH; apt-get install iproute2"
            )
    if found:
        return found
    try:
        return in_scratch_namespace(_try_kernel)  # ends with the trial
    except OSError as error:
        remedy = "leave the container, or docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN ..."
        return [f"the kernel gives no network namespace ({error}); {remedy}"]


def _try_kernel() -> list[str]:
    trials = {
        "ip link add b0 type bridge": ("no bridge in the kernel (CONFIG_BRIDGE)", "modprobe bridge"),
        "ip link add v0 type veth peer name v1": ("no veth in the kernel (CONFIG_VETH)", "modprobe veth"),
        f"tc qdisc add dev lo root {' '.join(shaper(10**9))}": (
            "no tbf qdisc in the kernel (CONFIG_NET_SCH_TBF), so rates are none", "modprobe sch_tbf",
        ),
    }  # fmt: skip
    found = []
    for trial, (why, remedy) in trials.items():
        try:
            command(*trial.split())
        except LabError as error:
            found.append(f"{why}: {error}; {remedy}")
    return found


def host_index(text: str, num_hosts: int) -> int:
    """Return the number of the host that `2` or `h2` names.

    Raises:
        ConfigError: the lab has no such host.
    """
    matched = re.fullmatch(r"h?(\d+)", text)
    if matched is None or int(matched[1]) >= num_hosts:
        raise ConfigError(f"host {text!r} is not in this lab of {num_hosts}: use h0 to h{num_hosts - 1}")
    return int(matched[1])


class Lab:
    """Hosts in network namespaces; `up` makes them, and the end of the `with` removes them.

    `rate` limits what each host sends; None or "none" is no limit. `mtu` is the size of a packet: headers take 4.6 % of a
    link at 1500 bytes, and 0.8 % at 9000.
    Two labs share nothing; their addresses only look the same.
    """

    def __init__(
        self, *, num_hosts: int = 4, rate: str | None = None, name: str | None = None, mtu: int = 1500
    ) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ConfigError(f"a lab of {num_hosts} hosts: use 1 to {MAX_HOSTS}")
        self.name = _check_name(name if name is not None else secrets.token_hex(3))
        self.num_hosts = num_hosts
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(num_hosts))
        self.namespaces = tuple(f"pliant-{self.name}-h{host}" for host in range(num_hosts))
        self._bridge = f"pliant-{self.name}-br"
        self._rate = None if rate is None else parse_rate(rate)
        self._mtu = mtu
        self._guardian: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self._counters: dict[int, int] = {}

    @property
    def nominal_rate(self) -> int | None:
        """Bits per second that each host may send when the lab comes up; None means no limit."""
        return self._rate

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """Return the lab `name` that `pliant lab up` made, or the only one there is. It is not removed when this object ends.

        Raises:
            ConfigError: no lab has that name.
            LabError: no name was given, and there is no lab, or there are several.
        """
        found = labs()
        listed = ", ".join(found) or "none"
        if name is None and len(found) != 1:
            raise LabError(
                f"which lab? there are {len(found)} ({listed}): give --name, or make one with `pliant lab up`"
            )
        chosen = next(iter(found)) if name is None else _check_name(name)
        if not found.get(chosen):
            raise ConfigError(
                f"no lab is named {chosen!r} (there are: {listed}); make it with `pliant lab up --name {chosen}`"
            )
        return cls(num_hosts=found[chosen], name=chosen)

    def up(self) -> Self:
        """Make the namespaces, links and queues.

        Raises:
            LabError: something is missing (the message says how to get it), or the name is taken; nothing is left behind.
        """
        problems = missing_for_lab()
        if problems:
            raise LabError(f"no lab on this machine: {'; '.join(problems)}")
        self._owner_pid = os.getpid()
        self._guardian = guardian.start(self.name)
        try:
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    def _build(self) -> None:
        self._batch("ip", *(f"netns add {namespace}" for namespace in self.namespaces))
        self._batch("ip", "link set lo up", "link add b0 type bridge", "link set b0 up", inside=self._bridge)
        for host, (namespace, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            veth = f"link add v{host} mtu {self._mtu} type veth peer name {INTERFACE} mtu {self._mtu} netns {namespace}"
            self._batch("ip", veth, f"link set v{host} master b0 up", inside=self._bridge)
            up = f"link set {INTERFACE} up"
            self._batch("ip", "link set lo up", f"addr add {address}/24 dev {INTERFACE}", up, inside=namespace)
            in_namespace(namespace, lambda: _set_tcp(throttled=self._rate is not None))
            if self._rate is not None:
                self._shape(namespace, self._rate)

    def down(self) -> None:
        """Remove everything, and kill what still runs inside; a second call does nothing."""
        if self._guardian is None or os.getpid() != self._owner_pid:  # a forked child must not end its parent's lab
            return
        try:
            self._close_counters()
            remove(self.name)
        finally:
            self._release(b"")
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(REMOVE_TIMEOUT_S)
            self._children.clear()

    def detach(self) -> None:
        """Let the lab live on without this process, until `pliant lab down`."""
        self._close_counters()
        self._release(b"detach")

    def _release(self, word: bytes) -> None:
        process, self._guardian = self._guardian, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(word, timeout=2 * REMOVE_TIMEOUT_S)

    def __enter__(self) -> Self:
        if self._guardian is None:
            raise LabError("the lab is not up: write `with Lab(...).up() as lab:`")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def set_rate(self, host: int, rate: str | None) -> None:
        """Limit what `host` sends from now on; None or "none" lifts the limit. Connections stay open."""
        self._shape(self.namespaces[host], None if rate is None else parse_rate(rate))

    def rate(self, host: int) -> int | None:
        """Return the kernel's limit on what `host` sends, in bits per second; None means no limit."""
        shown = command("tc", "-n", self.namespaces[host], "-j", "qdisc", "show", "dev", INTERFACE)
        rates = [queue["options"]["rate"] for queue in json.loads(shown) if queue["kind"] == "tbf"]
        return int(rates[0]) * 8 if rates else None

    def cut(self, host: int) -> None:
        """Disconnect the host: nothing arrives or leaves, and no connection is told."""
        self._batch("ip", f"link set v{host} down", inside=self._bridge)

    def mend(self, host: int) -> None:
        """Connect a host again that was cut off. What was sent meanwhile is sent again, as TCP's timers come to it."""
        self._batch("ip", f"link set v{host} up", inside=self._bridge)

    def popen(self, host: int, argv: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        """Start a program on `host`; the process is the program itself. It is killed at the latest when the lab ends.

        Args:
            settings: further arguments of `subprocess.Popen`.

        Raises:
            LabError: there is no such program.
        """
        child = subprocess.Popen(self.exec_argv(host, argv), **settings)
        self._children = [other for other in self._children if other.poll() is None]
        self._children.append(child)
        return child

    def run(self, host: int, argv: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a program on `host` to its end and return its output and exit status.

        Raises:
            LabError: there is no such program, or it was still running after `timeout_s`.
        """
        command, nowhere = self.exec_argv(host, argv), subprocess.DEVNULL
        try:
            return subprocess.run(command, stdin=nowhere, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise LabError(f"h{host}: {' '.join(argv)!r} not done after {timeout_s:g} s; raise timeout_s") from None

    def call(self, host: int, work: Callable[[], T]) -> T:
        """Call `work` on `host`, on a thread of its own in this process, and return its result.

        A socket made there belongs to `host` for good, and may be used from any thread.
        """
        return in_namespace(self.namespaces[host], work)

    def exec_argv(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on `host` in its own place."""
        if not argv or shutil.which(argv[0]) is None:
            raise LabError(f"h{host}: program {argv[0] if argv else ''!r} not found; give its path")
        return ["ip", "netns", "exec", self.namespaces[host], *argv]

    def tx_bytes(self, host: int) -> int:
        """Return the bytes that `host` has sent since the lab came up, headers included."""
        return self._counted(host)[8]

    def rx_bytes(self, host: int) -> int:
        """Return the bytes that `host` has received since the lab came up, headers included."""
        return self._counted(host)[0]

    def _counted(self, host: int) -> list[int]:
        # The file belongs to the namespace in which it was opened, so one open serves every later sample.
        if host not in self._counters:
            self._counters[host] = self.call(host, lambda: os.open("/proc/thread-self/net/dev", os.O_RDONLY))
        text = os.pread(self._counters[host], 1 << 16, 0).decode()
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
        return [int(word) for word in line.split(":", 1)[1].split()]

    def _close_counters(self) -> None:
        while self._counters:
            os.close(self._counters.popitem()[1])

    def _shape(self, namespace: str, bits_per_s: int | None) -> None:
        if bits_per_s is not None:
            self._batch("tc", f"qdisc replace dev {INTERFACE} root {' '.join(shaper(bits_per_s))}", inside=namespace)
        else:
            with contextlib.suppress(LabError):  # there was no limit to lift
                self._batch("tc", f"qdisc del dev {INTERFACE} root", inside=namespace)

    def _batch(self, tool: str, *lines: str, inside: str | None = None) -> None:
        # The tool inherits the guardian's pipe: if the owner is killed now, the guardian waits for what the tool still makes.
        stdin = self._guardian.stdin if self._guardian is not None else None
        held = (stdin.fileno(),) if stdin is not None else ()
        within = ("-n", inside) if inside is not None else ()
        command(tool, *within, "-batch", "-", text="\n".join(lines), pass_fds=held)


def _check_name(name: str) -> str:
    if not _LAB_NAME.fullmatch(name):
        raise ConfigError(f"lab name {name!r}: use 1 to 24 letters, digits or _")
    return name


def _set_tcp(*, throttled: bool) -> None:
    """Set TCP's settings in the calling thread's namespace, equal for ours and for every peer.

    The machine's default may be bbr, whose probing shows up as noise. Cubic is used, or reno if the machine does not let
    namespaces choose cubic (net.ipv4.tcp_allowed_congestion_control). A send buffer of 256 KB fills a 1 Gbit/s link of this
    lab, and keeps little below an engine's own queue.
    """
    allowed = (_TCP_SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    (_TCP_SETTINGS / "tcp_congestion_control").write_text("cubic" if "cubic" in allowed else "reno")
    if throttled:
        (_TCP_SETTINGS / "tcp_wmem").write_text("4096 65536 262144")
