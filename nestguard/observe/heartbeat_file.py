"""Layout of the file that holds the heartbeat of one process, and its reader.

Processes write and the monitor reads, without a lock. So the file has two copies of each part that changes, which are
written in turns: one of them is complete, even if the writer is stopped in the middle of the other one. The device is
observed by another thread, so its position is a part of its own.
"""

import ctypes
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nestguard.observe.directory import open_file
from nestguard.observe.view import DevicePosition, Identity, Phase, Reading

MAGIC = b"NESTBEAT"
VERSION = 4
TEXT_SIZE = 4096
UNSET = -1
WAIT_MARK = "\x1f"
"""First character of the line after the id of a cut whose bytes the process waits for: it holds their location."""

_MAX_TRIES = 8


class Record(ctypes.Structure):
    """The part of a heartbeat that changes. It is complete if both sequence numbers agree."""

    _fields_ = [
        ("sequence", ctypes.c_int64),
        ("beat_ns", ctypes.c_int64),
        ("phase", ctypes.c_int64),
        ("final_phase", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("microbatch", ctypes.c_int64),
        ("collectives", ctypes.c_int64),
        ("first_step", ctypes.c_int64),
        ("cuts_version", ctypes.c_int64),
        ("sequence_again", ctypes.c_int64),
    ]


class DeviceRecord(ctypes.Structure):
    """The position of the device. It is complete if both sequence numbers agree."""

    _fields_ = [
        ("sequence", ctypes.c_int64),
        ("observed_ns", ctypes.c_int64),
        ("phase", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("microbatch", ctypes.c_int64),
        ("sequence_again", ctypes.c_int64),
    ]


class HeartbeatFile(ctypes.Structure):
    """The whole file. Texts are UTF-8, and end at their first zero byte."""

    _fields_ = [
        ("magic", ctypes.c_char * len(MAGIC)),
        ("version", ctypes.c_uint32),
        ("is_armed", ctypes.c_uint32),
        ("pid", ctypes.c_int64),
        ("start_ticks", ctypes.c_int64),
        ("description", ctypes.c_char * (2 * TEXT_SIZE)),  # JSON: identity, name, error_file
        ("records", Record * 2),
        ("device_records", DeviceRecord * 2),
        ("cuts", (ctypes.c_char * TEXT_SIZE) * 2),
        ("detail", ctypes.c_char * TEXT_SIZE),
    ]


FILE_SIZE = ctypes.sizeof(HeartbeatFile)


def write_copy(copies: Any, record: Record | DeviceRecord) -> None:
    """Writes a record with its next sequence number over the older one of its two copies."""
    record.sequence += 1
    copy_index = record.sequence & 1
    copies[copy_index] = record
    copies[copy_index].sequence_again = record.sequence


def truncated_utf8(text: str) -> bytes:
    """Encodes text as UTF-8 in at most `TEXT_SIZE` bytes; longer text is cut and ends in an ellipsis."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= TEXT_SIZE:
        return data
    ellipsis = "…".encode()
    return data[: TEXT_SIZE - len(ellipsis)].decode("utf-8", errors="ignore").encode() + ellipsis


def read_heartbeat(path: Path) -> Reading | None:
    """Reads a heartbeat file.

    Returns:
        None if the file is missing, is damaged or not a heartbeat of this user, or has another version.
    """
    for _ in range(_MAX_TRIES):
        try:
            with open_file(path) as file:
                content = HeartbeatFile.from_buffer_copy(file.read(FILE_SIZE))
                file.seek(0)
                later = HeartbeatFile.from_buffer_copy(file.read(FILE_SIZE))
        except (OSError, ValueError):  # ValueError: it is too short
            return None
        if (content.magic, content.version) != (MAGIC, VERSION):
            return None
        record, later_record = _newest_complete(content.records), _newest_complete(later.records)
        # The writer overwrites a list of cuts two lists later, so the text is intact if the version has not changed.
        if record and later_record and record.cuts_version == later_record.cuts_version:
            try:
                return _reading(content, record)
            except (LookupError, RecursionError, TypeError, ValueError):
                return None  # damaged
    return None


def _newest_complete(copies: Iterable[Any]) -> Any:
    """Returns the newer of the copies that are complete; None if none of them is."""
    complete = [record for record in copies if 0 < record.sequence == record.sequence_again]
    return max(complete, key=lambda record: record.sequence, default=None)


def _reading(content: HeartbeatFile, record: Record) -> Reading:
    description = json.loads(content.description)
    device = _newest_complete(content.device_records)
    text = content.cuts[record.cuts_version & 1].value.decode("utf-8", errors="replace")
    cuts, _, waits_for = text.partition(f"\n{WAIT_MARK}")
    return Reading(
        identity=Identity(**description["identity"]),
        name=description["name"],
        pid=content.pid,
        start_ticks=content.start_ticks,
        is_armed=bool(content.is_armed),
        error_file=description["error_file"],
        beat_ns=record.beat_ns,
        phase=Phase(record.phase if record.final_phase == UNSET else record.final_phase),
        last_phase=Phase(record.phase),
        step=_optional(record.step),
        microbatch=_optional(record.microbatch),
        collectives=record.collectives,
        first_step=_optional(record.first_step),
        cuts=tuple(cuts.split("\n")) if cuts else (),
        waits_for=waits_for or None,
        detail=content.detail.decode("utf-8", errors="replace"),
        device=None if device is None else _device_position(device),
        device_ns=0 if device is None else device.observed_ns,
    )


def _device_position(record: DeviceRecord) -> DevicePosition | None:
    if record.phase == UNSET:
        return None
    return DevicePosition(Phase(record.phase), _optional(record.step), _optional(record.microbatch))


def _optional(value: int) -> int | None:
    return None if value == UNSET else value
