"""Size and modification time of the local audio files of a corpus, by which replaced files are noticed.

A cut that is read by the path in its line has no address. Its row of `addresses.npy` holds the version of its file
instead: the modification time in place of the first byte, and the lower 32 bits of the size in place of the length.
Zeros mean that the version is not known: files whose durations were trusted (`--probe missing`) are not opened.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.addresses import NO_SHARD
from nestdata.corpus.parts import map_array
from nestdata.errors import AudioError
from nestdata.storage import FileVersion

_LOW_BITS = 0xFFFFFFFF


def row_of(version: FileVersion) -> tuple[int, int]:
    """Returns the row of `addresses.npy` of a file, as unsigned numbers."""
    return version.mtime_ns, NO_SHARD << 32 | version.size


class FileVersions:
    """The versions of the files of all cuts of a corpus, memory-mapped."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self._rows = rows

    @classmethod
    def open(cls, directory: Path, num_cuts: int) -> "FileVersions | None":
        """Opens `addresses.npy` of a corpus directory; returns None without one.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is damaged.
        """
        path = directory / "addresses.npy"
        return cls(map_array(path, np.int64, (2, num_cuts))) if path.is_file() else None

    def __getitem__(self, index: int) -> FileVersion | None:
        """Returns the version of the file of a cut; None if it is not known, or if the cut has an address."""
        mtime_ns, extent = int(self._rows[0, index]), int(self._rows[1, index])
        if not (mtime_ns or extent & _LOW_BITS) or extent >> 32 & _LOW_BITS != NO_SHARD:
            return None
        return FileVersion(mtime_ns, extent & _LOW_BITS)

    def with_versions(self, versions: Iterable[tuple[int, FileVersion]]) -> NDArray[np.int64]:
        """Returns the content of `addresses.npy` with other versions of the files of some cuts, by their indices."""
        rows = np.array(self._rows)
        for index, version in versions:
            mtime_ns, extent = row_of(version)
            rows[:, index] = mtime_ns, extent - (1 << 64)  # as a signed number, like all extents without a shard
        return rows


def check_version(line: dict[str, Any], version: FileVersion) -> None:
    """Checks that the file of a cut was not replaced. It costs one `stat` call, about 2 microseconds on a local disk.

    A path that is no longer a regular file passes, since reading it fails with the reason.

    Raises:
        AudioError: "changed": the file has another size or modification time.
    """
    path = path_of(line)
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return
    found = FileVersion.of(status)
    if found != version and stat.S_ISREG(status.st_mode):
        what = "size" if found.size != version.size else "modification time"
        raise AudioError.because(
            "changed",
            f"cut {line['id']!r}: {path} has changed since the corpus was prepared: it has another {what}. Restore it, "
            "or prepare the corpus again. If only times have changed, as after copying, use `nestdata verify CORPUS "
            "--accept-changed`.",
        )


def path_of(line: dict[str, Any]) -> str:
    """Returns the path of the file of a cut that is read by its line."""
    sources = line["recording"]["sources"]
    return str(next((source for source in sources if line["channel"] in source["channels"]), sources[0])["source"])
