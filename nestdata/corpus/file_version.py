"""Size and modification time of the local audio files of a corpus, by which replaced files are noticed.

    versions.npy    `VERSION` (num_cuts,), in the order of index.npy; only if some are known

Zeros mean that a version is not known: of audio with an address, and of files that were not opened because their
durations were trusted (`--probe missing`).
"""

import os
import stat
from typing import Any

import numpy as np

from nestdata.errors import AudioError
from nestdata.storage import FileVersion

VERSION = np.dtype([("mtime_ns", "<i8"), ("size", "<u4")])
"""A row of `versions.npy`: the fields of a `FileVersion`."""


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
