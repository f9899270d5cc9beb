"""Races forms of a computation: each is checked against a reference, and the fastest correct one is taken.

Nothing here depends on the model. A form that fails, or that is wrong, is left out with the reason.

A form is correct if each error is at most twice that of the plain form, plus a few units in the last place. Errors are
distances from the reference. The reference is the plain form in so high a precision that its own
error does not count. A fixed tolerance would be too strict for long sums in low precision, or too loose for short ones;
the error of the plain form shows what the precision of the run costs for these shapes. Another order of sums gives
another error of about that size, hence the factor of two. The units are for what the plain form happens to round well.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from nestdata import last_error_line
from nestmodel.errors import TrainingError
from nestmodel.nn.gpu.kernel_choice import TORCH
from nestmodel.out_of_memory import is_out_of_memory

Run = Callable[[], Sequence[Tensor]]
"""Computes once, and returns outputs and gradients, always in the same order."""

Verdict = Literal["taken", "slower", "wrong", "failed"]

MIN_GAIN = 0.03
"""Share of the time of the plain form that a form has to save: the plain one is the simplest."""

_ERROR_FACTOR = 2.0
_NUM_ULPS = 4
_MAX_REASON = 160
_NOT_TRIED, _OUT_OF_MEMORY = "not tried", "out of memory"

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A computation that has several forms."""

    name: str
    reference: Callable[[], Run]
    """Builds the plain form in higher precision."""

    forms: Mapping[str, Callable[[], Run]]
    """Builds each form by name; the plain one has the name `torch`."""

    ulp: float
    """Distance from 1 to the next number in the type of the run's matrix products."""

    norm_floor: float = 0.1
    """A tensor with a smaller share of the norm of all tensors is measured by this share of it. Some gradients are zero
    except for rounding, such as those of a bias in front of batch norm, so that their relative errors are random."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found out about one form of a part."""

    part: str
    form: str
    verdict: Verdict
    seconds: float | None = None
    """Median time; None if the form was not timed."""

    error: float | None = None
    """Relative error of the output or gradient that comes closest to what is allowed, or exceeds it most."""

    allowed: float | None = None
    """Largest error that is allowed for that output or gradient."""

    reason: str = ""
    """Why the form failed, or why it is wrong without an error."""

    @property
    def is_lasting(self) -> bool:
        """Whether another race would find the same: not if time or memory was missing."""
        return self.verdict != "failed" or not self.reason.startswith((_NOT_TRIED, _OUT_OF_MEMORY))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Extent of a race."""

    form_s: float = 0.5
    """Seconds for which each form is measured."""

    race_s: float = 300.0
    """Seconds after which nothing more is built or measured: other ranks wait, and a compiler can be slow."""


Stopwatch = Callable[[Run, float], list[float]]
"""Runs a computation repeatedly for about the given seconds, and returns the seconds of each run."""


class Race:
    """Races the forms of parts, one part after the other.

    Args:
        stopwatch: Measures a form.
        limits: Extent of the race, whose time begins now.
        recover: Called after each form that failed, and after each part: frees memory.
        on_progress: Called before anything that may take long. If it returns a reason, the race ends for that reason.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        limits: Limits,
        recover: Callable[[], None] = lambda: None,
        on_progress: Callable[[], str] = lambda: "",
    ) -> None:
        self._stopwatch = stopwatch
        self._limits = limits
        self._recover = recover
        self._on_progress = on_progress
        self._end_s = time.monotonic() + limits.race_s

    def rows(self, part: Part) -> list[Row]:
        """Races the forms of a part and returns a row for each of them, the plain one first.

        Exactly one row is taken, unless the plain form or its reference fails; then none is.

        Raises:
            TrainingError: A form has left the device in a state in which nothing can be computed.
        """
        rows, runs = self._check_all(part)
        seconds: dict[str, list[float]] = {form: [] for form in runs}
        # In one order, then in reverse, so that a device that slows down when it gets warm favours none.
        for form in [*runs, *reversed(runs)] if len(runs) > 1 else []:
            if rows[form].verdict == "failed":
                continue
            times = self._attempt(part, form, partial(self._stopwatch, runs[form], self._limits.form_s / 2))
            if isinstance(times, str):
                rows[form] = replace(rows[form], verdict="failed", reason=times)
            else:
                seconds[form] += times
        runs.clear()
        self._recover()
        for form, times_of_form in seconds.items():
            if times_of_form:
                rows[form] = replace(rows[form], seconds=statistics.median(times_of_form))
        return _decide(list(rows.values()))

    def _check_all(self, part: Part) -> tuple[dict[str, Row], dict[str, Run]]:
        """Returns a row of each form, and the forms that are correct."""
        rows, runs = {}, {}
        expected = self._attempt(part, "reference", lambda: _checked(part.reference()()))
        errors_of_plain: list[float] = []
        for form in [TORCH, *(name for name in part.forms if name != TORCH)]:
            reason = f"the reference failed: {expected}"
            if isinstance(expected, list):
                reason = "the plain form failed, with which it is compared"
                if form == TORCH or errors_of_plain:
                    built = self._attempt(part, form, partial(_build, part.forms[form], expected, part.norm_floor))
                    if not isinstance(built, str):
                        runs[form], errors = built
                        rows[form] = _judged(part, form, errors, errors_of_plain or errors)
                        if rows[form].verdict == "wrong":
                            del runs[form]
                        elif form == TORCH:
                            errors_of_plain = errors
                        continue
                    reason = built
            rows[form] = Row(part=part.name, form=form, verdict="failed", reason=reason)
        return rows, runs

    def _attempt(self, part: Part, form: str, function: Callable[[], _T]) -> _T | str:
        """Returns the result, or the reason why there is none: the error itself would keep its tensors alive."""
        if time.monotonic() > self._end_s:
            return f"{_NOT_TRIED}, because the race has taken {self._limits.race_s:g} s"
        if reason := self._on_progress():
            return reason
        try:
            return function()
        except Exception as error:  # kernels and compilers can fail in many ways
            reason = _OUT_OF_MEMORY if is_out_of_memory(error) else last_error_line(error)[:_MAX_REASON]
        try:
            self._recover()
        except Exception as error:
            raise TrainingError(
                f"the form {form} of the part {part.name} has left the device unusable ({reason}). Set "
                f"model.kernels.{part.name} to another form, for example torch."
            ) from error
        return reason


def relative_errors(values: Sequence[Tensor], expected: Sequence[Tensor], norm_floor: float) -> list[float]:
    """Returns the Frobenius norm of each difference over that of the expected values; NaN where a value is not finite.

    Norms of expected values count as at least the share `norm_floor` of the norm of all of them.

    Raises:
        ValueError: A shape differs.
    """
    if [value.shape for value in values] != [each.shape for each in expected]:
        raise ValueError("outputs or gradients have other shapes than those of the reference")
    norms = [_norm(each) for each in expected]
    floor = norm_floor * math.hypot(*norms)
    return [
        _norm(value.to(each.dtype) - each) / max(norm, floor) if norm or floor else _norm(value)
        for value, each, norm in zip(values, expected, norms, strict=True)
    ]


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _checked(values: Sequence[Tensor]) -> list[Tensor]:
    if not all(bool(value.isfinite().all()) for value in values):
        raise ValueError("it is not finite")
    return list(values)


def _build(build: Callable[[], Run], expected: Sequence[Tensor], norm_floor: float) -> tuple[Run, list[float]]:
    """Builds a form, runs it once, and returns it with the errors of its outputs and gradients."""
    run = build()
    return run, relative_errors(run(), expected, norm_floor)


def _judged(part: Part, form: str, errors: list[float], errors_of_plain: list[float]) -> Row:
    """Returns a row whose verdict is `wrong`, or preliminary."""
    allowed = [_ERROR_FACTOR * error + _NUM_ULPS * part.ulp for error in errors_of_plain]

    def excess(number: int) -> float:
        ratio = errors[number] / allowed[number]
        return ratio if math.isfinite(ratio) else math.inf

    worst = max(range(len(errors)), key=excess)
    if not math.isfinite(errors[worst]):
        return Row(part=part.name, form=form, verdict="wrong", reason="an output or gradient is not finite")
    verdict: Verdict = "slower" if excess(worst) <= 1.0 else "wrong"
    return Row(part=part.name, form=form, verdict=verdict, error=errors[worst], allowed=allowed[worst])


def _decide(rows: list[Row]) -> list[Row]:
    """Marks the row that is taken: the fastest one, or the plain form if that one does not save `MIN_GAIN`."""
    plain = rows[0]
    if plain.verdict != "slower":
        return rows
    best = plain
    if plain.seconds is not None:
        timed = [(row.seconds, row) for row in rows if row.verdict == "slower" and row.seconds is not None]
        fastest_s, fastest = min(timed, key=lambda pair: pair[0])
        if fastest_s <= (1.0 - MIN_GAIN) * plain.seconds:
            best = fastest
    return [replace(row, verdict="taken") if row is best else row for row in rows]
