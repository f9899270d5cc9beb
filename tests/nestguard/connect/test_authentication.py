import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

import nestguard.connect.server
from nestguard import PeerConfig, new_token
from nestguard.connect.authentication import AuthenticationError, Handshake, Seal, SharedToken, Side
from nestguard.connect.coordinator import Coordinator
from nestguard.connect.follower import Connection, Follower
from tests.nestguard.connect.raw_peers import accept, authenticate, connect, hello, join
from tests.nestguard.connect.test_peers import closing, coordinator_of, follower_of, soon
from tests.nestguard.runs import PATIENCE_S, TOKEN
from tests.nestguard.views import view
from tests.ports import free_port

HANDSHAKE = Handshake("this run", 1, "host-1", "nonce a", "nonce b")


@pytest.fixture
def config() -> PeerConfig:
    return PeerConfig(host="127.0.0.1", port=free_port(), run_id="this run")


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


@pytest.mark.parametrize("proof", [None, 5, "", "é", "\ud800", "00" * 32])
def test_anything_else_is_not_a_proof(proof: object) -> None:
    assert not HANDSHAKE.is_proof(proof, b"token", Side.FOLLOWER)


def test_a_sealed_message_cannot_be_changed_repeated_or_left_out() -> None:
    sending = Seal(b"key")
    first, second = sending.next_mac(b"first"), sending.next_mac(b"second")
    Seal(b"key").check_next(first, b"first")
    for receiving, mac, payload in [
        (Seal(b"key"), first, b"First"),
        (Seal(b"key"), second, b"second"),
        (Seal(b"other"), first, b"first"),
    ]:
        with pytest.raises(AuthenticationError):
            receiving.check_next(mac, payload)
    receiving = Seal(b"key")
    receiving.check_next(first, b"first")
    with pytest.raises(AuthenticationError):
        receiving.check_next(first, b"first")


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
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 2) + b"{}",
        struct.pack("!I", 4000) + b"[" * 4000,
        struct.pack("!I", 24) + b'{"run_id": "this run"}  ',
        os.urandom(1 << 20),
    ],
    ids=["HTTP", "too large", "not JSON", "no object", "empty", "nested too deeply", "incomplete", "random bytes"],
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


def test_a_stranger_that_sends_half_a_frame_or_nothing_is_disconnected_after_some_time(
    config: PeerConfig,
    coordinator: Coordinator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nestguard.connect.server, "HANDSHAKE_S", 0.5)
    with (
        socket.create_connection((config.host, config.port)) as silent,
        socket.create_connection((config.host, config.port)) as half,
    ):
        half.sendall(struct.pack("!I", 100) + b'{"type": "hel')
        assert_works(config, coordinator)
        assert is_closed(silent)
        assert is_closed(half)
    assert caplog.text.count("refused a connection from 127.0.0.1") == 1
    assert coordinator.silences() or coordinator.views()


def test_many_silent_strangers_do_not_keep_a_monitor_out(config: PeerConfig, coordinator: Coordinator) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((config.host, config.port)))
        assert_works(config, coordinator)
        assert soon(lambda: len(coordinator._server._peers) < 100)


@pytest.mark.parametrize("token", ["", "the token of another run"])
def test_a_monitor_with_another_token_is_refused_by_the_coordinator(
    config: PeerConfig, coordinator: Coordinator, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    with closing(connect(config, PATIENCE_S)) as stranger:
        challenge = stranger.receive()
        assert challenge is not None
        stranger.send(hello(config, challenge["nonce"], token)[0])
        assert stranger.receive() is None
    assert not coordinator.silences()
    assert soon(lambda: "it did not prove that it belongs to this run" in caplog.text)


@pytest.mark.usefixtures("coordinator")
def test_a_recorded_first_message_is_of_no_use(config: PeerConfig, caplog: pytest.LogCaptureFixture) -> None:
    with closing(connect(config, PATIENCE_S)) as first, closing(connect(config, PATIENCE_S)) as second:
        challenge = first.receive()
        assert challenge is not None
        assert second.receive() is not None
        message, _ = hello(config, challenge["nonce"])
        first.send(message)
        second.send(message)
        assert first.receive() is not None
        assert second.receive() is None
    assert soon(lambda: "it did not prove that it belongs to this run" in caplog.text)


def test_a_message_without_its_seal_is_not_obeyed(
    config: PeerConfig, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(join(config, PATIENCE_S)) as other:
        authenticate(other, Handshake("another run", 1, "b", "c", "d"), Side.FOLLOWER)
        other.send({"type": "dumps", "dumps": {"rank-2.stack.txt": "here"}})
        assert soon(lambda: "a message that the other monitor did not send" in caplog.text)
        assert soon(lambda: not coordinator.silences())
    assert coordinator.receive_dumps(0.0) == {}


@pytest.mark.parametrize("token", ["", "the token of another run"])
def test_a_follower_does_not_obey_who_cannot_prove_to_belong_to_the_run(
    config: PeerConfig, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    stop = {"type": "stop", "report": {"cause": "", "processes": []}, "table": ""}
    with socket.create_server(("", config.port)) as listener, closing(follower_of(config)) as follower:
        for _ in range(2):
            accepted, _ = listener.accept()
            with closing(Connection(accepted)) as stranger:
                accept(stranger, token)
                stranger.send(stop)
                assert stranger.receive() is None
            assert not follower.has_coordinator()
        assert follower.decision() is None
        assert caplog.text.count("did not prove that it belongs to this run") == 1


def test_a_follower_does_not_obey_a_proof_that_is_missing(config: PeerConfig, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("", config.port)) as listener, closing(follower_of(config)) as follower:
        accepted, _ = listener.accept()
        with closing(Connection(accepted)) as stranger:
            stranger.send({"type": "challenge", "nonce": "a"})
            assert stranger.receive() is not None
            stranger.send({"type": "stop", "report": {"cause": "", "processes": []}, "table": ""})
            assert stranger.receive() is None
        assert follower.decision() is None
        assert soon(lambda: "did not prove that it belongs to this run" in caplog.text)


def test_a_follower_is_accepted_as_soon_as_both_sides_know_the_token(
    config: PeerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = SharedToken(), SharedToken(TOKEN)
    identity = view(2, node_rank=1).reading.identity
    with (
        closing(Coordinator(config, view(0, world_size=4).reading.identity, tokens[0])) as coordinator,
        closing(Follower(config, identity, PATIENCE_S, tokens[1])) as follower,
    ):
        time.sleep(0.5)
        assert not follower.has_coordinator()
        tokens[0].set(TOKEN)
        assert soon(follower.has_coordinator)
        assert soon(coordinator.silences)
    assert "refused" not in caplog.text


def test_a_follower_without_a_token_decides_for_itself(
    config: PeerConfig, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Follower(config, view(2, node_rank=1).reading.identity, 0.1, SharedToken())) as follower:
        assert soon(lambda: "the token of the run is not known" in caplog.text)
        assert not follower.has_coordinator()
    assert not coordinator.silences()


def test_a_monitor_of_another_run_is_refused_and_told_apart_in_the_log(
    config: PeerConfig, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(follower_of(replace(config, run_id="another run"))) as other:
        assert soon(lambda: "it belongs to another run" in caplog.text)
        assert not other.has_coordinator()
    assert not coordinator.silences()
