"""Decodes all audio of a corpus into its sample bank (see `nestdata.corpus.bank`), with one or more processes."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.audio.decode import empty_samples, load_samples
from nestdata.corpus.addresses import Address, AddressTable
from nestdata.corpus.bank import FULL_SCALE, RECORD
from nestdata.corpus.members import load_member
from nestdata.errors import AudioError
from nestdata.output import path_before_move
from nestdata.prepare.pool import Pool

_log = logging.getLogger(__name__)
_CUTS_PER_TASK = 16


@dataclass(frozen=True, slots=True)
class _Task:
    """Consecutive cuts of the index, to be decoded by any process."""

    directory: str
    stored_in: str
    lines: list[bytes]
    """The cuts as lines of `cuts.jsonl`."""

    addresses: list[Address | None]
    """Where the bytes of the cuts are; None for cuts that are read by the path in their line."""

    num_samples: list[int]
    """Length of each cut in samples."""

    start: int
    """Position of the first cut's first sample in the bank."""


def write_bank(
    directory: Path,
    stored_in: Path,
    pool: Pool,
    addresses: AddressTable | None = None,
) -> None:
    """Writes the sample bank of a corpus. A cut that cannot be decoded gets a gain of NaN, which marks it as unusable.

    Args:
        directory: The directory that holds `cuts.jsonl` and `index.npy`.
        stored_in: Path of the directory once the corpus is in place; paths of extracted audio in `cuts.jsonl`
            already start with it.
        pool: The processes that decode the cuts and write their samples.
        addresses: Where the bytes of the cuts are, if any cut has an address.

    Raises:
        CorpusError: A worker process ended unexpectedly.
        StorageError: Bytes cannot be read for a reason that says nothing about the cut.
    """
    lengths, offsets = np.load(directory / "index.npy", mmap_mode="r")
    ends = np.cumsum(lengths)
    with (directory / "bank.pcm").open("wb") as file:
        file.truncate(2 * int(ends[-1]))
    records = np.empty(len(ends), RECORD)
    records["start"] = ends - lengths
    tasks = _tasks(directory, stored_in, lengths, offsets, addresses)
    records["gain"] = np.concatenate(list(pool.map(_write_samples, tasks)))
    np.save(directory / "bank.npy", records)
    if num_bad := int(np.isnan(records["gain"]).sum()):
        _log.warning("%s: %d of %d cuts could not be decoded and will not be used", stored_in, num_bad, len(ends))


def _tasks(
    directory: Path,
    stored_in: Path,
    lengths: NDArray[np.int64],
    offsets: NDArray[np.int64],
    addresses: AddressTable | None,
) -> Iterator[_Task]:
    start = 0
    with (directory / "cuts.jsonl").open("rb") as file:
        for first in range(0, len(lengths), _CUTS_PER_TASK):
            lines = []
            for offset in offsets[first : first + _CUTS_PER_TASK].tolist():
                file.seek(offset)
                lines.append(file.readline())
            num_samples = lengths[first : first + _CUTS_PER_TASK].tolist()
            indices = range(first, first + len(lines))
            located = [addresses[index] if addresses else None for index in indices]
            yield _Task(str(directory), str(stored_in), lines, located, num_samples, start)
            start += sum(num_samples)


def _write_samples(task: _Task) -> NDArray[np.float32]:
    """Writes the samples of the cuts of a task.

    Returns:
        The gain of each cut, by which its samples are multiplied when they are read, shape (num_cuts,); NaN if it
        cannot be decoded.
    """
    gains = np.full(len(task.lines), np.nan, np.float32)
    with Path(task.directory, "bank.pcm").open("r+b") as file:
        file.seek(2 * task.start)
        cuts = zip(task.lines, task.addresses, task.num_samples, strict=True)
        for i, (line, address, num_samples) in enumerate(cuts):
            row = orjson.loads(line)
            for source in row["recording"]["sources"]:
                source["source"] = path_before_move(str(source["source"]), task.stored_in, task.directory)
            try:
                samples = empty_samples(row["id"], num_samples)
                if address:
                    location = path_before_move(address.location, task.stored_in, task.directory)
                    address = address._replace(location=location)
                    load_member(row, address, None, start=0, out=samples)
                else:
                    load_samples(row, num_samples=num_samples, out=samples)
            except AudioError:
                file.seek(2 * num_samples, 1)
                continue
            scale = _scale_of(samples)
            file.write(np.rint(samples * (FULL_SCALE / scale)).astype("<i2").tobytes())
            gains[i] = scale / FULL_SCALE
    return gains


def _scale_of(samples: NDArray[np.float32]) -> float:
    """Returns the smallest power of two, at least 1, by which samples must be divided so that none is clipped.

    Division by a power of two is exact, so 16-bit audio is stored without loss.
    """
    highest, lowest = FULL_SCALE * float(samples.max()), FULL_SCALE * float(samples.min())
    scale = 1.0
    while highest / scale >= FULL_SCALE - 0.5 or lowest / scale < -FULL_SCALE - 0.5:
        scale *= 2
    return scale
