"""Output directories and files that appear at their target complete or not at all.

An output is written to the folder `NAME.partial` beside its target. The program makes this folder itself and puts a
mark into it, a file that says what is written there. The mark is locked in the meantime, so that a second run into the
same target is refused. At the end, all files are flushed, and the folder is renamed. If the process is killed, the
target holds the old output or the new one, never a mixture; the next run into the same target finds the mark and clears
the folder, except for subfolders of finished work that it names.

Only a folder with such a mark is ever cleared. Anything else at `NAME.partial`, such as a link, a folder of another
user or one without a mark, is left as it is, and the run is refused. A run is also refused if its output would replace
one of its inputs, or a directory with files that this program has not made.
"""

import ctypes
import errno
import fcntl
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from re import Pattern
from typing import BinaryIO

from nestdata.errors import OutputError

MARK = ".nest-unfinished.json"
"""File in each folder that is being written, which says what is written there."""

# Error numbers of a disk that accepts no more data. Other system errors in the block may concern an input.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Error numbers of a file system without locks, or without locks of directories (NFS).
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
# Subfolder that holds the old output while the new one takes its place, where two directories cannot be swapped.
_REPLACED = ".replaced"
_FLUSHES_AT_A_TIME = 16


@contextmanager
def output_directory(
    output: Path,
    *,
    kind: str,
    names: Pattern[str],
    overwrite: bool,
    may_replace: Callable[[Path], bool],
    resumable: Collection[str] = (),
    inputs: Iterable[str | Path] = (),
) -> Iterator[Path]:
    """Yields a directory to write to, and renames it to the target at the end of the block.

    If the block raises, the directory is removed and the target stays as it was. Subfolders with finished work may be
    kept for the next run into the same target.

    Args:
        output: The target.
        kind: Name of this kind of output for messages, such as "a corpus".
        names: Matches the names of the files and folders that are directly in an output of this kind. An existing
            output with other names is not replaced.
        overwrite: Whether an existing output of the same kind is replaced.
        may_replace: Returns whether the existing target is an output of this kind. Called only with `overwrite`.
        resumable: Names of subfolders that stay in `NAME.partial` if the block raises or the process is killed, and
            that the next run finds there. At the end of the block, they are part of the output, unless it removed them.
        inputs: Local paths that are read. None of them may be the target, be in it, or be in `NAME.partial`.

    Raises:
        OutputError: The target exists and may not be replaced, cannot be written, or is being written by another run;
            or `NAME.partial` is not a folder that an earlier run has left; or an input would be replaced.
    """

    def check() -> None:
        _check_directory(output, kind, names, overwrite, may_replace)

    _check_inputs(output, inputs)
    check()
    with _unfinished_folder(output, kind, resumable) as (partial, leftovers):
        check()  # an output may have been restored
        yield partial
        check()  # another run may have finished meanwhile
        _move_into_place(partial, output, kind, leftovers)


@contextmanager
def output_file(output: Path, *, overwrite: bool, inputs: Iterable[str | Path] = ()) -> Iterator[Path]:
    """Yields a path to write to, and renames the file to the target at the end of the block.

    Other files that the block writes beside that path are moved along under their own names, such as the weights of
    an ONNX file above 2 GB. If the block raises, nothing is left and the target stays as it was.

    Args:
        output: The target. A link is replaced, and what it points to stays.
        overwrite: Whether existing files are replaced.
        inputs: Local paths that are read. None of them may be the target.

    Raises:
        OutputError: A target exists and may not be replaced, cannot be written, or is being written by another run; or
            `NAME.partial` is not a folder that an earlier run has left; or an input would be replaced.
    """
    _check_file(output, overwrite=True)
    _check_inputs(output, inputs)
    _check_file(output, overwrite)
    with _unfinished_folder(output, "a file") as (partial, leftovers):
        yield partial / output.name
        # The named file is moved last: once it exists, the others exist as well.
        written = sorted(
            (path for path in partial.iterdir() if path.name != MARK), key=lambda path: path.name == output.name
        )
        for path in written:
            _check_file(output.with_name(path.name), overwrite)
            flush_to_disk(path)
        for path in written:
            path.replace(output.with_name(path.name))
        _put_aside(partial, leftovers)
        flush_to_disk(output.parent)


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file that takes the place of a file of the program, once it is complete and on disk.

    The new file has a random name of its own, `unfinished_name`. If the block raises, it is removed and the old file
    stays. Nothing is buffered, so that a process that is forked in the meantime does not write it once more.

    Raises:
        OSError: The file cannot be written.
    """
    unfinished = unfinished_name(path)
    try:
        with unfinished.open("xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file of the program in one step, as `replaced_file` does.

    Raises:
        OSError: The file cannot be written.
    """
    with replaced_file(path) as file:
        write_all(file, content)


def write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    """Writes all content to a file without a buffer, whose `write` may take only a part of it."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def unfinished_name(path: Path) -> Path:
    """Returns a random name beside a path, which `unfinished_files` finds."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")


def unfinished_files(directory: Path, names: Pattern[str]) -> list[Path]:
    """Returns the files that killed processes have left under an `unfinished_name` of a file whose name matches."""
    return [
        path
        for path in directory.glob(".*.partial")
        if names.fullmatch(path.name[1:].rsplit(".", 2)[0]) and not path.is_dir()
    ]


def check_writable(directory: Path) -> None:
    """Creates a directory if it is missing, and checks that files can be created in it.

    Raises:
        OutputError: Files cannot be created in it.
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
    """Returns the directory in which an output is written before it is renamed to its target.

    Raises:
        OutputError: The target has no name: it is `.` or `/`.
    """
    if not output.name:
        raise OutputError(f"{output.absolute()}: cannot be an output. Choose a new name in a folder.")
    return output.with_name(output.name + ".partial")


def locked_directory(directory: Path) -> AbstractContextManager[None]:
    """Excludes other runs that write to a directory during the block; the lock ends with the process.

    Raises:
        OutputError: Another run is writing to it.
    """
    return _locked(directory, os.O_RDONLY, directory)


def locked_file(path: Path, what: Path) -> AbstractContextManager[None]:
    """Excludes other runs that lock the same file during the block; the file is made, and stays.

    Args:
        path: The file.
        what: What the lock is for, for messages.

    Raises:
        OutputError: Another run holds the lock.
        OSError: The file cannot be made.
    """
    return _locked(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, what)


def is_full_disk(error: OSError) -> bool:
    """Returns whether a disk accepts no more data; other system errors may concern an input."""
    return error.errno in _CANNOT_WRITE


def flush_to_disk(*paths: Path) -> None:
    """Waits until the content of files, or the entries of directories, are on disk (fsync).

    Raises:
        OSError: A path does not exist, or the disk reports an error.
    """
    if len(paths) == 1:
        _flush(paths[0])
    else:
        with ThreadPoolExecutor(_FLUSHES_AT_A_TIME) as threads:  # many flushes at a time take about as long as one
            for _ in threads.map(_flush, paths):
                pass


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_inputs(output: Path, inputs: Iterable[str | Path]) -> None:
    for given in inputs:
        path = Path(given).resolve()
        for directory in (output.resolve(), partial_path(output).resolve()):
            if path.is_relative_to(directory):
                what = "is the input" if path == directory else f"holds the input {given}"
                raise OutputError(f"{directory}: {what}, and would be replaced. Choose another path for the output.")


def _check_directory(
    output: Path, kind: str, names: Pattern[str], overwrite: bool, may_replace: Callable[[Path], bool]
) -> None:
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise _exists_already(output)
    if output.is_symlink() or not may_replace(output):
        raise OutputError(f"{output}: exists already and is not {kind}. Choose another path.")
    own = (MARK, _REPLACED)  # of a run that was killed while it replaced an output
    others = sorted(entry.name for entry in output.iterdir() if not (entry.name in own or names.fullmatch(entry.name)))
    if others:
        raise OutputError(
            f"{output}: is {kind}, but {others[0]!r} is not a part of it and would be deleted. Move it away, or choose "
            "another path."
        )


def _check_file(output: Path, overwrite: bool) -> None:
    if output.is_dir():
        raise OutputError(f"{output}: is a directory. Choose another path.")
    if not os.path.lexists(output):
        return
    if not (output.is_symlink() or output.is_file()):
        raise OutputError(f"{output}: is not a file. Choose another path.")
    if not overwrite:
        raise _exists_already(output)


def _exists_already(output: Path) -> OutputError:
    return OutputError(f"{output}: exists already. Choose another path, or pass --overwrite to replace it.")


def _cannot_be_written(output: Path, error: OSError) -> OutputError:
    return OutputError(f"{output}: cannot be written ({error.strerror}). Choose another path.")


def _is_written_elsewhere(output: Path) -> OutputError:
    return OutputError(f"{output}: another run is writing it. Wait for it, or choose another path.")


@contextmanager
def _unfinished_folder(output: Path, kind: str, resumable: Collection[str] = ()) -> Iterator[tuple[Path, list[Path]]]:
    """Yields a folder beside the target, whose mark is locked during the block, and a list of what is to be removed.

    At first it contains at most the mark and the subfolders in `resumable`, which an earlier run has left. If the block
    raises, it is removed, unless one of them contains a file: then the folder and these subfolders stay for the next
    run. Nothing is removed before the lock is released, because NFS keeps an open file that is removed.
    """
    partial, leftovers = partial_path(output), list[Path]()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        leftovers += _left_aside(partial)
        descriptor = _new_folder(partial, output, kind)
    except OSError as error:
        raise _cannot_be_written(output, error) from error
    try:
        if descriptor is None:
            _check_mark(partial / MARK, output, kind)
            descriptor = _lock(partial / MARK, os.O_RDWR | os.O_NOFOLLOW, output)
        try:
            if not os.path.lexists(output) and (partial / _REPLACED).is_dir():
                (partial / _REPLACED).rename(output)  # the earlier run was killed while the old output was replaced
            _clear(partial, resumable)
            yield partial, leftovers
        except BaseException as error:
            with suppress(OSError):
                if any(file.is_file() for name in resumable for file in (partial / name).rglob("*")):
                    _clear(partial, resumable)
                else:
                    _put_aside(partial, leftovers)
            if isinstance(error, OSError) and is_full_disk(error):
                raise _cannot_be_written(output, error) from error
            raise
        finally:
            os.close(descriptor)
    finally:
        for path in leftovers:
            with suppress(OSError):
                _clear(path)
                (path / MARK).unlink(missing_ok=True)  # last: an interrupted removal leaves a folder with its mark
                path.rmdir()


def _new_folder(partial: Path, output: Path, kind: str) -> int | None:
    """Makes a folder with a locked mark, and returns the descriptor of the lock; None if something is there already.

    The folder gets its name when the mark is in it.
    """
    if os.path.lexists(partial):
        return None
    made = unfinished_name(partial)
    made.mkdir()
    try:
        _write_mark(made / MARK, output, kind)
        descriptor = _lock(made / MARK, os.O_RDWR | os.O_NOFOLLOW, output)
        try:
            made.rename(partial)
        except OSError:
            os.close(descriptor)
            if not os.path.lexists(partial):
                raise
        else:
            return descriptor
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    shutil.rmtree(made, ignore_errors=True)  # another run was faster
    return None


def _write_mark(mark: Path, output: Path, kind: str) -> None:
    with mark.open("x", encoding="utf-8") as file:
        json.dump({"kind": kind, "output": output.name}, file)


def _is_own(folder: Path) -> bool:
    """Returns whether a path is a folder of this user with a mark."""
    try:
        status, mark = os.lstat(folder), os.lstat(folder / MARK)
    except OSError:
        return False
    owner = os.geteuid()
    return stat.S_ISDIR(status.st_mode) and stat.S_ISREG(mark.st_mode) and status.st_uid == mark.st_uid == owner


def _check_mark(mark: Path, output: Path, kind: str) -> None:
    """Raises OutputError unless this program has made the folder of a mark for this output, and this user owns it."""
    partial, found = mark.parent, None
    if not _is_own(partial):
        raise OutputError(
            f"{partial}: is in the way: {output.name} is written there first, and this program has not made it for "
            "this user. Move it away, or choose another path for the output."
        )
    with suppress(OSError, ValueError):
        found = json.loads(mark.read_text(encoding="utf-8"))
    if found != {"kind": kind, "output": output.name}:
        raise OutputError(
            f"{partial}: holds unfinished work for another output than {kind} {output.name}. Remove it if you do not "
            "need it, or choose another path for the output."
        )


@contextmanager
def _locked(path: Path, flags: int, output: Path) -> Iterator[None]:
    """Holds a lock on a file or directory during the block."""
    descriptor = _lock(path, flags, output)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path, flags: int, output: Path) -> int:
    """Locks a file or directory until the descriptor that is returned is closed, or the process ends for any reason."""
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:  # another run has just finished
        raise _is_written_elsewhere(output) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _is_written_elsewhere(output) from None
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
        # Another run may have renamed the folder to the target between `open` and `flock`.
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise _is_written_elsewhere(output)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _clear(directory: Path, keep: Collection[str] = ()) -> None:
    """Removes all that a marked folder contains, apart from the mark and the subfolders to keep."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path.name not in keep:
                shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _put_aside(folder: Path, leftovers: list[Path]) -> None:
    """Gives a folder another name, under which a later run finds and removes it if this one is killed before."""
    aside = unfinished_name(folder)
    folder.rename(aside)
    leftovers.append(aside)


def _left_aside(partial: Path) -> list[Path]:
    """Returns the folders that killed runs into the same target had put aside."""
    name = re.compile(rf"\.{re.escape(partial.name)}\.[0-9a-f]{{12}}\.partial")
    with os.scandir(partial.parent) as entries:
        found = [Path(entry.path) for entry in entries if name.fullmatch(entry.name)]
    return [path for path in found if (_is_own(path) and _is_unlocked(path / MARK)) or _is_empty(path)]


def _is_empty(folder: Path) -> bool:
    with suppress(OSError):
        return folder.is_dir() and not folder.is_symlink() and not os.listdir(folder)
    return False


def _is_unlocked(mark: Path) -> bool:
    try:
        os.close(_lock(mark, os.O_RDWR | os.O_NOFOLLOW, mark))
    except (OSError, OutputError):
        return False
    return True


def _move_into_place(partial: Path, output: Path, kind: str, leftovers: list[Path]) -> None:
    """Flushes a finished directory and renames it to the target, replacing an existing directory."""
    for directory, _, files in os.walk(partial, topdown=False):
        flush_to_disk(*(Path(directory, name) for name in files))
        flush_to_disk(Path(directory))
    if output.exists():
        # The old output takes the name of the folder for a moment: it has a mark as well, whose lock excludes others.
        with suppress(FileExistsError):  # of a run that was killed here
            _write_mark(output / MARK, output, kind)
        with _locked(output / MARK, os.O_RDWR | os.O_NOFOLLOW, output):
            if _swap(partial, output):
                _put_aside(partial, leftovers)
            else:
                output.rename(partial / _REPLACED)
                partial.rename(output)
                aside = unfinished_name(partial)
                (output / _REPLACED).rename(aside)
                leftovers.append(aside)
    else:
        partial.rename(output)
    (output / MARK).unlink()
    flush_to_disk(output.parent)


def _swap(first: Path, second: Path) -> bool:
    """Swaps two directories in one step; returns False if the system or the file system cannot."""
    current_directory, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    libc = ctypes.CDLL(None, use_errno=True)
    names = (current_directory, os.fsencode(first), current_directory, os.fsencode(second), exchange)
    return hasattr(libc, "renameat2") and libc.renameat2(*names) == 0
