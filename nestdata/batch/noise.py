"""The noise sampler: a span of noise for any cut, whatever state the noise corpus is in.

Noise collections are messy, so each step has a fallback: a noise that cannot be read is replaced by another, a silent
crop is drawn again, and when nothing comes of it there is white noise. Every fallback is counted.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestdata.batch.bad_audio import BadCut
from nestdata.corpus.audio import SILENCE_DB, energy
from nestdata.corpus.corpus import Corpus
from nestdata.errors import AudioError, ConfigError
from nestdata.stateless_rng import StatelessRng

# Silent crops of one noise that are read for themselves.
_CROPS_READ_SINGLY = 10


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """When the noise sampler tries again, and what it falls back to."""

    max_reads: int = 20
    """Noises that are tried before it is given up to read one."""

    max_crops: int = 100
    """Places in one noise that are tried before it is given up as silent."""

    silence_db: float = SILENCE_DB
    """Mean power, in dB of full scale, below which a span counts as silent."""

    white_db: tuple[float, float] = (-90.0, -46.0)
    """Bounds, in dB of full scale, of the level of white noise that is used for want of any other."""

    def __post_init__(self) -> None:
        for name in ("max_reads", "max_crops"):
            if getattr(self, name) < 1:
                raise ConfigError(f"noise.{name} is {getattr(self, name)}: give at least 1.")
        if self.white_db[0] > self.white_db[1]:
            raise ConfigError(f"noise.white_db is {self.white_db}: give the lower bound first.")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseSpan:
    """Noise as it was found, not yet scaled."""

    samples: NDArray[np.float32]
    """Shape (samples,): as many as were asked for, or fewer where the noise is shorter."""

    kind: Literal["noise", "white", "none"]
    cut_id: str = ""
    """The noise cut that it comes from; empty for white noise and none."""

    num_reads: int = 0
    bad: tuple[BadCut, ...] = ()
    """Noises that could not be read before one was found."""

    num_silent_crops: int = 0

    @property
    def source(self) -> str:
        """What it is called in the record of a mix."""
        return "white noise" if self.kind == "white" else self.cut_id


class NoiseSampler:
    """Draws noise from a corpus; without a corpus, gives zeros.

    Holds no state, so that a draw depends on its key alone: the same in every process and on every call.
    """

    def __init__(self, corpus: Corpus | None = None, config: NoiseConfig | None = None) -> None:
        self.corpus = corpus
        self.config = config or NoiseConfig()

    def draw(self, num_samples: int, draws: StatelessRng) -> NoiseSpan:
        """Returns a span of noise of `num_samples` samples, or shorter where the noise is.

        Args:
            num_samples: How much noise is needed, at least 1.
            draws: Decides which noise, which place in it, and the level of white noise.
        """
        if self.corpus is None:
            return NoiseSpan(samples=np.zeros(num_samples, np.float32), kind="none")
        bad: list[BadCut] = []
        while len(bad) < self.config.max_reads:
            row = draws.below(len(self.corpus))
            try:
                cut_id, samples, num_silent = self._crop(self.corpus, row, num_samples, draws)
            except AudioError as error:
                bad.append(BadCut.of(self.corpus.line(row)["id"], error))
                continue
            if samples is None:
                return self._white(num_samples, draws, bad, num_silent)
            return NoiseSpan(
                samples=samples,
                kind="noise",
                cut_id=cut_id,
                num_reads=len(bad) + 1,
                bad=tuple(bad),
                num_silent_crops=num_silent,
            )
        return self._white(num_samples, draws, bad, 0)

    def _crop(
        self, corpus: Corpus, row: int, num_samples: int, draws: StatelessRng
    ) -> tuple[str, NDArray[np.float32] | None, int]:
        """Returns the cut's id, a crop that is not silent, or None, and how many silent ones were met."""
        num_places = corpus.num_samples_of(row) - num_samples + 1
        if num_places <= 1:
            cut_id, samples = corpus.load(row)
            return (cut_id, None, 1) if self.is_silent(samples) else (cut_id, samples, 0)
        whole: NDArray[np.float32] | None = None
        for num_silent in range(self.config.max_crops):
            start = draws.below(num_places)
            if num_silent < _CROPS_READ_SINGLY:
                cut_id, samples = corpus.load(row, start=start, num_samples=num_samples)
            else:  # mostly silence: from here on it is cheaper to have all of it
                whole = corpus.load(row)[1] if whole is None else whole
                samples = whole[start : start + num_samples]
            if not self.is_silent(samples):
                return cut_id, samples, num_silent
        return cut_id, None, self.config.max_crops

    def is_silent(self, samples: NDArray[np.float32]) -> bool:
        """Tells whether the mean power of a span is below the threshold."""
        return energy(samples) < self._silence_power * len(samples)

    @property
    def _silence_power(self) -> float:
        return float(10.0 ** (self.config.silence_db / 10))

    def _white(self, num_samples: int, draws: StatelessRng, bad: list[BadCut], num_silent: int) -> NoiseSpan:
        level_db = draws.uniform(*self.config.white_db)
        return NoiseSpan(
            samples=draws.normal(num_samples) * np.float32(10 ** (level_db / 20)),
            kind="white",
            num_reads=len(bad) + bool(num_silent),
            bad=tuple(bad),
            num_silent_crops=num_silent,
        )
