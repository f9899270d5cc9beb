import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nestguard.monitor
from nestguard import PeerConfig, Phase
from nestguard.connect.channel import views_message, views_of
from nestguard.connect.coordinator import Coordinator
from nestguard.connect.follower import Follower
from nestguard.connect.peers import LocalOnly, SharedToken, StopDecision
from nestguard.diagnose.run_diagnosis import diagnose
from nestguard.monitor import connect_peers
from nestguard.observe.view import DevicePosition, ProcessState, ProcessView
from tests.nestguard.connect.connections import (
    LIMITS,
    RawPeer,
    accept,
    closing,
    coordinator_of,
    follower_of,
    join,
    new_config,
    soon,
)
from tests.nestguard.runs import PATIENCE_S, TOKEN
from tests.nestguard.views import view

STOP = StopDecision({"cause": "rank 1 is stuck", "processes": [{"name": "rank-1", "is_culprit": True}]}, "a table")


Pair = tuple[Coordinator, Follower]


@pytest.fixture
def config() -> PeerConfig:
    return new_config()


@pytest.fixture
def pair(config: PeerConfig) -> Iterator[Pair]:
    """A coordinator and a follower that are connected."""
    with closing(coordinator_of(config)) as coordinator, closing(follower_of(config)) as follower:
        assert soon(follower.has_coordinator)
        assert soon(coordinator.silences)
        yield coordinator, follower


def test_views_of_a_follower_age_until_the_coordinator_uses_them(pair: Pair) -> None:
    coordinator, follower = pair
    follower.send_views([view(2, age_s=100, node_rank=1)])
    assert soon(coordinator.views)
    (first,) = coordinator.views()
    time.sleep(0.05)
    (later,) = coordinator.views()
    assert 100 <= first.age_s < later.age_s < 160
    assert first.reading.identity.host == "host-1"


def test_the_coordinator_decides_for_all_nodes_and_receives_their_stacks(pair: Pair) -> None:
    coordinator, follower = pair
    coordinator.send_stop(STOP)
    assert soon(follower.decision)
    assert follower.decision() == STOP
    assert STOP.culprits() == {"rank-1"}
    follower.send_dumps({"rank-2.stack.txt": "here"})
    assert coordinator.receive_dumps(PATIENCE_S) == {"rank-2.stack.txt": "here"}


def test_silence_counts_from_the_last_message_on_both_sides(pair: Pair) -> None:
    coordinator, follower = pair
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
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, follower = pair
    follower.send_views([view(2, Phase.DONE, node_rank=1)])
    assert soon(coordinator.views)
    follower.close()
    assert soon(lambda: not coordinator.silences())
    # The table of the coordinator still shows that the rank is done.
    assert coordinator.views()[0].reading.phase is Phase.DONE
    assert caplog.text == ""


def test_ranks_behind_a_lost_connection_are_unseen_and_a_warning_is_logged(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, follower = pair
    follower.send_views([view(2, node_rank=1)])
    assert soon(coordinator.views)
    assert follower._channel is not None
    follower._call(follower._channel.close)
    assert soon(lambda: [rank.is_unseen and rank.ended_s > 0 for rank in coordinator.views()] == [True])
    assert not coordinator.silences()
    assert follower.disconnected_s() > 0
    assert soon(lambda: "node 1 (host host-1): lost the connection to its monitor" in caplog.text)


def test_a_follower_waits_until_the_coordinator_of_its_own_run_listens(config: PeerConfig) -> None:
    earlier = coordinator_of(config, SharedToken("of an earlier attempt"))
    with closing(follower_of(config)) as follower:
        time.sleep(0.3)
        assert not follower.has_coordinator()
        earlier.close()
        with closing(coordinator_of(config)) as coordinator:
            assert soon(follower.has_coordinator)
            assert soon(coordinator.silences)


FULL = asdict(view(2, node_rank=1))


@pytest.mark.parametrize(
    "invalid",
    [
        {"type": "views"},
        {"type": "views", "views": [{**FULL, "reading": {**FULL["reading"], "phase": 99}}]},
        {"type": "views", "views": [{**FULL, "reading": {**FULL["reading"], "device": [1, 5]}}]},
        {"type": "views", "views": [{**FULL, "other": 1}]},
        {"type": "dumps", "dumps": ["rank-2.stack.txt"]},
    ],
)
def test_a_follower_that_sends_an_invalid_message_is_disconnected(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, invalid: dict[str, Any]
) -> None:
    with closing(coordinator_of(config)) as coordinator, closing(join(config)) as other:
        other.send(invalid)
        assert soon(lambda: "its monitor sent an invalid message and was disconnected" in caplog.text)
        assert soon(lambda: not coordinator.silences())
        assert coordinator.views() == []
        assert coordinator.receive_dumps(0.0) == {}
        assert "lost the connection" not in caplog.text


@pytest.mark.parametrize("invalid", [{"type": "stop", "report": {}, "table": ""}, {}])
def test_a_coordinator_that_sends_an_invalid_message_is_disconnected(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, invalid: dict[str, Any]
) -> None:
    with socket.create_server(("", config.port)) as listener, closing(follower_of(config)) as follower:
        with closing(RawPeer(listener.accept()[0])) as other:
            accept(other, config)
            other.send(invalid)
            assert soon(lambda: "its monitor sent an invalid message and was disconnected" in caplog.text)
            assert not follower.has_coordinator()
            assert follower.decision() is None


VIEWS = st.builds(
    lambda phase, device, **values: view(
        phase=phase, device=None if device is None else DevicePosition(device, 5, 0), **values
    ),
    phase=st.sampled_from(Phase),
    device=st.none() | st.sampled_from([Phase.LOADING, Phase.FORWARD, Phase.COLLECTIVE]),
    rank=st.integers(0, 7),
    step=st.none() | st.integers(0, 9),
    age_s=st.floats(0, 200),
    state=st.sampled_from([state for state in ProcessState if state is not ProcessState.UNSEEN]),
    worker=st.none() | st.integers(0, 2),
    ended_s=st.floats(0, 5),
    cuts=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    world_size=st.just(8),
)


@settings(max_examples=50)
@given(st.lists(VIEWS, max_size=10, unique_by=lambda one: one.name))
def test_the_coordinator_finds_the_same_causes_as_if_it_knew_everything(views: list[ProcessView]) -> None:
    message = json.loads(json.dumps(views_message(views, LIMITS)))
    sent = views_of(message)
    expected, found = diagnose(views, LIMITS), diagnose(sent, LIMITS)
    assert (found.must_stop, found.cause) == (expected.must_stop, expected.cause)
    causes = [
        [(one.name, found) for one, found in zip(seen, result.diagnoses, strict=True) if found.is_culprit]
        for seen, result in ((views, expected), (sent, found))
    ]
    assert causes[0] == causes[1]


def test_a_second_connection_of_a_node_replaces_the_first_one_without_a_warning(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(coordinator_of(config)) as coordinator, closing(follower_of(config)) as first:
        assert soon(first.has_coordinator)
        first.send_views([view(2, step=5, node_rank=1)])
        assert soon(coordinator.views)
        with closing(follower_of(config)) as second:
            assert soon(second.has_coordinator)
            assert soon(lambda: not first.has_coordinator())
            second.send_views([view(2, step=6, node_rank=1)])
            assert soon(lambda: [rank.reading.step for rank in coordinator.views()] == [6])
            assert "its ranks continue" not in caplog.text


def test_a_follower_that_reads_slowly_does_not_delay_the_others(config: PeerConfig) -> None:
    table = os.urandom(4_000_000).hex()  # cannot be compressed to the size of a socket's buffers
    with closing(coordinator_of(config)) as coordinator, closing(join(config)) as slow:
        with closing(follower_of(config, node_rank=2)) as follower:
            assert soon(lambda: len(coordinator.silences()) == 2)
            started = time.monotonic()
            coordinator.send_stop(StopDecision({"cause": "", "processes": []}, table))
            coordinator.send_views([])
            assert time.monotonic() - started < PATIENCE_S / 3
            assert soon(follower.decision)
        received: dict[str, Any] | None = {"type": "keepalive"}
        while received is not None and received["type"] == "keepalive":
            received = slow.receive()
        assert received == {"type": "stop", "report": {"cause": "", "processes": []}, "table": table}


def test_a_port_that_is_taken_leaves_node_0_without_followers(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestguard.monitor, "_BIND_TIMEOUT_S", 0.5)
    with socket.create_server(("", config.port)):
        peers = connect_peers(config, view(0).reading.identity, LIMITS, SharedToken(TOKEN))
    assert type(peers) is LocalOnly
    assert "each node decides for itself and prints its own table" in caplog.text


def test_a_coordinator_that_cannot_be_reached_leaves_a_follower_on_its_own(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(
        connect_peers(
            config, view(2, node_rank=1).reading.identity, replace(LIMITS, first_step_s=0.1), SharedToken(TOKEN)
        )
    ) as peers:
        assert soon(lambda: "cannot connect to the monitor of node 0" in caplog.text)
        assert not peers.has_coordinator()
        peers.send_views([])
        assert peers.silences() == {}
