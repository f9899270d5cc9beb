"""Packed sets, which `nestdata pack` writes: read by their records, without reading the tar files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import orjson

from nestdata.corpus.packed_set import PackedMembers, PackedSet, PackedShard, read_members
from nestdata.errors import CorpusError, ManifestError, StorageError
from nestdata.prepare.inputs.audio import LhotseCut, Member
from nestdata.prepare.inputs.content import StoredContent
from nestdata.prepare.inputs.entry import Entry
from nestdata.storage import ObjectInfo, join, storage


@dataclass(frozen=True, slots=True)
class PackedShar:
    """A complete packed set. Its cuts get the order that they had before they were packed.

    The writer sorts them by `Entry.number`, because they arrive in the order of the shards, which is random.
    """

    items_per_task: ClassVar[int] = 1
    path: Path | str
    location: str
    """The folder of the set, an absolute path or a URL."""

    def items(self) -> Iterator[PackedShard]:
        """Yields the shards.

        Raises:
            ManifestError: The set is incomplete or damaged.
            StorageError: It cannot be read.
        """
        yield from _open(self.location).shards

    def entries(self, number: int, item: PackedShard) -> Iterator[Entry]:  # noqa: ARG002, the shard has its own
        """Yields the entries of a shard.

        Raises:
            ManifestError: A file of the shard is missing or has changed.
            StorageError: It cannot be read for another reason.
        """
        info = _info(join(self.location, item.recording.name), item.recording.size)
        lines = self._lines(item)
        try:
            members = read_members(self.location, item, storage())
        except CorpusError as error:
            raise ManifestError(str(error)) from error
        for index, line in enumerate(lines):
            yield self._entry(orjson.loads(line), info, members, index)

    def where(self, number: int) -> str:
        """Returns the path and the position of a cut in the corpora that were packed, counted from 1."""
        return f"{self.path} (packed cut {number})"

    def count(self) -> int | None:
        """Returns the number of shards."""
        return len(_open(self.location).shards)

    def _lines(self, shard: PackedShard) -> list[bytes]:
        location = join(self.location, shard.cuts.name)
        with _missing_files_named(location):
            content = storage().read(location)
        if sha256(content).hexdigest() != shard.cuts.sha256:
            raise ManifestError(_changed(location, "its checksum is another one"))
        return content.split(b"\n")[:-1]

    def _entry(self, cut: dict[str, Any], info: ObjectInfo, members: PackedMembers, index: int) -> Entry:
        if members.was_absolute[index]:
            cut["id"] = "/" + cut["id"]
        offset, length = int(members.offsets[index]), int(members.lengths[index])
        content = StoredContent(info.location, offset, length, info.etag, info.size)
        member = Member(info, offset, length, content, int(members.checksums[index]))
        number = int(members.numbers[index]) + 1
        return Entry(self.where(number), cut["id"], LhotseCut(cut, member, is_measured=True), number=number)


def _open(location: str) -> PackedSet:
    try:
        return PackedSet.open(location, storage())
    except CorpusError as error:
        raise ManifestError(str(error)) from error


def _info(location: str, size: int) -> ObjectInfo:
    with _missing_files_named(location):
        info = storage().info(location)
    if info.size != size:
        raise ManifestError(_changed(location, f"it has {info.size} bytes, and had {size}"))
    return info


@contextmanager
def _missing_files_named(location: str) -> Iterator[None]:
    """Raises ManifestError instead of StorageError if a file does not exist."""
    try:
        yield
    except StorageError as error:
        if error.kind != "missing":
            raise
        raise ManifestError(
            f"{location}: no such file, but the packed set has it. Restore it, or pack the corpus again."
        ) from error


def _changed(location: str, how: str) -> str:
    return f"{location}: has changed since it was packed: {how}. Restore it, or pack the corpus again."
