"""Settings of cutting at pauses, and of leaving out cuts with little or noisy speech. Imports no heavy package."""

from dataclasses import dataclass

from nestdata.config_checks import require, require_at_least
from nestdata.field_docs import with_field_docs

FRAME_SECONDS = 0.032
"""Length of a frame of the detector, in seconds: 512 samples at 16 kHz."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentConfig:
    """How recordings are cut at pauses. All times are rounded to frames of 32 ms."""

    min_seconds: float = 5.0
    """Length that cuts should reach, in seconds. Speech is joined across pauses of up to `max_pause` until a cut is at
    least this long. Speech without such a neighbour stays shorter; `PrepareConfig.min_seconds` rejects it."""

    max_seconds: float = 30.0
    """Longest cut, in seconds. Longer speech is cut at its longest pauses; speech without a pause, where it is least
    speech-like."""

    max_pause: float = 2.0
    """Longest pause inside a cut, in seconds. Longer pauses are left out."""

    padding_seconds: float = 0.3
    """What a cut includes before and after its speech, in seconds; less where the next cut is near."""

    def __post_init__(self) -> None:
        require_at_least(0, "segment", self, "min_seconds", "max_pause", "padding_seconds")
        require(self.max_seconds >= 1, "segment.max_seconds", self.max_seconds, "at least 1 s")
        require(
            self.min_seconds <= self.max_seconds,
            "segment.min_seconds",
            self.min_seconds,
            f"at most segment.max_seconds ({self.max_seconds:g})",
        )
        require(
            4 * self.padding_seconds <= self.max_seconds,
            "segment.padding_seconds",
            self.padding_seconds,
            f"at most a quarter of segment.max_seconds ({self.max_seconds:g})",
        )
