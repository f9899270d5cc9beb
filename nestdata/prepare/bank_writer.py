"""Decodes all audio of a corpus into its sample bank (see `nestdata.corpus.bank`), with one or more processes."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.bank import FULL_SCALE, RECORD
from nestdata.errors import AudioError
from nestdata.prepare.pool import Pool
from nestdata.prepare.written_cuts import WrittenCuts

_log = logging.getLogger(__name__)
_CUTS_PER_TASK = 64


class _Task(NamedTuple):
    """Consecutive cuts of the index, to be decoded by any process."""

    directory: Path
    stored_in: Path
    meta: Mapping[str, Any]
    first: int
    stop: int
    start: int
    """Position of the first cut's first sample in the bank."""


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
    tasks = (
        _Task(directory, stored_in, meta, first, min(first + _CUTS_PER_TASK, len(lengths)), start)
        for first, start in zip(
            range(0, len(lengths), _CUTS_PER_TASK), records["start"][::_CUTS_PER_TASK].tolist(), strict=True
        )
    )
    records["gain"] = np.concatenate(list(pool.map(_write_samples, tasks)))
    np.save(directory / "bank.npy", records)
    if num_bad := int(np.isnan(records["gain"]).sum()):
        _log.warning("%s: %d of %d cuts could not be decoded and will not be used", stored_in, num_bad, len(lengths))


def _write_samples(task: _Task) -> NDArray[np.float32]:
    """Writes the samples of the cuts of a task.

    Returns:
        The gain of each cut, by which its samples are multiplied when they are read, shape (num_cuts,); NaN if it
        cannot be decoded.
    """
    gains = np.full(task.stop - task.first, np.nan, np.float32)
    cuts = WrittenCuts(task.directory, task.stored_in, task.meta)
    with (task.directory / "bank.pcm").open("r+b") as file:
        file.seek(2 * task.start)
        for i, index in enumerate(range(task.first, task.stop)):
            num_samples = int(cuts.lengths[index])
            try:
                samples = cuts.load(index, num_samples)
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
