"""Two nodes: network namespaces with host names and addresses of their own, and a cable between them.

Needs the right to create network namespaces. Nothing that runs on a node can reach the network of the machine.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.network.cable import Cable

INTERFACE = "eth0"
NAMES = ("node-a", "node-b")
IPV4 = ("10.77.0.1", "10.77.0.2")
IPV6 = ("fd77::1", "fd77::2")

_FILES = Path("/etc/netns")
"""`ip netns exec NAME` shows the files of NAME in this directory as those of /etc."""

_SET_HOST_NAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


@dataclass(frozen=True)
class Node:
    """One of the two nodes."""

    namespace: str
    name: str
    """Its host name."""

    def command(self, *words: str) -> list[str]:
        """Returns a command line that runs another one on this node."""
        return [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "sh",
            "-c",
            _SET_HOST_NAME,
            self.name,
            *words,
        ]

    def ip(self, *words: str) -> None:
        ip("-n", self.namespace, *words)

    def write_hosts(self, hosts: dict[str, str]) -> None:
        """Writes what this node sees as /etc/hosts: an address for each name."""
        rows = {"localhost": "127.0.0.1", **hosts}
        directory = _FILES / self.namespace
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "hosts").write_text("".join(f"{address} {name}\n" for name, address in rows.items()))
        (directory / "resolv.conf").write_text("")  # no name server

    def set_kernel_option(self, path: str, value: int) -> None:
        """Sets a file below /proc/sys/net, which has a value of its own in each namespace."""
        subprocess.run(self.command("sh", "-c", 'echo "$1" > "$0"', f"/proc/sys/net/{path}", str(value)), check=True)

    def pids(self) -> list[int]:
        """Returns all processes on this node."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return list(map(int, found.stdout.split()))

    def kill_all(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        self.kill_all()
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)
        shutil.rmtree(_FILES / self.namespace, ignore_errors=True)


@dataclass(frozen=True)
class Network:
    """Two nodes."""

    nodes: Sequence[Node]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes(addresses: Sequence[str] = IPV4, cable: Cable | None = None) -> Iterator[Network]:
    """Creates two nodes, which know each other by name, and removes them and their processes at the end.

    Skips the test on a machine that cannot create them.

    Args:
        addresses: Of the two nodes, either IPv4 or IPv6.
        cable: What connects the nodes; by default a pair of virtual interfaces.
    """
    tag = secrets.token_hex(3)
    network = Network([Node(f"nest-{tag}-{i}", name) for i, name in enumerate(NAMES)])
    with contextlib.ExitStack() as stack:
        try:
            for node in network.nodes:
                stack.callback(node.remove)
                ip("netns", "add", node.namespace)
                node.write_hosts(dict(zip(NAMES, addresses, strict=True)))
            if cable is None:
                a, b = network.nodes
                a.ip("link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", b.namespace)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to create network namespaces and virtual cables")
        if cable is not None:
            stack.enter_context(cable.between(*(node.namespace for node in network.nodes)))
        for node, address in zip(network.nodes, addresses, strict=True):
            node.ip("link", "set", "lo", "up")
            if ":" in address:
                node.ip("address", "add", f"{address}/64", "dev", INTERFACE, "nodad")
            else:
                node.ip("address", "add", f"{address}/24", "dev", INTERFACE)
            node.ip("link", "set", INTERFACE, "up")
        yield network
