"""The sample bank: all audio of a corpus decoded once into one memory-mapped file, for noise that is used a lot.

    bank.pcm         16-bit samples of every cut, one after the other, in the order of `index.npy`
    bank.npy         for each cut where its samples start, and by what they are multiplied; NaN where it was unreadable

All processes share the pages. Audio that was 16-bit at the corpus's rate comes back bit for bit; what leaves [-1, 1]
is scaled so that nothing is clipped.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.errors import AudioError

FULL_SCALE = 32768.0
RECORD = np.dtype([("start", "<i8"), ("gain", "<f4")])


class SampleBank:
    """Samples of any span of any cut, at the cost of copying them."""

    def __init__(self, samples: NDArray[np.int16], records: NDArray[Any]) -> None:
        self._samples = samples
        self._records = records

    @classmethod
    def open(cls, directory: Path, lengths: NDArray[np.int64]) -> "SampleBank":
        """Opens the bank of a corpus directory whose cuts have these numbers of samples.

        Raises:
            OSError: A part of it is missing.
            ValueError: It is not the bank of these cuts.
        """
        records = np.asarray(np.load(directory / "bank.npy", mmap_mode="r"))
        if records.shape != lengths.shape or records.dtype != RECORD:
            raise ValueError("bank.npy is not the size that meta.json says")
        samples = np.asarray(np.memmap(directory / "bank.pcm", "<i2", "r"))
        if len(samples) != records[-1]["start"] + lengths[-1]:
            raise ValueError("bank.pcm is not the size that bank.npy says")
        return cls(samples, records)

    def read(self, row: int, cut_id: str, start: int, out: NDArray[np.float32]) -> None:
        """Fills `out` with samples of a cut, from the `start`-th on.

        Raises:
            AudioError: The cut could not be decoded when the bank was made.
        """
        first, gain = self._records[row]
        if np.isnan(gain):
            raise AudioError.because("unreadable", f"cut {cut_id!r} could not be decoded when the bank was made.")
        first = int(first) + start
        np.multiply(self._samples[first : first + len(out)], gain, out=out)
