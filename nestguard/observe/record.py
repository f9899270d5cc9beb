"""Layout of the file that holds one process's heartbeat, and its reader.

    offset  content
    0       magic, version, whether the process is armed, pid, start time in ticks, identity as JSON
    8192    the live record, two copies
    8704    the position of the device, two copies
    12288   cut ids, two copies
    20480   final error or status text

Processes write and the monitor reads, without a lock. The position of the device is written by another thread than the
live record, so it has copies of its own. The writer alternates between the two copies, so one of them is
always complete, even if the writer is stopped in the middle of a write. A record begins and ends with its sequence
number; it is complete if both agree.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, TypeVar

from nestguard.observe.directory import open_file
from nestguard.observe.view import DevicePosition, Identity, Phase, Reading

MAGIC = b"NESTBEAT"
VERSION = 3
HEADER = struct.Struct("=8sIIqqI")
ARMED = struct.Struct("=I")
ARMED_AT = 12
# Native byte order and alignment pack several times faster than an explicit byte order.
RECORD = struct.Struct("@12q")
RECORDS_AT = (8192, 8192 + 256)
DEVICE_RECORD = struct.Struct("@6q")
DEVICE_RECORDS_AT = (8192 + 512, 8192 + 768)
TEXT_SIZE = 4096
CUTS_AT = (12288, 12288 + TEXT_SIZE)
DETAIL_AT = 20480
FILE_SIZE = DETAIL_AT + TEXT_SIZE
UNSET = -1
WAIT_MARK = "\x1f"
"""First character of the line after the id of a cut whose bytes the process waits for: it holds their location."""

_MAX_TRIES = 8


class Record(NamedTuple):
    """The part of a heartbeat that changes, in the order of its fields in the file."""

    sequence: int
    beat_ns: int
    phase: int
    end: int
    step: int
    microbatch: int
    collectives: int
    first_step: int
    cuts_version: int
    cuts_size: int
    detail_size: int
    sequence_again: int


class DeviceRecord(NamedTuple):
    """The position of the device, in the order of its fields in the file."""

    sequence: int
    observed_ns: int
    phase: int
    step: int
    microbatch: int
    sequence_again: int


_AnyRecord = TypeVar("_AnyRecord", Record, DeviceRecord)


def header(identity: Identity, name: str, pid: int, started: int, error_file: str | None) -> bytes:
    """Returns the first part of the file of a process that is not armed yet."""
    described = json.dumps({"identity": asdict(identity), "name": name, "error_file": error_file}).encode()
    return HEADER.pack(MAGIC, VERSION, 0, pid, started, len(described)) + described


def truncated_utf8(text: str, size: int = TEXT_SIZE) -> bytes:
    """Encodes text as UTF-8 in at most `size` bytes; longer text is cut and ends in an ellipsis."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= size:
        return data
    ellipsis = "…".encode()
    return data[: size - len(ellipsis)].decode("utf-8", errors="ignore").encode() + ellipsis


def read_heartbeat(path: Path) -> Reading | None:
    """Reads a heartbeat file.

    Returns:
        None if the file is missing, is damaged or not a heartbeat of this user, or has another version.
    """
    for _ in range(_MAX_TRIES):
        try:
            with open_file(path) as file:
                data = file.read(FILE_SIZE)
                file.seek(0)
                again = file.read(FILE_SIZE)
        except OSError:
            return None
        record, later = _newest(data), _newest(again)
        # The writer overwrites a list of cuts two lists later, so the text is intact if the version has not changed.
        if record is not None and later is not None and later.cuts_version == record.cuts_version:
            try:
                return _reading(data, record)
            except (LookupError, RecursionError, TypeError, ValueError):
                return None  # damaged
    return None


def _newest(data: bytes) -> Record | None:
    if len(data) != FILE_SIZE or data[: len(MAGIC)] != MAGIC:
        return None
    return _newest_complete([Record(*RECORD.unpack_from(data, at)) for at in RECORDS_AT])


def _newest_of_device(data: bytes) -> DeviceRecord | None:
    return _newest_complete([DeviceRecord(*DEVICE_RECORD.unpack_from(data, at)) for at in DEVICE_RECORDS_AT])


def _newest_complete(records: Sequence[_AnyRecord]) -> _AnyRecord | None:
    """Returns the last of two copies that was written to its end."""
    complete = [record for record in records if record.sequence > 0 and record.sequence == record.sequence_again]
    return max(complete, default=None)


def _optional(value: int) -> int | None:
    return None if value == UNSET else value


def _reading(data: bytes, record: Record) -> Reading | None:
    _, version, is_armed, pid, started, size = HEADER.unpack_from(data)
    if version != VERSION:
        return None
    described = json.loads(data[HEADER.size : HEADER.size + size])
    device = _newest_of_device(data)
    cuts_at = CUTS_AT[record.cuts_version & 1]
    text = data[cuts_at : cuts_at + record.cuts_size].decode("utf-8", errors="replace")
    cuts, _, waits_for = text.partition(f"\n{WAIT_MARK}")
    return Reading(
        identity=Identity(**described["identity"]),
        name=described["name"],
        pid=pid,
        start_ticks=started,
        is_armed=bool(is_armed),
        error_file=described["error_file"],
        beat_ns=record.beat_ns,
        phase=Phase(record.phase if record.end == UNSET else record.end),
        last_phase=Phase(record.phase),
        step=_optional(record.step),
        microbatch=_optional(record.microbatch),
        collectives=record.collectives,
        first_step=_optional(record.first_step),
        cuts=tuple(cuts.split("\n")) if cuts else (),
        waits_for=waits_for or None,
        detail=data[DETAIL_AT : DETAIL_AT + record.detail_size].decode("utf-8", errors="replace"),
        device=None if device is None else _device_position(device),
        device_ns=0 if device is None else device.observed_ns,
    )


def _device_position(record: DeviceRecord) -> DevicePosition | None:
    if record.phase == UNSET:
        return None
    return DevicePosition(Phase(record.phase), _optional(record.step), _optional(record.microbatch))
