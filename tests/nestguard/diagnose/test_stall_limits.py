import math

import pytest

from nestguard import GuardError, Phase, StallLimits
from tests.nestguard.views import view

LIMITS = StallLimits(step_s=1, first_step_s=2, validation_s=3, checkpoint_s=4, finishing_s=5, node_silence_s=6)


@pytest.mark.parametrize(
    ("phase", "limit"),
    [
        (Phase.LOADING, 1),
        (Phase.COLLECTIVE, 1),
        (Phase.VALIDATION, 3),
        (Phase.CHECKPOINT, 4),
        (Phase.FINISHING, 5),
        (Phase.DONE, math.inf),
        (Phase.FAILED, math.inf),
    ],
)
def test_each_phase_has_its_limit(phase: Phase, limit: float) -> None:
    assert LIMITS.limit_of(view(0, phase, 5).reading) == limit


def test_every_limit_is_at_least_first_step_s_until_a_step_is_finished() -> None:
    assert LIMITS.limit_of(view(0, Phase.STARTING, None, first_step=None).reading) == 2
    assert LIMITS.limit_of(view(0, Phase.FORWARD, 1000, first_step=1000).reading) == 2
    assert LIMITS.limit_of(view(0, Phase.FORWARD, 1001, first_step=1000).reading) == 1
    assert LIMITS.limit_of(view(0, Phase.VALIDATION, None, first_step=None).reading) == 3


@pytest.mark.parametrize("seconds", [0.0, math.inf, math.nan])
def test_a_limit_that_is_not_a_positive_number_is_rejected(seconds: float) -> None:
    with pytest.raises(GuardError, match=r"limits\.checkpoint_s is .*: expected a positive number of seconds"):
        StallLimits(checkpoint_s=seconds)


def test_a_collective_may_wait_for_the_largest_limit_after_a_validation_or_checkpoint() -> None:
    assert StallLimits().longest_wait_s == 1740
    assert LIMITS.longest_wait_s == 5 + 4
    assert StallLimits(step_s=60, first_step_s=600, validation_s=100, checkpoint_s=50).longest_wait_s == 700
