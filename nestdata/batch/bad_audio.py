"""Records, counts and limits the cuts whose audio cannot be used during training.

The substitute of an unusable cut, the cut that replaces it, is a pure function of the batch key and the files. A batch
lists the cuts that were replaced. The loader in the process of the rank counts them, because it receives the batches in
order, while a loader worker sees a part of them. Each rank counts its own cuts only.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from nestdata.config_checks import require_at_least, require_share
from nestdata.errors import AudioError, AudioReason
from nestdata.field_docs import with_field_docs

_log = logging.getLogger(__name__)
_MOST_LISTED = 20


class BadCut(NamedTuple):
    """A cut whose audio could not be used."""

    cut_id: str
    reason: AudioReason
    detail: str
    """The message of the error."""

    @classmethod
    def of(cls, cut_id: str, error: AudioError) -> "BadCut":
        """Returns the record of a cut and the error that was raised for it."""
        return cls(cut_id, error.reason, str(error))


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class BadAudioConfig:
    """Tolerance for unusable audio in a run."""

    max_share: float = 0.01
    """Largest share of speech cuts that may be replaced."""

    max_noise_share: float = 0.5
    """Largest share of noise reads that may fail."""

    min_count: int = 20
    """Number of failures that is always tolerated, because a share of only a few reads means little."""

    def __post_init__(self) -> None:
        require_share("bad_audio", self, "max_share", "max_noise_share")
        require_at_least(0, "bad_audio", self, "min_count")


class BadAudioCounter:
    """Counts unusable audio by reason, logs each cut once, and raises when there is too much.

    Args:
        kind: Kind of audio for messages, such as "speech".
        max_share: Largest tolerated share of failed reads.
        min_count: Number of failed reads that is always tolerated.
    """

    def __init__(self, kind: str, max_share: float, min_count: int) -> None:
        self.reasons: Counter[str] = Counter()
        """Number of failed reads by reason."""

        self._kind = kind
        self._max_share = max_share
        self._min_count = min_count
        self._num_reads = 0
        self._seen: dict[str, BadCut] = {}

    def add(self, num_reads: int, bad: Iterable[BadCut]) -> None:
        """Counts reads.

        Args:
            num_reads: Number of reads, failed ones included.
            bad: The cuts of the failed reads.

        Raises:
            AudioError: More reads have failed than the limits allow; the message lists the cuts.
        """
        self._num_reads += num_reads
        for cut in bad:
            self.reasons[cut.reason] += 1
            if cut.cut_id not in self._seen:
                self._seen[cut.cut_id] = cut
                _log.warning("%s replaced, %s: %s", self._kind, cut.reason, cut.detail)
        num_bad = self.reasons.total()
        if num_bad > max(self._min_count, self._max_share * self._num_reads):
            reasons = ", ".join(f"{number} {reason}" for reason, number in self.reasons.most_common())
            listed = ", ".join(f"{cut.cut_id} ({cut.reason})" for cut in list(self._seen.values())[:_MOST_LISTED])
            more = f" and {len(self._seen) - _MOST_LISTED} more" if len(self._seen) > _MOST_LISTED else ""
            raise AudioError(
                f"{num_bad} of {self._num_reads} reads of {self._kind} failed ({reasons}), more than the allowed "
                f"{100 * self._max_share:g} %: {listed}{more}. Check that the files exist and are complete, then "
                "prepare the corpus again with --probe decode."
            )
