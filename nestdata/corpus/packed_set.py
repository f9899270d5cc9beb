"""The files of a packed set, which `nestdata pack` writes: Lhotse Shar, with addresses and checksums beside it.

    cuts.000000.jsonl           the cuts of the shard, as Lhotse Shar has them
    recording.000000.tar        their audio: for each cut its file, then its recording as JSON
    cuts.pack/settings.json     written first: what was packed, and how
    cuts.pack/000000.json       written when the shard is complete, its record: its files with checksums, and where each
                                member is
    cuts.pack/NAME.idx          index of the file NAME, as Lhotse 2 writes it
    cuts.pack/left_out.jsonl    every cut that is not in the set, and the reason
    cuts.pack/pack.json         written last: without it, the set is incomplete

The folder has its name because Lhotse takes the beginning of every name in a Shar directory for a field of the cuts,
and ignores only those that begin with `cuts.` and have no `.jsonl` in them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.errors import CorpusError, StorageError
from nestdata.storage import Storage, join

FOLDER = "cuts.pack"
SETTINGS = f"{FOLDER}/settings.json"
MANIFEST = f"{FOLDER}/pack.json"
LEFT_OUT = f"{FOLDER}/left_out.jsonl"

_KIND = "packed set"
_VERSION = 1


class PackedFile(NamedTuple):
    """A file of a packed set."""

    name: str
    """Name relative to the location of the set."""

    size: int
    sha256: str
    """Checksum of the whole file, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class PackedShard:
    """The two files of one shard."""

    number: int
    """Index of the shard, which is a part of the names of its files."""

    num_cuts: int
    recording: PackedFile
    cuts: PackedFile


class PackedMembers(NamedTuple):
    """The members of a shard in its order; all arrays have the shape (num_cuts,)."""

    numbers: NDArray[np.int64]
    """Position of each cut in the corpora that were packed, in the order of their input."""

    offsets: NDArray[np.int64]
    """Byte of the tar file at which the audio file starts."""

    lengths: NDArray[np.int64]
    """Size of the audio file in bytes."""

    checksums: NDArray[np.uint32]
    """crc32 of each audio file."""

    was_absolute: NDArray[np.bool_]
    """Whether the id began with a slash, which was removed so that no member has an absolute name."""


@dataclass(frozen=True)
class PackedSet:
    """A complete packed set, opened by its manifest alone."""

    location: str
    """The folder, an absolute path or a URL."""

    settings: dict[str, Any]
    """What was packed, and how: the content of `settings.json`."""

    totals: dict[str, Any]
    """Numbers of cuts, samples and bytes, and of the cuts that were left out, by reason."""

    shards: list[PackedShard]

    @classmethod
    def open(cls, location: str, storage: Storage) -> "PackedSet":
        """Opens the packed set of a folder.

        Raises:
            CorpusError: The set is incomplete or damaged, or of a later version.
            StorageError: The manifest cannot be read.
        """
        try:
            content = storage.read(join(location, MANIFEST))
        except StorageError as error:
            if error.kind != "missing":
                raise
            raise CorpusError(
                f"{location}: not a complete packed set: it has no {MANIFEST}. If it was interrupted, run the same "
                "`nestdata pack` again, which goes on where it ended."
            ) from error
        try:
            fields = orjson.loads(content)
            if fields["kind"] != _KIND or fields["version"] != _VERSION:
                raise ValueError(f"it is a {fields['kind']!r} of version {fields['version']}")
            return cls(location, fields["settings"], fields["totals"], [_shard(row) for row in fields["shards"]])
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{join(location, MANIFEST)}: cannot be used ({error}). Pack the corpus again."
            ) from error

    @cached_property
    def num_cuts(self) -> int:
        """Number of cuts in all shards."""
        return sum(shard.num_cuts for shard in self.shards)


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """A complete shard, without its members."""

    settings_digest: str
    """`digest_of` the settings, so that the shards of different runs are not mixed."""

    shard: PackedShard
    num_samples: int
    """Number of samples of all cuts."""

    num_rounded: int
    """Number of cuts whose samples are not those of the corpus, since they did not fit into the bits of the codec."""

    scaled: dict[str, float]
    """Factor for each cut id, by which audio outside of [-1, 1] was multiplied."""

    left_out: list[dict[str, Any]]
    """Cuts that are not in the set, in the form of the lines of `left_out.jsonl`."""


class ShardRecord(NamedTuple):
    """Content of the file that is written when a shard is complete: the shard record."""

    summary: ShardSummary
    members: PackedMembers

    def content(self) -> bytes:
        """Returns the record as JSON."""
        members = self.members
        columns = {
            "numbers": members.numbers.tolist(),
            "offsets": members.offsets.tolist(),
            "lengths": members.lengths.tolist(),
            "crc32": members.checksums.tolist(),
            "was_absolute": np.flatnonzero(members.was_absolute).tolist(),
        }
        return _json(asdict(self.summary) | {"shard": _row(self.summary.shard), "members": columns})

    @classmethod
    def parse(cls, content: bytes) -> "ShardRecord":
        """Parses what `content` returned.

        Raises:
            ValueError, KeyError, TypeError: It is not the record of a shard.
        """
        fields = orjson.loads(content)
        columns, shard = fields.pop("members"), _shard(fields.pop("shard"))
        was_absolute = np.zeros(shard.num_cuts, bool)
        was_absolute[np.array(columns["was_absolute"], np.int64)] = True
        members = PackedMembers(
            numbers=np.array(columns["numbers"], np.int64),
            offsets=np.array(columns["offsets"], np.int64),
            lengths=np.array(columns["lengths"], np.int64),
            checksums=np.array(columns["crc32"], np.uint32),
            was_absolute=was_absolute,
        )
        if any(column.shape != (shard.num_cuts,) for column in members):
            raise ValueError(f"it does not have {shard.num_cuts} members")
        return cls(ShardSummary(shard=shard, **fields), members)


def read_members(location: str, shard: PackedShard, storage: Storage) -> PackedMembers:
    """Reads where the members of a shard are.

    Args:
        location: The folder of the set.
        shard: The shard, as `pack.json` describes it.
        storage: Reads the record.

    Raises:
        CorpusError: The record of the shard is missing or damaged, or belongs to another set.
        StorageError: It cannot be read.
    """
    name = join(location, record_name(shard.number))
    try:
        record = ShardRecord.parse(storage.read(name))
    except StorageError as error:
        if error.kind != "missing":
            raise
        raise CorpusError(f"{name}: is missing. Restore it, or pack the corpus again with --overwrite.") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CorpusError(f"{name}: is damaged ({error}). Restore it, or pack the corpus again.") from error
    if record.summary.shard != shard:
        raise CorpusError(f"{name}: does not belong to {MANIFEST}. Pack the corpus again with --overwrite.")
    return record.members


def cuts_name(number: int) -> str:
    """Returns the name of the manifest of a shard."""
    return f"cuts.{number:06d}.jsonl"


def recording_name(number: int) -> str:
    """Returns the name of the tar file of a shard."""
    return f"recording.{number:06d}.tar"


def record_name(number: int) -> str:
    """Returns the name of the record of a shard."""
    return f"{FOLDER}/{number:06d}.json"


def index_name(name: str) -> str:
    """Returns the name of the index of a file."""
    return f"{FOLDER}/{name}.idx"


def index_content(offsets: NDArray[Any] | Sequence[int]) -> bytes:
    """Returns an index of Lhotse 2: where each cut of a file starts, and its size, as 64-bit integers."""
    return np.asarray(offsets, "<u8").tobytes()


def digest_of(settings: dict[str, Any]) -> str:
    """Returns a hash of settings."""
    return hashlib.blake2b(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def settings_content(settings: dict[str, Any]) -> bytes:
    """Returns the content of `settings.json`."""
    return _json(settings)


def manifest_content(settings: dict[str, Any], totals: dict[str, Any], shards: list[PackedShard]) -> bytes:
    """Returns the content of `pack.json`."""
    head = {"kind": _KIND, "version": _VERSION, "settings": settings, "totals": totals}
    lines = b",\n".join(b"  " + orjson.dumps(_row(shard)) for shard in shards)
    return orjson.dumps(head)[:-1] + b', "shards": [\n' + lines + b"\n]}\n"


def _row(shard: PackedShard) -> dict[str, Any]:
    files = {"recording": shard.recording._asdict(), "cuts": shard.cuts._asdict()}
    return asdict(shard) | files


def _shard(row: dict[str, Any]) -> PackedShard:
    return PackedShard(row["number"], row["num_cuts"], PackedFile(**row["recording"]), PackedFile(**row["cuts"]))


def _json(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
