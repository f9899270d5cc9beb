from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.runs import try_input
from tests.fuzz.targets import TARGETS


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_accepted_or_refused_by_an_error_of_ours(name: str) -> None:
    target = TARGETS[name]
    if missing := [package for package in target.packages if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(missing)}")

    @settings(
        max_examples=target.num_tested,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs())
    def check(example: object) -> None:
        try_input(target, example)

    check()
