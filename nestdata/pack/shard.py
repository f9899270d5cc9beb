"""Writes one shard of a packed set: in any process, and with the same bytes in each."""

import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import orjson

from nestdata.corpus.corpora import Corpora
from nestdata.corpus.packed_set import (
    FOLDER,
    PackedFile,
    PackedMembers,
    PackedShard,
    ShardRecord,
    ShardSummary,
    cuts_name,
    index_content,
    index_name,
    record_name,
    recording_name,
)
from nestdata.errors import AudioError
from nestdata.output import flush_to_disk
from nestdata.pack.config import PackConfig
from nestdata.pack.encoding import SUFFIXES, encode, load_integers
from nestdata.pack.fetching import fetched_members
from nestdata.pack.order import ShardCuts
from nestdata.pack.tar_writer import BLOCK, TarWriter
from nestdata.storage import is_url, join, storage

PARTIAL_SUFFIX = ".partial"
"""Suffix of local files that are being written."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard to write."""

    corpora: tuple[str, ...]
    """Paths of the corpora."""

    location: str
    """Location of the packed set."""

    number: int
    """Index of the shard."""

    cuts: ShardCuts
    config: PackConfig
    settings_digest: str


def write_shard(task: ShardTask) -> ShardSummary:
    """Writes the files of a shard, and its record as the last one.

    A file appears at its name complete or not at all. If this process is killed, the shard has no record, and the next
    run writes it again.

    Raises:
        StorageError: The set cannot be written, or a corpus cannot be read for a reason that may pass.
        OSError: The same, on a local disk.
    """
    writer = _ShardWriter(task)
    tar_name = recording_name(task.number)
    with _new_file(task.location, tar_name) as file:
        tar = writer.write_tar(file)
    recording = PackedFile(tar_name, tar.size, tar.sha256)
    _write(task.location, index_name(tar_name), index_content([*writer.headers, tar.size]))
    cuts = _write(task.location, cuts_name(task.number), b"".join(writer.lines))
    _write(task.location, index_name(cuts.name), index_content(np.cumsum([0, *map(len, writer.lines)])))
    record = writer.record(PackedShard(task.number, len(writer.lines), recording, cuts))
    _write(task.location, record_name(task.number), record.content())
    return record.summary


def name_in_set(cut_id: str) -> str | None:
    """Returns the id of a cut in a packed set, which is also the name of its files there without suffix.

    It is the id itself, without a slash at its start: a member with an absolute name would overwrite the original
    audio if somebody unpacked the tar file without care.

    Returns:
        None if the id cannot be a name: it has an empty part, `.` or `..` between slashes, or a null character.
    """
    name = cut_id.removeprefix("/")
    parts = name.split("/")
    if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
        return None
    path = PurePosixPath(f"{name}.flac")
    return name if str(path.parent / path.stem) == name else None  # as Lhotse finds the id of a member


class _ShardWriter:
    """Collects what the record of a shard needs while its tar file is being written."""

    def __init__(self, task: ShardTask) -> None:
        self.lines: list[bytes] = []
        self.headers: list[int] = []
        """Byte of the tar file at which the header of the audio starts, for each cut."""

        self._task = task
        self._corpora = _open_corpora(task.corpora)
        self._members: list[tuple[int, int, int, int, bool]] = []
        self._left_out: list[dict[str, Any]] = []
        self._scaled: dict[str, float] = {}
        self._num_rounded = 0
        self._num_samples = 0

    def write_tar(self, file: BinaryIO) -> TarWriter:
        """Writes the audio and the recordings of all cuts."""
        tar = TarWriter(file)
        indices = self._task.cuts.indices.tolist()
        members = fetched_members(self._corpora, indices)
        for index, number, fetched in zip(indices, self._task.cuts.numbers.tolist(), members, strict=True):
            self._add(tar, index, number, fetched)
        tar.finish()
        return tar

    def record(self, shard: PackedShard) -> ShardRecord:
        """Returns the record of the shard."""
        columns: list[Any] = list(zip(*self._members, strict=True)) or [[]] * 5
        members = PackedMembers(
            numbers=np.array(columns[0], np.int64),
            offsets=np.array(columns[1], np.int64),
            lengths=np.array(columns[2], np.int64),
            checksums=np.array(columns[3], np.uint32),
            was_absolute=np.array(columns[4], bool),
        )
        summary = ShardSummary(
            settings_digest=self._task.settings_digest,
            shard=shard,
            num_samples=self._num_samples,
            num_rounded=self._num_rounded,
            scaled=self._scaled,
            left_out=self._left_out,
        )
        return ShardRecord(summary, members)

    def _add(self, tar: TarWriter, index: int, number: int, fetched: Callable[[], bytes | None]) -> None:
        line, config = self._corpora.line(index), self._task.config
        name = name_in_set(line["id"])
        if name is None:
            detail = "the id cannot be the name of a file: it has an empty part, . or .. between slashes"
            self._leave_out(line, number, "unusable_id", detail)
            return
        try:
            audio = load_integers(self._corpora, index, config.bits, fetched())
        except AudioError as error:
            self._leave_out(line, number, error.reason, str(error))
            return
        cut = _packed_cut(line, name, len(audio.samples), self._corpora.sampling_rate)
        content = encode(audio, config.codec, self._corpora.sampling_rate)
        start = tar.add(name + SUFFIXES[config.codec], content)
        tar.add(f"{name}.json", _json_line(cut["recording"]))
        self.headers.append(start - BLOCK)
        self.lines.append(_json_line(cut))
        self._members.append((number, start, len(content), zlib.crc32(content), name != line["id"]))
        self._num_samples += len(audio.samples)
        self._num_rounded += not audio.is_exact
        if audio.scale != 1.0:
            self._scaled[name] = audio.scale

    def _leave_out(self, line: dict[str, Any], number: int, reason: str, detail: str) -> None:
        row = {"number": number, "cut_id": line["id"], "reason": reason, "detail": detail}
        self._left_out.append(row)


def _packed_cut(line: dict[str, Any], name: str, num_samples: int, rate: int) -> dict[str, Any]:
    """Returns a cut as Lhotse's own writer would: of a recording that is the cut alone, at the rate of the corpus."""
    recording = {
        "id": line["recording"]["id"],
        "sources": [{"type": "shar", "channels": [line["channel"]], "source": ""}],
        "sampling_rate": rate,
        "num_samples": num_samples,
        "duration": line["duration"],
        "channel_ids": [line["channel"]],
    }
    cut = {**line, "id": name, "start": 0.0, "recording": recording}
    cut.pop("features", None)  # they belong to the recording as it was
    return cut


@lru_cache(maxsize=1)
def _open_corpora(paths: tuple[str, ...]) -> Corpora:
    return Corpora.open(paths)


@contextmanager
def _new_file(location: str, name: str) -> Iterator[BinaryIO]:
    """Yields a file to write to, and gives it its name, or uploads it, at the end of the block."""
    if is_url(location):
        with tempfile.NamedTemporaryFile(prefix="nestdata-pack-") as temporary:
            yield cast(BinaryIO, temporary)
            temporary.flush()
            storage().write(join(location, name), Path(temporary.name))
        return
    partial = Path(location, FOLDER, name + PARTIAL_SUFFIX)
    try:
        with partial.open("wb") as file:
            yield file
        flush_to_disk(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, Path(location, name))


def _write(location: str, name: str, content: bytes) -> PackedFile:
    storage().write(join(location, name), content)
    return PackedFile(name, len(content), sha256(content).hexdigest())


def _json_line(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
