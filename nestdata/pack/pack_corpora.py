"""Packs corpora into Lhotse Shar: `pack_corpora`.

The cuts keep the order of their input, and their division into shards is a function of corpora and settings. Every
shard is written by one process, and its record comes last. A run that continues an earlier one keeps the shards that
have a record.
"""

import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nestdata.corpus.corpora import Corpora
from nestdata.errors import ConfigError, CorpusError, OutputError, StorageError
from nestdata.options import PackConfig
from nestdata.output import is_full_disk, locked_directory
from nestdata.pack.shard import FOLDER, ShardRecord, ShardTask, name_in_shar, record_name, write_shard
from nestdata.prepare.pool import open_pool
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.storage import is_url, join, location_of, storage

# The files of shards and their records, relative to the folder of the Shar.
_OWN_FILES = re.compile(
    r"cuts\.\d+\.jsonl\.gz|recording\.\d+\.tar"
    r"|cuts\.pack/(?:left_out\.jsonl|\d+\.json(?:\.partial/(?:cuts\.\d+\.jsonl\.gz|recording\.\d+\.tar))?)"
)
_MODULES = ["nestdata.pack.shard", "soundfile", "lhotse", "nestdata.filters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """Summary of the Shar that was written."""

    location: str
    """The folder, an absolute path or a URL."""

    num_cuts: int
    hours: float
    num_shards: int
    num_bytes: int
    """Size of all shards."""

    num_kept_shards: int
    """Number of shards that an earlier run had written."""

    num_rounded: int
    """Number of cuts whose samples did not fit into 16 bits: they differ by at most 2^-16, or by their scale."""

    num_scaled: int
    """Number of cuts that were made quieter, because they had amplitudes outside of [-1, 1]."""

    left_out: dict[str, int]
    """Number of cuts that were not packed, by reason, most frequent first; each is a line of `left_out.jsonl`."""

    left_out_file: str
    """Location of `left_out.jsonl`."""

    prepare_command: str
    """The command that prepares a corpus of all packed cuts."""


def pack_corpora(
    corpora: Sequence[str | Path],
    output: str | Path,
    config: PackConfig | None = None,
    *,
    overwrite: bool = False,
    jobs: int = 1,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> PackReport:
    """Writes the audio of corpora as Lhotse Shar, in the order of their inputs, to a folder or an object store.

    Every cut becomes a member of its own: one channel, at the rate of the corpora. If a run ends early, the next one
    with the same corpora and settings continues it.

    Args:
        corpora: Corpus directories.
        output: Folder to write to, a path or a URL.
        config: Form and size of the shards; the defaults if None.
        overwrite: Whether to delete the output of an earlier run with other corpora or settings.
        jobs: Number of processes, each of which writes one shard at a time.
        on_progress: Called with the number of shards that are complete, and their total.

    Raises:
        OutputError: Something else is at `output`, such as shards with other settings, or another run is writing
            there, or the disk is full.
        CorpusError: A corpus cannot be opened, no cut of it can be packed, or a worker process ended unexpectedly.
        ConfigError: The corpora have different sampling rates, or share an id, or their audio is in the folder that
            would be replaced, or a setting is invalid.
        StorageError: The output cannot be written, or a corpus cannot be read for a transient reason.
    """
    config = config or PackConfig()
    opened = Corpora.open([Path(path).resolve() for path in corpora])
    location = location_of(output)
    if len(opened.corpora) > 1:
        _check_ids(opened)
    with _lock(location):
        sizes = _begin(location, opened, config, overwrite=overwrite)
        try:
            records, num_kept = _write_shards(location, opened, config, sizes, jobs, on_progress)
        except OSError as error:
            if is_full_disk(error):
                raise OutputError(
                    f"{location}: a shard cannot be written ({error.strerror}). Complete shards are kept: free some "
                    "space, for stores in the folder TMPDIR, and run the same command again."
                ) from error
            raise
        return _finish(location, opened, records, num_kept)


def _check_ids(corpora: Corpora) -> None:
    """Raises ConfigError if two cuts of several corpora would have the same name."""
    seen: set[str] = set()
    for index in range(len(corpora)):
        cut_id = corpora.line(index)["id"]
        if (name := name_in_shar(cut_id)) is None:
            continue  # it will be left out
        if name in seen:
            raise ConfigError(
                f"several corpora have a cut with the id {cut_id!r}. Pack them one by one, or prepare one corpus from "
                "all of their inputs, which makes the ids distinct."
            )
        seen.add(name)


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


def _begin(location: str, corpora: Corpora, config: PackConfig, *, overwrite: bool) -> dict[str, int]:
    """Writes the settings into an empty folder, or checks that an earlier run there had the same.

    Returns:
        The size of every file in the folder, by its name relative to it.

    Raises:
        OutputError: Something else is there.
        ConfigError: Audio of the corpora is there and would be deleted.
    """
    settings_file = join(location, f"{FOLDER}/settings.json")
    settings = {
        "corpora": [[each.fingerprint, _digest(each.path / "cuts.jsonl")] for each in corpora.corpora],
        "sampling_rate": corpora.sampling_rate,
        **asdict(config),
    }
    sizes = _sizes(location)
    begun = settings
    if f"{FOLDER}/settings.json" in sizes:
        begun = orjson.loads(storage().read(settings_file))
    elif any(not name.startswith(f"{FOLDER}/") for name in sizes):
        raise OutputError(f"{location}: is not empty, and not from `nestdata pack`. Choose another path.")
    if begun != settings:
        other = ", ".join(name for name in settings if begun.get(name) != settings[name])
        if not overwrite:
            raise OutputError(
                f"{location}: holds shards of other {other}. Choose another path, or pass --overwrite to replace them."
            )
        _check_sources(location, corpora)
        # The records are deleted first, so that no later run keeps a shard of which a file was deleted.
        for name in sorted(sizes, key=lambda name: not name.startswith(FOLDER)):
            if _OWN_FILES.fullmatch(name):
                storage().delete(join(location, name))
        sizes = {}
    storage().write(settings_file, orjson.dumps(settings))
    return sizes


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _sizes(location: str) -> dict[str, int]:
    try:
        return {found.location[len(location) + 1 :]: found.size for found in storage().list_objects(location)}
    except StorageError as error:
        if error.kind != "missing":
            raise
        return {}


def _check_sources(location: str, corpora: Corpora) -> None:
    for corpus in corpora.corpora:
        for shard in () if corpus.has_bank else corpus.shards():
            source = shard.info.location
            if (source if is_url(source) else os.path.realpath(source)).startswith(location + "/"):
                raise ConfigError(
                    f"{location}: holds the audio of {corpus.path}, so it cannot be replaced by packing that corpus. "
                    "Choose another path."
                )


def _write_shards(
    location: str,
    corpora: Corpora,
    config: PackConfig,
    sizes: dict[str, int],
    jobs: int,
    on_progress: Callable[[int, int | None], None] | None,
) -> tuple[list[ShardRecord], int]:
    """Returns the records of all shards in order, and how many of the shards were there already."""
    paths = tuple(str(corpus.path) for corpus in corpora.corpora)
    records: dict[int, ShardRecord] = {}
    tasks = []
    for number, indices in enumerate(_divided(corpora, config.shard_hours)):
        if (found := _complete(location, number, sizes)) is not None:
            records[number] = found
        else:
            tasks.append(ShardTask(paths, location, number, indices, config.codec))
    num_kept, total = len(records), len(records) + len(tasks)
    with open_pool(jobs, preload=_MODULES) as pool:
        for task, record in zip(tasks, pool.map(write_shard, tasks), strict=True):
            records[task.number] = record
            if on_progress:
                on_progress(len(records), total)
    return [records[number] for number in range(total)], num_kept


def _divided(corpora: Corpora, shard_hours: float) -> Iterator[Any]:
    """Yields the indices of the cuts of each shard: consecutive in the order of the input, and about equally long."""
    order = corpora.input_order()
    ends = np.cumsum(np.concatenate(corpora.num_samples)[order])
    total = int(ends[-1])
    num_shards = max(1, round(total / (shard_hours * 3600 * corpora.sampling_rate)))
    starts = [total * number // num_shards for number in range(num_shards)]
    bounds = np.unique([*np.searchsorted(ends, starts, side="right"), len(order)])
    for first, stop in pairwise(bounds):
        yield order[first:stop]


def _complete(location: str, number: int, sizes: dict[str, int]) -> ShardRecord | None:
    """Returns the record of a shard if it is complete."""
    if record_name(number) not in sizes:
        return None
    record = ShardRecord(**orjson.loads(storage().read(join(location, record_name(number)))))
    return record if all(sizes.get(name) == size for name, size in record.sizes.items()) else None


def _finish(location: str, corpora: Corpora, records: list[ShardRecord], num_kept: int) -> PackReport:
    """Writes `left_out.jsonl`, and returns the report."""
    left_out = [row for record in records for row in record.left_out]
    left_out_file = join(location, f"{FOLDER}/left_out.jsonl")
    lines = (orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in left_out)
    storage().write(left_out_file, b"".join(lines))
    num_cuts = sum(record.num_cuts for record in records)
    if not num_cuts:
        first = left_out[0]
        paths = ", ".join(str(corpus.path) for corpus in corpora.corpora)
        raise CorpusError(
            f"{paths}: no cut can be packed; the first: {first['cut_id']!r}: {first['reason']}, {first['detail']}"
        )
    return PackReport(
        location=location,
        num_cuts=num_cuts,
        hours=sum(record.num_samples for record in records) / corpora.sampling_rate / 3600,
        num_shards=sum(1 for record in records if record.sizes),
        num_bytes=sum(sum(record.sizes.values()) for record in records),
        num_kept_shards=num_kept,
        num_rounded=sum(record.num_rounded for record in records),
        num_scaled=sum(len(record.scaled) for record in records),
        left_out=dict(Counter(row["reason"] for row in left_out).most_common()),
        left_out_file=left_out_file,
        prepare_command=_prepare_command(location, corpora),
    )


def _prepare_command(location: str, corpora: Corpora) -> str:
    """Returns the command that prepares a corpus of all packed cuts."""
    rate = corpora.sampling_rate
    options = [] if rate == PrepareConfig().sampling_rate else ["--sampling-rate", str(rate)]
    if min(int(lengths[0]) for lengths in corpora.num_samples) / rate < PrepareConfig().min_seconds:
        options += ["--min-seconds", "0"]
    name = location.rpartition("/")[2]
    return shlex.join(["nestdata", "prepare", location, "-o", f"{name}.corpus", *options])
