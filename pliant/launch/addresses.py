"""Addresses and ports of this machine: its network interfaces, its place in a host list, and its listening sockets.

The runner binds the ports of its workers and hands them on as open sockets: a port that is only looked up can be taken
before the worker binds it, a listening socket that the worker inherits cannot. Peers that connect early wait in its backlog.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence

from pliant.cluster import Host, PortRange, check_host, is_address
from pliant.errors import CapacityError, ConfigError

_SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"
BACKLOG = 1024


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each network interface: its first IPv4, then its IPv6 ones."""
    by_nic: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, found in by_nic.items():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # the interface has no IPv4 address
            found.append(socket.inet_ntoa(answer[20:24]))
    for name, address in _ipv6_addresses():
        by_nic.setdefault(name, []).append(address)
    return {name: tuple(found) for name, found in by_nic.items()}


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        with open("/proc/net/if_inet6") as lines:
            words = [line.split() for line in lines]
    except OSError:
        return []
    found = [(word[5], ipaddress.IPv6Address(bytes.fromhex(word[0]))) for word in words]
    # A link-local address means nothing without its interface, so that other hosts cannot use it.
    return [(name, str(address)) for name, address in found if not address.is_link_local]


def resolve(host: str) -> str:
    """Return the address of `host`: itself if it is one, else the first IPv4 (or IPv6) that its name has.

    Raises:
        ConfigError: the name does not resolve.
    """
    if is_address(host):
        return host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host name {host!r} does not resolve ({error}): correct it in -H/-hostfile/-self, "
            "or give its address instead"
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    return next((address for address in addresses if "." in address), addresses[0])


def resolve_hosts(hosts: Sequence[Host], lookup: Callable[[str], str] = resolve) -> tuple[Host, ...]:
    """Return `hosts` with addresses for names; names are looked up here, once, and never again.

    Raises:
        ConfigError: a name does not resolve, two hosts are the same, or a name of a job with
            several hosts resolves to a loopback address, which the others could not reach.
    """
    resolved: dict[str, Host] = {}
    for host in hosts:
        address = lookup(host.address)
        if address != host.address and len(hosts) > 1 and ipaddress.ip_address(address).is_loopback:
            raise ConfigError(
                f"host name {host.address!r} resolves to {address} on this machine, which other hosts cannot "
                "reach: give its address in -H, or correct /etc/hosts"
            )
        if address in resolved:
            raise ConfigError(f"-H: host {host.address} is {address}, which is listed already; list it once")
        resolved[address] = Host(address, host.slots, host.public if host.public != host.address else "")
    return tuple(resolved.values())


def nic_addresses(nic: str, nics: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the addresses of the interface that `-nic` names; raise ConfigError if it has none, or does not exist."""
    if nics.get(nic):
        return tuple(nics[nic])
    there = ", ".join(f"{name} ({' '.join(found)})" for name, found in nics.items() if found) or "none"
    why = "has no address" if nic in nics else "does not exist"
    raise ConfigError(f"-nic {nic}: this interface {why}; with an address there are: {there}")


def choose_self(
    hosts: Sequence[Host],
    *,
    asked: str,
    nic: str,
    nics: Mapping[str, Sequence[str]],
    local: Callable[[str], bool],
) -> str:
    """Return which of `hosts` this machine is: `-self`, else `-nic`, else 127.0.0.1, else the only one that is local.

    Raises:
        ConfigError: none is, or several are and nothing says which.
    """
    listed = [host.address for host in hosts]
    if asked:
        candidates, flag = [check_host(asked)], f"-self {asked}"
    elif nic:
        candidates, flag = list(nic_addresses(nic, nics)), f"-nic {nic}"
    elif LOOPBACK in listed:
        return LOOPBACK
    else:
        candidates, flag = [address for address in listed if local(address)], ""
        if len(candidates) > 1:
            raise ConfigError(f"hosts {', '.join(candidates)} are all this machine: say which with -self")
    for address in candidates:
        if address in listed:
            return address
    here = ", ".join(address for found in nics.values() for address in found) or "no address"
    what = f"{flag} ({', '.join(candidates)})" if flag else "this machine"
    raise ConfigError(
        f"{what} is not in the host list {','.join(listed)}: this machine has {here}; "
        "add one of them to -H/-hostfile, or say which host this is with -self or -nic"
    )


# --- listening sockets ---


def listen_on(address: str, port: int) -> socket.socket:
    """Return a socket that listens on (`address`, `port`); port 0 takes any. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        # Only one socket of those bound with SO_REUSEADDR can listen, so that this call decides.
        sock.listen(BACKLOG)
        undo.pop_all()
    return sock


def bind_ports(address: str, num_ports: int, ports: PortRange, avoid: Collection[int] = ()) -> dict[int, socket.socket]:
    """Return the first `num_ports` free ports of the range on `address`, each listening; taken ones are skipped.

    Raises:
        CapacityError: fewer are free; those already bound are closed again.
        ConfigError: `address` is not of this machine, or the ports need privileges.
    """
    bound: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo:
        for port in range(ports.begin, ports.end + 1):
            if len(bound) == num_ports:
                break
            if port in avoid:
                continue
            try:
                bound[port] = undo.enter_context(listen_on(address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"cannot listen on {address}:{port} ({error.strerror}): give an address of this "
                        "machine with -self or -nic, and ports from 1024 on with -port-range"
                    ) from None
        if len(bound) < num_ports:
            raise CapacityError(
                f"no free port: -port-range {ports} has {len(ports)} ports, {len(bound)} of them free on {address}, "
                f"and {num_ports} workers need one each; give another -port-range"
            )
        undo.pop_all()
    return bound
