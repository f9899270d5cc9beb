"""The checks of `verify_corpus` for packed sets."""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256

from nestdata.corpus.packed_set import FOLDER, PackedSet, PackedShard
from nestdata.errors import CorpusError
from nestdata.pack.verify import Checked, MemberStream, VerifyProblem, VerifyReport, compare_size
from nestdata.storage import join, storage

_BLOCK_BYTES = 1 << 22


def packed_tasks(location: str, checksums: bool) -> tuple[VerifyReport, Iterator[Callable[[], Checked]]]:
    """Returns an empty report of a packed set, and its checks.

    Raises:
        CorpusError: The set is incomplete or damaged.
        StorageError: It cannot be read.
    """
    packed = PackedSet.open(location, storage())
    report = VerifyReport(location=location, num_cuts=packed.num_cuts, num_shards=len(packed.shards))
    return report, _tasks(packed, checksums)


def _tasks(packed: PackedSet, checksums: bool) -> Iterator[Callable[[], Checked]]:
    yield partial(_check_names, packed)
    for shard in packed.shards:
        yield partial(_check_shard, packed, shard, checksums)


def _check_names(packed: PackedSet) -> Checked:
    """Finds files that are not of the set; Lhotse would take them for a part of it."""
    own = {file.name for shard in packed.shards for file in (shard.recording, shard.cuts)}
    start = len(packed.location) + 1
    found = (info.location for info in storage().list_objects(packed.location))
    others = [name for name in found if name[start:] not in own and not name[start:].startswith(f"{FOLDER}/")]
    return Checked(0, [VerifyProblem(name, "unexpected", "it is not a file of the packed set") for name in others])


def _check_shard(packed: PackedSet, shard: PackedShard, checksums: bool) -> Checked:
    problems: list[VerifyProblem] = []
    for file in (shard.recording, shard.cuts):
        location = join(packed.location, file.name)
        found = compare_size(location, file.size, None)
        if checksums and not found and _sha256(location) != file.sha256:
            found = [VerifyProblem(location, "corrupt", "its content does not have the checksum in pack.json")]
            found += _damaged_members(packed, shard) if file is shard.recording else []
        problems += found
    if not checksums:
        problems += _check_record(packed, shard)
    return Checked(shard.num_cuts if checksums else 0, problems)


def _check_record(packed: PackedSet, shard: PackedShard) -> list[VerifyProblem]:
    try:
        packed.members(shard, storage())
    except CorpusError as error:
        return [VerifyProblem(join(packed.location, shard.recording.name), "unusable", str(error))]
    return []


def _damaged_members(packed: PackedSet, shard: PackedShard) -> list[VerifyProblem]:
    """Finds the members of a damaged tar file that are damaged."""
    try:
        members = packed.members(shard, storage())
    except CorpusError as error:
        return [VerifyProblem(join(packed.location, shard.recording.name), "unusable", str(error))]
    location = join(packed.location, shard.recording.name)
    problems = []
    columns = zip(members.offsets.tolist(), members.lengths.tolist(), members.checksums.tolist(), strict=True)
    with MemberStream(location) as stream:
        for number, (offset, length, checksum) in enumerate(columns):
            if zlib.crc32(stream.read(offset, length)) != checksum:
                detail = (
                    f"its cut {number}, bytes {offset} to {offset + length}, does not have the checksum of its audio"
                )
                problems.append(VerifyProblem(location, "corrupt", detail))
    return problems


def _sha256(location: str) -> str:
    checksum = sha256()
    with storage().open_stream(location) as stream:
        while block := stream.read(_BLOCK_BYTES):
            checksum.update(block)
    return checksum.hexdigest()
