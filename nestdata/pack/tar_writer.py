"""Writes tar files whose bytes depend on the names and contents of their members alone."""

import hashlib
import tarfile
from typing import BinaryIO

BLOCK = 512
"""Size of a tar header in bytes; contents are padded to multiples of it."""


class TarWriter:
    """Writes members one after the other. They have no times and owners, so equal members give equal files.

    Args:
        file: Open file that receives the archive.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.size = 0
        """Number of bytes written so far."""

    @property
    def sha256(self) -> str:
        """Checksum of all bytes written so far, in hexadecimal digits."""
        return self._sha256.hexdigest()

    def add(self, name: str, content: bytes) -> int:
        """Writes a member, and returns the byte at which its content starts. Its header is in the 512 bytes before."""
        self._write(_header(name, len(content)))
        start = self.size
        self._write(content)
        self._write(bytes(-len(content) % BLOCK))
        return start

    def finish(self) -> None:
        """Writes the end of the archive: two empty blocks, and zeros up to the usual multiple of 10,240 bytes."""
        self._write(bytes(2 * BLOCK))
        self._write(bytes(-self.size % tarfile.RECORDSIZE))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)
        self.size += len(content)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8")
    except ValueError:  # the name is too long: its header follows one that holds the name
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8")
