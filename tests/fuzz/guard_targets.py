"""Targets of the stall guard: heartbeat files, and what monitors receive from each other."""

import json
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from nestguard import Heartbeat, Identity, Phase, read_heartbeat
from nestguard.connect.authentication import AuthenticationError, Handshake, Seal, Side
from nestguard.connect.frames import SIZE, Codec, InvalidFrameError, pack
from nestguard.connect.messages import INVALID_MESSAGE_ERRORS, NodeRanks, UpdateEncoder, encode_details, view_from_json
from nestguard.observe.collectives import parse_trace
from tests.fuzz.inputs import VALUES, altered, mutated
from tests.fuzz.target import Target
from tests.nestguard.views import view

_TRACE = {
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": 3, "last_started_collective": 2, "last_completed_collective": 1}},
    "entries": [
        {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 3, "profiling_name": "nccl:all_reduce"}
    ],
}


@cache
def _heartbeat() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        identity = Identity(rank=0, local_rank=0, node_rank=0, world_size=2, local_world_size=2, host="a")
        heartbeat = Heartbeat(Path(folder), identity)
        heartbeat.beat(Phase.FORWARD, 3, 1, ["cut-1", "cut-2"])
        heartbeat.note_wait("cut-3", "s3://speech/audio.tar")
        heartbeat.finish(Phase.FAILED, "an error")
        return (Path(folder) / "rank-0.beat").read_bytes()


def _read_heartbeat(content: bytes, folder: Path) -> bool:
    path = folder / "rank-0.beat"
    path.write_bytes(content)
    return read_heartbeat(path) is not None


def _messages() -> list[dict[str, Any]]:
    views = [view(0, Phase.FORWARD, 3, cuts=("a",)), view(1, Phase.LOADING, 4, worker=0), view(1, Phase.DONE, 4)]
    encoder = UpdateEncoder()
    first = encoder.encode(views, 1.0)
    second = encoder.encode([view(0, Phase.BACKWARD, 4)], 2.0)
    details = encode_details(views, time.monotonic())
    return [json.loads(json.dumps(message)) for message in (first, second, details)]


def _apply_message(message: dict[str, Any], _: Path) -> bool:
    """Does with a message of an authenticated monitor what the coordinator does."""
    codec = Codec()
    found = codec.message(pack(message))
    if "views" in found:
        return bool([view_from_json(data) for data in found["views"]])
    ranks = NodeRanks()
    ranks.apply(_messages()[0], 0.0)
    ranks.apply(found, 1.0)
    return bool(list(ranks.views(2.0)))


def _read_frame(received: tuple[bytes, bool], _: Path) -> bool:
    content, is_authenticated = received
    codec = Codec()
    if is_authenticated:
        codec.authenticate(Seal(b"1"), Seal(b"2"))
    size = codec.frame_size(content)
    return bool(size and codec.message(content[SIZE.size :]))


def _frames() -> st.SearchStrategy[tuple[bytes, bool]]:
    sender = Codec()
    seeds = [sender.frame(pack(message)) for message in (*_messages(), {"type": "stacks", "text": "x" * 50000})]
    sender.authenticate(Seal(b"2"), Seal(b"1"))
    seeds.append(sender.frame(pack({"type": "hello"})))
    deep = pack({"type": "hello"}).replace(b'"hello"', b"[" * 3000)
    return st.tuples(mutated(*seeds, SIZE.pack(len(deep)) + deep), st.booleans())


def _check_proof(proof: object, _: Path) -> bool:
    handshake = Handshake("run", 0, "host", "1", "2")
    assert not handshake.is_proof(proof, b"token", Side.FOLLOWER)
    return False


def _read_trace(content: bytes, _: Path) -> bool:
    return bool(parse_trace(content.decode(errors="replace")))


_INVALID = (InvalidFrameError, AuthenticationError, *INVALID_MESSAGE_ERRORS)
GUARD_TARGETS: dict[str, Target] = {
    "heartbeat file": Target(lambda: mutated(_heartbeat()), _read_heartbeat, (), num_tested=300),
    "guard frame": Target(_frames, _read_frame, _INVALID, num_tested=200),
    "guard message": Target(lambda: altered(_messages()), _apply_message, _INVALID, num_tested=200),
    "guard proof": Target(lambda: VALUES, _check_proof, (), num_tested=50),
    "trace of collectives": Target(
        lambda: st.one_of(
            mutated(json.dumps(_TRACE).encode()), altered([_TRACE]).map(lambda t: json.dumps(t).encode())
        ),
        _read_trace,
        INVALID_MESSAGE_ERRORS,
        num_tested=100,
    ),
}
