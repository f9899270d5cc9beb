import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import nestguard.rendezvous
from nestguard import GuardError, PeerConfig, Phase
from nestguard.coordinator import Coordinator
from nestguard.follower import Follower
from nestguard.peers import LocalOnly, StopDecision
from nestguard.process import ProcessState
from nestguard.rendezvous import connect_peers
from nestguard.wire import view_from_json, view_to_json
from tests.nestguard.runs import PATIENCE_S
from tests.nestguard.views import view
from tests.ports import free_port

STOP = StopDecision({"cause": "rank 1 is stuck", "processes": [{"name": "rank-1", "is_culprit": True}]}, "a table")


@pytest.fixture
def config() -> PeerConfig:
    return PeerConfig(host="127.0.0.1", port=free_port(), run_id="this run")


@contextlib.contextmanager
def closing(peers: LocalOnly) -> Iterator[LocalOnly]:
    try:
        yield peers
    finally:
        peers.close()


def soon(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def follower_of(config: PeerConfig) -> Follower:
    return Follower(config, view(2, node_rank=1).reading.identity, 5.0)


def test_a_view_survives_the_round_trip_through_json() -> None:
    sent = view(3, Phase.LOADING, 7, 12.5, worker=1, cuts=("a", "b"), state=ProcessState.STOPPED, first_step=None)
    assert view_from_json(json.loads(json.dumps(view_to_json(sent)))) == sent


def test_views_of_a_follower_age_until_the_coordinator_uses_them(config: PeerConfig) -> None:
    with closing(Coordinator(config)) as coordinator, closing(follower_of(config)) as follower:
        assert soon(follower.has_coordinator)
        follower.send_views([view(2, age_s=100, node_rank=1)])
        assert soon(coordinator.views)
        (first,) = coordinator.views()
        time.sleep(0.05)
        (later,) = coordinator.views()
        assert 100 <= first.age_s < later.age_s < 160
        assert first.reading.identity.host == "host-1"


def test_the_coordinator_decides_for_all_nodes_and_receives_their_stacks(config: PeerConfig) -> None:
    with closing(Coordinator(config)) as coordinator, closing(follower_of(config)) as follower:
        assert soon(coordinator.silences)
        coordinator.send_stop(STOP)
        assert soon(follower.decision)
        assert follower.decision() == STOP
        assert STOP.culprits() == {"rank-1"}
        follower.send_dumps({"rank-2.stack.txt": "here"})
        assert coordinator.receive_dumps(PATIENCE_S) == {"rank-2.stack.txt": "here"}


def test_silence_counts_from_the_last_message_on_both_sides(config: PeerConfig) -> None:
    with closing(Coordinator(config)) as coordinator, closing(follower_of(config)) as follower:
        assert soon(coordinator.silences)
        assert soon(follower.silences)
        time.sleep(1)
        assert coordinator.silences()[1].host == "host-1"
        assert coordinator.silences()[1].seconds > 0.9
        assert follower.silences()[0].seconds > 0.9

        def silence_ends() -> bool:
            coordinator.send_views([])
            follower.send_views([])
            return coordinator.silences()[1].seconds < 0.9 and follower.silences()[0].seconds < 0.9

        assert soon(silence_ends)


def test_a_follower_that_says_goodbye_is_not_silent_and_keeps_its_last_views(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Coordinator(config)) as coordinator, closing(follower_of(config)) as follower:
        assert soon(follower.has_coordinator)
        follower.send_views([view(2, Phase.DONE, node_rank=1)])
        assert soon(coordinator.views)
        follower.close()
        assert soon(lambda: not coordinator.silences())
        # The table of the coordinator still shows that the rank is done.
        assert coordinator.views()[0].reading.phase is Phase.DONE
        assert caplog.text == ""


def test_ranks_behind_a_lost_connection_are_unseen_and_a_warning_is_logged(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Coordinator(config)) as coordinator, closing(follower_of(config)) as follower:
        assert soon(follower.has_coordinator)
        follower.send_views([view(2, node_rank=1)])
        assert soon(coordinator.views)
        assert isinstance(follower, Follower)
        assert follower._connection is not None
        follower._connection.close()
        assert soon(lambda: [one.is_unseen and one.ended_s > 0 for one in coordinator.views()] == [True])
        assert not coordinator.silences()
        assert follower.disconnected_s() > 0
        assert soon(lambda: "node 1 (host host-1): lost the connection to its monitor" in caplog.text)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"type": "hello", "run_id": "another run", "node": 1}\n',
        b"[]\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=["not JSON", "another run", "not an object", "nested too deeply"],
)
def test_a_connection_from_outside_the_run_is_closed(config: PeerConfig, data: bytes) -> None:
    with closing(Coordinator(config)) as coordinator, socket.create_connection((config.host, config.port)) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        assert not coordinator.silences()


def test_a_follower_waits_until_the_coordinator_of_its_own_run_listens(config: PeerConfig) -> None:
    earlier = Coordinator(replace(config, run_id="earlier attempt"))
    with closing(follower_of(config)) as follower:
        time.sleep(0.3)
        assert not follower.has_coordinator()
        earlier.close()
        with closing(Coordinator(config)) as coordinator:
            assert soon(follower.has_coordinator)
            assert soon(coordinator.silences)


def message(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


HELLO = message(type="hello", run_id="this run", node=1, host="b")
VIEW = view_to_json(view(2, node_rank=1))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"node": 1},
        {"host": "b"},
        {"node": "first", "host": "b"},
        {"node": None, "host": "b"},
        {"node": float("inf"), "host": "b"},
    ],
)
def test_a_peer_with_an_invalid_first_message_is_disconnected(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, fields: dict[str, object]
) -> None:
    with closing(Coordinator(config)) as coordinator, socket.create_connection((config.host, config.port)) as other:
        other.settimeout(PATIENCE_S)
        other.sendall(message(type="hello", run_id="this run", **fields))
        assert other.recv(1) == b""
        assert "a monitor sent an invalid first message and was disconnected" in caplog.text
        assert not coordinator.silences()
        with closing(follower_of(config)) as follower:
            assert soon(follower.has_coordinator)


@pytest.mark.parametrize(
    "invalid",
    [
        message(type="views"),
        message(type="views", views=[{}]),
        message(type="views", views=[{**VIEW, "age_s": "long"}]),
        message(type="views", views=[{**VIEW, "reading": {**VIEW["reading"], "step": "5"}}]),
        message(type="views", views=[{**VIEW, "reading": {**VIEW["reading"], "cuts": [1]}}]),
        message(type="dumps", dumps=["rank-2.stack.txt"]),
        message(views=[VIEW]),
    ],
)
def test_a_follower_that_sends_an_invalid_message_is_disconnected(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, invalid: bytes
) -> None:
    with closing(Coordinator(config)) as coordinator, socket.create_connection((config.host, config.port)) as other:
        other.sendall(HELLO + invalid)
        assert soon(lambda: "its monitor sent an invalid message and was disconnected" in caplog.text)
        assert soon(lambda: not coordinator.silences())
        assert coordinator.views() == []
        assert coordinator.receive_dumps(0.0) == {}


@pytest.mark.parametrize("invalid", [message(type="stop"), message(type="stop", report={}, table=""), message()])
def test_a_coordinator_that_sends_an_invalid_message_is_disconnected(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, invalid: bytes
) -> None:
    with socket.create_server(("", config.port)) as listener, closing(follower_of(config)) as follower:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(invalid)
            assert soon(lambda: "its monitor sent an invalid message and was disconnected" in caplog.text)
            assert not follower.has_coordinator()
            assert follower.decision() is None


def test_a_port_that_is_taken_leaves_node_0_without_followers(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestguard.rendezvous, "_BIND_TIMEOUT_S", 0.5)
    with socket.create_server(("", config.port)):
        peers = connect_peers(config, view(0).reading.identity, 1.0)
    assert type(peers) is LocalOnly
    assert "each node decides for itself and prints its own table" in caplog.text


def test_a_coordinator_that_cannot_be_reached_leaves_a_follower_on_its_own(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(connect_peers(config, view(2, node_rank=1).reading.identity, 0.0)) as peers:
        assert soon(lambda: "cannot connect to the monitor of node 0" in caplog.text)
        assert not peers.has_coordinator()
        peers.send_views([])
        assert peers.silences() == {}


def test_a_single_node_needs_no_port(tmp_path: Path) -> None:
    assert type(connect_peers(None, view(0).reading.identity, 1.0)) is LocalOnly
    with pytest.raises(GuardError, match=r"peers\.port is 0: expected a port"):
        PeerConfig(host=str(tmp_path), port=0)
