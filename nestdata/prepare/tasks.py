"""Tasks of `prepare`: consecutive items of a source, probed by any process.

The results of tasks whose audio is in shards or at URLs, or is searched for speech, are kept in files until the corpus
is complete, so that a run that was ended by a signal, a full disk or a store goes on where it stopped. A kept result is
taken only if source, items and settings are the same, and neither the shards, the searched files nor the audio that was
rejected have changed.
"""

import hashlib
import importlib.metadata
import json
import os
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nestdata.corpus.meta import FORMAT_VERSION
from nestdata.errors import StorageError
from nestdata.output import path_before_move
from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.inputs import Source
from nestdata.prepare.inputs.audio import Member, Unusable
from nestdata.prepare.inputs.entry import ReadsFiles
from nestdata.prepare.inputs.remote import in_parallel, located_entries
from nestdata.prepare.probe import probe
from nestdata.prepare.read import reads_audio
from nestdata.prepare.writing.found import Cut, Reject
from nestdata.prepare.writing.item_collector import ItemCollector
from nestdata.prepare.writing.probed_items import ProbedItems
from nestdata.storage import ObjectInfo, is_url, storage

# Another version of the package may find something else in the same audio.
_DISTRIBUTION = "nest-pretrain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Consecutive items of a source."""

    source: Source
    source_index: int
    first: int
    """Number of the first item, counted from 1."""

    items: list[Any]
    config: PrepareConfig
    kept_in: str
    """Directory of kept results."""

    moved: tuple[str, str]
    """Paths of the corpus directory once it is in place, and now."""


class Traffic(NamedTuple):
    """Bytes of shards and objects."""

    read: int = 0
    """Bytes that were read to probe the items; a kept result has none."""

    in_epoch: int = 0
    """Bytes that an epoch reads: each cut needs all of its member."""

    needed: float = 0.0
    """Bytes of the members that the cuts cover."""

    def plus(self, other: "Traffic") -> "Traffic":
        """Returns the sums."""
        return Traffic(self.read + other.read, self.in_epoch + other.in_epoch, self.needed + other.needed)


class TaskResult(NamedTuple):
    """What a task found."""

    source_index: int
    probed: ProbedItems
    traffic: Traffic


class _Found(NamedTuple):
    """What a task found, apart from the cuts and rejects themselves."""

    in_epoch: int
    needed: float
    audio: dict[str, ObjectInfo | None]
    """Locations of audio that was rejected or searched for speech, with size and ETag where they are known. Other local
    files are probed again, which is fast."""

    can_be_kept: bool
    """Whether all that the result depends on is known: every cut has an address or a searched file, and every reject a
    location."""


def run_task(task: Task) -> TaskResult:
    """Probes the items of a task, or takes the kept result of an earlier run; runs in a worker.

    Raises:
        ManifestError: An item cannot be parsed.
        StorageError: A shard or object cannot be read for a reason that says nothing about its audio.
    """
    kept = _KeptResult(task)
    result = kept.load()
    if result is None:
        collector = ItemCollector()
        found = _probe_items(task, collector)
        result = collector.collected(), Traffic(_newly_read(), found.in_epoch, found.needed)
        if found.can_be_kept:
            kept.save(*result, found.audio, has_files=bool(found.audio and task.config.finds_speech))
    return TaskResult(task.source_index, *result)


def _probe_items(task: Task, collector: ItemCollector) -> _Found:
    in_epoch, needed, can_be_kept = 0, 0.0, True
    depends_on: dict[str, ObjectInfo | None] = {}
    finds_speech = task.config.finds_speech
    entries = located_entries(task.source, task.items, task.first, lambda entry: reads_audio(entry, task.config))
    for number, entry in entries:
        found = probe(entry, task.config)
        collector.add(found, number, entry.where, replaces=entry.number is not None)
        for outcome in found:
            match outcome:
                case Cut(member=Member() as member):
                    in_epoch += member.length
                    needed += member.length * _share_of_recording(outcome)
                case Cut():
                    if outcome.version and finds_speech:
                        depends_on[entry.audio.location] = None
                    else:
                        can_be_kept = False
                case Reject():
                    audio = entry.audio.audio if isinstance(entry.audio, Unusable) else entry.audio
                    if audio and audio.location:
                        depends_on[audio.location] = audio.member.shard if audio.member else None
                    else:  # the files that an item depends on are known anyway, if the source names them
                        can_be_kept &= isinstance(task.source, ReadsFiles)
    return _Found(in_epoch, needed, depends_on, can_be_kept)


def _share_of_recording(cut: Cut) -> float:
    return min(1.0, float(cut.row["duration"] / cut.row["recording"]["duration"]))


class _KeptResult:
    """The result of one task, in a file whose name is a digest of all that the result depends on."""

    def __init__(self, task: Task) -> None:
        self._moved = task.moved
        self._task = task
        self._infos = {item.location: item for item in task.items if isinstance(item, ObjectInfo)}
        self._directory = Path(task.kept_in)
        # Before anything is read, because the files may change meanwhile.
        self._files = self._versions(_files_of(task.source, task.items))

    @cached_property
    def _path(self) -> Path:
        task = self._task
        versions = [_package_version(), str(FORMAT_VERSION)]
        if task.config.finds_speech:
            from nestdata.prepare.speech.detector import detector_name

            versions.append(detector_name())
        depends_on = (versions, task.source, task.first, task.items, _settings(task.config), self._files)
        digest = hashlib.blake2b(repr(depends_on).encode(errors="surrogateescape"), digest_size=20)
        return self._directory / digest.hexdigest()

    def load(self) -> tuple[ProbedItems, Traffic] | None:
        """Returns the kept result; None if there is none, or if a shard has changed."""
        try:
            with os.scandir(self._directory) as kept:
                if not any(kept):  # the digest would take a tenth of the time of a line whose duration is trusted
                    return None
            header, _, content = self._path.read_bytes().partition(b"\n")
            values = json.loads(header)
            probed = ProbedItems.from_bytes(content)
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None
        if values["versions"] != self._versions([location for location, *_ in values["versions"]]):
            return None
        return probed, Traffic(0, values["in_epoch"], values["needed"])

    def save(
        self, probed: ProbedItems, traffic: Traffic, audio: dict[str, ObjectInfo | None], *, has_files: bool
    ) -> None:
        """Keeps a result whose audio is in shards, at URLs, or in files that were searched for speech.

        Args:
            probed: The cuts and rejects.
            traffic: Their traffic.
            audio: Locations of audio that was rejected or searched, with size and ETag where they are known. If one of
                them changes, the result is not taken.
            has_files: Whether local files were searched for speech.

        Raises:
            OSError: The disk is full.
        """
        # A worker of Dask may have no access to the directory.
        if not (probed.shards or has_files) or not self._directory.is_dir():
            return
        infos = audio | {shard.location: shard for shard in probed.shards}
        versions = self._versions([*infos], [info for info in infos.values() if info])
        header = {"versions": versions, "in_epoch": traffic.in_epoch, "needed": traffic.needed}
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_bytes(json.dumps(header).encode() + b"\n" + probed.to_bytes())
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _versions(self, locations: list[str], known: Iterable[ObjectInfo] = ()) -> list[list[Any]]:
        """Returns what distinguishes the content of each location from others; objects of a store are asked for it."""
        if not locations:  # of most tasks
            return []
        infos = self._infos | {info.location: info for info in known}

        def version(location: str) -> list[Any]:
            try:
                if is_url(location):
                    info = infos.get(location) or storage().info(location)
                    return [location, info.size, info.etag]
                status = os.stat(path_before_move(location, *self._moved))
                return [location, status.st_size, status.st_mtime_ns]
            except (OSError, ValueError, StorageError):  # ValueError: the path holds a null character
                return [location, None, None]

        return list(in_parallel(version, locations, is_slow=lambda name: is_url(name) and name not in infos))


@cache
def _package_version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return ""


def _settings(config: PrepareConfig) -> PrepareConfig:
    """Returns a configuration without the settings that do not change the result of a task."""
    return replace(config, format=None, tars=(), strict=False, pcm=False, report_samples=0)


def _files_of(source: Source, items: list[Any]) -> list[str]:
    # Asked once for all items, because it takes 10 microseconds whether a source has a method.
    return [file for item in items for file in source.files(item)] if isinstance(source, ReadsFiles) else []


_claimed = 0
_claiming = threading.Lock()


def _newly_read() -> int:
    """Returns the bytes that this process has read through `storage()` since the last call.

    The sum over all calls is exact, even if a worker of Dask runs several tasks at a time.
    """
    global _claimed
    with _claiming:
        total = storage().stats.bytes_read
        newly, _claimed = total - _claimed, total
    return newly
