"""Packs corpora into Lhotse Shar: `pack_corpora`.

The order of the cuts and their division into shards are functions of corpora and settings. Every shard is written by
one process, and its record comes last. A run that goes on after an earlier one keeps the shards that have a record.

numpy and the modules that need it are imported when a corpus is packed, so that importing this module is fast.
"""

import logging
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestdata.errors import CorpusError, OutputError
from nestdata.output import is_full_disk, locked_directory
from nestdata.pack.config import PackConfig
from nestdata.prepare.pool import open_pool
from nestdata.storage import has_scheme, is_url, join
from nestdata.storage.location import parse_url

if TYPE_CHECKING:
    from nestdata.corpus.corpora import Corpora
    from nestdata.corpus.packed_set import ShardSummary
    from nestdata.pack.output import PackOutput
    from nestdata.pack.shard import ShardTask

_log = logging.getLogger(__name__)
# Cuts that are encoded to estimate how large FLAC files will be.
_SAMPLED_CUTS = 32
_BYTES_PER_1000_SAMPLES = {16: 2000, 24: 3000}
_MODULES = ["nestdata.pack.shard", "soundfile", "lhotse", "torchaudio"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """Summary of a packed set that was written."""

    location: str
    """The folder of the set, an absolute path or a URL."""

    num_cuts: int
    hours: float
    num_shards: int
    num_bytes: int
    """Size of all tar files."""

    num_kept_shards: int
    """Number of shards that an earlier run had written."""

    num_rounded: int
    """Number of cuts whose samples differ from those of the corpus by at most 2^-bits, or by their scale."""

    num_scaled: int
    """Number of cuts that were made quieter, because they had amplitudes outside of [-1, 1]."""

    left_out: dict[str, int]
    """Number of cuts that are not in the set, by reason, most frequent first; each is a line of `left_out.jsonl`."""

    left_out_file: str
    """Location of `left_out.jsonl`."""

    prepare_command: str
    """The command that prepares a corpus from the set."""


def pack_corpora(
    corpora: Sequence[str | Path],
    output: str | Path,
    config: PackConfig | None = None,
    *,
    overwrite: bool = False,
    jobs: int = 1,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> PackReport:
    """Writes the audio of corpora as Lhotse Shar, in a random order, to a folder or an object store.

    Every cut becomes a member of its own: one channel, at the rate of the corpora. Equal corpora, settings and versions
    of the encoder give equal bytes. If a run ends early, the next one with the same corpora and settings goes on.

    Args:
        corpora: Corpus directories.
        output: Folder to write to, a path or a URL.
        config: Form, order and size of the shards; the defaults if None.
        overwrite: Whether a packed set at `output` is replaced. Its files are deleted first.
        jobs: Number of processes, each of which writes one shard at a time. The bytes do not depend on it.
        on_progress: Called with the number of shards that are complete, and their total.

    Returns:
        A summary of the set.

    Raises:
        OutputError: Something else is at `output`, such as a part of a set with other settings, or another run is
            writing it, or the disk is full.
        CorpusError: A corpus cannot be opened, no cut of it can be packed, or a worker process ended unexpectedly.
        ConfigError: The corpora have different sampling rates, or share an id, or their audio is in the set that would
            be replaced, or a setting is invalid.
        StorageError: The output cannot be written, or a corpus cannot be read for a reason that may pass.
    """
    from nestdata.corpus.corpora import Corpora
    from nestdata.pack.checks import check_ids, check_sources, warn_of_windows
    from nestdata.pack.output import PackOutput

    config = config or PackConfig()
    opened = Corpora.open([Path(path).resolve() for path in corpora])
    location = str(output).rstrip("/") if has_scheme(str(output)) else str(Path(output).resolve())
    if has_scheme(location):
        parse_url(location)
    with _lock(location):
        target = PackOutput.open(location, overwrite=overwrite)
        if overwrite and target.sizes:
            check_sources(opened, target)
        check_ids(opened)
        warn_of_windows(opened)
        settings = _settings(opened, config, target)
        target.begin(settings, overwrite=overwrite)
        try:
            summaries, num_kept = _write_shards(opened, config, target, settings, jobs, on_progress)
        except OSError as error:
            if is_full_disk(error):
                place = f"{location}: a shard in {tempfile.gettempdir()}" if is_url(location) else f"{location}:"
                raise OutputError(
                    f"{place} cannot be written ({error.strerror}). Complete shards are kept: free some space, "
                    "and run the same command again."
                ) from error
            raise
        return _finish(summaries, num_kept, opened, target, settings)


def _lock(location: str) -> AbstractContextManager[Any]:
    """Excludes other runs that write to the same local folder, which is made if it does not exist."""
    if is_url(location):
        return nullcontext()
    folder = Path(location)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written ({error.strerror}). Choose another path.") from error
    return locked_directory(folder)


def _settings(corpora: "Corpora", config: PackConfig, target: "PackOutput") -> dict[str, Any]:
    """Returns all that decides the bytes of the set.

    The estimated size of audio is that of the set which is already begun, if there is one.
    """
    from nestdata.pack.encoding import encoder_version

    settings = {
        "corpora": [
            {"fingerprint": corpus.fingerprint, "num_cuts": len(corpus), "crc32": _crc32(corpus.path / "cuts.jsonl")}
            for corpus in corpora.corpora
        ],
        "sampling_rate": corpora.sampling_rate,
        **asdict(config),
        "encoder": encoder_version(),
    }
    begun = target.begun_settings or {}
    size = begun.get("bytes_per_1000_samples") or _bytes_per_1000_samples(corpora, config)
    return settings | {"bytes_per_1000_samples": size}


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _bytes_per_1000_samples(corpora: "Corpora", config: PackConfig) -> int:
    """Returns the size of encoded audio, estimated for FLAC from the first cuts in packed order."""
    from nestdata.errors import AudioError
    from nestdata.pack.encoding import encode, load_integers
    from nestdata.pack.order import PackingOrder

    num_samples = num_bytes = 0
    if config.codec == "flac":
        order = PackingOrder(corpora, config.seed)
        for index in order.cuts(0, min(_SAMPLED_CUTS, len(corpora))).indices.tolist():
            try:
                audio = load_integers(corpora, index, config.bits)
            except AudioError:
                continue
            num_samples += len(audio.samples)
            num_bytes += len(encode(audio, config.codec, corpora.sampling_rate))
    return 1000 * num_bytes // num_samples if num_samples else _BYTES_PER_1000_SAMPLES[config.bits]


def _write_shards(
    corpora: "Corpora",
    config: PackConfig,
    target: "PackOutput",
    settings: dict[str, Any],
    jobs: int,
    on_progress: Callable[[int, int | None], None] | None,
) -> "tuple[list[ShardSummary], int]":
    """Returns all shards in order, and how many of them were there already."""
    from nestdata.corpus.packed_set import digest_of
    from nestdata.pack.order import PackingOrder
    from nestdata.pack.shard import ShardTask, write_shard

    order = PackingOrder(corpora, config.seed)
    bounds = order.shard_bounds(config.shard_bytes, settings["bytes_per_1000_samples"])
    summaries = target.finished_shards(len(bounds) - 1)
    num_kept, total = len(summaries), len(bounds) - 1
    paths = tuple(str(corpus.path) for corpus in corpora.corpora)

    def tasks() -> "Iterator[ShardTask]":
        for number in range(total):
            if number not in summaries:
                cuts = order.cuts(bounds[number], bounds[number + 1])
                yield ShardTask(paths, target.location, number, cuts, config, digest_of(settings))

    with open_pool(jobs, preload=_MODULES) as pool:
        written = pool.map(write_shard, tasks()) if num_kept < total else iter(())
        for summary in written:
            summaries[summary.shard.number] = summary
            if on_progress:
                on_progress(len(summaries), total)
    return [summaries[number] for number in range(total)], num_kept


def _finish(
    summaries: "list[ShardSummary]", num_kept: int, corpora: "Corpora", target: "PackOutput", settings: dict[str, Any]
) -> PackReport:
    """Writes `left_out.jsonl` and, as the last file, the manifest."""
    from nestdata.corpus.packed_set import LEFT_OUT

    left_out = sorted((row for summary in summaries for row in summary.left_out), key=lambda row: row["number"])
    shards = [summary.shard for summary in summaries]
    num_cuts = sum(shard.num_cuts for shard in shards)
    if not num_cuts:
        first = left_out[0]
        raise CorpusError(
            f"{', '.join(str(corpus.path) for corpus in corpora.corpora)}: no cut can be packed; the first: "
            f"{first['cut_id']!r}: {first['reason']}, {first['detail']}"
        )
    totals: dict[str, Any] = {
        "num_cuts": num_cuts,
        "num_samples": sum(summary.num_samples for summary in summaries),
        "num_bytes": sum(shard.recording.size for shard in shards),
        "num_rounded": sum(summary.num_rounded for summary in summaries),
        "num_scaled": sum(len(summary.scaled) for summary in summaries),
        "left_out": dict(Counter(row["reason"] for row in left_out).most_common()),
    }
    target.finish(settings, totals, shards, left_out)
    shortest = min(int(lengths[0]) for lengths in corpora.num_samples) / corpora.sampling_rate
    return PackReport(
        location=target.location,
        num_cuts=num_cuts,
        hours=totals["num_samples"] / corpora.sampling_rate / 3600,
        num_shards=len(shards),
        num_bytes=totals["num_bytes"],
        num_kept_shards=num_kept,
        num_rounded=totals["num_rounded"],
        num_scaled=totals["num_scaled"],
        left_out=totals["left_out"],
        left_out_file=join(target.location, LEFT_OUT),
        prepare_command=_prepare_command(target.location, corpora.sampling_rate, shortest),
    )


def _prepare_command(location: str, rate: int, shortest_s: float) -> str:
    """Returns the command that accepts every cut of the set."""
    import shlex

    from nestdata.prepare.config import PrepareConfig

    name = location.rstrip("/").rpartition("/")[2]
    options = [] if rate == PrepareConfig().sampling_rate else ["--sampling-rate", str(rate)]
    if shortest_s < PrepareConfig().min_seconds:
        options += ["--min-seconds", "0"]
    return shlex.join(["nestdata", "prepare", location, "-o", f"{name}.corpus", *options])
