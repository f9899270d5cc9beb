"""Targets of the stall guard: heartbeat files, and what monitors receive from each other."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from nestguard import Heartbeat, Identity, Phase, StallLimits, read_heartbeat
from nestguard.connect.channel import (
    MAX_HANDSHAKE_BYTES,
    SIZE_BYTES,
    InvalidMessageError,
    pack,
    unpack,
    views_message,
    views_of,
)
from nestguard.connect.peers import Handshake, Side
from nestguard.observe.view import INVALID_VALUE_ERRORS
from tests.fuzz.inputs import VALUES, altered, mutated
from tests.fuzz.target import Target
from tests.nestguard.views import view


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
    views = [view(0, Phase.FORWARD, 3), view(1, Phase.LOADING, 4, 500, cuts=("a",)), view(1, worker=0, cuts=("b",))]
    messages = views_message(views, StallLimits()), {"type": "goodbye"}
    return [json.loads(json.dumps(message)) for message in messages]


def _read_views(message: dict[str, Any], _: Path) -> bool:
    return bool(views_of(message))


def _read_message(content: bytes, _: Path) -> bool:
    return bool(unpack(content, MAX_HANDSHAKE_BYTES))


def _packed() -> st.SearchStrategy[bytes]:
    seeds = [pack(message)[SIZE_BYTES:] for message in (*_messages(), {"type": "stacks", "text": "x" * 50000})]
    return mutated(*seeds, b'{"type":' + b"[" * 3000)


def _check_proof(proof: object, _: Path) -> bool:
    handshake = Handshake("run", 0, "host", "1", "2")
    assert not handshake.is_proof(proof, b"token", Side.FOLLOWER)
    return False


GUARD_TARGETS: dict[str, Target] = {
    "heartbeat file": Target(lambda: mutated(_heartbeat()), _read_heartbeat, (), num_tested=150),
    "guard message": Target(_packed, _read_message, (InvalidMessageError,), num_tested=100),
    "guard views": Target(lambda: altered(_messages()), _read_views, INVALID_VALUE_ERRORS, num_tested=100),
    "guard proof": Target(lambda: VALUES, _check_proof, (), num_tested=50),
}
