"""Optimizer steps that are not made, since their loss or gradients are no numbers."""

import warnings
from dataclasses import dataclass

from nestmodel.errors import TrainingError

_SCALER_STEPS = 24
"""A gradient scaler starts at 2**16 and halves with every step that overflows, until none does."""


class SkippedStepWarning(UserWarning):
    """An optimizer step was not made, since its loss or gradients are no numbers."""


@dataclass
class SkippedSteps:
    """How many there were; the same on all ranks, which look at the same sums."""

    total: int = 0
    in_a_row: int = 0

    def skip(self, what: str, limit: int, has_scaler: bool) -> None:
        """Counts another one, and warns.

        Args:
            what: Which step, and whose fault.
            limit: Steps in a row that may be skipped.
            has_scaler: Whether gradients are scaled, to be tried out first.

        Raises:
            TrainingError: There were too many in a row.
        """
        self.total += 1
        self.in_a_row += 1
        limit += _SCALER_STEPS if has_scaler else 0
        if self.in_a_row > limit:
            raise TrainingError(
                f"{self.in_a_row} steps in a row are no numbers, more than optimizer.max_skipped_steps allows "
                f"({limit}); {what}. Lower optimizer.lr, or go on from an earlier checkpoint."
            )
        warnings.warn(f"{what}.", SkippedStepWarning, stacklevel=3)
