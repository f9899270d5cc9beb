"""Tests the bits that decide about dropout for uniformity and independence, over 10^9 decisions for each test.

    python -m benchmarks run dropout_bits [--keys 250]

Decisions are those of `nestmodel.nn.dropout` for tensors of 4 x 500 x 2,048 values: 16 bits each. Each test counts
16-bit numbers, or pairs of 8-bit ones, and compares the counts with equal ones by chi-square; or it counts the dropped
values of each row, column or frame, and compares their spread with that of independent decisions. Of good bits, a
p-value below 0.001 or above 0.999 comes once in 500 tests. Prints Markdown.
"""

import sys
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report
from nestmodel.nn.dropout import FACTORS, draw_keys, mix

SHAPE = (4, 500, 2048)
DROPPED = 6554
"""Decisions of 65536 that drop a value: a probability of 0.1."""

QUICK = ("--keys", "1")
Bits = NDArray[np.uint16]


def main() -> int:
    """Runs the tests and prints their p-values."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--keys", type=int, default=250, help="number of keys, each with 4 million decisions")
    arguments = parser.parse_args()
    num_keys = arguments.keys
    report = Report(
        "Bits of dropout",
        __file__,
        f"{num_keys} keys, {num_keys * np.prod(SHAPE):,} decisions for each test, counted once.",
        results=arguments.results,
    )
    report.table(["counted", "p-value"], ([name, f"{_p_value(*test(num_keys)):.3f}"] for name, test in TESTS.items()))
    return 0


def decisions(keys: torch.Tensor) -> Iterator[Bits]:
    """Yields the bits of all values of a tensor for each key; shape `SHAPE`."""
    pairs = torch.arange(int(np.prod(SHAPE)) // 2, dtype=torch.int32)
    for key in keys:
        yield mix(FACTORS[0] * pairs + key[0], key[1]).numpy().view(np.uint16).reshape(SHAPE)


def _keys_of_steps(num_keys: int) -> torch.Tensor:
    """Returns keys of one place in the network, in steps one after the other."""
    return torch.cat([draw_keys(seed, 1) for seed in range(num_keys)])


def _keys_of_layers(num_keys: int) -> torch.Tensor:
    """Returns keys of one step, of places one after the other."""
    return draw_keys(0, num_keys)


def _counts(num_keys: int) -> tuple[float, int]:
    counts = reduce(add, (np.bincount(bits.ravel(), minlength=2**16) for bits in decisions(_keys_of_steps(num_keys))))
    return _chi_square(counts)


def _neighbours(distance: int, axis: int) -> Callable[[int], tuple[float, int]]:
    def test(num_keys: int) -> tuple[float, int]:
        counts = np.zeros(2**16)
        for bits in decisions(_keys_of_steps(num_keys)):
            along = np.moveaxis(bits, axis, 0)
            counts += _pair_counts(along[:-distance], along[distance:])
        return _chi_square(counts)

    return test


def _halves(num_keys: int) -> tuple[float, int]:
    """Counts pairs of the two decisions of one hash."""
    every = decisions(_keys_of_steps(num_keys))
    counts = reduce(add, (_pair_counts(bits[..., ::2], bits[..., 1::2]) for bits in every))
    return _chi_square(counts)


def _same_position(keys: Callable[[int], torch.Tensor]) -> Callable[[int], tuple[float, int]]:
    def test(num_keys: int) -> tuple[float, int]:
        counts, before = np.zeros(2**16), None
        for bits in decisions(keys(num_keys + 1)):
            if before is not None:
                counts += _pair_counts(before, bits)
            before = bits
        return _chi_square(counts)

    return test


def _spread(axes: tuple[int, ...]) -> Callable[[int], tuple[float, int]]:
    """Compares the spread of the number of dropped values with that of a binomial distribution."""

    def test(num_keys: int) -> tuple[float, int]:
        prob, total, number = DROPPED / 2**16, 0.0, 0
        for bits in decisions(_keys_of_steps(num_keys)):
            dropped = (bits < DROPPED).sum(axes)
            trials = bits.size / dropped.size
            total += float(((dropped - trials * prob) ** 2).sum() / (trials * prob * (1 - prob)))
            number += dropped.size
        return total, number

    return test


def _of_positions(num_keys: int) -> tuple[float, int]:
    """Does the same for each position over all keys."""
    prob, dropped = DROPPED / 2**16, np.zeros(SHAPE, dtype=np.int32)
    for bits in decisions(_keys_of_layers(num_keys)):
        dropped += bits < DROPPED
    variance = num_keys * prob * (1 - prob)
    return float(((dropped - num_keys * prob) ** 2).sum() / variance), dropped.size


def _pair_counts(one: Bits, other: Bits) -> NDArray[np.int64]:
    return np.bincount(((one & 0xFF00) | (other >> 8)).ravel(), minlength=2**16)


def _chi_square(counts: NDArray[np.integer[Any] | np.floating[Any]]) -> tuple[float, int]:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2).sum() / expected), len(counts) - 1


def _p_value(statistic: float, freedom: int) -> float:
    return float(chi2.sf(statistic, freedom))


TESTS: dict[str, Callable[[int], tuple[float, int]]] = {
    "16-bit numbers": _counts,
    "pairs: the two halves of a hash": _halves,
    "pairs: values side by side": _neighbours(1, 2),
    "pairs: two values apart": _neighbours(2, 2),
    "pairs: 1,024 values apart": _neighbours(1024, 2),
    "pairs: one frame apart": _neighbours(1, 1),
    "pairs: one utterance apart": _neighbours(1, 0),
    "pairs: same position, one place in the network apart": _same_position(_keys_of_layers),
    "pairs: same position, one step apart": _same_position(_keys_of_steps),
    "dropped values of each frame": _spread((2,)),
    "dropped values of each column of an utterance": _spread((1,)),
    "dropped values of each utterance": _spread((1, 2)),
    "dropped values of each tensor": _spread((0, 1, 2)),
    "dropped values of each position, over keys": _of_positions,
}


if __name__ == "__main__":
    sys.exit(main())
