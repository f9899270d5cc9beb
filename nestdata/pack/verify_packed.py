"""The checks of `verify_corpus` for packed sets."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.packed_set import (
    FOLDER,
    LEFT_OUT,
    PackedFile,
    PackedMembers,
    PackedSet,
    PackedShard,
    index_content,
    index_name,
    read_members,
    record_name,
)
from nestdata.errors import CorpusError, StorageError
from nestdata.pack.verify_report import Checked, VerifyProblem, VerifyReport, compare_size, problem_of
from nestdata.storage import join, storage

_BLOCK_BYTES = 1 << 22
_TAR_BLOCK = 512


def packed_tasks(location: str, checksums: bool) -> tuple[VerifyReport, int, Iterator[Callable[[], Checked]]]:
    """Returns an empty report of a packed set, the number of its checks, and the checks.

    Raises:
        CorpusError: The set is incomplete or damaged.
        StorageError: It cannot be read.
    """
    packed = PackedSet.open(location, storage())
    report = VerifyReport(location=location, num_cuts=packed.num_cuts, num_shards=len(packed.shards))
    return report, 1 + len(packed.shards), _tasks(packed, checksums)


def _tasks(packed: PackedSet, checksums: bool) -> Iterator[Callable[[], Checked]]:
    yield partial(_check_names, packed)
    for shard in packed.shards:
        yield partial(_check_shard, packed, shard, checksums)


def _check_names(packed: PackedSet) -> Checked:
    """Finds files that are not of the set, which Lhotse would take for a part of it, and small files that are gone."""
    files = [file.name for shard in packed.shards for file in (shard.recording, shard.cuts)]
    start = len(packed.location) + 1
    names = {info.location[start:] for info in storage().list_objects(packed.location)}
    others = sorted(name for name in names.difference(files) if not name.startswith(f"{FOLDER}/"))
    missing = [name for name in [*map(index_name, files), LEFT_OUT] if name not in names]
    problems = [(name, "unexpected", "it is not a file of the packed set") for name in others]
    problems += [(name, "missing", "it does not exist") for name in missing]
    return Checked(0, [VerifyProblem(join(packed.location, name), *found) for name, *found in problems])


def _check_shard(packed: PackedSet, shard: PackedShard, checksums: bool) -> Checked:
    """Checks the files of a shard, and that its record describes them."""
    problems: list[VerifyProblem] = []
    members: PackedMembers | None = None
    try:
        members = read_members(packed.location, shard, storage())
    except CorpusError as error:
        problems.append(VerifyProblem(join(packed.location, record_name(shard.number)), "unusable", str(error)))
    for file in (shard.recording, shard.cuts):
        location = join(packed.location, file.name)
        found = compare_size(location, file.size, None)
        if checksums and not found:
            try:
                found = _check_content(packed, file, members if file is shard.recording else None)
            except (OSError, StorageError) as error:
                found = [problem_of(error, location)]
        problems += found
    return Checked(shard.num_cuts if checksums else 0, problems)


def _check_content(packed: PackedSet, file: PackedFile, members: PackedMembers | None) -> list[VerifyProblem]:
    """Reads a file once, and compares its checksum, those of its members, and its index."""
    location = join(packed.location, file.name)
    problems: list[VerifyProblem] = []
    index: NDArray[np.int64] | None = None
    checksum = sha256()
    with storage().open_stream(location) as stream:

        def read(number: int) -> bytes:
            content = stream.read(number)
            checksum.update(content)
            return content

        if file.name.endswith(".jsonl"):
            content = read(file.size)
            index = np.cumsum([0, *map(len, content.splitlines(keepends=True))])
        elif members is not None:
            index = np.append(members.offsets - _TAR_BLOCK, file.size)
            problems += _damaged_members(location, file.size, read, members)
        while read(_BLOCK_BYTES):
            pass
    if checksum.hexdigest() != file.sha256:
        problems.insert(
            0, VerifyProblem(location, "corrupt", "its content does not have the checksum in cuts.pack/pack.json")
        )
    elif index is not None:
        problems += _check_index(join(packed.location, index_name(file.name)), index_content(index))
    return problems


def _damaged_members(
    location: str, size: int, read: Callable[[int], bytes], members: PackedMembers
) -> Iterator[VerifyProblem]:
    """Finds members whose bytes do not have the checksum in the record; `read` returns the next bytes of the file."""
    position = 0
    columns = zip(members.offsets.tolist(), members.lengths.tolist(), members.checksums.tolist(), strict=True)
    for number, (offset, length, checksum) in enumerate(columns):
        content = b""
        if position <= offset and 0 <= length <= size - offset:
            read(offset - position)
            content = read(length)
            position = offset + length
        if len(content) != length or zlib.crc32(content) != checksum:
            detail = f"its cut {number}, bytes {offset} to {offset + length}, does not have the checksum of its audio"
            yield VerifyProblem(location, "corrupt", detail)


def _check_index(location: str, expected: bytes) -> list[VerifyProblem]:
    try:
        content = storage().read(location)
    except StorageError as error:
        # `_check_names` reports one that is missing.
        return [] if error.kind == "missing" else [problem_of(error, location)]
    return [] if content == expected else [VerifyProblem(location, "corrupt", "it does not fit the file it is for")]
