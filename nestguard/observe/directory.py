"""The directory in which the processes of one node write their heartbeats: who may use it, and who removes it.

This module also names the files, and opens them so that another user who can write to a directory cannot redirect them.

/dev/shm is shared by all users of a node. So the directories of a user are inside one that only this user may enter.
This is checked before anything is written there.

Every rank and the monitor hold a shared lock on the directory of the run, which the kernel releases however they end.
The last one to leave removes the files. If all were killed, the lock is free, and the next start removes the directory.
Locks, unlike process ids, are never reused, and they are also valid between containers that share /dev/shm. A forked
loader worker inherits the lock of its rank.
"""

import contextlib
import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from nestguard.observe.view import GuardError, Identity

_log = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")
_LOCK_S = 5.0
"""How long a process tries to enter a directory that others remove at the same time."""

_RETRY_S = 0.01
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

BEAT_SUFFIX = ".beat"
STACK_REQUEST_SUFFIX = ".stack.wanted"
STACK_SUFFIX = ".stack.txt"
CRASH_SUFFIX = ".crash.txt"
TRACEBACK_SUFFIX = ".traceback.txt"
TRACES_REQUEST = "traces.wanted"
"""Name of the file that requests the traces of the flight recorder from the ranks of a node."""

TRACE_SUFFIX = ".flight-recorder.json"
PARTIAL_SUFFIX = ".partial"
"""End of the name of a file that is renamed when it is complete."""

_SUFFIXES = (
    *(BEAT_SUFFIX, STACK_REQUEST_SUFFIX, STACK_SUFFIX, CRASH_SUFFIX, TRACEBACK_SUFFIX, TRACE_SUFFIX),
    *(PARTIAL_SUFFIX, TRACE_SUFFIX + PARTIAL_SUFFIX),
)
_OWN_FILE = re.compile(
    rf"{re.escape(TRACES_REQUEST)}|"
    rf"\.?rank-\d+(\.worker-\d+)?(\.\d+)*({'|'.join(re.escape(suffix) for suffix in _SUFFIXES)})"
)
"""Names of the files of the stall guard. A program may keep other files beside them."""


class DirectoryLock:
    """A shared lock on a directory, from `lock_directory` or inherited.

    Args:
        path: The directory.
        fd: The open directory, which holds the lock.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        os.set_inheritable(fd, False)

    def pass_on(self) -> None:
        """Forgets the lock without releasing it: a process that has inherited it keeps it."""
        os.close(self.fd)

    def release(self) -> None:
        """Releases the lock. If no other process uses the directory, it is removed; see `remove`."""
        # This gives up the shared lock even if the exclusive one is refused. Of several processes that leave at the
        # same time, the last one gets it.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.remove()
        os.close(self.fd)

    def remove(self) -> None:
        """Removes the files of the stall guard, and the directory unless it contains others."""
        _remove_files(self.fd)
        with contextlib.suppress(OSError):
            self.path.rmdir()


def lock_directory(path: Path) -> DirectoryLock:
    """Locks a directory; creates it, with mode 0700, if it is missing.

    Raises:
        GuardError: The directory belongs to another user, or is open to others.
        OSError: It can be neither created nor opened.
    """
    path = Path(os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    parent_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _enter(path, parent_fd)
    finally:
        os.close(parent_fd)


@contextmanager
def run_directory(run_id: str, identity: Identity) -> Iterator[Path]:
    """Creates the directory for the heartbeats of the ranks that a run has on this node, and removes dead ones.

    It is in /dev/shm or, if that is not possible, in the directory for temporary files, and only this user can enter
    it. A directory is dead if all processes that used it have ended. While the block runs, this one is not removed;
    start the heartbeat and the monitor in it.

    Args:
        run_id: Equal on all ranks of the run on this node, and on no other run there.
        identity: Identity of this rank. The first local rank logs a warning if /dev/shm cannot be used safely.

    Raises:
        GuardError: There is no safe place for the directory.
    """
    name = f"{run_id}-node-{identity.node_rank}".replace("/", "-")
    lock = _enter_first(name, warns=identity.local_rank == 0)
    try:
        yield lock.path
    finally:
        lock.release()


def check_private(path: Path) -> None:
    """Raises GuardError unless a directory belongs to this user alone, and OSError if it cannot be opened."""
    os.close(_open_private(path, path.name))


def _enter_first(name: str, *, warns: bool) -> DirectoryLock:
    """Enters the directory of a run in the first place that is safe."""
    reasons: list[str] = []
    for place in dict.fromkeys((_SHARED_MEMORY, Path(tempfile.gettempdir()))):
        try:
            lock = _enter_in(place, name)
        except (GuardError, OSError) as error:
            reasons.append(str(error).rstrip("."))
        else:
            if reasons and warns:
                _log.warning("%s. Heartbeats are written to %s instead.", reasons[0], lock.path.parent)
            return lock
    raise GuardError(f"{'. '.join(reasons)}. Set TMPDIR to a directory of your own.")


def _enter_in(place: Path, name: str) -> DirectoryLock:
    """Enters the directory of a run inside the one of this user, and removes dead ones beside it."""
    status = place.stat()
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise GuardError(f"{place} has no sticky bit: other users could replace what is in it. Give it mode 1777.")
    home = place / f"nestguard-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    home_fd = _open_private(home, home.name)
    try:
        lock = _enter(home / name, home_fd)
        _remove_dead(home_fd, name)
        return lock
    finally:
        os.close(home_fd)


def _enter(path: Path, parent_fd: int) -> DirectoryLock:
    """Opens and locks a directory; repeats this if it is removed in between."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=parent_fd)
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            fd = _open_private(path, path.name, parent_fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path.name, dir_fd=parent_fd, follow_symlinks=False)):
                    return DirectoryLock(path, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        if time.monotonic() > deadline:
            raise GuardError(f"{path} is locked, or removed again and again, by another process. Start the run again.")
        time.sleep(_RETRY_S)


def _open_private(path: Path, name: str, parent_fd: int | None = None) -> int:
    """Opens a directory that only this user may enter. `name` is relative to `parent_fd`, if that is given."""
    try:
        fd = os.open(path if parent_fd is None else name, _OPEN_DIRECTORY, dir_fd=parent_fd)
    except NotADirectoryError:
        raise GuardError(f"{path} is a link or a file, not a directory. {_remedy(path)}") from None
    status = os.fstat(fd)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, not to this user ({os.geteuid()})"
    elif status.st_mode & 0o077:
        problem = f"is open to other users: its mode is {stat.S_IMODE(status.st_mode):04o}, not 0700"
    if problem:
        os.close(fd)
        raise GuardError(f"{path} {problem}. {_remedy(path)}")
    return fd


def _remedy(path: Path) -> str:
    return f"Remove {path}, or ask its owner or an administrator to do so."


def _remove_dead(home_fd: int, own: str) -> None:
    """Removes the directories that no process uses any more."""
    for name in os.listdir(home_fd):
        if name == own:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(name, _OPEN_DIRECTORY, dir_fd=home_fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_files(fd)
                os.rmdir(name, dir_fd=home_fd)
            finally:
                os.close(fd)


def _remove_files(fd: int) -> None:
    for name in os.listdir(fd):
        if _OWN_FILE.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)


def create_file(path: Path) -> FileIO:
    """Opens a new file for reading and writing. Replaces an existing file or link; does not follow links."""
    path.unlink(missing_ok=True)
    return FileIO(path, "x+")  # O_CREAT | O_EXCL


def open_file(path: Path) -> FileIO:
    """Opens a file for reading. Links are not followed, and no writer of a pipe is waited for.

    Raises:
        OSError: The file cannot be opened, or it is not a regular file of this user.
    """
    file = FileIO(path, opener=_open)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"{path} is not a regular file of this user")
    return file


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
