"""The directory that a corpus is written to: beside its target, locked while it is written, renamed when whole.

A killed run leaves the old corpus or the new one at the target, never a mixture; what it had begun lies in
`NAME.partial` and is cleared by the next run. Two runs into one target: the second is refused.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nestdata.errors import CorpusError


def check_target(output: Path, overwrite: bool) -> None:
    """Raises CorpusError where something is in the way that may not be replaced."""
    if output.exists() and not (overwrite and (output / "meta.json").is_file()):
        advice = "Choose another place." if overwrite else "Choose another place, or pass --overwrite to replace it."
        raise CorpusError(f"{output}: exists already. {advice}")


# What the system says of a place where nothing more can be written.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def partial_directory(output: Path) -> Iterator[Path]:
    """Yields an empty directory beside the target, locked for as long as it is written, and removed on an error.

    Raises:
        CorpusError: It cannot be written, or another run is writing it.
    """
    partial = output.with_name(output.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"{output}: cannot be written ({error.strerror}). Choose another place.") from error
    with _locked(partial, output):
        _clear(partial)
        try:
            yield partial
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
                raise CorpusError(f"{output}: cannot be written ({error.strerror}). Choose another place.") from error
            raise


@contextmanager
def _locked(directory: Path, output: Path) -> Iterator[None]:
    """Holds a lock on a directory, which the system lets go of when the process ends, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another run may have renamed the directory into place between the two calls.
        if not directory.exists() or not os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise BlockingIOError
        yield
    except BlockingIOError:
        raise CorpusError(f"{output}: another run is writing it. Wait for it, or choose another place.") from None
    finally:
        os.close(descriptor)


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def move_into_place(partial: Path, output: Path) -> None:
    """Flushes a finished directory and gives it the name of its target, in place of what is there."""
    for path in (*partial.iterdir(), partial):
        _flush(path)
    if output.exists():
        # The old corpus takes the partial's name, and is cleared with it; the lock keeps other runs off until then.
        with _locked(output, output):
            _exchange(partial, output)
            shutil.rmtree(partial)
    else:
        partial.rename(output)
    _flush(output.parent)


def _exchange(first: Path, second: Path) -> None:
    """Swaps two directories in one step, so that there is no moment without a corpus at the target."""
    current_directory, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    libc = ctypes.CDLL(None, use_errno=True)
    names = (current_directory, os.fsencode(first), current_directory, os.fsencode(second), exchange)
    if not hasattr(libc, "renameat2") or libc.renameat2(*names) != 0:
        # Not Linux, or a file system that cannot swap: the old corpus steps aside for an instant.
        aside = first.with_name(first.name + ".old")
        second.rename(aside)
        first.rename(second)
        aside.rename(first)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
