"""What happens to a run on two nodes when their network fails or is unusual: the table of docs/many-gpus.md."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import MessyCorpora
from tests.network.cable import Cable
from tests.network.nodes import INTERFACE, IPV4, IPV6, Network, two_nodes
from tests.network.runs import GATE_STEP, LIMITS, STEPS, Run, wait_for

pytestmark = [pytest.mark.network, pytest.mark.multiprocess, pytest.mark.slow]

WRONG_ADDRESS = "172.17.0.1"

SHORT_START = {**LIMITS, "first_step_s": 60}
"""After the rank of one node has failed, the other one waits for it until the limit of its stall guard."""


@pytest.fixture
def network() -> Iterator[Network]:
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(messy_corpora: MessyCorpora, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run over IPv4 that nothing disturbs."""
    with two_nodes() as network:
        run = Run(tmp_path_factory.mktemp("undisturbed") / "run", messy_corpora, network)
        finish(run)
    assert "stall guard" not in run.output()
    assert "Traceback" not in run.output()
    return run


def finish(run: Run, disturb: Callable[[], None] = lambda: None) -> None:
    """Runs to the end, with a disturbance between two steps; nothing may fail."""
    processes = run.start()
    try:
        run.wait_at_gate()
        disturb()
    finally:
        run.open_gate()
        codes = run.finish(processes)
    assert codes == [0, 0], run.output()
    assert run.last_step() == STEPS
    assert not run.tables()


def pull_cable(network: Network) -> None:
    network.nodes[1].ip("link", "set", INTERFACE, "down")


def plug_cable_in(network: Network) -> None:
    network.nodes[1].ip("link", "set", INTERFACE, "up")


@pytest.mark.smoke
def test_a_link_that_is_down_for_5_s_changes_nothing(
    network: Network, messy_corpora: MessyCorpora, tmp_path: Path, undisturbed: Run
) -> None:
    run = Run(tmp_path / "run", messy_corpora, network)

    def disturb() -> None:
        pull_cable(network)
        run.open_gate()  # the ranks now try to make a step
        time.sleep(5)
        assert run.last_step() == GATE_STEP
        plug_cable_in(network)

    finish(run, disturb)
    assert "no message from node" not in run.output()
    assert run.state() == undisturbed.state()


def disconnect_until_ended(run: Run) -> None:
    """Pulls the cable between two steps, and waits until the stall guards of both nodes have ended their ranks."""
    pull_cable(run.network)
    run.open_gate()
    for node in (0, 1):
        message = f"stall guard: ending all ranks of node-{'ab'[node]} with exit code 44"
        wait_for(lambda node=node, message=message: message in run.outputs()[node], run.output)  # type: ignore[misc]


def assert_each_node_has_named_the_other(run: Run) -> None:
    for output, other in zip(run.outputs(), ("node 1 (host node-b)", "node 0 (host node-a)"), strict=True):
        found = re.search(rf"stall guard: no message from {re.escape(other)} for (\d+) s", output)
        assert found, output
        # At the limit, or when a rank of this node has made no progress for as long; a busy machine gets longer.
        assert LIMITS["node_silence_s"] <= int(found[1]) < 3 * LIMITS["node_silence_s"]
    assert len(run.tables()) == 2
    assert all("silent: no message from the monitor of its node" in table for table in run.tables())


def test_a_link_that_returns_after_the_guards_have_ended_the_run_lets_torchrun_restart_it_exactly(
    network: Network, messy_corpora: MessyCorpora, tmp_path: Path, undisturbed: Run
) -> None:
    run = Run(tmp_path / "run", messy_corpora, network)
    processes = run.start()
    try:
        run.wait_at_gate()
        disconnect_until_ended(run)
        plug_cable_in(network)
    finally:
        codes = run.finish(processes)
    assert codes == [0, 0], run.output()
    assert_each_node_has_named_the_other(run)
    assert run.state() == undisturbed.state()


def test_a_link_that_stays_down_ends_torchrun_on_both_nodes_and_a_new_start_is_exact(
    network: Network, messy_corpora: MessyCorpora, tmp_path: Path, undisturbed: Run
) -> None:
    for node in network.nodes:
        node.set_kernel_option("ipv4/tcp_retries2", 6)  # TCP gives up after 25 s instead of 15 minutes
    run = Run(tmp_path / "run", messy_corpora, network)
    processes = run.start()
    try:
        run.wait_at_gate()
        disconnect_until_ended(run)
    finally:
        codes = run.finish(processes)
    assert codes == [1, 1], run.output()
    assert_each_node_has_named_the_other(run)
    assert run.last_step() == GATE_STEP
    plug_cable_in(network)
    assert run.finish(run.start()) == [0, 0], run.output()
    assert run.state() == undisturbed.state()


@pytest.mark.parametrize("cable", [Cable(lost=0.05), Cable(delay_s=0.2)], ids=["5 % loss", "200 ms delay"])
def test_a_lossy_or_slow_network_gives_equal_results(
    messy_corpora: MessyCorpora, tmp_path: Path, undisturbed: Run, cable: Cable
) -> None:
    with two_nodes(cable=cable) as network:
        run = Run(tmp_path / "run", messy_corpora, network)
        finish(run)
    assert "stall guard" not in run.output()
    assert run.state() == undisturbed.state()


@pytest.mark.parametrize("endpoint", ["node-a:29400", "[fd77::1]:29400"])
def test_a_network_with_ipv6_only_gives_equal_results(
    messy_corpora: MessyCorpora, tmp_path: Path, undisturbed: Run, endpoint: str
) -> None:
    with two_nodes(IPV6) as network:
        run = Run(tmp_path / "run", messy_corpora, network, endpoint=endpoint)
        finish(run)
    assert "stall guard" not in run.output()
    assert run.state() == undisturbed.state()


def put_another_interface_first(network: Network) -> None:
    """Gives both nodes an interface that leads nowhere, with the same address, which their own names stand for."""
    for i, node in enumerate(network.nodes):
        node.ip("link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
        node.ip("address", "add", f"{WRONG_ADDRESS}/16", "dev", "docker0")
        for interface in ("docker0", "docker1"):
            node.ip("link", "set", interface, "up")
        names = {other.name: address for other, address in zip(network.nodes, IPV4, strict=True)}
        node.write_hosts({**names, network.nodes[i].name: WRONG_ADDRESS})


def test_gloo_socket_ifname_chooses_the_interface_of_ranks_and_of_the_guard(
    network: Network, messy_corpora: MessyCorpora, tmp_path: Path, undisturbed: Run
) -> None:
    put_another_interface_first(network)
    run = Run(tmp_path / "run", messy_corpora, network, environment={"GLOO_SOCKET_IFNAME": INTERFACE})
    finish(run)
    assert "each node decides for itself" not in run.output()
    assert run.state() == undisturbed.state()


def test_a_name_of_node_0_without_an_address_is_one_line_and_ends_both_nodes(
    network: Network, messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    a, b = network.nodes
    b.write_hosts({b.name: IPV4[1]})
    run = Run(tmp_path / "run", messy_corpora, network, endpoint=f"{IPV4[0]}:29400", max_restarts=0, limits=SHORT_START)
    assert run.finish(run.start()) == [1, 1]
    found = [line for line in run.outputs()[1].splitlines() if line.startswith("error: ")]
    assert len(found) == 1, run.output()
    assert f"the name of node 0, '{a.name}', cannot be resolved on {b.name} within 10 s" in found[0]
    assert "cannot be retrieved (gai error" not in run.output()


def test_local_addr_replaces_the_name_of_node_0(
    network: Network, messy_corpora: MessyCorpora, tmp_path: Path, undisturbed: Run
) -> None:
    network.nodes[1].write_hosts({network.nodes[1].name: IPV4[1]})
    run = Run(tmp_path / "run", messy_corpora, network, endpoint=f"{IPV4[0]}:29400", local_addresses=IPV4)
    finish(run)
    assert run.state() == undisturbed.state()
