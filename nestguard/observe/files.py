"""Opens files so that another user who can write to their directory cannot redirect them."""

import os
import stat
from io import FileIO
from pathlib import Path


def create_file(path: Path) -> FileIO:
    """Opens a new file for reading and writing. What has the path already is replaced; links are not followed."""
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
