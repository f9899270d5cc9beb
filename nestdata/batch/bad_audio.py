"""Audio that turns out to be unusable while a run is under way: replaced, counted, and at some point too much of it.

What a batch holds in place of what could not be used is a pure function of its key and of the files; counting it is
left to whoever takes the batches in order, which is the loader.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nestdata.errors import AudioError, AudioReason, ConfigError

_log = logging.getLogger(__name__)
_MOST_LISTED = 20


class BadCut(NamedTuple):
    """A cut whose audio could not be used."""

    cut_id: str
    reason: AudioReason
    detail: str

    @classmethod
    def of(cls, cut_id: str, error: AudioError) -> "BadCut":
        """Returns what an error says of a cut."""
        return cls(cut_id, error.reason, str(error))


@dataclass(frozen=True, kw_only=True)
class BadAudioConfig:
    """How much unusable audio a run puts up with."""

    max_share: float = 0.01
    """Largest share of cuts of speech that may be replaced."""

    max_noise_share: float = 0.5
    """Largest share of reads of noise that may fail."""

    min_count: int = 20
    """Up to so many are always put up with, for the first few say nothing about shares."""

    def __post_init__(self) -> None:
        for name in ("max_share", "max_noise_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"bad_audio.{name} is {getattr(self, name)}: expected a share in [0, 1].")
        if self.min_count < 0:
            raise ConfigError(f"bad_audio.min_count is {self.min_count}: a count cannot be negative.")


class BadAudioCounter:
    """Counts what could not be used, by reason, logs each cut once, and ends a run that has too much of it."""

    def __init__(self, what: str, max_share: float, min_count: int) -> None:
        self.reasons: Counter[str] = Counter()
        """Number of reads that failed, by reason."""

        self._what = what
        self._max_share = max_share
        self._min_count = min_count
        self._num_reads = 0
        self._seen: dict[str, BadCut] = {}

    def add(self, num_reads: int, bad: Iterable[BadCut]) -> None:
        """Takes account of so many reads, those that failed included.

        Raises:
            AudioError: More have failed than is put up with; the message lists them.
        """
        self._num_reads += num_reads
        for cut in bad:
            self.reasons[cut.reason] += 1
            if cut.cut_id not in self._seen:
                self._seen[cut.cut_id] = cut
                _log.warning("%s replaced, %s: %s", self._what, cut.reason, cut.detail)
        num_bad = self.reasons.total()
        if num_bad > max(self._min_count, self._max_share * self._num_reads):
            reasons = ", ".join(f"{number} {reason}" for reason, number in self.reasons.most_common())
            listed = ", ".join(f"{cut.cut_id} ({cut.reason})" for cut in list(self._seen.values())[:_MOST_LISTED])
            more = f" and {len(self._seen) - _MOST_LISTED} more" if len(self._seen) > _MOST_LISTED else ""
            raise AudioError(
                f"{num_bad} of {self._num_reads} reads of {self._what} failed ({reasons}), more than the "
                f"{100 * self._max_share:g} % that is put up with: {listed}{more}. See that the files are there and "
                "whole, then prepare the corpus again with --probe decode."
            )
