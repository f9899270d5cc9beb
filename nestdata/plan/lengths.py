"""Cut lengths as a plan reads them: one ascending int64 array per corpus, converted once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.errors import PlanError

Lengths = NDArray[np.int64]
"""Length of every cut of a corpus in samples, ascending, shape (num_cuts,)."""

LengthsLike = NDArray[Any] | Sequence[Any]
"""Lengths of one corpus as an array or list of integers, or a list of these for several corpora."""


def as_lengths(num_samples: LengthsLike) -> list[Lengths]:
    """Returns the lengths of each corpus as int64.

    Arrays that are int64 already, memory-mapped ones included, are neither copied nor read. All others are converted
    here once, because NumPy would convert them again in every binary search.

    Raises:
        PlanError: The lengths of a corpus are not one-dimensional or not integers.
    """
    is_one_corpus = isinstance(num_samples, np.ndarray) or not len(num_samples) or np.ndim(num_samples[0]) == 0
    return [_as_int64(lengths) for lengths in ([num_samples] if is_one_corpus else num_samples)]


def check_ascending(corpora: Sequence[Lengths]) -> None:
    """Raises PlanError if the lengths of a corpus are negative or not in ascending order; reads all of them."""
    for lengths in corpora:
        if len(lengths) and lengths[0] < 0:
            raise PlanError(f"cut lengths must not be negative: the first is {lengths[0]}.")
        if (lengths[1:] < lengths[:-1]).any():
            first = int(np.argmax(lengths[1:] < lengths[:-1]))
            raise PlanError(
                f"cut lengths must be ascending: {lengths[first + 1]} follows {lengths[first]} at index {first + 1}. "
                "Sort them."
            )


def _as_int64(lengths: LengthsLike) -> Lengths:
    try:
        array = np.asarray(lengths)
    except ValueError as error:  # NumPy: lists of different lengths
        raise PlanError(f"cut lengths must be one list of integers per corpus ({error}).") from error
    if array.ndim != 1:
        raise PlanError(f"cut lengths have the shape {array.shape}: give one number per cut for each corpus.")
    if array.size and array.dtype.kind not in "iu":
        raise PlanError(f"cut lengths have the type {array.dtype}: give whole numbers of samples.")
    return array.astype(np.int64, copy=False)
