import warnings

import pytest

from nestmodel import SkippedStepWarning, TrainingError
from nestmodel.training.step_stats import SkippedSteps


def test_a_skipped_step_is_counted_with_a_warning() -> None:
    skipped = SkippedSteps(total=3, in_a_row=0)
    with pytest.warns(SkippedStepWarning, match=r"^step 7 is skipped\.$"):
        skipped.skip("step 7 is skipped", limit=2, has_scaler=False)
    assert skipped == SkippedSteps(total=4, in_a_row=1)


@pytest.mark.parametrize(("has_scaler", "allowed"), [(False, 2), (True, 26)])
def test_more_consecutive_skipped_steps_than_allowed_end_the_run(has_scaler: bool, allowed: int) -> None:
    skipped = SkippedSteps(total=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedStepWarning)
        for _ in range(allowed):
            skipped.skip("a step is skipped", limit=2, has_scaler=has_scaler)
    with pytest.raises(TrainingError, match=rf"{allowed + 1} consecutive steps .* allows \({allowed}\); step 9 is"):
        skipped.skip("step 9 is skipped", limit=2, has_scaler=has_scaler)
