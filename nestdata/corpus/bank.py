"""The sample bank: all audio of a corpus, decoded once into one memory-mapped file, for noise that is read often.

    bank.pcm         16-bit samples of all cuts, one cut after the other, in the order of `index.npy`
    bank.npy         for each cut, the position of its first sample and the gain; NaN if the cut could not be decoded

All processes share the memory pages. 16-bit audio at the sampling rate of the corpus is restored bit for bit. Audio
that exceeds [-1, 1] is scaled, so that nothing is clipped.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.meta import map_array
from nestdata.errors import AudioError

FULL_SCALE = 32768.0
"""The 16-bit value of amplitude 1."""

RECORD = np.dtype([("start", "<i8"), ("gain", "<f4")])
"""One record of `bank.npy`. The amplitude of a sample is its 16-bit value multiplied by the gain."""


class SampleBank:
    """Reads the samples of any span of any cut at the cost of a copy."""

    def __init__(self, directory: Path, lengths: NDArray[np.int64]) -> None:
        """Opens the bank of a corpus directory.

        Args:
            directory: The corpus directory.
            lengths: Length of each cut in samples.

        Raises:
            OSError: A file is missing.
            ValueError: The bank does not belong to cuts of these lengths.
        """
        self._records = map_array(directory / "bank.npy", RECORD, lengths.shape)
        self._samples = np.asarray(np.memmap(directory / "bank.pcm", "<i2", "r"))
        if len(self._samples) != self._records[-1]["start"] + lengths[-1]:
            raise ValueError("bank.pcm is not the size that bank.npy says")

    def read(self, index: int, cut_id: str, start: int, out: NDArray[np.float32]) -> None:
        """Fills `out` with the samples of a cut, from sample `start` on.

        Raises:
            AudioError: The cut could not be decoded when the bank was written.
        """
        first, gain = self._records[index]
        if np.isnan(gain):
            raise AudioError.because(
                "unreadable",
                f"cut {cut_id!r} could not be decoded when the bank was written. Restore its audio and prepare the "
                "corpus again.",
            )
        first = int(first) + start
        np.multiply(self._samples[first : first + len(out)], gain, out=out)
