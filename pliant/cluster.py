"""Workers, hosts and views; the wanted view and the membership of a job; host lists and hostfiles.

Pure values and how they are read and written. Nothing here opens a socket or a file. `identity` says which worker a
process is.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pliant.errors import CapacityError, ConfigError, InvalidView

ORIGIN_HEADER = "Pliant-Origin"
"""The header in which a client of a config server says in words who asks."""
BY_PROGRAM = "the program"
"""What a worker says there. If it wants 0 workers (`job.resize`, a policy, --resize-schedule), the step before was the last one."""
DEFAULT_RUNNER_PORT = 38080

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


def is_address(text: str) -> bool:
    """Return whether `text` is an IPv4 or IPv6 literal."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def check_host(text: str) -> str:
    """Return `text` as a host: an IPv4 or IPv6 literal in canonical form, or a host name.

    Raises:
        ConfigError: it is neither.
    """
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_address(bare):
        return str(ipaddress.ip_address(bare))
    if _HOST_NAME.fullmatch(bare) and not re.fullmatch(r"[0-9.]+", bare):
        return bare
    raise ConfigError(f"host {text!r} is neither an IP address nor a host name, such as 10.0.0.1, [::1] or node7")


def check_port(port: int, what: str = "port") -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"{what} {port!r} is not a port: use a number from 1 to 65535")
    return port


@dataclass(frozen=True, order=True, slots=True)
class Worker:
    """One worker process (or a runner), named by where it listens."""

    host: str
    port: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", check_host(self.host))
        check_port(self.port, f"{self.host}:")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def label(self) -> str:
        """The name used in log prefixes and file names: `127.0.0.1.10000`."""
        return f"{self.host}.{self.port}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Parse `host:port` or `[ipv6]:port`."""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal():
            raise ConfigError(f"worker {text!r} is not host:port, such as 10.0.0.1:10000 or [::1]:10000")
        return cls(host, int(port))

    def to_json(self) -> dict[str, object]:
        """Return KungFu's form: an IPv4 address as a big-endian number. Other hosts are given under `Host`."""
        try:
            return {"IPv4": int(ipaddress.IPv4Address(self.host)), "Port": self.port}
        except ValueError:
            return {"Host": self.host, "Port": self.port}

    @classmethod
    def from_json(cls, value: object) -> Worker:
        try:
            match value:
                case {"Port": bool()} | {"IPv4": bool()}:
                    pass  # for Python, true is a number
                case {"Port": int(port), "IPv4": int() | str() as address}:
                    return cls(str(ipaddress.IPv4Address(address)), port)
                case {"Port": int(port), "Host": str(host)}:
                    return cls(host, port)
        except (ValueError, ConfigError) as error:
            raise InvalidView(f"{value!r} is not a worker: {error}") from None
        raise InvalidView(
            f'{value!r} is not a worker: use {{"IPv4": 2130706433, "Port": 10000}}, or "Host" with a name'
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A machine (or namespace) and how many workers it takes."""

    address: str
    slots: int = 1
    public: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", check_host(self.address))
        object.__setattr__(self, "public", check_host(self.public) if self.public else self.address)
        if self.slots < 1:
            raise ConfigError(f"host {self.address} has {self.slots} slots: use 1 or more")

    @classmethod
    def parse(cls, text: str) -> Host:
        """Parse `<host>[:<slots>[:<public address>]]`; an IPv6 address stands in brackets."""
        matched = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+)(?::(\[[^\]]+\]|[^:\[\]]+))?)?", text.strip())
        if matched is None:
            raise ConfigError(f"-H: {text!r} is not <host>[:<slots>[:<public address>]], such as 10.0.0.1:4 or [::1]:2")
        address, slots, public = matched.groups()
        return cls(address, int(slots or 1), public or "")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse the comma list of `-H`."""
    if not text.strip():
        raise ConfigError("-H is empty: give a comma list such as 10.0.0.1:4,10.0.0.2:4")
    return _distinct((Host.parse(part) for part in text.split(",")), "-H")


def parse_hostfile(text: str, name: str = "hostfile") -> tuple[Host, ...]:
    """Parse lines `<host> [slots=N] [public_addr=X]`; `#` starts a comment."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        options = dict(word.partition("=")[::2] for word in words[1:])
        unknown = set(options) - {"slots", "public_addr"}
        slots = options.get("slots", "1")
        if unknown or not slots.isdecimal():
            wrong = ", ".join(sorted(unknown)) or f"slots={slots}"
            raise ConfigError(f"{name}:{number}: {wrong!r} not understood; use <host> [slots=N] [public_addr=X]")
        try:
            hosts.append(Host(words[0], int(slots), options.get("public_addr", "")))
        except ConfigError as error:
            raise ConfigError(f"{name}:{number}: {error}") from None
    if not hosts:
        raise ConfigError(f"{name} lists no host: give one per line, <host> [slots=N]")
    return _distinct(hosts, name)


def _distinct(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    seen: dict[str, Host] = {}
    for host in hosts:
        if host.address in seen:
            raise ConfigError(f"{where}: host {host.address} is listed twice; give its slots once, as {host.address}:N")
        seen[host.address] = host
    return tuple(seen.values())


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports for workers, both ends included."""

    begin: int = 10000
    end: int = 11000

    def __post_init__(self) -> None:
        check_port(self.begin, "-port-range begin")
        check_port(self.end, "-port-range end")
        if self.end < self.begin:
            raise ConfigError(f"-port-range {self}: the end lies before the begin")

    def __str__(self) -> str:
        return f"{self.begin}-{self.end}"

    def __len__(self) -> int:
        return self.end - self.begin + 1

    @classmethod
    def parse(cls, text: str) -> PortRange:
        matched = re.fullmatch(r"(\d+)-(\d+)", text.strip())
        if matched is None:
            raise ConfigError(f"-port-range {text!r} is not <begin>-<end>, such as 10000-11000")
        return cls(int(matched[1]), int(matched[2]))


@dataclass(frozen=True, slots=True)
class View:
    """A numbered list of workers, and the runners that start them. The order gives the ranks.

    Raises (when made):
        InvalidView: a worker or runner twice, two runners on a host, or a worker whose host has none.
    """

    number: int
    workers: tuple[Worker, ...]
    runners: tuple[Worker, ...]

    def __post_init__(self) -> None:
        if self.number < 0:
            raise InvalidView(f"version {self.number} is negative: versions count from 0")
        everyone = set()
        for member in (*self.workers, *self.runners):
            if member in everyone:
                raise InvalidView(f"{member} is listed twice: each worker and runner needs a port of its own")
            everyone.add(member)
        hosts = Counter(runner.host for runner in self.runners)
        for host, num_runners in hosts.items():
            if num_runners > 1:
                raise InvalidView(f"host {host} has {num_runners} runners: one runner starts all its workers")
        for worker in self.workers:
            if worker.host not in hosts:
                known = ", ".join(hosts) or "none"
                raise InvalidView(f"worker {worker} is on an unknown host: runners are on {known}; add a runner first")

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(worker.host for worker in self.workers)

    def rank_of(self, worker: Worker) -> int:
        """Return the rank of `worker`; raise InvalidView if it is not in this view."""
        try:
            return self.workers.index(worker)
        except ValueError:
            raise InvalidView(f"{worker} is not in view {self.number}") from None

    def to_json(self) -> dict[str, object]:
        return {
            "Version": self.number,
            "Runners": [runner.to_json() for runner in self.runners],
            "Workers": [worker.to_json() for worker in self.workers],
        }

    @classmethod
    def from_json(cls, value: object, number: int | None = None) -> View:
        """Return the view that `value` describes; `number` replaces its `Version` where given.

        Raises:
            InvalidView: with the reason.
        """
        if not isinstance(value, Mapping):
            raise InvalidView(f'a cluster is an object with "Workers" and "Runners", not {value!r:.60}')
        unknown = set(value) - {"Version", "Workers", "Runners"}
        if unknown:
            raise InvalidView(
                f'{sorted(map(str, unknown))} not understood: a cluster has "Workers", "Runners", "Version"'
            )
        lists = {}
        for key in ("Workers", "Runners"):
            members = value.get(key)
            if not isinstance(members, Sequence) or isinstance(members, str):
                raise InvalidView(f'"{key}" must be a list of {{"IPv4", "Port"}} objects')
            lists[key] = tuple(Worker.from_json(member) for member in members)
        version = value.get("Version", 0) if number is None else number
        if isinstance(version, bool) or not isinstance(version, int):
            raise InvalidView(f'"Version" {version!r} is not a number')
        return cls(version, lists["Workers"], lists["Runners"])


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted view and its version, which counts accepted changes and never goes back.

    `view` is None where it is unset: nobody has put one yet, or somebody has reset it.
    """

    version: int = 0
    view: View | None = None

    @property
    def cleared(self) -> bool:
        """Whether all workers must stop."""
        return self.view is not None and not self.view.workers

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The wanted workers; none where the view is unset."""
        return self.view.workers if self.view is not None else ()


@dataclass(frozen=True, slots=True)
class Membership:
    """The numbered list of the workers that train now."""

    number: int = 0
    """Counts changes of the members, over all jobs of a config server; 0: nobody has been ready yet."""
    members: tuple[Worker, ...] = ()
    """The workers that train. Their order gives the ranks."""
    urgent: int = 0
    """The highest number that came from the loss of a member. Who is in an older membership drops its step at once."""
    over: bool = False
    """Whether the job has ended: all workers stop, and nothing but a reset is accepted."""
    wanted: int = 0
    """Version of the wanted view when this membership was made."""
    begun: bool = False
    """Whether a step of the job was done before this membership was made. If none of its members has the state of the
    job, that state was lost."""
    ended_by: str = ""
    """Who has ended the job before its last step, in words; empty if its program has run to its end, or runs."""

    def missing(self, view: View | None) -> tuple[Worker, ...]:
        """Return the workers of `view` that do not train yet."""
        return tuple(worker for worker in (view.workers if view else ()) if worker not in self.members)

    def to_json(self) -> dict[str, object]:
        return {
            "Number": self.number,
            "Members": [member.to_json() for member in self.members],
            "Urgent": self.urgent,
            "Over": self.over,
            "Wanted": self.wanted,
            "Begun": self.begun,
            "EndedBy": self.ended_by,
        }

    @classmethod
    def from_json(cls, value: object) -> Membership:
        """Return the membership that `value` describes; raise ConfigError if it describes none."""
        match value:
            case {
                "Number": int(number),
                "Members": list(members),
                "Urgent": int(urgent),
                "Over": bool(over),
                "Wanted": int(wanted),
                **others,
            }:
                begun = others.get("Begun") is True  # a state file of version 0.1 does not say
                ended_by = str(others.get("EndedBy", ""))
                return cls(number, tuple(map(Worker.from_json, members)), urgent, over, wanted, begun, ended_by)
        raise ConfigError(f"{value!r:.200} is no membership of a config server: is it of another version?")


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The wanted view and the membership of one moment: all that workers and runners learn from the config server."""

    wanted: Wanted = field(default_factory=Wanted)
    membership: Membership = field(default_factory=Membership)
    id: str = ""
    """Which job's state it is; empty if it is not known."""
    restored: int = 0
    """How often the server has lost its state, and was told it by workers and runners."""

    @property
    def tag(self) -> str:
        """A text that differs between any two snapshots, of any servers."""
        over = int(self.membership.over)
        return f"{self.wanted.version}.{self.membership.number}.{over}.{self.restored}.{self.id}"

    def has_kept(self, known: ClusterSnapshot) -> bool:
        """Whether the server that is at this snapshot is the one that was at `known`, and has forgotten nothing of it.

        Of a job that is over nothing has to be kept, and of a server that nobody has asked for anything neither.
        """
        if known.wanted.version == 0 or known.membership.over:
            return True
        is_as_new = self.wanted.version >= known.wanted.version and self.membership.number >= known.membership.number
        return self.id == known.id and is_as_new

    def to_json(self) -> dict[str, object]:
        view = None if self.wanted.view is None else self.wanted.view.to_json()
        return {
            "Version": self.wanted.version,
            "View": view,
            "Membership": self.membership.to_json(),
            "Id": self.id,
            "Restored": self.restored,
        }

    @classmethod
    def from_json(cls, value: object) -> ClusterSnapshot:
        """Return the snapshot that `value` describes; raise ConfigError if it describes none."""
        match value:
            case {
                "Version": int(version),
                "View": view,
                "Membership": membership,
                "Id": str(id),
                "Restored": int(restored),
            } if re.fullmatch(r"[0-9a-z]{0,64}", id):
                wanted = Wanted(version, None if view is None else View.from_json(view))
                return cls(wanted, Membership.from_json(membership), id, restored)
        raise ConfigError(f"{value!r:.200} is no state of a config server: is it of another version?")


def place(
    hosts: Sequence[Host], num_workers: int, ports: Mapping[str, Sequence[int]] | PortRange
) -> tuple[Worker, ...]:
    """Return workers for the first `num_workers` slots, host by host, each with the next port of its host.

    Raises:
        CapacityError: more workers than slots, or more than ports.
    """
    slots = sum(host.slots for host in hosts)
    if num_workers > slots:
        listed = ",".join(f"{host.address}:{host.slots}" for host in hosts)
        raise CapacityError(
            f"-np {num_workers}: not enough capacity, {listed} has {slots} slots; raise the slots in -H"
        )
    workers: list[Worker] = []
    for host in hosts:
        take = min(host.slots, num_workers - len(workers))
        if isinstance(ports, PortRange):
            if take > len(ports):
                raise CapacityError(
                    f"-port-range {ports} has {len(ports)} ports, {host.address} needs {take}: widen it"
                )
            workers.extend(Worker(host.address, ports.begin + slot) for slot in range(take))
        else:
            workers.extend(Worker(host.address, port) for port in ports[host.address][:take])
    return tuple(workers)
