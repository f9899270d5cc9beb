"""Lines of a manifest in bounded memory, and gzip streams that cannot expand without bound."""

import gzip
import io
from collections.abc import Iterator
from io import BufferedIOBase

from nestdata.errors import ManifestError

MAX_LINE_BYTES = 1 << 24
"""Length of the longest line. A cut with an alignment of every word of a day is a few megabytes."""

# A manifest may be this many times as long as its gzip stream, which is ten times what lines of a manifest reach, and
# somewhat more if it is short. Gzip can expand a thousandfold.
_MAX_RATIO, _MAX_EXPANDED = 200, 1 << 24
_BUFFER_BYTES = 1 << 16


class LineReader:
    """The lines of an open manifest; one of more than `MAX_LINE_BYTES` is an error.

    Reading takes as long as iterating over the file itself.
    """

    def __init__(self, name: str, file: BufferedIOBase) -> None:
        self._name = name
        self._file = file
        self._num_lines = 0

    def readline(self) -> bytes:
        """Returns the next line, with its newline; empty at the end.

        Raises:
            ManifestError: It is too long.
        """
        return next(iter(self), b"")

    def __iter__(self) -> Iterator[bytes]:
        read, limit = self._file.readline, MAX_LINE_BYTES + 1
        while line := read(limit):
            self._num_lines += 1
            if len(line) == limit:
                raise ManifestError(
                    f"{self._name}:{self._num_lines}: a line of more than {MAX_LINE_BYTES >> 20} MiB, which begins "
                    f"with {line[:80]!r}. Check that this is a manifest, and divide or drop the line."
                )
            yield line

    def read(self, num_bytes: int) -> bytes:
        """Returns up to a number of bytes; empty at the end."""
        return self._file.read(num_bytes)


def expanded(name: str, stream: BufferedIOBase) -> io.BufferedReader:
    """Returns the content of a gzip stream, which is closed along with the result.

    Reads raise ManifestError if the stream expands more than any manifest does, and otherwise the errors of `gzip`.
    """
    return io.BufferedReader(_Expanded(name, stream), _BUFFER_BYTES)


class _Expanded(io.RawIOBase):
    def __init__(self, name: str, stream: BufferedIOBase) -> None:
        self._name = name
        self._stream = stream
        self._file = gzip.GzipFile(fileobj=stream, mode="rb")
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the standard library says WriteableBuffer
        count = self._file.readinto(buffer)
        self._num_bytes += count
        if self._num_bytes > _MAX_EXPANDED + _MAX_RATIO * self._stream.tell():
            raise ManifestError(
                f"{self._name}: {self._stream.tell()} bytes of gzip expand to more than {self._num_bytes} bytes, which "
                "no manifest does. Check where the file comes from; if it is right, decompress it first."
            )
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            self._stream.close()
        super().close()
