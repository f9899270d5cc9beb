"""Local files: ranges by `pread` with few open descriptors, and files that appear complete or not at all."""

import os
import shutil
import stat
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from nestdata.output import flush_to_disk
from nestdata.storage.config import StorageConfig
from nestdata.storage.failures import ObjectChanged, classify, classify_system_error
from nestdata.storage.info import ObjectInfo, StatsCounter
from nestdata.storage.patience import Patience

Result = TypeVar("Result")


class LocalFiles:
    """Reads and writes local files. Thread-safe."""

    def __init__(self, config: StorageConfig, stats: StatsCounter) -> None:
        self._config = replace(config, patience_s=min(config.patience_s, config.local_patience_s))
        self._stats = stats
        self._open = OpenFiles(config.max_open_files)

    def info(self, location: str) -> ObjectInfo:
        """Returns the size of a file."""
        return self._persist(location, lambda: _info(location))

    def read_range(self, location: str, offset: int, length: int, *, size: int | None) -> bytes:
        """Returns a range of a file."""

        def read() -> bytes:
            with self._open.descriptor(location) as descriptor:
                if size is not None and (found := os.fstat(descriptor).st_size) != size:
                    raise ObjectChanged(f"has {found} bytes, expected {size}")
                return _pread(descriptor, offset, length)

        content = self._persist(location, read)
        self._stats.add(requests=1, bytes_read=length)
        return content

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        """Yields the files below a folder, sorted by location. Links to folders are not followed."""
        found = self._persist(folder, lambda: sorted(_files_below(folder)))
        for path in found:
            yield self.info(path)

    def write(self, location: str, source: bytes | Path) -> ObjectInfo:
        """Writes a file beside its target, and renames it."""

        def write() -> ObjectInfo:
            target = Path(location)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.partial")
            try:
                if isinstance(source, Path):
                    shutil.copyfile(source, partial)
                else:
                    partial.write_bytes(source)
                flush_to_disk(partial)
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
            self._open.forget(location)
            return _info(location)

        info = self._persist(location, write)
        self._stats.add(requests=1, bytes_written=info.size)
        return info

    def delete(self, location: str) -> None:
        """Deletes a file. One that does not exist counts as deleted."""
        self._persist(location, lambda: Path(location).unlink(missing_ok=True))
        self._open.forget(location)

    def replace_lock(self) -> None:
        """Makes the object usable in a forked child, whose copy of the lock may be held by a thread of the parent."""
        self._open.replace_lock()

    def _persist(self, location: str, action: Callable[[], Result]) -> Result:
        patience = Patience(location, self._config, self._stats)
        while True:
            try:
                return action()
            except ObjectChanged as error:
                self._open.forget(location)  # the file may be replaced by a restored one
                patience.failed(classify(error))
            except OSError as error:
                failure = classify_system_error(error)
                if failure.is_transient:
                    self._open.forget(location)
                patience.failed(failure)


class OpenFiles:
    """The descriptors that were used last, opened for reading, by path. A descriptor in use is never closed.

    A path that leads to another file than before is opened anew, so that bytes of a replaced file are never read.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()

    @contextmanager
    def descriptor(self, path: str) -> Iterator[int]:
        """Yields a descriptor of a file, opened before or now."""
        file = self._take(path)
        try:
            yield file.descriptor
        finally:
            self._release(file)

    def forget(self, path: str) -> None:
        """Closes the descriptor of a path, so that the next read opens the file anew."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is not None:
                file.is_kept = False
                file.close_if_unused()

    def replace_lock(self) -> None:
        """See `LocalFiles.replace_lock`. Files that were in use by threads of the parent stay open."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes all descriptors that are not in use."""
        for path in list(self._files):
            self.forget(path)

    def _take(self, path: str) -> "_OpenFile":
        known = self._take_known(path)
        if known is not None:
            if known.is_at(path):
                return known
            self._release(known)
            self.forget(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(f"{path}: not a regular file")
        with self._lock:
            known = self._files.get(path)
            if known is not None:
                os.close(descriptor)
                known.num_users += 1
                return known
            file = self._files[path] = _OpenFile(descriptor)
            while len(self._files) > self._max_open:
                _, oldest = self._files.popitem(last=False)
                oldest.is_kept = False
                oldest.close_if_unused()
            return file

    def _take_known(self, path: str) -> "_OpenFile | None":
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                file.num_users += 1
            return file

    def _release(self, file: "_OpenFile") -> None:
        with self._lock:
            file.num_users -= 1
            file.close_if_unused()

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)


class _OpenFile:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.num_users = 1
        self.is_kept = True
        self._status = os.fstat(descriptor)

    def is_at(self, path: str) -> bool:
        """Returns whether a path leads to this file; another one may have been renamed to it."""
        try:
            return os.path.samestat(self._status, os.stat(path))
        except OSError:
            return False

    def close_if_unused(self) -> None:
        if not self.is_kept and self.num_users == 0:
            os.close(self.descriptor)


def _info(location: str) -> ObjectInfo:
    found = os.stat(location)
    if not stat.S_ISREG(found.st_mode):
        raise IsADirectoryError(f"{location}: not a regular file")
    return ObjectInfo(location, found.st_size, None)


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    content = os.pread(descriptor, length, offset)
    while len(content) < length:
        more = os.pread(descriptor, length - len(content), offset + len(content))
        if not more:
            raise ObjectChanged(f"ends at byte {offset + len(content)}, expected {offset + length} bytes or more")
        content += more
    return content


def _files_below(folder: str) -> Iterator[str]:
    if not os.path.isdir(folder):
        raise FileNotFoundError(folder)

    def fail(error: OSError) -> None:
        raise error

    for directory, _, names in os.walk(folder, onerror=fail):
        for name in names:
            path = os.path.join(directory, name)
            if os.path.isfile(path):
                yield path
