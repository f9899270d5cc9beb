"""The cuts of a corpus that is being written: their dicts and samples, for the report and the sample bank.

The bank holds the samples of all cuts (see `nestdata.corpus.bank`); one or more processes write it.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

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
from nestdata.storage import is_url

_log = logging.getLogger(__name__)
_CUTS_PER_TASK = 64


class WrittenCuts:
    """The cuts in the order of the index.

    Args:
        directory: The directory that holds the cuts, their index and their addresses.
        stored_in: Its path once the corpus is in place; paths of audio in it already start with this path.
        meta: The content of `meta.json`, which may be written later.
    """

    def __init__(self, directory: Path, stored_in: Path, meta: Mapping[str, Any]) -> None:
        self.lengths, self._offsets = np.load(directory / "index.npy", mmap_mode="r")
        self._directory, self._stored_in = directory, stored_in
        self._addresses = AddressTable.open(directory, meta)

    def row(self, index: int) -> dict[str, Any]:
        """Returns a cut as a dict; may be called by several threads."""
        with (self._directory / "cuts.jsonl").open("rb") as file:
            file.seek(int(self._offsets[index]))
            row: dict[str, Any] = orjson.loads(file.readline())
        return row

    def is_remote(self, index: int) -> bool:
        """Returns whether the audio of a cut is in an object store."""
        address = self._address(index)
        return address is not None and is_url(address.location)

    def load(self, index: int, num_samples: int) -> NDArray[np.float32]:
        """Returns the first samples of a cut, shape (num_samples,); may be called by several threads.

        Raises:
            AudioError: They cannot be decoded.
            StorageError: Bytes cannot be read for a reason that says nothing about the cut.
        """
        row = self.row(index)
        for source in row["recording"]["sources"]:
            source["source"] = self._now(str(source["source"]))
        samples = empty_samples(row["id"], num_samples)
        if address := self._address(index):
            load_member(row, address._replace(location=self._now(address.location)), start=0, out=samples)
            return samples
        return load_samples(row, num_samples=num_samples, out=samples)

    def _address(self, index: int) -> Address | None:
        return self._addresses[index] if self._addresses else None

    def _now(self, location: str) -> str:
        return path_before_move(location, self._stored_in, self._directory)


def write_bank(directory: Path, stored_in: Path, meta: Mapping[str, Any], pool: Pool) -> None:
    """Writes the sample bank of a corpus. A cut that cannot be decoded gets a gain of NaN, which marks it as unusable.

    Args:
        directory: The directory that holds the cuts, their index and their addresses.
        stored_in: Path of the directory once the corpus is in place.
        meta: The content of `meta.json`, which may be written later.
        pool: The processes that decode the cuts and write their samples.

    Raises:
        CorpusError: A worker process ended unexpectedly.
        StorageError: Bytes cannot be read for a reason that says nothing about the cut.
    """
    lengths = np.asarray(np.load(directory / "index.npy", mmap_mode="r")[0])
    records = np.empty(len(lengths), RECORD)
    records["start"] = np.cumsum(lengths) - lengths
    with (directory / "bank.pcm").open("wb") as file:
        file.truncate(2 * int(lengths.sum()))
    firsts = range(0, len(lengths), _CUTS_PER_TASK)
    spans = zip(firsts, records["start"][::_CUTS_PER_TASK].tolist(), strict=True)
    records["gain"] = np.concatenate([*pool.map(partial(_write_samples, directory, stored_in, meta), spans)])
    np.save(directory / "bank.npy", records)
    if num_bad := int(np.isnan(records["gain"]).sum()):
        _log.warning("%s: %d of %d cuts could not be decoded and will not be used", stored_in, num_bad, len(lengths))


def _write_samples(
    directory: Path, stored_in: Path, meta: Mapping[str, Any], span: tuple[int, int]
) -> NDArray[np.float32]:
    """Writes the samples of consecutive cuts; runs in any process.

    Args:
        directory: As for `write_bank`.
        stored_in: As for `write_bank`.
        meta: As for `write_bank`.
        span: Index of the first cut, and position of its first sample in the bank.

    Returns:
        The gain of each cut, by which its samples are multiplied when they are read, shape (num_cuts,); NaN if it
        cannot be decoded.
    """
    cuts, (first, start) = WrittenCuts(directory, stored_in, meta), span
    lengths = cuts.lengths[first : first + _CUTS_PER_TASK].tolist()
    gains = np.full(len(lengths), np.nan, np.float32)
    with (directory / "bank.pcm").open("r+b") as file:
        file.seek(2 * start)
        for i, num_samples in enumerate(lengths):
            try:
                samples = cuts.load(first + i, num_samples)
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
