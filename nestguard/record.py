"""The file that holds one process's heartbeat: its layout, and reading it.

    0       magic, version, whether it is armed, pid, start tick, identity as JSON
    8192    the live record, twice: the writer alternates, so that one of them is whole wherever it was stopped
    12288   ids of cuts, twice, for the same reason
    20480   how it ended

Ranks write and the monitor reads, with no lock. A record begins and ends with its number and is used if they agree.
"""

import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

MAGIC = b"NESTBEAT"
VERSION = 2
HEADER = struct.Struct("=8sIIqqI")
ARMED = struct.Struct("=I")
ARMED_AT = 12
# Native order and alignment: several times as fast to pack as a stated order.
RECORD = struct.Struct("@12q")
RECORDS_AT = (8192, 8192 + 256)
TEXT_SIZE = 4096
CUTS_AT = (12288, 12288 + TEXT_SIZE)
DETAIL_AT = 20480
FILE_SIZE = DETAIL_AT + TEXT_SIZE
UNSET = -1
_TRIES = 8


class Phase(IntEnum):
    """What a process is doing, in the order of a step; the last three are final."""

    STARTING = 0
    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    COLLECTIVE = 4
    OPTIMIZER = 5
    VALIDATION = 6
    CHECKPOINT = 7
    FINISHING = 8
    DONE = 9
    FAILED = 10
    LEAVING = 11
    """Asked to leave, as by SIGTERM: it may do so at any time."""

    @property
    def is_final(self) -> bool:
        """Whether nothing more is to be heard."""
        return self >= Phase.DONE


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which process of the run this is."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    host: str
    worker: int | None = None
    """Number of the loader worker; None for the rank itself."""

    @property
    def name(self) -> str:
        """What its files are called: `rank-3`, `rank-3.worker-0`."""
        return f"rank-{self.rank}" + ("" if self.worker is None else f".worker-{self.worker}")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a process last said of itself."""

    identity: Identity
    name: str
    """What its files are called; differs from that of the identity where two loaders have a worker of this number."""

    pid: int
    start_ticks: int
    is_armed: bool
    """Whether it takes the signals for stacks and for the end."""

    error_file: str | None
    """Where torchrun looks for the reason of a failure."""

    beat_ns: int
    """CLOCK_MONOTONIC of this machine."""

    phase: Phase
    last_phase: Phase
    """What it did, or did before it ended."""

    step: int | None
    microbatch: int | None
    collectives: int
    """Entered since the start."""

    first_step: int | None
    """The one that it began with."""

    cuts: tuple[str, ...]
    """What it is loading; none for a loader worker that has nothing to do."""

    detail: str
    """How it ended, in a line."""

    @property
    def has_stepped(self) -> bool:
        """Whether it has finished a step since the start."""
        return self.first_step is not None and self.step is not None and self.step > self.first_step


class Record(NamedTuple):
    """The live part of a heartbeat, field by field as it lies in the file."""

    number: int
    beat_ns: int
    phase: int
    end: int
    step: int
    microbatch: int
    collectives: int
    first_step: int
    texts: int
    text_size: int
    detail_size: int
    number_again: int


def header(identity: Identity, name: str, pid: int, started: int, error_file: str | None) -> bytes:
    """The first part of a file, of a process that is not armed yet."""
    told = json.dumps({"identity": asdict(identity), "name": name, "error_file": error_file}).encode()
    return HEADER.pack(MAGIC, VERSION, 0, pid, started, len(told)) + told


def shortened(text: str, size: int = TEXT_SIZE) -> bytes:
    """Text in so many bytes; an ellipsis stands for what is left out."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= size:
        return data
    ellipsis = "…".encode()
    return data[: size - len(ellipsis)].decode("utf-8", errors="ignore").encode() + ellipsis


def read_heartbeat(path: Path) -> Reading | None:
    """Returns what a file says; None where it is missing, is no heartbeat, or of another version."""
    for _ in range(_TRIES):
        try:
            with path.open("rb", buffering=0) as file:
                data = file.read(FILE_SIZE)
                file.seek(0)
                again = file.read(FILE_SIZE)
        except OSError:
            return None
        record, later = _newest(data), _newest(again)
        # The text of a record stays until the second one after it.
        if record is not None and later is not None and later.texts == record.texts:
            return _reading(data, record)
    return None


def _newest(data: bytes) -> Record | None:
    if len(data) != FILE_SIZE or data[: len(MAGIC)] != MAGIC:
        return None
    records = [Record(*RECORD.unpack_from(data, at)) for at in RECORDS_AT]
    whole = [record for record in records if record.number > 0 and record.number == record.number_again]
    return max(whole, default=None)


def _known(value: int) -> int | None:
    return None if value == UNSET else value


def _reading(data: bytes, record: Record) -> Reading | None:
    _, version, is_armed, pid, started, size = HEADER.unpack_from(data)
    if version != VERSION:
        return None
    told = json.loads(data[HEADER.size : HEADER.size + size])
    cuts_at = CUTS_AT[record.texts & 1]
    cuts = data[cuts_at : cuts_at + record.text_size].decode("utf-8", errors="replace")
    return Reading(
        identity=Identity(**told["identity"]),
        name=told["name"],
        pid=pid,
        start_ticks=started,
        is_armed=bool(is_armed),
        error_file=told["error_file"],
        beat_ns=record.beat_ns,
        phase=Phase(record.phase if record.end == UNSET else record.end),
        last_phase=Phase(record.phase),
        step=_known(record.step),
        microbatch=_known(record.microbatch),
        collectives=record.collectives,
        first_step=_known(record.first_step),
        cuts=tuple(cuts.split("\n")) if cuts else (),
        detail=data[DETAIL_AT : DETAIL_AT + record.detail_size].decode("utf-8", errors="replace"),
    )
