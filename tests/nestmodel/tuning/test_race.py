from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nestmodel import ConfigError, TrainingError
from nestmodel.tuning.race import Limits, Part, Race, Row, relative_errors

GENERATOR = torch.Generator().manual_seed(0)
LEFT, RIGHT = (torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64) for _ in range(2))


@dataclass(frozen=True)
class Product:
    """A product and one of its factors, computed with planted errors in a planted time."""

    seconds: float = 1.0
    dtype: torch.dtype = torch.float32
    shift: float = 0.0
    error: Exception | None = None

    def __call__(self) -> Sequence[Tensor]:
        if self.error is not None:
            raise self.error
        left, right = LEFT.to(self.dtype), RIGHT.to(self.dtype)
        return [left @ right + self.shift, left]


def stopwatch(run: object, seconds: float) -> list[float]:
    assert isinstance(run, Product)
    assert seconds == 0.25
    return [run.seconds, run.seconds, 9.0]


def part(**forms: Product) -> Part:
    given = {"torch": Product(), **forms}
    return Part(
        name="product",
        reference=lambda: Product(dtype=torch.float64),
        forms={name: lambda form=form: form for name, form in given.items()},  # type: ignore[misc]
        ulp=torch.finfo(torch.float32).eps,
    )


def race(**forms: Product) -> dict[str, Row]:
    rows = Race(stopwatch, Limits()).rows(part(**forms))
    assert next(iter(rows)).form == "torch"
    assert sum(row.verdict == "taken" for row in rows) == 1
    return {row.form: row for row in rows}


def test_the_fastest_correct_form_is_taken() -> None:
    rows = race(fast=Product(0.5), fastest=Product(0.25), slow=Product(2.0))
    assert {form: row.verdict for form, row in rows.items()} == {
        "torch": "slower",
        "fast": "slower",
        "fastest": "taken",
        "slow": "slower",
    }
    assert rows["fast"].seconds == 0.5  # the median


@pytest.mark.parametrize(("seconds", "taken"), [(0.98, "torch"), (0.96, "other")])
def test_a_form_that_saves_less_than_three_percent_is_not_taken(seconds: float, taken: str) -> None:
    assert race(other=Product(seconds))[taken].verdict == "taken"


@pytest.mark.parametrize("shift", [1e-4, 1.0])
def test_a_wrong_form_is_left_out_however_fast_it_is(shift: float) -> None:
    row = race(wrong=Product(0.01, shift=shift))["wrong"]
    assert row.verdict == "wrong"
    assert row.error is not None
    assert row.allowed is not None
    assert row.error > row.allowed
    assert row.seconds is None


def test_a_form_in_lower_precision_is_wrong_and_one_in_higher_precision_is_not() -> None:
    rows = race(lower=Product(0.1, dtype=torch.bfloat16), higher=Product(0.2, dtype=torch.float64))
    assert rows["lower"].verdict == "wrong"
    assert rows["higher"].verdict == "taken"


@pytest.mark.parametrize("shift", [float("nan"), float("inf")])
def test_a_form_whose_values_are_not_finite_is_wrong(shift: float) -> None:
    row = race(broken=Product(0.01, shift=shift))["broken"]
    assert (row.verdict, row.reason, row.error) == ("wrong", "an output or gradient is not finite", None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("first line\nlast line"), "last line"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory"),
        (RuntimeError("x" * 1000), "x" * 160),
    ],
    ids=["error", "out of memory", "long"],
)
def test_a_form_that_fails_is_left_out_with_the_reason(error: Exception, reason: str) -> None:
    rows = race(broken=Product(error=error), fast=Product(0.5))
    assert (rows["broken"].verdict, rows["broken"].reason) == ("failed", reason)
    assert rows["fast"].verdict == "taken"


def test_a_form_that_fails_while_it_is_measured_is_left_out() -> None:
    def failing(run: object, seconds: float) -> list[float]:
        assert isinstance(run, Product)
        if run.seconds == 0.5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stopwatch(run, seconds)

    rows = {row.form: row for row in Race(failing, Limits()).rows(part(broken=Product(0.5), fast=Product(0.6)))}
    assert (rows["broken"].verdict, rows["broken"].reason) == ("failed", "out of memory")
    assert rows["fast"].verdict == "taken"


def test_a_form_with_other_shapes_is_left_out() -> None:
    class Short(Product):
        def __call__(self) -> Sequence[Tensor]:
            return super().__call__()[:1]

    assert "other shapes" in race(short=Short())["short"].reason


def test_nothing_is_taken_if_the_plain_form_or_its_reference_fails() -> None:
    fails = Product(error=ConfigError("not here"))
    first, second = Race(stopwatch, Limits()).rows(part(torch=fails, fast=Product(0.5)))
    assert (first.verdict, first.reason) == ("failed", "not here")
    assert (second.verdict, second.reason) == ("failed", "the plain form failed, with which it is compared")
    for reference, reason in ((fails, "not here"), (Product(shift=float("nan")), "it is not finite")):
        without = Part(name="product", reference=lambda r=reference: r, forms=part().forms, ulp=1e-7)  # type: ignore[misc]
        (row,) = Race(stopwatch, Limits()).rows(without)
        assert (row.verdict, row.reason) == ("failed", f"the reference failed: {reason}")


def test_forms_are_measured_forwards_and_backwards() -> None:
    seen = []

    def record(run: object, seconds: float) -> list[float]:
        assert isinstance(run, Product)
        seen.append(run.seconds)
        return stopwatch(run, seconds)

    Race(record, Limits()).rows(part(a=Product(2.0), b=Product(3.0)))
    assert seen == [1.0, 2.0, 3.0, 3.0, 2.0, 1.0]


def test_a_race_whose_time_is_over_tries_nothing_more() -> None:
    first, second = Race(stopwatch, Limits(race_s=0.0)).rows(part(fast=Product(0.5)))
    assert first.verdict == second.verdict == "failed"
    assert first.reason.endswith("not tried, because the race has taken 0 s")


def test_a_race_ends_early_when_it_is_told_to() -> None:
    reasons = iter(["", "", "the run is to end"])  # the reference and the plain form are still built
    first, second = Race(stopwatch, Limits(), on_progress=lambda: next(reasons)).rows(part(fast=Product(0.5)))
    assert first.verdict == "taken"
    assert (second.verdict, second.reason) == ("failed", "the run is to end")


def test_a_form_that_breaks_the_device_is_named_with_the_remedy() -> None:
    def recover() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(TrainingError, match=r"the form broken of the part product has left .* \(no\)\. Set model\.k"):
        Race(stopwatch, Limits(), recover).rows(part(broken=Product(error=ValueError("no"))))


def test_small_tensors_are_measured_by_a_share_of_the_norm_of_all() -> None:
    large, small = torch.full((100,), 10.0), torch.zeros(3)  # a norm of 100, so that the floor is 10
    errors = relative_errors([large + 0.1, small + 0.01], [large, small], 0.1)
    assert errors == pytest.approx([0.01, 0.001 * 3**0.5], rel=1e-4)
    assert relative_errors([small], [small], 0.1) == [0.0]
