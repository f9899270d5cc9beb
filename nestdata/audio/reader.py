"""`AudioReader`: the methods by which audio of any format is decoded."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

# Samples of all channels that are decoded at a time to count or skip them, in 4 MiB.
_BLOCK_SAMPLES = 1 << 20


class MixedStreamsError(ValueError):
    """A file consists of streams of different form, which cannot be read as one."""


class AudioReader(ABC):
    """Open audio, for a `with` statement. Its samples are read once and in order, from the start or from a position."""

    rate: int
    """In Hz."""

    num_channels: int

    num_samples: int | None = None
    """Samples of each channel; None if only decoding gives their number."""

    ends_early: bool = False
    """Whether the file is shorter than its own header says."""

    damage: Exception | None = None
    """The error for which there are no more samples; None at the end of the file."""

    def __enter__(self) -> "AudioReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def seek(self, position: int) -> None:
        """Moves from the start to a position in samples, or to the end if that comes first."""

    @abstractmethod
    def read(self, num_samples: int) -> NDArray[np.float32]:
        """Returns the next samples of each channel, shape (num_samples, num_channels); fewer at the end."""

    def close(self) -> None:  # noqa: B027  # not every reader has something to close
        """Frees what the reader holds; the bytes that it was given stay open."""

    def read_into(self, out: NDArray[np.float32]) -> int:
        """Fills an array, shape (num_samples,), with the next samples of audio of one channel; returns their number."""
        samples = self.read(len(out))
        out[: len(samples)] = samples[:, 0]
        return len(samples)

    def count(self) -> int:
        """Returns the number of samples of each channel from the start; decodes them if nothing else gives it."""
        return self.skip() if self.num_samples is None else self.num_samples

    def skip(self, num_samples: int | None = None) -> int:
        """Decodes the next samples, by default all, without keeping them; returns their number, fewer at the end."""
        num_skipped, block = 0, max(1, _BLOCK_SAMPLES // self.num_channels)
        while num_samples is None or num_skipped < num_samples:
            num_found = len(self.read(block if num_samples is None else min(block, num_samples - num_skipped)))
            if not num_found:
                break
            num_skipped += num_found
        return num_skipped
