"""How interference is added to clean speech: whether, what, where and how loud.

The semantics are those of NeMo's MultiSpeakerNoiseAugmentation, which NEST is trained with, less its faults: a cut that
is not chosen keeps its clean audio, and the ratio holds over the samples that were mixed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestdata.audio import energy
from nestdata.errors import ConfigError
from nestdata.keyed import Draws
from nestdata.noise import NoiseSpan

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

    num_failed_reads: int = 0
    """Noises that could not be read before one was found."""

    num_silent_crops: int = 0


@dataclass(frozen=True, slots=True)
class Speech:
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
        draws: Draws,
        draw_noise: Callable[[int], NoiseSpan],
    ) -> tuple[NDArray[np.float32] | None, Mix]:
        """Decides about one cut of a microbatch and makes what is added to it.

        Args:
            index: Which cut of the microbatch.
            microbatch: All its cuts; they are not written to.
            draws: Decides everything about this cut.
            draw_noise: Gives noise of a number of samples, or fewer; called only for mode noise.

        Returns:
            What to add to the clean samples, zero outside the mixed segments, shape (samples,), or None where
            nothing is added; and a record of it. Nothing is added to a cut that was not chosen, nor where
            either side has no power over the mixed samples, since no gain reaches the ratio then.
        """
        config, clean = self.config, microbatch[index].samples
        if draws.uniform() >= config.prob:
            return None, Mix(mode="none")
        wants_noise = draws.uniform() < config.noise_ratio
        num_mixed = max(1, int(len(clean) * draws.uniform(*config.mix_rate)))
        segments = _place_segments(len(clean), num_mixed, draws.between(*config.num_segments), draws)
        others = [other for other in microbatch if other.row != microbatch[index].row]
        if wants_noise or not others:
            snr_db = draws.uniform(*config.noise_snr_db)
            span = draw_noise(num_mixed)
            mode: MixMode = "noise"
            sources: tuple[str, ...] = ("white noise" if span.kind == "white" else span.cut_id,)
            interference = np.resize(span.samples, num_mixed)
            counts = (span.num_failed_reads, span.num_silent_crops)
        else:
            snr_db = draws.uniform(*config.speech_snr_db)
            chosen = draws.distinct(min(draws.between(*config.num_speakers), len(others)), len(others))
            mode, counts = "speech", (0, 0)
            sources = tuple(others[i].cut_id for i in chosen)
            interference = _sum_of([_fit(others[i].samples, num_mixed, draws) for i in chosen])
        scaled = scale_to_snr(_gather(clean, segments), interference, snr_db)
        if scaled is None:
            return None, Mix(mode="none", num_failed_reads=counts[0], num_silent_crops=counts[1])
        mix = Mix(
            mode=mode,
            sources=sources,
            snr_db=snr_db,
            segments=segments,
            num_failed_reads=counts[0],
            num_silent_crops=counts[1],
        )
        return _scatter(scaled, segments, len(clean)), mix


def scale_to_snr(
    clean: NDArray[np.float32], interference: NDArray[np.float32], snr_db: float
) -> NDArray[np.float32] | None:
    """Scales interference so that it stands in a given ratio to clean speech.

    Both are the samples that will be added to each other, shape (samples,). Power is the mean square over them,
    silence included. Returns None where either has no power.

    Source: NEST, arXiv:2408.13106, noisy speech augmentation. Differs: NeMo measures power over the whole utterance.
    """
    clean_energy, interference_energy = energy(clean), energy(interference)
    if clean_energy <= 0.0 or interference_energy <= 0.0:
        return None
    gain = np.sqrt(clean_energy / interference_energy / 10.0 ** (snr_db / 10))
    scaled: NDArray[np.float32] = np.multiply(interference, gain, dtype=np.float64).astype(np.float32)
    return scaled


def _place_segments(length: int, num_mixed: int, num_segments: int, draws: Draws) -> tuple[tuple[int, int], ...]:
    """Divides `num_mixed` samples into segments and places them at random, in order and without overlap."""
    num_segments = min(num_segments, num_mixed)
    cuts = [0, *sorted(1 + cut for cut in draws.distinct(num_segments - 1, num_mixed - 1)), num_mixed]
    gaps = sorted(draws.between(0, length - num_mixed) for _ in range(num_segments))
    return tuple((gap + start, end - start) for gap, start, end in zip(gaps, cuts[:-1], cuts[1:], strict=True))


def _fit(samples: NDArray[np.float32], num_samples: int, draws: Draws) -> NDArray[np.float32]:
    """Crops at a random place, or repeats, to a number of samples."""
    if len(samples) <= num_samples:
        return np.resize(samples, num_samples)
    start = draws.below(len(samples) - num_samples + 1)
    return samples[start : start + num_samples]


def _sum_of(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return parts[0] if len(parts) == 1 else np.sum(parts, axis=0, dtype=np.float32)


def _gather(samples: NDArray[np.float32], segments: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    return np.concatenate([samples[start : start + number] for start, number in segments])


def _scatter(mixed: NDArray[np.float32], segments: Sequence[tuple[int, int]], num_samples: int) -> NDArray[np.float32]:
    added = np.zeros(num_samples, np.float32)
    position = 0
    for start, number in segments:
        added[start : start + number] = mixed[position : position + number]
        position += number
    return added
