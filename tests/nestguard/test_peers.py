import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import nestguard.peers
from nestguard import GuardError, PeerConfig, Phase
from nestguard.peers import Coordinator, Follower, LocalOnly, Stop, meet
from nestguard.process import ProcessState
from nestguard.wire import view_from_json, view_to_json
from tests.nestguard.views import view
from tests.ports import free_port

STOP = Stop({"cause": "rank 1 is stuck", "processes": [{"name": "rank-1", "is_culprit": True}]}, "a table")


@pytest.fixture
def config() -> PeerConfig:
    return PeerConfig(host="127.0.0.1", port=free_port(), run_id="ours")


@contextlib.contextmanager
def closing(peers: LocalOnly) -> Iterator[LocalOnly]:
    try:
        yield peers
    finally:
        peers.close()


def soon(is_so: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 45  # a busy machine may be slow; a test that passes does not wait for it
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(is_so())


def spoke_of(config: PeerConfig) -> Follower:
    return Follower(config, view(2, node_rank=1).reading.identity, 5.0)


def test_a_view_comes_back_as_it_was_told_but_for_the_clock() -> None:
    told = view(3, Phase.LOADING, 7, 12.5, worker=1, cuts=("a", "b"), state=ProcessState.STOPPED, first_step=None)
    assert view_from_json(json.loads(json.dumps(view_to_json(told)))) == told


def test_what_a_node_sees_grows_older_on_the_way(config: PeerConfig) -> None:
    with closing(Coordinator(config)) as hub, closing(spoke_of(config)) as spoke:
        assert soon(spoke.leaves_judging)
        spoke.tell([view(2, age_s=100, node_rank=1)])
        assert soon(hub.views)
        (first,) = hub.views()
        time.sleep(0.05)
        (later,) = hub.views()
        assert 100 <= first.age_s < later.age_s < 160
        assert first.reading.identity.host == "host-1"


def test_node_0_decides_for_all_and_is_given_their_stacks(config: PeerConfig) -> None:
    with closing(Coordinator(config)) as hub, closing(spoke_of(config)) as spoke:
        assert soon(hub.silences)
        hub.stop(STOP)
        assert soon(spoke.decision)
        assert spoke.decision() == STOP
        assert STOP.culprits() == {"rank-1"}
        spoke.send_texts({"rank-2.stack.txt": "here"})
        assert hub.texts(45) == {"rank-2.stack.txt": "here"}


def test_silence_is_counted_from_the_last_word_on_both_sides(config: PeerConfig) -> None:
    with closing(Coordinator(config)) as hub, closing(spoke_of(config)) as spoke:
        assert soon(hub.silences)
        assert soon(spoke.silences)
        time.sleep(1)
        assert hub.silences()[1].host == "host-1"
        assert hub.silences()[1].seconds > 0.9
        assert spoke.silences()[0].seconds > 0.9

        def both_are_heard_again() -> bool:
            hub.tell([])
            spoke.tell([])
            return hub.silences()[1].seconds < 0.9 and spoke.silences()[0].seconds < 0.9

        assert soon(both_are_heard_again)


def test_who_says_goodbye_is_no_longer_waited_for(config: PeerConfig, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Coordinator(config)) as hub, closing(spoke_of(config)) as spoke:
        assert soon(spoke.leaves_judging)
        spoke.tell([view(2, Phase.DONE, node_rank=1)])
        assert soon(hub.views)
        spoke.close()
        assert soon(lambda: not hub.silences())
        assert hub.views()[0].reading.phase is Phase.DONE  # others may be told that it is done
        assert caplog.text == ""


def test_who_hangs_up_is_out_of_sight_with_a_warning(config: PeerConfig, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Coordinator(config)) as hub, closing(spoke_of(config)) as spoke:
        assert soon(spoke.leaves_judging)
        spoke.tell([view(2, node_rank=1)])
        assert soon(hub.views)
        assert isinstance(spoke, Follower)
        assert spoke._line is not None
        spoke._line.close()
        assert soon(lambda: [one.is_unseen and one.ended_s > 0 for one in hub.views()] == [True])
        assert not hub.silences()
        assert spoke.out_of_touch_s() > 0
        assert soon(lambda: "the monitor of node 1 (host-1) has hung up" in caplog.text)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b'{"type": "hello", "run_id": "other", "node": 1}\n', b"[]\n"]
)
def test_strangers_are_not_listened_to(config: PeerConfig, data: bytes) -> None:
    with closing(Coordinator(config)) as hub, socket.create_connection((config.host, config.port)) as stranger:
        stranger.settimeout(45)
        stranger.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        assert not hub.silences()


def test_a_node_waits_for_the_monitor_of_its_own_attempt(config: PeerConfig) -> None:
    before = Coordinator(replace(config, run_id="before"))
    with closing(spoke_of(config)) as spoke:
        time.sleep(0.3)
        assert not spoke.leaves_judging()
        before.close()
        with closing(Coordinator(config)) as hub:
            assert soon(spoke.leaves_judging)
            assert soon(hub.silences)


def test_a_node_that_is_not_understood_is_left_out(config: PeerConfig, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Coordinator(config)) as hub, socket.create_connection((config.host, config.port)) as other:
        other.sendall(
            b'{"type": "hello", "run_id": "ours", "node": 1, "host": "b"}\n{"type": "views", "views": [{}]}\n'
        )
        assert soon(lambda: "is not understood" in caplog.text)
        assert soon(lambda: not hub.silences())


def test_a_port_that_is_taken_leaves_each_node_on_its_own(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestguard.peers, "_BIND_S", 0.5)
    with socket.create_server(("", config.port)):
        peers = meet(config, view(0).reading.identity, 1.0)
    assert type(peers) is LocalOnly
    assert "each node has a table of its own" in caplog.text


def test_a_node_0_that_cannot_be_reached_leaves_each_node_on_its_own(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(meet(config, view(2, node_rank=1).reading.identity, 0.0)) as peers:
        assert soon(lambda: "cannot be reached, each node is on its own" in caplog.text)
        assert not peers.leaves_judging()
        peers.tell([])
        assert peers.silences() == {}


def test_one_node_needs_no_port(tmp_path: Path) -> None:
    assert type(meet(None, view(0).reading.identity, 1.0)) is LocalOnly
    with pytest.raises(GuardError, match=r"peers\.port is 0: expected a port"):
        PeerConfig(host=str(tmp_path), port=0)
