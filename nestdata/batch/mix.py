"""How interference is added to clean speech: whether, what, where and how loud.

The semantics are those of NeMo's MultiSpeakerNoiseAugmentation, which NEST is trained with, less its faults: a cut that
is not chosen keeps its clean audio, and the ratio holds over the samples that were mixed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.batch.bad_audio import BadCut
from nestdata.batch.noise import NoiseSpan
from nestdata.corpus.audio import energy
from nestdata.errors import ConfigError
from nestdata.stateless_rng import StatelessRng

MixMode = Literal["noise", "speech", "none"]


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """Which cuts receive interference, and which; the defaults are NEST's."""

    prob: float = 0.5
    """Share of cuts that receive interference."""

    noise_ratio: float = 0.5
    """Share of those that receive noise; the others receive speech of other cuts of the microbatch."""

    noise_snr_db: tuple[float, float] = (-5.0, 20.0)
    """Bounds of the uniform draw of the ratio of clean power to noise power."""

    speech_snr_db: tuple[float, float] = (-5.0, 5.0)
    """The same for interfering speech."""

    mix_rate: tuple[float, float] = (0.5, 0.5)
    """Bounds of the share of the cut's length that is mixed."""

    num_segments: tuple[int, int] = (1, 1)
    """Bounds of the number of separate segments that this share is divided into."""

    num_speakers: tuple[int, int] = (1, 1)
    """Bounds of the number of other cuts that are added up to interfering speech."""

    def __post_init__(self) -> None:
        for name in ("prob", "noise_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"mix.{name} is {getattr(self, name)}: expected a share in [0, 1].")
        for name in ("noise_snr_db", "speech_snr_db", "mix_rate", "num_segments", "num_speakers"):
            low, high = getattr(self, name)
            if low > high:
                raise ConfigError(f"mix.{name} is ({low}, {high}): give the lower bound first.")
        if not 0.0 < self.mix_rate[0] <= self.mix_rate[1] <= 1.0:
            raise ConfigError(f"mix.mix_rate is {self.mix_rate}: expected shares in (0, 1].")
        for name in ("num_segments", "num_speakers"):
            if getattr(self, name)[0] < 1:
                raise ConfigError(f"mix.{name} is {getattr(self, name)}: give at least 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What was done to one cut."""

    mode: MixMode
    sources: tuple[str, ...] = ()
    """Ids of the noise or speech cuts; `white noise` for the fallback."""

    snr_db: float = float("nan")
    """10 log10(clean power / interference power), each the mean square over the mixed samples; NaN for mode none."""

    segments: tuple[tuple[int, int], ...] = ()
    """The mixed samples, as (start, number) in order and without overlap."""

    num_reads: int = 0
    """Noises that were read, or should have been."""

    bad_noise: tuple[BadCut, ...] = ()
    """Those that could not be read before one was found."""

    num_silent_crops: int = 0


_UNTOUCHED = Mix(mode="none")
# What single precision holds; beyond, gains are applied in two steps.
_LARGE_GAIN = 1e30


class Speech(NamedTuple):
    """A clean cut of the microbatch, as others may be mixed with it."""

    row: int
    cut_id: str
    samples: NDArray[np.float32]
    """Shape (samples,)."""


class SpeakerNoiseMixer:
    """Adds noise, or other speakers of the same microbatch, to clean speech."""

    def __init__(self, config: MixConfig | None = None) -> None:
        self.config = config or MixConfig()

    def __call__(
        self,
        index: int,
        microbatch: Sequence[Speech],
        draws: StatelessRng,
        draw_noise: Callable[[int], NoiseSpan],
        out: NDArray[np.float32],
    ) -> Mix:
        """Decides about one cut of a microbatch and makes what is added to it.

        Args:
            index: Which cut of the microbatch.
            microbatch: All its cuts; they are not written to.
            draws: Decides everything about this cut.
            draw_noise: Gives noise of a number of samples, or fewer; called only for mode noise.
            out: Zeros, at least as many as the cut has samples. What is to be added to them is written into it,
                within the mixed segments.

        Returns:
            A record of what was done. Nothing is written for a cut that was not chosen, nor where either side has no
            power over the mixed samples, since no gain reaches the ratio then.
        """
        config, clean = self.config, microbatch[index].samples
        if draws.uniform() >= config.prob:
            return _UNTOUCHED
        wants_noise = draws.uniform() < config.noise_ratio
        num_mixed = max(1, int(len(clean) * draws.uniform(*config.mix_rate)))
        segments = _place_segments(len(clean), num_mixed, draws.between(*config.num_segments), draws)
        others = [] if wants_noise else [other for other in microbatch if other.row != microbatch[index].row]
        span = None
        if others:
            snr_db = draws.uniform(*config.speech_snr_db)
            chosen = draws.distinct(min(draws.between(*config.num_speakers), len(others)), len(others))
            interference = _sum_of([_fit(others[i].samples, num_mixed, draws) for i in chosen])
        else:
            snr_db = draws.uniform(*config.noise_snr_db)
            span = draw_noise(num_mixed)
            interference = _repeated(span.samples, num_mixed)
        gain = gain_for_snr(_gather(clean, segments), interference, snr_db)
        if gain is not None:
            _scatter(interference, gain, segments, out)
        mode: MixMode = "none" if gain is None else "speech" if span is None else "noise"
        sources = tuple(others[i].cut_id for i in chosen) if span is None else (span.source,)
        return Mix(
            mode=mode,
            sources=sources if gain is not None else (),
            snr_db=snr_db if gain is not None else math.nan,
            segments=segments if gain is not None else (),
            num_reads=span.num_reads if span else 0,
            bad_noise=span.bad if span else (),
            num_silent_crops=span.num_silent_crops if span else 0,
        )


def gain_for_snr(clean: NDArray[np.float32], interference: NDArray[np.float32], snr_db: float) -> float | None:
    """Returns by what interference is multiplied so that it stands in a given ratio to clean speech.

    Both are the samples that will be added to each other, shape (samples,). Power is the mean square over them,
    silence included. Returns None where either has no power.

    Source: NEST, arXiv:2408.13106, noisy speech augmentation. Differs: NeMo measures power over the whole utterance.
    """
    clean_energy, interference_energy = energy(clean), energy(interference)
    if clean_energy <= 0.0 or interference_energy <= 0.0:
        return None
    return math.sqrt(clean_energy / interference_energy / 10.0 ** (snr_db / 10))


def _place_segments(length: int, num_mixed: int, num_segments: int, draws: StatelessRng) -> tuple[tuple[int, int], ...]:
    """Divides `num_mixed` samples into segments and places them at random, in order and without overlap."""
    num_segments = min(num_segments, num_mixed)
    cuts = [0, *sorted(1 + cut for cut in draws.distinct(num_segments - 1, num_mixed - 1)), num_mixed]
    gaps = sorted(draws.between(0, length - num_mixed) for _ in range(num_segments))
    return tuple((gap + start, end - start) for gap, start, end in zip(gaps, cuts[:-1], cuts[1:], strict=True))


def _fit(samples: NDArray[np.float32], num_samples: int, draws: StatelessRng) -> NDArray[np.float32]:
    """Crops at a random place, or repeats, to a number of samples."""
    if len(samples) <= num_samples:
        return _repeated(samples, num_samples)
    start = draws.below(len(samples) - num_samples + 1)
    return samples[start : start + num_samples]


def _repeated(samples: NDArray[np.float32], num_samples: int) -> NDArray[np.float32]:
    return samples if len(samples) == num_samples else np.resize(samples, num_samples)


def _sum_of(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return parts[0] if len(parts) == 1 else np.sum(parts, axis=0, dtype=np.float32)


def _gather(samples: NDArray[np.float32], segments: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    parts = [samples[start : start + number] for start, number in segments]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scatter(
    interference: NDArray[np.float32],
    gain: float,
    segments: Sequence[tuple[int, int]],
    out: NDArray[np.float32],
) -> None:
    if gain > _LARGE_GAIN:
        interference, gain = interference * np.float32(_LARGE_GAIN), gain / _LARGE_GAIN
    position = 0
    for start, number in segments:
        np.multiply(interference[position : position + number], np.float32(gain), out=out[start : start + number])
        position += number
