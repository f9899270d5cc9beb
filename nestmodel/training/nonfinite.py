"""Optimizer steps that are skipped because the loss or the gradients are not finite."""

import warnings
from dataclasses import dataclass

from nestmodel.errors import TrainingError

_SCALER_STEPS = 24
"""A gradient scaler starts at 2**16 and halves at every step that overflows, until no step does."""


class SkippedStepWarning(UserWarning):
    """An optimizer step was skipped because the loss or the gradients are not finite."""


@dataclass
class SkippedSteps:
    """Counts of skipped optimizer steps. All ranks hold the same counts, because they decide by the same sums."""

    total: int = 0
    """Skipped steps of the whole run."""

    in_a_row: int = 0
    """Skipped steps since the last step that was made."""

    def skip(self, what: str, limit: int, has_scaler: bool) -> None:
        """Counts one more skipped step and issues a `SkippedStepWarning`.

        Args:
            what: Which step was skipped and why, for the message.
            limit: Maximum number of consecutive skipped steps.
            has_scaler: Whether gradients are scaled (float16). The scaler first has to find its scale, so 24 more
                skipped steps are allowed.

        Raises:
            TrainingError: More consecutive steps than allowed were skipped.
        """
        self.total += 1
        self.in_a_row += 1
        limit += _SCALER_STEPS if has_scaler else 0
        if self.in_a_row > limit:
            raise TrainingError(
                f"{self.in_a_row} consecutive steps were not finite, more than optimizer.max_skipped_steps allows "
                f"({limit}); {what}. Lower optimizer.lr, or resume from an earlier checkpoint."
            )
        warnings.warn(f"{what}.", SkippedStepWarning, stacklevel=3)
