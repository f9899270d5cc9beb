"""Local files: ranges, lists, and files that appear complete or not at all."""

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nestdata.errors import StorageError
from nestdata.output import flush_to_disk, unfinished_name
from nestdata.storage.location import ObjectInfo
from nestdata.storage.storage_config import MIB


def file_info(path: str) -> ObjectInfo:
    """Returns the size of a file."""
    with _storage_errors(path):
        return ObjectInfo(path, _size_of_file(path, os.stat(path)), None)


def read_file_range(path: str, offset: int, length: int, *, size: int | None) -> bytes:
    """Returns a range of a file."""
    with _storage_errors(path):
        # A pipe is opened without waiting for its writer, and then refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = _size_of_file(path, os.fstat(descriptor))
            if size is not None and found != size:
                raise StorageError.because("changed", f"{path}: has {found} bytes, expected {size}.")
            return _pread(descriptor, path, offset, length)
        finally:
            os.close(descriptor)


def open_file(path: str, offset: int) -> io.BufferedReader:
    """Opens a file for sequential reading."""
    with _storage_errors(path):
        _size_of_file(path, os.stat(path))  # opening a pipe would wait for a writer
        file: io.BufferedReader = io.BufferedReader(io.FileIO(path), buffer_size=MIB)
        file.seek(offset)
        return file


def list_files(folder: str) -> Iterator[ObjectInfo]:
    """Yields the files below a folder, sorted by location. Links to folders are not followed."""
    with _storage_errors(folder):
        found = sorted(_files_below(folder))
    for path in found:
        yield file_info(path)


def write_file(path: str, source: bytes | Path) -> ObjectInfo:
    """Writes a file beside its target, and renames it."""
    with _storage_errors(path):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = unfinished_name(target)
        try:
            if isinstance(source, Path):
                shutil.copyfile(source, partial)
            else:
                partial.write_bytes(source)
            flush_to_disk(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return file_info(path)


def delete_file(path: str) -> None:
    """Deletes a file. One that does not exist counts as deleted."""
    with _storage_errors(path):
        Path(path).unlink(missing_ok=True)


@contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Raises StorageError in place of errors of the system."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            failure = StorageError.because("missing", f"{path}: no such file.")
        elif isinstance(error, IsADirectoryError):
            failure = StorageError.because("invalid", f"{path}: is a directory, expected a file.")
        elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
            failure = StorageError.because("denied", f"{path}: no permission ({reason}).")
        elif error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
            failure = StorageError.because("invalid", f"{path}: {reason}.")
        else:
            failure = StorageError.because("unavailable", f"{path}: {reason}.")
        raise failure from None


def _size_of_file(path: str, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise StorageError.because("invalid", f"{path}: {kind}, expected a file.")
    return status.st_size


def _pread(descriptor: int, path: str, offset: int, length: int) -> bytes:
    content = os.pread(descriptor, length, offset)
    while len(content) < length:
        more = os.pread(descriptor, length - len(content), offset + len(content))
        if not more:
            found, expected = offset + len(content), offset + length
            raise StorageError.because("changed", f"{path}: ends at byte {found}, expected {expected} bytes or more.")
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
