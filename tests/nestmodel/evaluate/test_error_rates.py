import numpy as np
import pytest

from nestmodel import ConfigError, ErrorCounts, count_errors, error_difference, error_rate
from tests.extras import needs

pytestmark = needs("probe", "jiwer")


def counts(errors: list[int], num_reference: list[int]) -> ErrorCounts:
    none = [0] * len(errors)
    return ErrorCounts(np.array([none, none, errors, num_reference]).T)


def test_errors_are_counted_by_kind_and_utterance() -> None:
    # Insertion of x; deletion of "b c"; substitution of a; no error.
    references, hypotheses = ["ab", "a b c", "a", "b"], ["axb", "a ", "b", "b"]
    found = count_errors(references, hypotheses, "characters")
    assert found.table.tolist() == [[1, 0, 0, 2], [0, 4, 0, 5], [0, 0, 1, 1], [0, 0, 0, 1]]
    words = count_errors(references, hypotheses, "words")
    assert words.errors.tolist() == [1, 2, 1, 0]
    assert words.table[:, 1].tolist() == [0, 2, 0, 0]
    assert words.num_reference.tolist() == [1, 3, 1, 1]
    assert count_errors(["ab"], [""], "words").table.tolist() == [[0, 1, 0, 1]]


def test_a_rate_is_the_sum_of_errors_over_the_sum_of_lengths() -> None:
    found = error_rate(count_errors(["ab", "a b c"], ["axb", "a"], "characters"))
    assert (found.rate, found.insertions, found.deletions, found.substitutions) == (5 / 7, 1, 4, 0)
    assert found.num_reference == 7
    assert 0.5 <= found.low <= found.rate <= found.high <= 0.8  # the rates of the two utterances are 1/2 and 4/5


def test_the_interval_of_a_rate_is_that_of_the_bootstrap_distribution() -> None:
    # 400 utterances of one character, half of them wrong: the standard error is sqrt(0.25 / 400) = 0.025, and the
    # quantiles of 2000 draws are known to about a twentieth of the interval's width.
    found = error_rate(counts([0, 1] * 200, [1] * 400))
    assert found.rate == 0.5
    assert found.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


def test_differences_are_paired_by_utterance() -> None:
    generator = np.random.default_rng(0)
    errors = generator.integers(0, 20, 100).tolist()
    one, other = counts(errors, [20] * 100), counts([error + 1 for error in errors], [20] * 100)
    # Every utterance has one error more, so that no draw changes the difference.
    assert error_difference(one, other) == pytest.approx((-0.05, -0.05, -0.05))
    rate = error_rate(one)
    assert rate.high - rate.low > 0.1


@pytest.mark.parametrize(("references", "hypotheses"), [([], []), (["a"], []), (["a", ""], ["a", "b"])])
def test_empty_references_and_unequal_numbers_of_texts_are_refused(
    references: list[str], hypotheses: list[str]
) -> None:
    with pytest.raises(ConfigError, match="give one for each, and no empty reference"):
        count_errors(references, hypotheses, "words")


def test_groups_are_drawn_whole_and_give_wider_intervals() -> None:
    # Ten scenes of twenty lines each; all lines of a scene have the same number of errors.
    groups = [f"scene {i // 20}" for i in range(200)]
    errors = np.repeat(np.arange(10), 20)
    each = counts(errors.tolist(), [10] * 200)
    grouped = each.by_group(groups)
    assert grouped.errors.tolist() == [20 * i for i in range(10)]
    assert grouped.num_reference.tolist() == [200] * 10
    alone, together = error_rate(each), error_rate(grouped)
    assert alone[3:] == together[3:]
    assert alone.rate == together.rate == 0.45
    # Standard errors: of 200 lines 0.287 / sqrt(200) = 0.020, of 10 scenes 0.287 / sqrt(10) = 0.091.
    assert alone.high - alone.low == pytest.approx(3.92 * 0.020, rel=0.1)
    assert together.high - together.low == pytest.approx(3.92 * 0.091, rel=0.1)
