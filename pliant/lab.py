"""A lab: hosts as network namespaces on one bridge, with rates, made and removed by one `with`.

    with Lab(num_hosts=4, rate="1gbit").up() as lab:
        lab.run(0, ["ping", "-c1", lab.addresses[1]])

The bridge lives in a namespace of its own, so the machine's own network is never touched and the
addresses (10.77.0.0/24) exist only inside. All state is in the names of the namespaces
(`pliant-<lab>-br`, `pliant-<lab>-h0`, ...); there is no state file. A guardian process claims the
name before anything else is made, and removes the lab when its owner ends, even by `kill -9`.
Needs root. Knows nothing about workers or training.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

from pliant.errors import ConfigError, LabError

log = logging.getLogger(__name__)

NETWORK = "10.77.0.0/24"
INTERFACE = "e0"
"""The name of every host's interface, as GLOO_SOCKET_IFNAME wants it."""
MAX_HOSTS = 200
QUEUE_S = 0.015
"""How long a shaped link's queue may be."""

_NAMESPACES = Path("/run/netns")
_TCP_SETTINGS = Path("/proc/sys/net/ipv4")
_NAMESPACE_NAME = re.compile(r"pliant-([A-Za-z0-9_]{1,24})-(br|h\d+)")
_LAB_NAME = re.compile(r"[A-Za-z0-9_]{1,24}")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 20.0
_REMOVE_TIMEOUT_S = 10.0

T = TypeVar("T")
_Stream = int | IO[bytes] | None


def parse_rate(text: str) -> int | None:
    """Bits per second of `1gbit`, `100mbit`, `2.5gbit`, `500kbit`; None (no limit) of `none`.

    Raises:
        ConfigError: another form, or outside 8kbit .. 100gbit.
    """
    lowered = text.strip().lower()
    if lowered == "none":
        return None
    matched = _RATE.fullmatch(lowered)
    if matched is None:
        raise ConfigError(f"rate {text!r} not understood: use 1gbit, 100mbit, 2.5gbit, 500kbit or none")
    bits_per_s = round(float(matched[1]) * _UNITS[matched[2]])
    if not 8_000 <= bits_per_s <= 100 * 10**9:
        raise ConfigError(f"rate {text!r} is outside 8kbit to 100gbit; `none` means no limit")
    return bits_per_s


def format_rate(bits_per_s: int | None) -> str:
    """The shortest text that `parse_rate` reads back."""
    if bits_per_s is None:
        return "none"
    for letter, unit in reversed(_UNITS.items()):
        if bits_per_s >= unit:
            return f"{bits_per_s / unit:.10g}{letter}bit"
    return f"{bits_per_s / 1000:.10g}kbit"


def shaper(bits_per_s: int) -> list[str]:
    """The arguments of `tc qdisc replace dev X root` that hold a device to this rate.

    A burst of 128 KB lets whole GSO packets (64 KB) through unsplit at 100 Mbit/s and above; it is
    never less than 1 ms of traffic, so that a late timer costs no rate, and at low rates not more
    than 10 ms. The queue is some milliseconds, given in bytes: a long one would hide priorities, a short one drops the
    last packets of a burst, and with few packets under way TCP then waits for 200 ms.
    """
    bytes_per_s = bits_per_s / 8
    burst = max(4096, min(128 << 10, bytes_per_s * 0.010), bytes_per_s * 0.001)
    limit = max(32 << 10, 2 * burst, bytes_per_s * QUEUE_S)
    return ["tbf", "rate", f"{bits_per_s}bit", "burst", f"{burst:.0f}", "limit", f"{limit:.0f}"]


def host_index(text: str, num_hosts: int) -> int:
    """The host that `2`, `h2` or `10.77.0.3` names.

    Raises:
        ConfigError: none of these, or beyond the lab's hosts.
    """
    matched = re.fullmatch(r"h?(\d+)", text) or re.fullmatch(r"10\.77\.0\.(\d+)", text)
    if matched is None:
        raise ConfigError(
            f"host {text!r} not understood: use h0 to h{num_hosts - 1}, 0 to {num_hosts - 1}, or an address"
        )
    index = int(matched[1]) - text.startswith("10.77.")
    if not 0 <= index < num_hosts:
        raise ConfigError(f"host {text!r} is not in this lab of {num_hosts}: use h0 to h{num_hosts - 1}")
    return index


def check() -> list[str]:
    """What keeps this machine from holding a lab, each with its remedy; empty where all is well.

    The kernel is asked by trying in a nameless namespace that ends with the trial.
    """
    problems = []
    if os.geteuid() != 0:
        problems.append("not root: network namespaces need it; run with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            problems.append(
                f"`{tool}` not found: install iproute2 (apt-get install iproute2), or put /usr/sbin on PATH"
            )
    if not problems:
        try:
            problems = _in_scratch_namespace(_try_kernel)
        except OSError as error:
            problems = [
                f"the kernel gives no network namespace ({error}): leave the container, or give it CAP_SYS_ADMIN"
            ]
    return problems


def _try_kernel() -> list[str]:
    trials = {
        "ip link add b0 type bridge": "no bridge in the kernel: modprobe bridge (CONFIG_BRIDGE)",
        "ip link add v0 type veth peer name v1": "no veth in the kernel: modprobe veth (CONFIG_VETH)",
        f"tc qdisc add dev lo root {' '.join(shaper(10**9))}": "no tbf qdisc in the kernel: modprobe sch_tbf "
        "(CONFIG_NET_SCH_TBF), or use rate none",
    }
    problems = []
    for command, remedy in trials.items():
        try:
            _command(*command.split())
        except LabError as error:
            problems.append(f"{remedy}; {error}")
    return problems


def labs() -> dict[str, int]:
    """Every lab on this machine, whoever made it, and its number of hosts."""
    found: dict[str, int] = {}
    for namespace in _namespaces():
        matched = _NAMESPACE_NAME.fullmatch(namespace)
        if matched is not None:
            found[matched[1]] = found.get(matched[1], 0) + (matched[2] != "br")
    return dict(sorted(found.items()))


def remove(name: str) -> None:
    """Kill whatever runs in the lab `name` and delete its namespaces; nothing happens where there is none.

    Raises:
        LabError: something in it does not die.
    """
    ours = [namespace for namespace in _namespaces() if _lab_of(namespace) == name]
    inodes = {(_NAMESPACES / namespace).stat().st_ino for namespace in ours}
    _kill_inside(inodes)
    for namespace in ours:
        with contextlib.suppress(LabError):  # somebody else removed it at the same time
            _command("ip", "netns", "del", namespace)
    # A process that was on its way in while the first sweep ran; with the names gone no other follows.
    _kill_inside(inodes)


class Lab:
    """Hosts in network namespaces; `up` makes them, the end of the `with` removes them.

    `rate` limits what each host sends, `rx_rate` what it receives; None or "none" is no limit. `mtu` is the size of a
    packet: headers take 4.6 % of a link at 1500 bytes, and 0.8 % at 9000.
    Two labs share nothing but the look of their addresses.
    """

    def __init__(
        self,
        *,
        num_hosts: int = 4,
        rate: str | None = None,
        rx_rate: str | None = None,
        name: str | None = None,
        mtu: int = 1500,
    ) -> None:
        if not 576 <= mtu <= 65535:
            raise ConfigError(f"packets of {mtu} bytes: use 576 to 65535, such as 1500 or 9000")
        self._mtu = mtu
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ConfigError(f"a lab of {num_hosts} hosts: use 1 to {MAX_HOSTS}")
        self.name = _check_name(name if name is not None else secrets.token_hex(3))
        self.num_hosts = num_hosts
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(num_hosts))
        self.namespaces = tuple(f"pliant-{self.name}-h{host}" for host in range(num_hosts))
        self._bridge = f"pliant-{self.name}-br"
        self._rate = None if rate is None else parse_rate(rate)
        self._rx_rate = None if rx_rate is None else parse_rate(rx_rate)
        self._guardian: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self._counters: dict[int, int] = {}

    @property
    def nominal_rate(self) -> int | None:
        """Bits per second that each host may send when the lab comes up; None: no limit."""
        return self._rate

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """The lab `name` that somebody made with `pliant lab up`, or the only one there is.

        It is not removed when this object ends.

        Raises:
            LabError: there is none, or no name was given and there are several.
        """
        found = labs()
        listed = ", ".join(found) or "none"
        if name is None and len(found) != 1:
            raise LabError(
                f"which lab? there are {len(found)} ({listed}): give --name, or make one with `pliant lab up`"
            )
        chosen = next(iter(found)) if name is None else _check_name(name)
        if not found.get(chosen):
            raise LabError(f"no lab named {chosen!r}, there is: {listed}; make it with `pliant lab up --name {chosen}`")
        return cls(num_hosts=found[chosen], name=chosen)

    def up(self) -> Self:
        """Make the namespaces, links and queues.

        Raises:
            LabError: what is missing and how to get it, or that the name is taken; nothing is left behind.
        """
        problems = check()
        if problems:
            raise LabError(f"no lab on this machine: {'; '.join(problems)}")
        self._owner_pid = os.getpid()
        self._guardian = _start_guardian(self.name)
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
            _in_namespace(namespace, lambda: _set_tcp(throttled=self._rate is not None))
            if self._rate is not None:
                self._shape(namespace, INTERFACE, self._rate)
            if self._rx_rate is not None:
                self._shape(self._bridge, f"v{host}", self._rx_rate)

    def down(self) -> None:
        """Remove everything, and kill what still runs inside; again is harmless."""
        if self._guardian is None or os.getpid() != self._owner_pid:  # a forked child must not end its parent's lab
            return
        try:
            self._close_counters()
            remove(self.name)
        finally:
            self._release(b"")
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_REMOVE_TIMEOUT_S)
            self._children.clear()

    def detach(self) -> None:
        """Let the lab live on without this process, until `pliant lab down`."""
        self._close_counters()
        self._release(b"detach")

    def _release(self, word: bytes) -> None:
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                guardian.communicate(word, timeout=2 * _REMOVE_TIMEOUT_S)

    def __enter__(self) -> Self:
        if self._guardian is None:
            raise LabError("the lab is not up: write `with Lab(...).up() as lab:`")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def set_rate(self, host: int, rate: str | None) -> None:
        """Limit what `host` sends from now on; None or "none" lifts the limit. Nothing that flows is interrupted."""
        self._shape(self.namespaces[host], INTERFACE, None if rate is None else parse_rate(rate))

    def set_rx_rate(self, host: int, rate: str | None) -> None:
        """Limit what `host` receives from now on; None or "none" lifts the limit."""
        self._shape(self._bridge, f"v{host}", None if rate is None else parse_rate(rate))

    def rate(self, host: int) -> int | None:
        """What the kernel holds `host` to when it sends, in bits per second; None: no limit."""
        shown = _command("tc", "-n", self.namespaces[host], "-j", "qdisc", "show", "dev", INTERFACE)
        rates = [queue["options"]["rate"] for queue in json.loads(shown) if queue["kind"] == "tbf"]
        return int(rates[0]) * 8 if rates else None

    def cut(self, host: int) -> None:
        """Pull the cable: nothing arrives or leaves, and nobody is told."""
        self._batch("ip", f"link set v{host} down", inside=self._bridge)

    def mend(self, host: int) -> None:
        """Plug the cable in again."""
        self._batch("ip", f"link set v{host} up", inside=self._bridge)

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        *,
        stdin: _Stream = None,
        stdout: _Stream = None,
        stderr: _Stream = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a program on `host`; its pid is the program's own. It is killed at the latest when the lab ends.

        Raises:
            LabError: there is no such program.
        """
        child = subprocess.Popen(
            self.exec_argv(host, argv), stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd, pass_fds=pass_fds
        )
        self._children = [other for other in self._children if other.poll() is None]
        self._children.append(child)
        return child

    def run(
        self, host: int, argv: Sequence[str], *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on `host` to its end and return what it said; its exit status is the caller's to judge.

        Raises:
            LabError: there is no such program, or it was still running after `timeout_s`.
        """
        try:
            return subprocess.run(
                self.exec_argv(host, argv),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=env,
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"h{host}: {' '.join(argv)!r} not done after {timeout_s:g} s; raise timeout_s") from None

    def call(self, host: int, work: Callable[[], T]) -> T:
        """What `work` returns when called on `host`, on a thread of its own in this process.

        A socket made there belongs to `host` for good, and may be used from any thread.
        """
        return _in_namespace(self.namespaces[host], work)

    def exec_argv(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on `host`, replacing itself with it."""
        if not argv or shutil.which(argv[0]) is None:
            raise LabError(f"h{host}: program {argv[0] if argv else ''!r} not found; give its path")
        return ["ip", "netns", "exec", self.namespaces[host], *argv]

    def congestion_control(self, host: int) -> str:
        """The algorithm that TCP uses on `host`."""
        return self.call(host, lambda: (_TCP_SETTINGS / "tcp_congestion_control").read_text().strip())

    def tx_bytes(self, host: int) -> int:
        """Bytes that `host` has sent since the lab came up, headers included."""
        return self._counted(host)[8]

    def rx_bytes(self, host: int) -> int:
        """Bytes that `host` has received since the lab came up, headers included."""
        return self._counted(host)[0]

    def _counted(self, host: int) -> list[int]:
        # The file belongs to the namespace it was opened in, so one open serves every later sample.
        if host not in self._counters:
            self._counters[host] = self.call(host, lambda: os.open("/proc/thread-self/net/dev", os.O_RDONLY))
        text = os.pread(self._counters[host], 1 << 16, 0).decode()
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
        return [int(word) for word in line.split(":", 1)[1].split()]

    def _close_counters(self) -> None:
        while self._counters:
            os.close(self._counters.popitem()[1])

    def _shape(self, namespace: str, device: str, bits_per_s: int | None) -> None:
        if bits_per_s is not None:
            self._batch("tc", f"qdisc replace dev {device} root {' '.join(shaper(bits_per_s))}", inside=namespace)
        else:
            with contextlib.suppress(LabError):  # there was no limit to lift
                self._batch("tc", f"qdisc del dev {device} root", inside=namespace)

    def _batch(self, tool: str, *lines: str, inside: str | None = None) -> None:
        # The guardian's pipe stays open until the tool ends: an owner killed now does not leave behind what
        # the tool is still making.
        stdin = self._guardian.stdin if self._guardian is not None else None
        held = (stdin.fileno(),) if stdin is not None else ()
        within = ("-n", inside) if inside is not None else ()
        _command(tool, *within, "-batch", "-", text="\n".join(lines), pass_fds=held)


def _check_name(name: str) -> str:
    if not _LAB_NAME.fullmatch(name):
        raise ConfigError(f"lab name {name!r}: use 1 to 24 letters, digits or _")
    return name


def _namespaces() -> list[str]:
    try:
        return sorted(os.listdir(_NAMESPACES))
    except FileNotFoundError:  # no namespace was ever made on this machine
        return []


def _lab_of(namespace: str) -> str | None:
    matched = _NAMESPACE_NAME.fullmatch(namespace)
    return matched[1] if matched else None


def _command(*argv: str, text: str = "", pass_fds: Sequence[int] = ()) -> str:
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, pass_fds=pass_fds
        )
    except FileNotFoundError:
        raise LabError(f"`{argv[0]}` not found: install iproute2") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(argv)}` hangs: not done after {_COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        detail = f" {text.strip()!r}" if text else ""
        raise LabError(f"`{' '.join(argv)}`{detail} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _set_tcp(*, throttled: bool) -> None:
    """Settings of the calling thread's namespace, equal for ours and for every peer.

    The machine's default may be bbr, whose probing dips would show up as noise. Cubic, or reno where
    the machine does not let namespaces choose cubic (net.ipv4.tcp_allowed_congestion_control). A send
    buffer of 256 KB fills a 1 Gbit/s link of this lab and keeps little below an engine's own queue.
    """
    allowed = (_TCP_SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    (_TCP_SETTINGS / "tcp_congestion_control").write_text("cubic" if "cubic" in allowed else "reno")
    if throttled:
        (_TCP_SETTINGS / "tcp_wmem").write_text("4096 65536 262144")


def _libc_call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _on_own_thread(work: Callable[[], T]) -> T:
    # A namespace is a property of the thread, and this one ends here.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(work).result()


def enter(namespace: str) -> None:
    """Move the calling thread, and those that it will start, into one of a lab's `namespaces`, for good.

    Raises:
        LabError: there is no such namespace.
    """
    try:
        with open(_NAMESPACES / namespace, "rb") as handle:
            _libc_call("setns", handle.fileno(), _CLONE_NEWNET)
    except OSError as error:
        raise LabError(f"namespace {namespace}: {error}; is the lab up? see `pliant lab list`") from error


def _in_namespace(namespace: str, work: Callable[[], T]) -> T:
    def enter_and_work() -> T:
        enter(namespace)
        return work()

    return _on_own_thread(enter_and_work)


def _in_scratch_namespace(work: Callable[[], T]) -> T:
    def enter_and_work() -> T:
        _libc_call("unshare", _CLONE_NEWNET)
        return work()

    return _on_own_thread(enter_and_work)


def _processes_inside(inodes: set[int]) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is a zombie, which is in no namespace
                if os.stat(f"/proc/{entry}/ns/net").st_ino in inodes:
                    yield int(entry)


def _kill_inside(inodes: set[int]) -> None:
    deadline_s = time.monotonic() + _REMOVE_TIMEOUT_S
    while pids := list(_processes_inside(inodes)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {pids} do not die {_REMOVE_TIMEOUT_S:g} s after SIGKILL; see /proc/<pid>/stack")
        time.sleep(0.002)


def _start_guardian(name: str) -> subprocess.Popen[bytes]:
    guardian = subprocess.Popen(
        [sys.executable, "-m", "pliant.lab", name, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C or a kill of our group must not take it along
    )
    assert guardian.stdout is not None, "made with a pipe"
    answer = guardian.stdout.read().decode().strip()
    if answer != "claimed":
        guardian.communicate(timeout=_COMMAND_TIMEOUT_S)
        raise LabError(answer or f"the lab's guardian ended at once; try `{sys.executable} -m pliant.lab {name} 1`")
    return guardian


def _guard(name: str, owner_pid: int) -> int:
    """Claim the lab's name, wait for the owner's end, remove the lab.

    The claim is made here and not by the owner, so that there is no moment at which a killed owner
    leaves a namespace, and no doubt about whose it is when the name is taken.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    claimed, answer = True, "claimed"
    try:
        _command("ip", "netns", "add", f"pliant-{name}-br")
    except LabError as error:
        claimed, answer = False, str(error)
        if "File exists" in answer:
            answer = f"a lab named {name!r} is up already: `pliant lab down {name}`, or take another name"
    with contextlib.suppress(BrokenPipeError):  # the owner may have been killed meanwhile
        print(answer, flush=True)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # the owner reads to the end
    if claimed and _last_word(owner_pid) != b"detach":
        remove(name)
    return 0


def _last_word(owner_pid: int) -> bytes:
    """What the owner wrote before it closed the pipe or died.

    Its death alone is not enough: a tool it started may still be making something and holds the pipe.
    A closed pipe alone is not either, where the owner's forked children hold it.
    """
    waiting = select.poll()
    waiting.register(0, select.POLLIN | select.POLLHUP)
    owner_fd = -1
    with contextlib.suppress(ProcessLookupError):
        owner_fd = os.pidfd_open(owner_pid)
        waiting.register(owner_fd, select.POLLIN)
    timeout_ms = None if owner_fd >= 0 else 5_000
    word = b""
    while ready := [fd for fd, _ in waiting.poll(timeout_ms)]:
        if 0 in ready:
            read = os.read(0, 64)
            word += read
            if not read:
                break
        elif owner_fd in ready:
            waiting.unregister(owner_fd)
            timeout_ms = 5_000
    return word


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1], int(sys.argv[2])))
