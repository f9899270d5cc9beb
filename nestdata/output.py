"""Output directories and files that appear at their target complete or not at all.

An output is written to the directory `NAME.partial` beside its target, which is locked in the meantime, and is flushed
and renamed at the end. If the process is killed, the target holds the old output or the new one, never a mixture; the
next run into the same target clears `NAME.partial`, except for folders of finished work that it names. A second run
into a target that is being written is refused.
"""

import ctypes
import errno
import fcntl
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path

from nestdata.errors import OutputError

# Error numbers of a disk that accepts no more data. Other system errors in the block may concern an input.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def output_directory(
    output: Path, *, kind: str, overwrite: bool, may_replace: Callable[[Path], bool], resumable: Collection[str] = ()
) -> Iterator[Path]:
    """Yields an empty directory to write to, and renames it to the target at the end of the block.

    If the block raises, the directory is removed and the target stays as it was. Subfolders with finished work may be
    kept for the next run into the same target.

    Args:
        output: The target.
        kind: Name of this kind of output for messages, such as "a corpus".
        overwrite: Whether an existing output of the same kind is replaced.
        may_replace: Returns whether the existing target is an output of this kind. Called only with `overwrite`.
        resumable: Names of subfolders that stay in `NAME.partial` if the block raises or the process is killed, and
            that the next run finds there. At the end of the block, they are part of the output, unless it removed them.

    Raises:
        OutputError: The target exists and may not be replaced, cannot be written, or is being written by another run.
    """
    _check_directory(output, kind, overwrite, may_replace)
    with _partial_directory(output, resumable) as partial:
        yield partial
        _check_directory(output, kind, overwrite, may_replace)  # another run may have finished since the first check
        _move_into_place(partial, output)


@contextmanager
def output_file(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a path to write to, and renames the file to the target at the end of the block.

    Other files that the block writes beside that path are moved along under their own names, such as the weights of
    an ONNX file above 2 GB. If the block raises, nothing is left and the target stays as it was.

    Args:
        output: The target.
        overwrite: Whether an existing file is replaced.

    Raises:
        OutputError: The target exists and may not be replaced, cannot be written, or is being written by another run.
    """
    _check_file(output, overwrite)
    with _partial_directory(output) as partial:
        yield partial / output.name
        _check_file(output, overwrite)  # another run may have finished since the first check
        # The named file is moved last: once it exists, the others exist as well.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == output.name):
            flush_to_disk(path)
            path.replace(output.with_name(path.name))
        shutil.rmtree(partial)
        flush_to_disk(output.parent)


def check_writable(directory: Path) -> None:
    """Creates a directory if it is missing, and checks that files can be created in it.

    Raises:
        OutputError: They cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _cannot_be_written(directory, error) from error


def path_before_move(path: str, output: str | Path, partial: str | Path) -> str:
    """Returns where a file is while its output directory is written; the path itself if it is not in the directory.

    Args:
        path: Path of the file once the directory is in place, or any other path or URL.
        output: The target of the directory, an absolute path.
        partial: The directory that is written.
    """
    inside = f"{output}/"
    return f"{partial}/{path[len(inside) :]}" if path.startswith(inside) else path


def has_json_kind(directory: Path, file_name: str, kind: str) -> bool:
    """Returns whether a directory holds a JSON file with an object whose field `kind` has the given value."""
    try:
        return bool(json.loads((directory / file_name).read_text(encoding="utf-8")).get("kind") == kind)
    except (OSError, ValueError, AttributeError):
        return False


@cache
def package_version() -> str:
    """Returns the version of the package, on which finished work of an earlier run depends; empty if not installed."""
    try:
        return importlib.metadata.version("nest-pretrain")
    except importlib.metadata.PackageNotFoundError:
        return ""


def partial_path(output: Path) -> Path:
    """Returns the directory in which an output is written before it is renamed to its target."""
    return output.with_name(output.name + ".partial")


def locked_directory(directory: Path) -> AbstractContextManager[None]:
    """Excludes other runs that write to a directory during the block; the lock ends with the process.

    Raises:
        OutputError: Another run is writing to it.
    """
    return _locked(directory, directory)


def is_full_disk(error: OSError) -> bool:
    """Returns whether a disk accepts no more data; other system errors may concern an input."""
    return error.errno in _CANNOT_WRITE


def flush_to_disk(path: Path) -> None:
    """Waits until the content of a file, or the entries of a directory, are on disk (fsync).

    Raises:
        OSError: The path does not exist, or the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_directory(output: Path, kind: str, overwrite: bool, may_replace: Callable[[Path], bool]) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise _exists_already(output)
    if not may_replace(output):
        raise OutputError(f"{output}: exists already and is not {kind}. Choose another path.")


def _check_file(output: Path, overwrite: bool) -> None:
    if output.is_dir():
        raise OutputError(f"{output}: is a directory. Choose another path.")
    if output.exists() and not overwrite:
        raise _exists_already(output)


def _exists_already(output: Path) -> OutputError:
    return OutputError(f"{output}: exists already. Choose another path, or pass --overwrite to replace it.")


def _cannot_be_written(output: Path, error: OSError) -> OutputError:
    return OutputError(f"{output}: cannot be written ({error.strerror}). Choose another path.")


@contextmanager
def _partial_directory(output: Path, resumable: Collection[str] = ()) -> Iterator[Path]:
    """Yields a directory beside the target, locked during the block, and removes it if the block raises.

    At first it contains at most the subfolders in `resumable`, which an earlier run has left. If the block raises and
    one of them contains a file, the directory and these subfolders stay for the next run.
    """
    partial = partial_path(output)
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_written(output, error) from error
    with _locked(partial, output):
        _clear(partial, resumable)
        try:
            yield partial
        except BaseException as error:
            _clear_after_error(partial, resumable)
            if isinstance(error, OSError) and is_full_disk(error):
                raise _cannot_be_written(output, error) from error
            raise


@contextmanager
def _locked(directory: Path, output: Path) -> Iterator[None]:
    """Holds a lock on a directory; the operating system releases it when the process ends for any reason."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another run may have renamed the directory to the target between `open` and `flock`.
        if not directory.exists() or not os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise BlockingIOError
        yield
    except BlockingIOError:
        raise OutputError(f"{output}: another run is writing it. Wait for it, or choose another path.") from None
    finally:
        os.close(descriptor)


def _clear(directory: Path, keep: Collection[str] = ()) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name not in keep:
                shutil.rmtree(path)
        else:
            path.unlink()


def _clear_after_error(partial: Path, resumable: Collection[str]) -> None:
    """Removes the content of a directory except its subfolders of finished work, or all of it if there is none."""
    if any(file.is_file() for name in resumable for file in (partial / name).rglob("*")):
        with suppress(OSError):
            _clear(partial, resumable)
    else:
        shutil.rmtree(partial, ignore_errors=True)


def _move_into_place(partial: Path, output: Path) -> None:
    """Flushes a finished directory and renames it to the target, replacing an existing directory."""
    for path in (*partial.iterdir(), partial):
        flush_to_disk(path)
    if output.exists():
        # The old output takes the name of the partial directory and is removed there; the lock excludes other runs.
        with _locked(output, output):
            _exchange(partial, output)
            shutil.rmtree(partial)
    else:
        partial.rename(output)
    flush_to_disk(output.parent)


def _exchange(first: Path, second: Path) -> None:
    """Swaps two directories; atomically if the system can, so that the target exists at every moment."""
    current_directory, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    libc = ctypes.CDLL(None, use_errno=True)
    names = (current_directory, os.fsencode(first), current_directory, os.fsencode(second), exchange)
    if not hasattr(libc, "renameat2") or libc.renameat2(*names) != 0:
        # Not Linux, or the file system cannot swap: the target is missing for an instant.
        aside = first.with_name(first.name + ".old")
        second.rename(aside)
        first.rename(second)
        aside.rename(first)
