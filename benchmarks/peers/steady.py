"""Speed of a loader while as much is read ahead as is used; shared by all contestants of `remote`."""

import time
from collections.abc import Iterable

NUM_UNCOUNTED = 16
"""Number of batches at the beginning and at the end, during which more or less is read ahead than used. At the end,
these include partial batches, and the wait for the last ones."""


def utterances_per_s(num_utterances: Iterable[int], num_batches: int) -> float:
    """Returns the speed of a loader between its first and last uncounted batches.

    Args:
        num_utterances: The number of utterances of each batch, while it is loaded; may be endless.
        num_batches: Number of batches to load, more than twice the uncounted ones.
    """
    number, started, speed = 0, 0.0, 0.0
    for position, size in enumerate(num_utterances, 1):
        number += size
        if position == NUM_UNCOUNTED:
            number, started = 0, time.perf_counter()
        elif position == num_batches - NUM_UNCOUNTED:
            speed = number / (time.perf_counter() - started)
        if position == num_batches:
            break
    return speed
