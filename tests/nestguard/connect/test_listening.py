import contextlib
import logging
import socket
from collections.abc import Iterator

import pytest

from nestguard.connect.listening import _is_chosen_by_nccl, listen
from tests.ports import free_port


@pytest.fixture(autouse=True)
def no_choice_of_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[set[str]]:
    """Listens, and yields the addresses at which it does."""
    listeners = listen(host, port)
    try:
        yield {listener.getsockname()[0] for listener in listeners}
    finally:
        for listener in listeners:
            listener.close()


def answers(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connecting:
        return connecting.connect_ex((address, port)) == 0


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Replaces the resolver, as /etc/hosts or a name server of this machine would answer for any name."""
    resolve = socket.getaddrinfo

    def answer(_host: object, port: int, **options: int) -> list[object]:
        return [info for address in addresses for info in resolve(address, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_it_listens_at_the_address_of_node_0_and_at_no_other() -> None:
    port = free_port()
    with listening("127.0.0.1", port) as addresses:
        assert addresses == {"127.0.0.1"}
        assert answers("127.0.0.1", port)
        assert not answers("127.0.0.2", port)  # every address 127.x.x.x is one of this machine


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_it_listens_at_an_ipv6_address_only_if_that_is_the_one_of_node_0() -> None:
    port = free_port()
    with listening("::1", port) as addresses:
        assert addresses == {"::1"}
        assert answers("::1", port)
        assert not answers("127.0.0.1", port)


def test_it_listens_at_every_address_of_the_name_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "192.0.2.1", "127.0.0.1", "127.0.0.2")
    port = free_port()
    with listening("localhost", port) as addresses:
        assert addresses == {"127.0.0.1", "127.0.0.2"}


def test_a_name_that_means_only_this_machine_opens_the_chosen_interface(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_to(monkeypatch, "127.0.1.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the only interface that every machine has
    port = free_port()
    with listening("gpu-a", port) as addresses:
        assert {"127.0.1.1", "127.0.0.1"} <= addresses <= {"127.0.1.1", "127.0.0.1", "::1"}
        assert not answers("127.0.0.2", port)
    assert not caplog.records


def test_a_name_with_an_address_of_the_wrong_interface_opens_the_chosen_one_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve_to(monkeypatch, "127.0.0.2")
    monkeypatch.setattr(
        "nestguard.connect.listening._is_loopback", lambda _: False
    )  # stands for an address of a network
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with listening("gpu-a", free_port()) as addresses:
        assert {"127.0.0.2", "127.0.0.1"} <= addresses


@pytest.mark.parametrize("address", ["127.0.1.1", "192.0.2.1"])
def test_without_a_chosen_interface_it_listens_everywhere_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    resolve_to(monkeypatch, address)  # an entry in /etc/hosts, or an address that a router translates
    port = free_port()
    with caplog.at_level(logging.WARNING), listening("gpu-a", port):
        assert answers("127.0.0.2", port)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"gpu-a is {address} on node 0")
    assert f"port {port} is open on all of its interfaces. Set GLOO_SOCKET_IFNAME" in record.getMessage()


def test_a_taken_port_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2")
    port = free_port()
    with socket.create_server(("127.0.0.2", port)):
        with pytest.raises(OSError, match="in use"):
            listen("localhost", port)
        assert not answers("127.0.0.1", port)


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("", []),
        ("eth", ["eth0", "eth1"]),
        ("eth0,ib", ["eth0", "ib0"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("^eth,lo", ["ib0"]),
        ("^=eth0,lo", ["eth1", "ib0"]),
    ],
)
def test_the_variable_of_nccl_chooses_interfaces_as_nccl_does(choice: str, chosen: list[str]) -> None:
    assert [name for name in ("lo", "eth0", "eth1", "ib0") if _is_chosen_by_nccl(name, choice)] == chosen


def test_a_port_that_is_taken_on_any_interface_is_an_error_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_to(monkeypatch, "192.0.2.1")
    port = free_port()
    with socket.create_server(("", port)), pytest.raises(OSError, match="in use"):
        listen("gpu-a", port)
    assert not caplog.records
