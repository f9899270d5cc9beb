from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.limits import Crash, limited
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


def test_too_much_cpu_time_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.limits.MAX_CPU_S", 0.2)
    with pytest.raises(Crash, match="CPU time"):
        _compute_for_ever()


def _compute_for_ever() -> None:
    with limited():
        while True:
            pass


def test_too_much_memory_is_a_crash() -> None:
    with pytest.raises(Crash, match="MiB of memory"), limited():
        bytearray(600 << 20)


@given(st.integers(0, 1000))
def test_small_inputs_are_no_crash(size: int) -> None:
    with limited() as usage:
        bytes(size)
    assert usage.num_bytes < 100 << 20
