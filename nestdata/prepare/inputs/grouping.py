"""Groups the lines of one manifest by shard, with memory for the lines of a few shards only."""

import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby

from nestdata.prepare.inputs.lines import numbered_lines

Lines = list[tuple[int, bytes]]
"""Lines with their numbers, counted from 1."""

_LENGTHS = struct.Struct("<QI")  # number and length of a line
# Bytes of lines that wait in memory until they are appended to the files of their shards.
_MAX_WAITING = 64 << 20


def grouped_lines(
    manifest: str, shard_of: Callable[[int, bytes], int | None], scratch: str, *, max_waiting: int = _MAX_WAITING
) -> Iterator[tuple[int, Lines]]:
    """Yields each shard once, with all its lines; shards are in the order in which they are first named.

    The manifest is read twice. If the lines of a shard are not consecutive, they are collected in files.

    Args:
        manifest: Absolute path or URL.
        shard_of: Returns the shard of a line, given its number and content; None for a line to be skipped.
        scratch: Folder for these files, which is made if need be, and removed at the end.
        max_waiting: Bytes of lines that wait in memory to be appended to the files.
    """
    seen: dict[int, None] = {}
    is_consecutive, last = True, None
    for number, line in numbered_lines(manifest):
        shard = shard_of(number, line)
        if shard is not None and shard != last:
            is_consecutive &= shard not in seen
            seen[shard], last = None, shard
    if is_consecutive:
        yield from _runs(manifest, shard_of)
        return
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    os.makedirs(scratch)
    try:
        _spill(manifest, shard_of, scratch, max_waiting)
        for shard in seen:
            path = _path(scratch, shard)
            yield shard, _read(path)
            os.remove(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _runs(manifest: str, shard_of: Callable[[int, bytes], int | None]) -> Iterator[tuple[int, Lines]]:
    with_shard = ((shard_of(*line), line) for line in numbered_lines(manifest))
    named = ((shard, line) for shard, line in with_shard if shard is not None)
    for shard, run in groupby(named, lambda pair: pair[0]):
        yield shard, [line for _, line in run]


def _spill(manifest: str, shard_of: Callable[[int, bytes], int | None], scratch: str, max_waiting: int) -> None:
    """Appends each line to the file of its shard."""
    waiting: dict[int, bytearray] = defaultdict(bytearray)
    num_bytes = 0
    for number, line in numbered_lines(manifest):
        shard = shard_of(number, line)
        if shard is None:
            continue
        waiting[shard] += _LENGTHS.pack(number, len(line)) + line
        num_bytes += _LENGTHS.size + len(line)
        if num_bytes > max_waiting:
            _append(waiting, scratch)
            num_bytes = 0
    _append(waiting, scratch)


def _append(waiting: dict[int, bytearray], scratch: str) -> None:
    for shard, content in waiting.items():
        with open(_path(scratch, shard), "ab") as file:
            file.write(content)
    waiting.clear()


def _read(path: str) -> Lines:
    with open(path, "rb") as file:
        content = file.read()
    lines: Lines = []
    position = 0
    while position < len(content):
        number, length = _LENGTHS.unpack_from(content, position)
        position += _LENGTHS.size
        lines.append((number, content[position : position + length]))
        position += length
    return lines


def _path(scratch: str, shard: int) -> str:
    return os.path.join(scratch, f"{shard}.lines")
