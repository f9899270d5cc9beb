"""Keeps the results of tasks until the corpus is complete, so that a run that was ended goes on where it stopped.

The result of a task is one file, whose name is the number of the task. It begins with one digest of all that the
result depends on: the package, the settings, the source and its items, and size and time or ETag of every file and
object that the task read or rejected. The names of these files and objects follow, so that the next run can compute the
digest again. It takes the result if the digest is the same, so a changed shard only repeats the tasks that read it.

Results are kept where reading again would take long: of audio in shards or at URLs, and of audio that was decoded or
searched for speech. Headers of other files are read again.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nestdata.corpus.meta import FORMAT_VERSION
from nestdata.errors import StorageError
from nestdata.output import package_version, path_before_move
from nestdata.prepare.found import Found
from nestdata.prepare.inputs.entry import ReadsFiles, Source
from nestdata.prepare.inputs.remote import in_parallel
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.prepare.speech import detector_name
from nestdata.storage import ObjectInfo, is_url, storage

KEPT_RESULTS = "tasks"
"""Subfolder of the corpus directory while it is being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Consecutive items of a source."""

    number: int
    """Number of the task in the run."""

    source: Source
    source_index: int
    first: int
    """Number of the first item, counted from 1."""

    items: list[Any]
    config: PrepareConfig
    moved: tuple[str, str]
    """Paths of the corpus directory once it is in place, and now."""


class KeptResult:
    """The file with the result of a task. Create it before the task reads anything: files may change meanwhile."""

    def __init__(self, task: Task) -> None:
        source = task.source
        self._task, self._path = task, Path(task.moved[1], KEPT_RESULTS, str(task.number))
        self._infos = {item.location: item for item in task.items if isinstance(item, ObjectInfo)}
        files = [file for item in task.items for file in source.files(item)] if isinstance(source, ReadsFiles) else []
        # Another version of the package may find something else in the same audio.
        versions = [package_version(), FORMAT_VERSION, detector_name() if task.config.finds_speech else ""]
        # These settings change no result of a task.
        config = replace(task.config, format=None, tars=(), strict=False, pcm=False, report_samples=0)
        self._inputs = versions, config, source, task.first, task.items, self._versions(files)

    def load(self) -> Found | None:
        """Returns the kept result; None if there is none, or if anything that it depends on has changed."""
        try:
            header, _, content = self._path.read_bytes().partition(b"\n")
            digest, *audio = json.loads(header)
            found = Found.from_bytes(content)
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None
        return found if digest == self._digest(audio) else None

    def save(self, found: Found, audio: Mapping[str, ObjectInfo | None]) -> None:
        """Keeps a result.

        Args:
            found: The result.
            audio: Locations of the audio of all entries, with size and ETag of shards and objects.

        Raises:
            OSError: The disk is full.
        """
        # If all files of a task are rejected, nothing is kept, and they are decoded again.
        has_decoded = self._task.config.probe == "decode" and len(found.records) > 0
        takes_long = found.shards or found.searched.seconds or has_decoded
        # A worker of Dask may have no access to the directory.
        if not (takes_long and self._path.parent.is_dir()):
            return
        self._infos |= {location: info for location, info in audio.items() if info}
        header = json.dumps([self._digest([*audio]), *audio]).encode()
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")  # the caller of all tasks removes what is left
        temporary.write_bytes(header + b"\n" + found.to_bytes())
        temporary.replace(self._path)

    def _digest(self, audio: Sequence[str]) -> str:
        depends_on = repr((self._inputs, self._versions(audio))).encode(errors="surrogateescape")
        return hashlib.blake2b(depends_on, digest_size=20).hexdigest()

    def _versions(self, locations: Sequence[str]) -> list[tuple[str, int, Any] | None]:
        """Returns size and time or ETag of each location; None for one that cannot be read."""

        def version(location: str) -> tuple[str, int, Any] | None:
            try:
                if is_url(location):
                    info = self._infos.get(location) or storage().info(location)
                    return location, info.size, info.etag
                status = os.stat(path_before_move(location, *self._task.moved))
                return location, status.st_size, status.st_mtime_ns
            except (OSError, ValueError, StorageError):  # ValueError: the path holds a null character
                return None

        return [*in_parallel(version, locations, is_slow=lambda name: is_url(name) and name not in self._infos)]
