"""Adds noise or other speakers to clean speech, and records what was added.

Follows NeMo's MultiSpeakerNoiseAugmentation, with which NEST is trained, with two differences: a cut that is not
selected keeps its clean audio, and the SNR is measured over the mixed samples alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import energy
from nestdata.batch.bad_audio import BadCut
from nestdata.batch.noise import NoiseSpan
from nestdata.config_checks import require, require_bounds, require_share
from nestdata.field_docs import with_field_docs
from nestdata.stateless_rng import StatelessRng

MixMode = Literal["noise", "speech", "none"]
_MAX_SNR_DB = 200.0
"""Beyond it, powers leave the range of single precision."""


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """Which cuts receive interference, and of which kind; the defaults are NeMo's."""

    prob: float = 0.5
    """Share of cuts that receive interference."""

    noise_ratio: float = 0.5
    """Share of the selected cuts that receive noise; the others receive speech of other cuts of the microbatch."""

    noise_snr_db: tuple[float, float] = (-5.0, 20.0)
    """Bounds, in dB, of the uniformly drawn ratio of clean power to noise power."""

    speech_snr_db: tuple[float, float] = (-5.0, 5.0)
    """Bounds, in dB, of the uniformly drawn ratio of clean power to the power of interfering speech."""

    mix_rate: tuple[float, float] = (0.5, 0.5)
    """Bounds of the share of the cut's length that is mixed."""

    num_segments: tuple[int, int] = (1, 1)
    """Bounds of the number of separate segments into which the mixed samples are divided."""

    num_speakers: tuple[int, int] = (1, 1)
    """Bounds of the number of other cuts that are summed as interfering speech."""

    def __post_init__(self) -> None:
        require_share("mix", self, "prob", "noise_ratio")
        require_bounds("mix", self, "noise_snr_db", "speech_snr_db", "mix_rate", "num_segments", "num_speakers")
        for name in ("noise_snr_db", "speech_snr_db"):
            bounds = getattr(self, name)
            require(
                max(map(abs, bounds)) <= _MAX_SNR_DB, f"mix.{name}", bounds, f"at most {_MAX_SNR_DB:g} dB either way"
            )
        are_shares = self.mix_rate[0] > 0.0 and self.mix_rate[1] <= 1.0
        require(are_shares, "mix.mix_rate", self.mix_rate, "shares in (0, 1]")
        for name in ("num_segments", "num_speakers"):
            bounds = getattr(self, name)
            require(bounds[0] >= 1, f"mix.{name}", bounds, "1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Record of the interference that was added to one cut."""

    mode: MixMode
    sources: tuple[str, ...] = ()
    """Ids of the added noise or speech cuts; `white noise` for the fallback."""

    snr_db: float = float("nan")
    """10 log10(clean power / interference power), each the mean square over the mixed samples; NaN for mode none."""

    segments: tuple[tuple[int, int], ...] = ()
    """The mixed samples as (start, number of samples), in order and without overlap."""

    num_reads: int = 0
    """Number of noise cuts that were read, failed reads included."""

    bad_noise: tuple[BadCut, ...] = ()
    """Noise cuts that could not be read."""

    num_silent_crops: int = 0
    """Number of silent crops of noise that were discarded."""


# Gains above this are applied in two steps, because they exceed the range of single precision.
_LARGE_GAIN = 1e30


class Speech(NamedTuple):
    """A clean cut of the microbatch, which may be added to other cuts."""

    corpus_index: int
    cut_id: str
    samples: NDArray[np.float32]
    """Shape (samples,)."""


class SpeakerNoiseMixer:
    """Draws the interference of a cut: noise, or other speakers of the same microbatch."""

    def __init__(self, config: MixConfig | None = None) -> None:
        self.config = config or MixConfig()

    def draw_mode(self, rng: StatelessRng) -> MixMode:
        """Draws the kind of interference of a cut from the first of its random numbers; needs no audio.

        A cut without other cuts in its microbatch receives noise where this returns "speech".
        """
        if rng.uniform() >= self.config.prob:
            return "none"
        return "noise" if rng.uniform() < self.config.noise_ratio else "speech"

    def __call__(
        self,
        position: int,
        microbatch: Sequence[Speech],
        rng: StatelessRng,
        draw_noise: Callable[[int], NoiseSpan],
        out: NDArray[np.float32],
    ) -> Mix:
        """Draws the interference of one cut of a microbatch and writes it to `out`.

        Args:
            position: Position of the cut in the microbatch.
            microbatch: All cuts of the microbatch; they are not modified.
            rng: Source of all random numbers for this cut.
            draw_noise: Returns noise of at most the given number of samples; called only for mode noise.
            out: Zeros, at least as many as the cut has samples. Receives the scaled interference in the mixed segments.

        Returns:
            A record of the interference. Nothing is written for a cut that was not selected, or if the clean speech or
            the interference has no power in the mixed samples, because no gain would then reach the ratio.
        """
        config, clean = self.config, microbatch[position].samples
        drawn = self.draw_mode(rng)
        if drawn == "none":
            return Mix(mode="none")
        num_mixed = max(1, int(len(clean) * rng.uniform(*config.mix_rate)))
        segments = _draw_segments(len(clean), num_mixed, rng.between(*config.num_segments), rng)
        others = [other for other in microbatch if other.corpus_index != microbatch[position].corpus_index]
        span = None
        if others and drawn == "speech":
            snr_db = rng.uniform(*config.speech_snr_db)
            chosen = rng.distinct(min(rng.between(*config.num_speakers), len(others)), len(others))
            interference = _sum_of([_fit(others[i].samples, num_mixed, rng) for i in chosen])
        else:
            snr_db = rng.uniform(*config.noise_snr_db)
            span = draw_noise(num_mixed)
            interference = _repeated(span.samples, num_mixed)
        counts: dict[str, Any] = {}
        if span is not None:
            counts = {"num_reads": span.num_reads, "bad_noise": span.bad, "num_silent_crops": span.num_silent_crops}
        gain = gain_for_snr(_gather(clean, segments), interference, snr_db)
        if gain is None:
            return Mix(mode="none", **counts)
        _scatter(interference, gain, segments, out)
        mode: MixMode = "speech" if span is None else "noise"
        sources = tuple(others[i].cut_id for i in chosen) if span is None else (span.source,)
        return Mix(mode=mode, sources=sources, snr_db=snr_db, segments=segments, **counts)


def gain_for_snr(clean: NDArray[np.float32], interference: NDArray[np.float32], snr_db: float) -> float | None:
    """Returns the gain that scales interference to a given ratio of clean power to interference power.

    Power is the mean square over all samples, silence included.

    Args:
        clean: The samples of clean speech to which interference is added, shape (samples,).
        interference: The interference, shape (samples,).
        snr_db: The ratio in dB.

    Returns:
        The factor for the interference, or None if either has no power.

    Source: NEST, arXiv:2408.13106, noisy speech augmentation. Differs: NeMo measures power over the whole utterance.
    """
    clean_energy, interference_energy = energy(clean), energy(interference)
    if clean_energy <= 0.0 or interference_energy <= 0.0:
        return None
    return math.sqrt(clean_energy / interference_energy / 10.0 ** (snr_db / 10))


def _draw_segments(length: int, num_mixed: int, num_segments: int, rng: StatelessRng) -> tuple[tuple[int, int], ...]:
    """Divides `num_mixed` samples into segments at random positions, in order and without overlap."""
    num_segments = min(num_segments, num_mixed)
    cuts = [0, *sorted(1 + cut for cut in rng.distinct(num_segments - 1, num_mixed - 1)), num_mixed]
    gaps = sorted(rng.between(0, length - num_mixed) for _ in range(num_segments))
    return tuple((gap + start, end - start) for gap, start, end in zip(gaps, cuts[:-1], cuts[1:], strict=True))


def _fit(samples: NDArray[np.float32], num_samples: int, rng: StatelessRng) -> NDArray[np.float32]:
    """Crops samples at a random position, or repeats them, to `num_samples`."""
    if len(samples) <= num_samples:
        return _repeated(samples, num_samples)
    start = rng.below(len(samples) - num_samples + 1)
    return samples[start : start + num_samples]


def _repeated(samples: NDArray[np.float32], num_samples: int) -> NDArray[np.float32]:
    """Repeats samples up to `num_samples`."""
    return samples if len(samples) == num_samples else np.resize(samples, num_samples)


def _sum_of(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return parts[0] if len(parts) == 1 else np.sum(parts, axis=0, dtype=np.float32)


def _gather(samples: NDArray[np.float32], segments: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    """Concatenates the samples of segments."""
    parts = [samples[start : start + number] for start, number in segments]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scatter(
    interference: NDArray[np.float32],
    gain: float,
    segments: Sequence[tuple[int, int]],
    out: NDArray[np.float32],
) -> None:
    """Writes scaled interference into the segments of `out`."""
    if gain > _LARGE_GAIN:
        interference, gain = interference * np.float32(_LARGE_GAIN), gain / _LARGE_GAIN
    position = 0
    for start, number in segments:
        np.multiply(interference[position : position + number], np.float32(gain), out=out[start : start + number])
        position += number
