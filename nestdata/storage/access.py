"""`Storage`: one interface to the bytes of local files and of objects in stores."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path

from nestdata.errors import StorageError
from nestdata.redaction import redacted_url
from nestdata.storage.local import delete_file, file_info, list_files, open_file, read_file_range, write_file
from nestdata.storage.location import ObjectInfo, StorageStats, is_url
from nestdata.storage.remote import RemoteObjects
from nestdata.storage.storage_config import MIB, StorageConfig
from nestdata.storage.stream import PartStream


class Storage:
    """Reads and writes bytes by location.

    Thread-safe. A pickle holds the configuration alone: no connections, and no credentials. In a process that was
    forked after its parent had used an object store, every request to a store raises `StorageError`, because the
    client's threads do not survive a fork; local files work there.

    All methods raise `StorageError`, see its `kind`; with a URL, they raise `ConfigError` if the extra `remote` is not
    installed.
    """

    def __init__(self, config: StorageConfig | None = None) -> None:
        """Opens nothing; connections are made at the first request.

        Args:
            config: Patience and limits. Default: `StorageConfig()`.
        """
        self.config = config or StorageConfig()
        self._remote = RemoteObjects(self.config)
        # Counted by thread, without a lock, which another thread might hold while this process is forked.
        self._bytes_read: dict[int, int] = {}

    def __reduce__(self) -> tuple[type["Storage"], tuple[StorageConfig]]:
        """Pickles the configuration only."""
        return Storage, (self.config,)

    @property
    def stats(self) -> StorageStats:
        """What was read since this object was made."""
        return StorageStats(sum(list(self._bytes_read.values())))

    def info(self, location: str) -> ObjectInfo:
        """Returns size and ETag of an object (a HEAD request), or the size of a file."""
        if is_url(location):
            return self._remote.info(location)
        return file_info(_local_path(location))

    def read(self, location: str) -> bytes:
        """Returns a whole object, read in parts."""
        with self.open_stream(location) as stream:
            return stream.read()

    def read_range(
        self, location: str, offset: int, length: int, *, etag: str | None = None, size: int | None = None
    ) -> bytes:
        """Returns a range of an object or file, always of the full length.

        Args:
            location: What to read.
            offset: First byte.
            length: Number of bytes.
            etag: The version of the object. Another one is an error of kind "changed". Ignored for local files and for
                servers that send no ETag.
            size: Size of the whole object. Another one is an error of kind "changed".

        Raises:
            StorageError: See the class.
        """
        if length == 0:
            return b""
        if is_url(location):
            content = self._remote.read_range(location, offset, length, etag=etag, size=size)
        else:
            content = read_file_range(_local_path(location), offset, length, size=size)
        thread = threading.get_ident()
        self._bytes_read[thread] = self._bytes_read.get(thread, 0) + length
        return content

    def open_stream(self, location: str, *, offset: int = 0, info: ObjectInfo | None = None) -> io.BufferedReader:
        """Opens an object or file for sequential reading.

        Objects are read in parts, of which some are requested ahead. An object that is replaced after `info` was
        returned is an error of kind "changed".

        Args:
            location: What to read.
            offset: Where to begin, in bytes.
            info: What `info` returned for this location, which saves a request; by default, it is requested now.
                Ignored for local files.
        """
        if not is_url(location):
            return open_file(_local_path(location), offset)
        known = info or self._remote.info(location)

        def fetch(start: int, length: int) -> bytes:
            return self.read_range(location, start, length, etag=known.etag, size=known.size)

        raw = PartStream(fetch, name=location, size=known.size, offset=offset, config=self.config)
        return io.BufferedReader(raw, buffer_size=MIB)

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        """Yields the objects or files below a folder at any depth, sorted by location.

        A folder of a store that does not exist is empty; a local one is an error of kind "missing".
        """
        if is_url(folder):
            return self._remote.list_objects(folder)
        return list_files(_local_path(folder))

    def write(self, location: str, source: bytes | Path) -> ObjectInfo:
        """Writes an object or file, which appears complete or not at all and replaces an existing one.

        Args:
            location: The target. Local folders are created.
            source: The content, or a local file with it.
        """
        if is_url(location):
            return self._remote.write(location, source)
        return write_file(_local_path(location), source)

    def delete(self, location: str) -> None:
        """Deletes an object or file. One that does not exist counts as deleted."""
        if is_url(location):
            self._remote.delete(location)
        else:
            delete_file(_local_path(location))


_of_process = Storage()


def storage() -> Storage:
    """Returns the `Storage` of this process with the default configuration."""
    return _of_process


def _local_path(location: str) -> str:
    if not location.startswith("/"):
        raise StorageError.because(
            "invalid", f"{redacted_url(location)}: expected an absolute path or a URL (s3://, gs://, az://, https://)."
        )
    return location
