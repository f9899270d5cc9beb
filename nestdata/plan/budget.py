"""The budget of a microbatch, and the cuts that are not in a plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nestdata.errors import PlanError
from nestdata.plan.lengths import Lengths

# Largest share of the audio that may be left out because it is in cuts that no microbatch can hold.
_MAX_LEFT_OUT = 1 / 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limit for the cost of a microbatch; a cut of n samples costs n + n² / quadratic_samples."""

    limit: int
    quadratic_samples: int | None
    max_cuts: int | None
    microbatches: int
    """Microbatches of an optimizer step."""

    def cost(self, num_samples: int) -> int:
        """Returns the cost of a cut, in samples."""
        return num_samples + (num_samples**2 // self.quadratic_samples if self.quadratic_samples else 0)

    def num_cuts(self, num_samples: int) -> int:
        """Returns how many cuts of a length fit into a microbatch."""
        return min(self.limit // self.cost(num_samples), self.max_cuts or self.limit)

    def longest_of(self, num_cuts: int) -> int:
        """Returns the greatest length at which `num_cuts` cuts fit into a microbatch, or 0 if that many never fit."""
        if self.max_cuts and num_cuts > self.max_cuts:
            return 0
        each, q = self.limit // num_cuts, self.quadratic_samples
        if not q:
            return each
        longest = (math.isqrt(q * q + 4 * q * each) - q) // 2
        return longest + 1 if self.cost(longest + 1) <= each else longest


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """The cuts that are not in a plan: no microbatch can hold them, or they are shorter than `min_seconds`."""

    num_long: int
    long_samples: int
    num_short: int
    short_samples: int


def leave_out_cuts(
    corpora: Sequence[Lengths], rate: int, budget: Budget, min_samples: int, shortest_allowed: int
) -> tuple[list[slice], LeftOut]:
    """Returns which cuts of each corpus are in a plan, and what is left out.

    Args:
        corpora: Lengths of the cuts of each corpus in samples, ascending.
        rate: Sampling rate in Hz.
        budget: Largest cost of a microbatch.
        min_samples: Length to which shorter cuts are extended.
        shortest_allowed: Length of the shortest cut that is kept.

    Raises:
        PlanError: There are no cuts, more than a tenth of the audio is in cuts that no microbatch can hold, no
            microbatch can hold a cut that is extended to `min_samples`, or all cuts are too short.
    """
    num_cuts, longest_allowed = sum(map(len, corpora)), budget.longest_of(1)
    if num_cuts == 0:
        raise PlanError("the corpus is empty: there is nothing to plan. Prepare it from a manifest with usable audio.")
    starts = [int(np.searchsorted(lengths, shortest_allowed)) for lengths in corpora]
    stops = [int(np.searchsorted(lengths, longest_allowed, "right")) for lengths in corpora]
    kept = list(map(slice, starts, stops))
    too_long = [lengths[stop:] for lengths, stop in zip(corpora, stops, strict=True)]
    too_short = [lengths[:start] for lengths, start in zip(corpora, starts, strict=True)]
    left_out = LeftOut(
        num_long=sum(map(len, too_long)),
        long_samples=_total(too_long),
        num_short=sum(map(len, too_short)),
        short_samples=_total(too_short),
    )
    if left_out.num_long:
        share = left_out.long_samples / _total(corpora)
        if share > _MAX_LEFT_OUT:
            longest = max(int(lengths[-1]) for lengths in too_long if len(lengths))
            counted = ", quadratic term included" if budget.quadratic_samples else ""
            seconds = limit_text(longest_allowed, rate)
            raise PlanError(
                f"{left_out.num_long} of {num_cuts} cuts, with {100 * share:.0f} % of the audio, are longer than "
                f"plan.max_batch_seconds allows ({seconds} s{counted}); the longest lasts {longest / rate:.1f} s. At "
                f"most {100 * _MAX_LEFT_OUT:.0f} % may be left out. Raise max_batch_seconds, or divide the recordings: "
                f"prepare them with --window-seconds {seconds}, or --segment vad --max-segment-seconds {seconds}."
            )
    if left_out.num_short == num_cuts:
        raise PlanError(
            f"all {num_cuts} cuts are shorter than plan.min_seconds ({shortest_allowed / rate:g} s). Lower it: with 0, "
            "short cuts are repeated up to plan.min_audio_seconds."
        )
    if min_samples > longest_allowed:
        raise PlanError(
            f"plan.min_audio_seconds is {min_samples / rate:g} s, more than a microbatch holds "
            f"({longest_allowed / rate:g} s). Lower it, or raise max_batch_seconds."
        )
    return kept, left_out


def _total(corpora: Sequence[Lengths]) -> int:
    return sum(int(lengths.sum()) for lengths in corpora)


def limit_text(num_samples: int, sampling_rate: int) -> str:
    """Returns a largest length in seconds, rounded down, so that a cut of the rounded length fits as well."""
    return f"{100 * num_samples // sampling_rate / 100:g}"
