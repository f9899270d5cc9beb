"""Draws spans of noise from a noise corpus, with fallbacks for unreadable and silent noise.

A noise cut that cannot be read is replaced by another one, a silent crop is drawn again, and white noise is the last
resort. Every fallback is counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import SILENCE_DB, energy
from nestdata.batch.bad_audio import BadCut
from nestdata.config_checks import require_at_least
from nestdata.corpus.corpora import CorpusInput, open_corpus
from nestdata.corpus.corpus import Corpus
from nestdata.errors import AudioError
from nestdata.field_docs import with_field_docs
from nestdata.stateless_rng import StatelessRng

# Crops of one noise cut that are read one by one; after that many silent crops, the whole cut is read.
_CROPS_READ_SINGLY = 10
# Level range of white noise in dB of full scale, as in NeMo. Mixing scales the noise to the drawn SNR, so its level
# matters only for transforms of `augment.noise` that depend on the level.
_WHITE_DB = (-90.0, -46.0)

CutReader = Callable[..., tuple[str, NDArray[np.float32]]]
"""`Corpus.load` of one cut: takes its arguments without the index."""


def _reader(corpus: Corpus, index: int) -> CutReader:
    return partial(corpus.load, index)


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """Limits of the noise sampler, beyond which it uses white noise."""

    max_reads: int = 20
    """Number of noise cuts that may be unreadable before white noise is used instead."""

    max_crops: int = 100
    """Number of crops of one noise cut that may be silent before white noise is used instead."""

    silence_db: float = SILENCE_DB
    """Mean power, in dB of full scale, below which a span is treated as silent."""

    def __post_init__(self) -> None:
        require_at_least(1, "noise_sampler", self, "max_reads", "max_crops")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseSpan:
    """A span of noise at its original level."""

    samples: NDArray[np.float32]
    """Shape (samples,): the requested number of samples, or fewer if the noise cut is shorter."""

    kind: Literal["noise", "white", "none"]
    cut_id: str = ""
    """Id of the noise cut; empty for white noise and without noise."""

    num_reads: int = 0
    """Number of noise cuts that were read, failed reads included."""

    bad: tuple[BadCut, ...] = ()
    """Noise cuts that could not be read."""

    num_silent_crops: int = 0
    """Number of silent crops that were discarded."""

    @property
    def source(self) -> str:
        """Name of the noise in the record of a mix."""
        return "white noise" if self.kind == "white" else self.cut_id


class NoiseSampler:
    """Draws noise from a corpus; without a corpus, returns zeros.

    Has no state: a span depends only on the random numbers that are passed in.

    Args:
        corpus: A `Corpus`, or the path of one.
        config: The defaults if None.

    Raises:
        CorpusError: The corpus cannot be opened, or something else is given.
    """

    def __init__(self, corpus: CorpusInput | None = None, config: NoiseConfig | None = None) -> None:
        self.corpus: Corpus | None = None if corpus is None else open_corpus(corpus)
        self.config = config or NoiseConfig()

    def first_index(self, rng: StatelessRng) -> int:
        """Returns the index of the cut that `draw` reads first, given a corpus and the same fresh random numbers."""
        assert self.corpus is not None
        return rng.below(len(self.corpus))

    def draw(
        self,
        num_samples: int,
        rng: StatelessRng,
        *,
        reader: Callable[[Corpus, int], CutReader] = _reader,
    ) -> NoiseSpan:
        """Returns a span of noise of `num_samples` samples, or fewer if the noise cut is shorter.

        Args:
            num_samples: Number of samples, at least 1.
            rng: Source of the random numbers for the choice of noise, the position of the crop, and white noise.
            reader: Returns what loads the noise cut of an index: by default, its `Corpus.load`.
        """
        if self.corpus is None:
            return NoiseSpan(samples=np.zeros(num_samples, np.float32), kind="none")
        bad: list[BadCut] = []
        cut_id, samples, num_silent = None, None, 0
        while cut_id is None and len(bad) < self.config.max_reads:
            index = rng.below(len(self.corpus))
            try:
                num_starts = self.corpus.num_samples_of(index) - num_samples + 1
                cut_id, samples, num_silent = self._crop(reader(self.corpus, index), num_starts, num_samples, rng)
            except AudioError as error:
                bad.append(BadCut.of(self.corpus.line(index)["id"], error))
        num_reads = len(bad) + (cut_id is not None)
        if samples is None:
            cut_id = None
            level_db = rng.uniform(*_WHITE_DB)
            samples = rng.normal(num_samples) * np.float32(10 ** (level_db / 20))
        return NoiseSpan(
            samples=samples,
            kind="white" if cut_id is None else "noise",
            cut_id=cut_id or "",
            num_reads=num_reads,
            bad=tuple(bad),
            num_silent_crops=num_silent,
        )

    def _crop(
        self,
        read: CutReader,
        num_starts: int,
        num_samples: int,
        rng: StatelessRng,
    ) -> tuple[str, NDArray[np.float32] | None, int]:
        """Returns the id of a noise cut, a crop that is not silent, and the number of silent crops before it.

        The crop is None if all crops were silent.

        Args:
            read: Loads the cut, or a span of it.
            num_starts: Number of positions at which a crop can start; below 1 if the cut is shorter than the crop.
            num_samples: Length of the crop.
            rng: Source of the positions.
        """
        if num_starts <= 1:
            cut_id, samples = read()
            return (cut_id, None, 1) if self.is_silent(samples) else (cut_id, samples, 0)
        whole: NDArray[np.float32] | None = None
        for num_silent in range(self.config.max_crops):
            start = rng.below(num_starts)
            if num_silent < _CROPS_READ_SINGLY:
                cut_id, samples = read(start=start, num_samples=num_samples)
            else:  # mostly silence: reading the whole cut once is now cheaper
                whole = read()[1] if whole is None else whole
                samples = whole[start : start + num_samples]
            if not self.is_silent(samples):
                return cut_id, samples, num_silent
        return cut_id, None, self.config.max_crops

    def is_silent(self, samples: NDArray[np.float32]) -> bool:
        """Returns whether the mean power of a span is below the threshold."""
        return energy(samples) < float(10.0 ** (self.config.silence_db / 10)) * len(samples)
