"""Character and word error rates with 95 % intervals; jiwer aligns and counts. It belongs to the extra `probe`.

Errors are counted per utterance, so that rates and differences get bootstrap intervals: utterances are drawn with
replacement, and a draw counts the same utterances for both recognisers that are compared (paired bootstrap). This
treats utterances as independent. Utterances of one recording, scene or speaker are not: `ErrorCounts.by_group` adds
them up, so that whole groups are drawn, and intervals become wider.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata import derive_key
from nestmodel.errors import ConfigError

ErrorUnit = Literal["characters", "words"]
"""What is counted: characters, spaces included (CER), or words (WER)."""

NUM_DRAWS = 2000
"""Number of bootstrap draws of an interval."""

_KINDS = ("insert", "delete", "substitute")
_QUANTILES = (0.025, 0.975)
_DRAWS_AT_A_TIME = 100


@dataclass(frozen=True, slots=True, eq=False)
class ErrorCounts:
    """Errors of one recogniser by utterance."""

    table: NDArray[np.int64]
    """Insertions, deletions, substitutions, and characters or words of the reference; shape (utterances, 4)."""

    @property
    def errors(self) -> NDArray[np.int64]:
        """All errors of each utterance."""
        errors: NDArray[np.int64] = self.table[:, :3].sum(axis=1)
        return errors

    @property
    def num_reference(self) -> NDArray[np.int64]:
        """Number of characters or words of each reference."""
        return self.table[:, 3]

    def __add__(self, other: "ErrorCounts") -> "ErrorCounts":
        """Returns the counts of two recognitions of the same utterances, such as with two seeds."""
        return ErrorCounts(self.table + other.table)

    def by_group(self, groups: Sequence[str]) -> "ErrorCounts":
        """Returns the counts added up over groups of utterances, in order of their names.

        If there is only one group, these counts are returned: no interval can be drawn from one group.

        Args:
            groups: The group of each utterance, such as its recording.
        """
        names, numbers = np.unique(list(groups), return_inverse=True)
        if len(names) < 2:
            return self
        table = np.zeros((len(names), 4), np.int64)
        np.add.at(table, numbers, self.table)
        return ErrorCounts(table)


class Estimate(NamedTuple):
    """A quantity with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class ErrorRate(NamedTuple):
    """An error rate with its 95 % bootstrap interval, and the errors of all utterances."""

    rate: float
    """Errors per character or word of the references; above 1 if there are many insertions."""

    low: float
    high: float
    insertions: int
    deletions: int
    substitutions: int
    num_reference: int


def count_errors(references: Sequence[str], hypotheses: Sequence[str], unit: ErrorUnit) -> ErrorCounts:
    """Counts the errors of recognised texts by utterance.

    Args:
        references: Normalised transcripts.
        hypotheses: The recognised text of each transcript, normalised in the same way; may be empty.
        unit: Whether characters or words are counted.

    Raises:
        ConfigError: A reference is empty, the numbers of texts differ, or jiwer is not installed.
    """
    check_jiwer()
    if len(references) != len(hypotheses) or not references or not all(references):
        raise ConfigError(
            f"{len(hypotheses)} recognised texts for {len(references)} references: give one for each, and no empty "
            "reference."
        )
    import jiwer

    count = jiwer.process_characters if unit == "characters" else jiwer.process_words
    found = count(list(references), list(hypotheses))
    table = np.zeros((len(references), 4), np.int64)
    table[:, 3] = [len(reference) for reference in found.references]
    for row, alignment in zip(table, found.alignments, strict=True):
        for chunk in alignment:
            if chunk.type != "equal":
                length = max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
                row[_KINDS.index(chunk.type)] += length
    return ErrorCounts(table)


def error_rate(counts: ErrorCounts, seed: int = 0) -> ErrorRate:
    """Returns the error rate over all utterances; `seed` determines the draws of the interval."""
    rate = bootstrap(lambda sums: sums[0] / sums[1], (counts.errors, counts.num_reference), seed)
    return ErrorRate(*rate, *counts.table.sum(axis=0).tolist())


def error_difference(counts: ErrorCounts, baseline: ErrorCounts, seed: int = 0) -> Estimate:
    """Returns the error rate minus a baseline's rate on the same utterances: negative if there are fewer errors."""
    columns = (counts.errors, counts.num_reference, baseline.errors, baseline.num_reference)
    return bootstrap(lambda sums: sums[0] / sums[1] - sums[2] / sums[3], columns, seed)


def percent(estimate: tuple[Any, ...]) -> str:
    """Returns a value and its interval, the first three fields of any estimate, in percent."""
    value, low, high = estimate[:3]
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def check_jiwer() -> None:
    """Raises ConfigError if jiwer is not installed."""
    if importlib.util.find_spec("jiwer") is None:
        raise ConfigError("error rates need jiwer: pip install 'nest-pretrain[probe]'.")


def bootstrap(
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]], columns: Sequence[NDArray[np.int64]], seed: int
) -> Estimate:
    """Returns a function of the sums of columns over utterances; it maps sums (columns, draws) to values (draws,)."""
    values = np.stack(columns).astype(np.float64)  # (columns, utterances)
    num_utterances = values.shape[1]
    generator = np.random.Generator(np.random.Philox(key=derive_key(seed, "bootstrap")))
    draws = []
    for _ in range(NUM_DRAWS // _DRAWS_AT_A_TIME):
        times = generator.multinomial(num_utterances, np.full(num_utterances, 1 / num_utterances), _DRAWS_AT_A_TIME)
        draws.append(statistic(values @ times.T))
    low, high = np.quantile(np.concatenate(draws), _QUANTILES)
    value = float(statistic(values.sum(axis=1, keepdims=True))[0])
    # Draws of few utterances may all lie on one side of the value, by rounding or because one utterance decides it.
    return Estimate(value, min(value, float(low)), max(value, float(high)))
