import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

import nestguard.connect.coordinator
from nestguard import PeerConfig, new_token
from nestguard.connect.coordinator import Coordinator
from nestguard.connect.peers import Handshake, SharedToken, Side
from tests.nestguard.connect.connections import (
    LIMITS,
    RawPeer,
    accept,
    closing,
    connect,
    coordinator_of,
    follower_of,
    hello,
    new_config,
    soon,
)
from tests.nestguard.runs import PATIENCE_S, TOKEN
from tests.nestguard.views import view

HANDSHAKE = Handshake("this run", 1, "host-1", "nonce a", "nonce b")
STOP = {"type": "stop", "report": {"cause": "", "processes": []}, "table": ""}


@pytest.fixture
def config() -> PeerConfig:
    return new_config()


@pytest.fixture
def coordinator(config: PeerConfig) -> Iterator[Coordinator]:
    with closing(coordinator_of(config)) as started:
        yield started


def is_closed(stranger: socket.socket) -> bool:
    """Waits until the other side has closed the connection."""
    stranger.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while stranger.recv(4096):
            pass
    return True


def assert_works(config: PeerConfig, coordinator: Coordinator) -> None:
    """Asserts that the monitors of the run still connect and exchange messages."""
    with closing(follower_of(config)) as follower:
        assert soon(follower.has_coordinator)
        follower.send_views([view(2, node_rank=1)])
        assert soon(lambda: [rank.name for rank in coordinator.views()] == ["rank-2"])
        assert not any(rank.is_unseen for rank in coordinator.views())


@pytest.mark.parametrize(
    "changed", [{"run_id": "b"}, {"node_rank": 2}, {"host": "b"}, {"coordinator_nonce": "c"}, {"follower_nonce": "c"}]
)
def test_a_proof_depends_on_the_token_the_side_and_all_that_was_said(changed: dict[str, object]) -> None:
    proof = HANDSHAKE.proof(b"token", Side.FOLLOWER)
    assert HANDSHAKE.is_proof(proof, b"token", Side.FOLLOWER)
    assert not HANDSHAKE.is_proof(proof, b"other", Side.FOLLOWER)
    assert not HANDSHAKE.is_proof(proof, b"token", Side.COORDINATOR)
    assert not HANDSHAKE._replace(**changed).is_proof(proof, b"token", Side.FOLLOWER)  # type: ignore[arg-type]


def test_the_token_is_that_of_the_environment_or_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESTGUARD_TOKEN", "from the launcher")
    assert new_token() == "from the launcher"
    monkeypatch.delenv("NESTGUARD_TOKEN")
    assert len(new_token()) == 64
    assert new_token() != new_token()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 4097),
        struct.pack("!I", 5) + b"hello",
        struct.pack("!I", 2) + b"{}",
        struct.pack("!I", 4000) + b"[" * 4000,
    ],
    ids=["HTTP", "too large", "not JSON", "empty", "nested too deeply"],
)
def test_a_stranger_is_logged_once_and_disconnected(
    config: PeerConfig, coordinator: Coordinator, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    for _ in range(2):
        with socket.create_connection((config.host, config.port)) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
            assert is_closed(stranger)
    assert_works(config, coordinator)
    assert caplog.text.count("refused a connection from 127.0.0.1") == 1


def test_a_stranger_that_sends_half_a_message_or_nothing_is_disconnected_after_some_time(
    config: PeerConfig,
    coordinator: Coordinator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nestguard.connect.coordinator, "HANDSHAKE_S", 0.5)
    with (
        socket.create_connection((config.host, config.port)) as silent,
        socket.create_connection((config.host, config.port)) as half,
    ):
        half.sendall(struct.pack("!I", 100) + b'{"type": "hel')
        assert is_closed(silent)
        assert is_closed(half)
    assert soon(lambda: caplog.text.count("refused a connection from 127.0.0.1") == 1)
    monkeypatch.undo()
    assert_works(config, coordinator)


def test_many_silent_strangers_do_not_keep_a_monitor_out(config: PeerConfig, coordinator: Coordinator) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((config.host, config.port))) for _ in range(300)]
        assert_works(config, coordinator)
        assert is_closed(strangers[0])


@pytest.mark.parametrize("token", ["", "the token of another run"])
def test_a_monitor_with_another_token_is_refused_by_the_coordinator(
    config: PeerConfig, coordinator: Coordinator, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    with closing(connect(config)) as stranger:
        challenge = stranger.receive()
        assert challenge is not None
        stranger.send(hello(config, challenge["nonce"], token)[0])
        assert stranger.receive() is None
    assert not coordinator.silences()
    assert soon(lambda: "it did not prove that it belongs to this run" in caplog.text)


@pytest.mark.usefixtures("coordinator")
def test_a_recorded_first_message_is_of_no_use(config: PeerConfig) -> None:
    with closing(connect(config)) as first, closing(connect(config)) as second:
        challenge = first.receive()
        assert challenge is not None
        assert second.receive() is not None
        message, _ = hello(config, challenge["nonce"])
        first.send(message)
        second.send(message)
        assert first.receive() is not None
        assert second.receive() is None


@pytest.mark.parametrize("token", [None, "the token of another run"], ids=["no proof", "wrong proof"])
def test_a_follower_does_not_obey_who_cannot_prove_to_belong_to_the_run(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, token: str | None
) -> None:
    with socket.create_server(("", config.port)) as listener, closing(follower_of(config)) as follower:
        for _ in range(2):
            with closing(RawPeer(listener.accept()[0])) as stranger:
                if token is None:
                    stranger.send({"type": "challenge", "nonce": "a"})
                    assert stranger.receive() is not None
                else:
                    accept(stranger, config, token)
                stranger.send(STOP)
                assert stranger.receive() is None
            assert not follower.has_coordinator()
        assert follower.decision() is None
        assert caplog.text.count("did not prove that it belongs to this run") == 1


def test_a_follower_is_accepted_as_soon_as_both_sides_know_the_token(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    token = SharedToken()
    with closing(coordinator_of(config, token)) as coordinator, closing(follower_of(config)) as follower:
        time.sleep(0.5)
        assert not follower.has_coordinator()
        token.set(TOKEN)
        assert soon(follower.has_coordinator)
        assert soon(coordinator.silences)
    assert "refused" not in caplog.text


def test_a_follower_without_a_token_decides_for_itself(
    config: PeerConfig, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(follower_of(config, SharedToken(), limits=replace(LIMITS, first_step_s=0.1))) as follower:
        assert soon(lambda: "the token of the run is not known" in caplog.text)
        assert not follower.has_coordinator()
    assert not coordinator.silences()
