"""Chooses the addresses at which the monitor of node 0 listens: those at which the process group meets, if possible."""

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import resource
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_BACKLOG = 4096
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that this machine does not have."""

_SIOCGIFADDR = 0x8915
_Address = tuple[Any, ...]
"""An address as `socket` expects it: host, port and, for IPv6, flow information and the number of the interface."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Listens where the other nodes look for node 0.

    These are the addresses of `host` that this machine has, and the interfaces that GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME name, because a name may have an address of the wrong interface here. A name may also mean only
    this machine here, such as an entry 127.0.1.1 in /etc/hosts, or be an address that a router translates. If the
    variables are not set either, it listens on all interfaces, and logs a warning.

    Args:
        host: Name or address of node 0.
        port: Port at all addresses.

    Raises:
        OSError: The name cannot be resolved, or the port is taken or may not be used.
    """
    found = [address for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    is_on_one_machine = _is_loopback_name(host)
    chosen = [] if is_on_one_machine else _addresses_of_interfaces(port)
    listeners = _listen_at([*found, *chosen])
    is_reachable = (
        chosen or is_on_one_machine or any(not _is_loopback(listener.getsockname()) for listener in listeners)
    )
    if listeners and is_reachable:
        return listeners
    _close(listeners)
    everywhere = _listen_everywhere(port)
    _log.warning(
        "%s is %s on node 0, which is no address of its network, so port %d is open on all of its interfaces. Set "
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the interface of the process group, or MASTER_ADDR to the address "
        "of node 0",
        host,
        " and ".join(dict.fromkeys(str(address[0]) for address in found)),
        port,
    )
    return [everywhere]


def allow_open_files() -> None:
    """Raises the soft limit of open files, which is often 1,024, to the hard limit: each node takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen_at(addresses: Iterable[_Address]) -> list[socket.socket]:
    """Listens at those addresses that this machine has."""
    listeners: list[socket.socket] = []
    for address in dict.fromkeys(addresses):
        family = socket.AF_INET if len(address) == 2 else socket.AF_INET6
        try:
            listeners.append(socket.create_server(address, family=family, backlog=_BACKLOG))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                _close(listeners)
                raise
    return listeners


def _listen_everywhere(port: int) -> socket.socket:
    """Listens on all IPv4 addresses, and on all IPv6 addresses if the machine has IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _addresses_of_interfaces(port: int) -> list[_Address]:
    """Returns the addresses of the interfaces that the user has chosen for gloo or NCCL; none without a choice."""
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    found: list[_Address] = []
    for index, name in socket.if_nameindex():
        if name in gloo or _is_chosen_by_nccl(name, nccl):
            found += [*_ipv4_addresses(name, port), *_ipv6_addresses(name, index, port)]
    return found


def _is_chosen_by_nccl(interface: str, choice: str) -> bool:
    """NCCL_SOCKET_IFNAME lists beginnings of names; `=` before the list means whole names, and `^` all but these."""
    names = choice.lstrip("^=").split(",")
    is_exact = choice.removeprefix("^").startswith("=")
    is_listed = any(name and (interface == name if is_exact else interface.startswith(name)) for name in names)
    return is_listed != choice.startswith("^")


def _ipv4_addresses(interface: str, port: int) -> list[_Address]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        reply = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return [(socket.inet_ntoa(reply[20:24]), port)]
    return []  # an interface without such an address


def _ipv6_addresses(interface: str, index: int, port: int) -> list[_Address]:
    with contextlib.suppress(OSError):
        rows = [row.split() for row in Path("/proc/net/if_inet6").read_text().splitlines()]
        texts = [str(ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows if row[5] == interface]
        return [(text, port, 0, index if ipaddress.IPv6Address(text).is_link_local else 0) for text in texts]
    return []  # a machine without IPv6


def _is_loopback_name(host: str) -> bool:
    """Returns whether a name or address means this machine on every machine."""
    try:
        return host in _LOOPBACK_NAMES or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_loopback(address: _Address) -> bool:
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback


def _close(listeners: Iterable[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
