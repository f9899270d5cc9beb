"""Copies audio that cannot be read in place to uncompressed tars in the corpus directory, where it has addresses."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

from nestdata.output import flush_to_disk
from nestdata.prepare.inputs.audio import Member
from nestdata.prepare.inputs.content import StoredContent
from nestdata.prepare.inputs.entry import Entry
from nestdata.storage import ObjectInfo

_TAR_BYTES = 1_000_000_000
_TAR_HEADER = 512


class AudioTars:
    """Writes the audio of one file of an input to tars of about a gigabyte, each of which appears when it is complete.

    Args:
        write_to: Folder in the corpus directory while it is written.
        stored_in: Path of the same folder once the corpus is in place.
        number: Number of the file in its input; part of the names of its tars.
    """

    def __init__(self, write_to: str, stored_in: str, number: int) -> None:
        self._write_to = Path(write_to)
        self._stored_in = stored_in
        self._number = number
        self._num_tars = 0
        self._num_members = 0
        self._file: io.BufferedWriter | None = None
        self._tar: tarfile.TarFile | None = None
        # Each returns an entry, given the path of the tar and its later location.
        self._entries: list[Callable[[Path, ObjectInfo], Entry]] = []

    def add(self, entry: Callable[[Member], Entry], content: bytes, suffix: str) -> Iterator[Entry]:
        """Adds the audio of the entry that `entry` returns; yields the entries of the tar if that is now complete."""
        if self._tar is None:
            self._write_to.mkdir(parents=True, exist_ok=True)
            self._file = self._path(".tmp").open("wb")
            self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        header = tarfile.TarInfo(f"{self._num_members:09d}{suffix}")
        header.size = len(content)
        offset, length, checksum = self._tar.offset + _TAR_HEADER, len(content), crc32(content)

        def complete(tar: Path, shard: ObjectInfo) -> Entry:
            return entry(Member(shard, offset, length, StoredContent(str(tar), offset, length), checksum))

        self._entries.append(complete)
        self._tar.addfile(header, io.BytesIO(content))
        self._num_members += 1
        if self._tar.offset >= _TAR_BYTES:
            yield from self.finish()

    def add_other(self, entry: Entry) -> Iterator[Entry]:
        """Adds an entry without bytes, which keeps its place among the others."""
        if self._tar is None:
            yield entry
        else:
            self._entries.append(lambda *_: entry)

    def finish(self) -> Iterator[Entry]:
        """Completes the tar that is being written, and yields its entries with their addresses."""
        if self._tar is None:
            return
        entries, self._entries = self._entries, []
        self._tar.close()
        self._tar = None
        self.close()
        path = self._path("")
        flush_to_disk(self._path(".tmp"))  # the corpus is flushed at the end, but not what is in its folders
        os.replace(self._path(".tmp"), path)
        shard = ObjectInfo(f"{self._stored_in}/{path.name}", path.stat().st_size, None)
        self._num_tars += 1
        yield from (complete(path, shard) for complete in entries)

    def close(self) -> None:
        """Closes the tar that is being written; it stays incomplete."""
        file, self._file = self._file, None
        if file:
            file.close()

    def _path(self, suffix: str) -> Path:
        # The folder is part of the name, so that names are unique in the corpus.
        return self._write_to / f"{self._write_to.name}-{self._number:06d}-{self._num_tars:03d}.tar{suffix}"
