"""Speech share, level and signal-to-noise ratio of spans of a recording, from the power of its frames.

The signal-to-noise ratio is an estimate. Its noise is the median power of the frames without speech, in the pauses of
the span itself if they last at least half a second, and otherwise in all pauses of the recording. Its signal is the
mean power of the frames of speech, less that noise. It assumes that the noise goes on under the speech. Music that
stops when somebody speaks therefore lowers it, and what comes only with the speech, such as a second talker,
reverberation or clipping, does not. Frequencies above 8 kHz are not measured.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.prepare.speech.cutting import Spans

SHARE_FIELD, LEVEL_FIELD, SNR_FIELD = "nest_speech_share", "nest_speech_dbfs", "nest_snr_db"
"""Custom fields of cuts: share of frames with speech, level of these frames, signal-to-noise ratio."""

# Quantisation noise of 16-bit audio. Lower powers, such as those of digital silence, count as this one.
_FLOOR_DB = -98.0
# Lowest ratio of signal to noise, -20 dB. Below it, the power of the signal is a difference of two nearly equal powers,
# mostly rounding and chance.
_LOWEST_RATIO = 0.01
# Frames of a pause next to speech that may hold its onset or decay.
_MARGIN = 2
# Frames that the noise is estimated from, half a second.
_MIN_NOISE_FRAMES = 16


class SpeechMeasures(NamedTuple):
    """Speech in a span of a recording."""

    share: float
    """Share of frames with speech, from 0 to 1."""

    level_db: float | None
    """Mean power of the frames with speech, in dB of full scale; None without speech. A sine of full scale has -3."""

    snr_db: float | None
    """Estimated signal-to-noise ratio; None without speech, or if the recording has less than half a second without."""

    def fields(self) -> dict[str, float]:
        """Returns the custom fields of the cut, without those that are unknown."""
        fields = {SHARE_FIELD: self.share, LEVEL_FIELD: self.level_db, SNR_FIELD: self.snr_db}
        return {name: value for name, value in fields.items() if value is not None}


class FramePowers:
    """Power and speech of the frames of one recording.

    Args:
        powers: Mean square of the samples of each frame, shape (num_frames,).
        runs: The spans of speech.
    """

    def __init__(self, powers: NDArray[np.float32], runs: Spans) -> None:
        self._powers = powers
        self._is_speech = np.zeros(len(powers), np.bool_)
        self._is_noise = np.ones(len(powers), np.bool_)
        for start, stop in runs.tolist():
            self._is_speech[start:stop] = True
            self._is_noise[max(0, start - _MARGIN) : stop + _MARGIN] = False

    def num_speech_frames(self, start: int, stop: int) -> int:
        """Returns the number of frames with speech in a span."""
        return int(self._is_speech[start:stop].sum())

    def measure(self, start: int, stop: int) -> SpeechMeasures:
        """Measures a span. Values are rounded, so that the limits are compared with what users see."""
        is_speech = self._is_speech[start:stop]
        if not is_speech.any():
            return SpeechMeasures(0.0, None, None)
        speech = float(self._powers[start:stop][is_speech].mean(dtype=np.float64))
        noise = self._noise(start, stop)
        signal = speech if noise is None else max(speech - noise, _LOWEST_RATIO * noise)
        snr_db = None if noise is None else round(_decibels(signal) - _decibels(noise), 1)
        return SpeechMeasures(round(float(is_speech.mean()), 3), round(_decibels(speech), 1), snr_db)

    def _noise(self, start: int, stop: int) -> float | None:
        found = self._noise_within(start, stop)
        return self._noise_of_recording if found is None else found

    @cached_property
    def _noise_of_recording(self) -> float | None:
        return self._noise_within(0, len(self._powers))

    def _noise_within(self, start: int, stop: int) -> float | None:
        powers = self._powers[start:stop][self._is_noise[start:stop]]
        return float(np.median(powers.astype(np.float64))) if len(powers) >= _MIN_NOISE_FRAMES else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechTotals:
    """Sums over recordings, in frames of 32 ms."""

    num_recordings: int = 0
    num_without_speech: int = 0
    """Number of recordings without any speech."""

    frames: int = 0
    """All frames of all recordings."""

    speech_frames: int = 0
    cut_frames: int = 0
    """Frames inside the cuts, before cuts are rejected for other reasons."""

    num_in_speech: int = 0
    """Number of places where two cuts meet in running speech."""

    @classmethod
    def sum(cls, totals: Iterable["SpeechTotals"]) -> "SpeechTotals":
        """Returns the sums of all fields."""
        totals = [*totals]
        return cls(**{field.name: sum(getattr(each, field.name) for each in totals) for field in fields(cls)})


def _decibels(power: float) -> float:
    return max(_FLOOR_DB, 10 * math.log10(power)) if power > 0 else _FLOOR_DB
