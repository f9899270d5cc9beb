"""Writes one shard of Lhotse Shar: a tar of audio and the manifest of its cuts, by Lhotse's writers, in any process."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.corpus.corpora import Corpora
from nestdata.corpus.members import UNREAD, MemberBytes, read_intact
from nestdata.corpus.read_ahead import ReadAhead, Request
from nestdata.errors import AudioError
from nestdata.options import PackCodec
from nestdata.output import flush_to_disk
from nestdata.storage import is_url, join, storage

FOLDER = "cuts.pack"
"""Folder of the records. Lhotse ignores names in a Shar folder that begin with `cuts.` and do not contain `.jsonl`."""

_FULL_SCALE = 1 << 15
_THREADS = 16
# Most bytes that are fetched ahead.
_AHEAD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard to write."""

    corpora: tuple[str, ...]
    """Paths of the corpora."""

    location: str
    """Folder of the Shar, an absolute path or a URL."""

    number: int
    """Index of the shard, which is a part of the names of its files."""

    indices: NDArray[np.int64]
    """Indices of its cuts in the corpora, in their order in the shard."""

    codec: PackCodec


@dataclass(kw_only=True)
class ShardRecord:
    """A complete shard; stored as `cuts.pack/NUMBER.json`."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each file of the shard; none if all cuts were left out."""

    num_cuts: int = 0
    num_samples: int = 0

    num_rounded: int = 0
    """Number of cuts whose samples did not fit into 16 bits."""

    scaled: dict[str, float] = field(default_factory=dict)
    """The factor by which the amplitudes of cuts outside of [-1, 1] were multiplied, by cut id."""

    left_out: list[dict[str, str]] = field(default_factory=list)
    """Cuts that cannot be packed: `cut_id`, `reason` and `detail`."""

    def leave_out(self, line: dict[str, Any], reason: str, detail: str) -> None:
        """Records a cut that cannot be packed."""
        self.left_out.append({"cut_id": line["id"], "reason": reason, "detail": detail})


def write_shard(task: ShardTask) -> ShardRecord:
    """Writes the files of a shard, then its record, which marks it as complete.

    Raises:
        StorageError: The shard cannot be written, or a corpus cannot be read for a transient reason.
        OSError: The same, on a local disk.
    """
    from lhotse import AudioSource, Recording
    from lhotse.audio.backend import audio_backend
    from lhotse.shar.writers import AudioTarWriter, JsonlShardWriter

    corpora, record = _open_corpora(task.corpora), ShardRecord()
    located = [corpora.locate(index) for index in task.indices.tolist()]
    addresses = (None if corpus.has_bank else corpus.address(index) for corpus, index in located)
    requests = [address and Request(address) for address in addresses]
    ahead = ReadAhead(_fetch, num_threads=_THREADS, max_bytes=_AHEAD_BYTES)
    ahead.begin([request for request in requests if request], ())
    with _staging_folder(task, record) as folder, audio_backend("LibsndfileBackend"):
        pattern = str(folder).replace("%", "%%") + "/{}.%06d.{}"
        numbered = {"shard_size": len(located) + 1, "shard_offset": task.number}
        with (
            AudioTarWriter(pattern.format("recording", "tar"), format=task.codec, **numbered) as tar,
            JsonlShardWriter(pattern.format("cuts", "jsonl.gz"), **numbered) as cuts,
        ):
            for (corpus, index), request in zip(located, requests, strict=True):
                line = corpus.line(index)
                given = UNREAD if request is None else MemberBytes(ahead.take(request), is_checked=True)
                if (name := name_in_shar(line["id"])) is None:
                    record.leave_out(line, "unusable_id", "the id cannot be the name of a file")
                    continue
                try:
                    _, samples = corpus.load(index, given=given)
                except AudioError as error:
                    record.leave_out(line, error.reason, str(error))
                    continue
                recording = Recording(
                    id=line["recording"]["id"],
                    sources=[AudioSource("shar", [line["channel"]], "")],
                    sampling_rate=corpora.sampling_rate,
                    num_samples=len(samples),
                    duration=line["duration"],
                    channel_ids=[line["channel"]],
                )
                integers = _as_integers(samples, name, record)
                tar.write(name, integers[None], corpora.sampling_rate, recording)
                line.pop("features", None)  # they belong to the recording as it was
                cuts.write({**line, "id": name, "start": 0.0, "recording": recording.to_dict()})
                record.num_cuts += 1
                record.num_samples += len(samples)
    storage().write(join(task.location, record_name(task.number)), orjson.dumps(asdict(record)))
    return record


def record_name(number: int) -> str:
    """Returns the name of the record of a shard."""
    return f"{FOLDER}/{number:06d}.json"


def name_in_shar(cut_id: str) -> str | None:
    """Returns the id of a cut in Shar, which is the name of its files there without suffix.

    It is the id without a slash at its start: unpacking a member with an absolute name may overwrite the original.

    Returns:
        None if the id cannot be a name: it has an empty part, `.` or `..` between slashes, or a null character.
    """
    name = cut_id.removeprefix("/")
    path = PurePosixPath(f"{name}.flac")
    is_usable = "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))
    return name if is_usable and str(path.parent / path.stem) == name else None  # as Lhotse finds the id of a member


def _as_integers(samples: NDArray[np.float32], name: str, record: ShardRecord) -> NDArray[np.int16]:
    """Returns samples in 16 bits, and records what is not kept exactly.

    Samples that do not fit are rounded to the nearest: the error of an amplitude is at most 2^-16; near 1, which the
    integers do not reach, it is at most 2^-15. Audio with an amplitude outside of [-1, 1] is made quieter, not clipped.
    """
    exact = samples * np.float32(_FULL_SCALE)
    fitting: NDArray[Any] = exact
    if (largest := float(max(samples.max(), -samples.min()))) > 1.0:
        record.scaled[name] = 1.0 / largest
        fitting = exact.astype(np.float64) / largest
    integers: NDArray[Any] = np.minimum(np.rint(fitting), _FULL_SCALE - 1)
    record.num_rounded += not np.array_equal(integers, exact)
    in_16_bits: NDArray[np.int16] = integers.astype(np.int16)
    return in_16_bits


@lru_cache(maxsize=1)
def _open_corpora(paths: tuple[str, ...]) -> Corpora:
    return Corpora.open(paths)


@contextmanager
def _staging_folder(task: ShardTask, record: ShardRecord) -> Iterator[Path]:
    """Yields a folder for files, which are moved or uploaded to the Shar at the end of the block."""
    is_remote = is_url(task.location)
    folder = Path(tempfile.mkdtemp(prefix="nestdata-pack-")) if is_remote else _local_folder(task)
    try:
        yield folder
        for path in sorted(folder.iterdir(), reverse=True):  # the tar before the manifest that names it
            record.sizes[path.name] = path.stat().st_size
            if is_remote:
                storage().write(join(task.location, path.name), path)
            else:
                flush_to_disk(path)
                os.replace(path, Path(task.location, path.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _local_folder(task: ShardTask) -> Path:
    folder = Path(task.location, f"{record_name(task.number)}.partial")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    return folder


def _fetch(request: Request) -> bytes | None:
    return read_intact(request.address, storage())
