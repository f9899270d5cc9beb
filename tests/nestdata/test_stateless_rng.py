import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata.stateless_rng import Permutation, StatelessRng, derive_key

keys = st.integers(0, 2**64 - 1)


def images(size: int, key: int) -> list[int]:
    return Permutation(size, key)(np.arange(size)).tolist()


@pytest.mark.slow
def test_permutation_is_a_bijection_at_every_size_up_to_five_thousand() -> None:
    for size in range(1, 5001):
        counts = np.bincount(Permutation(size, derive_key(0, "size", size))(np.arange(size)), minlength=size)
        assert len(counts) == size
        assert (counts == 1).all()


@given(size=st.integers(1, 10**12), key=keys, data=st.data())
@settings(deadline=None, max_examples=50)
def test_permutation_of_one_position_does_not_depend_on_the_others(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    permutation = Permutation(size, key)
    together = permutation(np.array(positions))
    alone = [permutation.at(position) for position in positions]
    assert together.dtype == np.int64
    assert together.tolist() == alone
    assert all(0 <= image < size for image in alone)
    assert len(set(alone)) == len(set(positions))


def test_permutation_differs_by_key() -> None:
    orders = {tuple(images(50, derive_key(seed, "order"))) for seed in range(200)}
    assert len(orders) == 200


def test_permutation_is_the_same_in_every_version() -> None:
    assert images(10, derive_key(0, "cuts", 0, 0)) == [5, 0, 9, 8, 1, 2, 3, 4, 6, 7]


def test_permutation_maps_every_position_to_every_image_equally_often() -> None:
    size, num_keys, num_bins = 97, 1000, 10
    orders = np.array([Permutation(size, derive_key(seed, "places"))(np.arange(size)) for seed in range(num_keys)])
    bins = orders * num_bins // size
    expected = np.array([(np.arange(size) * num_bins // size == i).mean() for i in range(num_bins)]) * num_keys
    for position in range(0, size, size // 48):
        counts = np.bincount(bins[:, position], minlength=num_bins)
        # 9 degrees of freedom: 40 is exceeded with a probability of 1/100,000.
        assert ((counts - expected) ** 2 / expected).sum() < 40


def test_permutation_separates_neighbours() -> None:
    size, num_keys = 97, 1000
    orders = np.array([Permutation(size, derive_key(seed, "neighbours"))(np.arange(size)) for seed in range(num_keys)])
    steps = np.diff(orders, axis=1) % size
    # In a random order, two neighbours have any given distance with a probability of 1 / (size - 1).
    counts = np.bincount(steps.ravel(), minlength=size)[1:]
    expected = steps.size / (size - 1)
    assert counts.min() > 0.8 * expected * (1 - 8 / math.sqrt(expected))
    assert np.isin(steps, (1, size - 1)).mean() == pytest.approx(2 / (size - 1), rel=0.1)


def test_permutation_has_both_orders_of_every_pair_equally_often() -> None:
    num_keys = 2000
    orders = np.array([images(7, derive_key(seed, "pairs")) for seed in range(num_keys)])
    for first in range(7):
        for second in range(first + 1, 7):
            share = float((orders[:, first] < orders[:, second]).mean())
            assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(num_keys)


def test_permutation_of_size_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        Permutation(0, 1)


def test_keys_differ_by_seed_purpose_and_every_counter() -> None:
    given = [(0, "mix", 0, 0), (1, "mix", 0, 0), (0, "noise", 0, 0), (0, "mix", 1, 0), (0, "mix", 0, 1), (0, "mix", 0)]
    assert len({derive_key(*key) for key in given}) == len(given)
    # Counters are separated: (1, 11) differs from (11, 1).
    assert derive_key(0, "mix", 1, 11) != derive_key(0, "mix", 11, 1)


def test_random_numbers_are_the_same_in_every_version() -> None:
    rng = StatelessRng(0, "mix", 0, 0)
    assert derive_key(0, "mix", 0, 0) == 16512981776751267817
    assert [rng.uniform(), rng.below(1000), rng.between(-5, 5)] == [0.4810235609462902, 210, 2]
    assert rng.distinct(4, 9) == [7, 4, 8, 2]


@given(seed=st.integers(-(2**63), 2**63), counter=st.integers(0, 10**9))
@settings(deadline=None, max_examples=30)
def test_random_numbers_are_equal_for_one_key_and_different_for_another(seed: int, counter: int) -> None:
    first, again, other = (StatelessRng(seed, purpose, counter) for purpose in ("mix", "mix", "noise"))
    drawn = [first.uniform(), first.below(10**9), *first.distinct(3, 100)]
    assert [again.uniform(), again.below(10**9), *again.distinct(3, 100)] == drawn
    assert [other.uniform(), other.below(10**9), *other.distinct(3, 100)] != drawn
    np.testing.assert_array_equal(first.normal(8), again.normal(8))


@given(seed=keys, bound=st.integers(1, 10**15))
@settings(deadline=None, max_examples=50)
def test_random_integers_stay_within_their_bounds(seed: int, bound: int) -> None:
    rng = StatelessRng(seed, "bounds")
    assert all(0 <= rng.below(bound) < bound for _ in range(10))
    assert all(-bound <= rng.between(-bound, bound) <= bound for _ in range(10))
    assert rng.between(bound, bound) == bound


def test_all_integers_within_the_bounds_occur() -> None:
    rng = StatelessRng(0, "small")
    assert {rng.below(3) for _ in range(100)} == {0, 1, 2}
    assert {rng.between(-1, 1) for _ in range(100)} == {-1, 0, 1}


@given(seed=keys, low=st.floats(-1e6, 1e6), width=st.floats(0, 1e6))
@settings(deadline=None, max_examples=50)
def test_uniform_numbers_stay_within_their_bounds(seed: int, low: float, width: float) -> None:
    rng = StatelessRng(seed, "bounds")
    assert all(low <= rng.uniform(low, low + width) <= low + width for _ in range(10))


def test_uniform_numbers_fill_their_range_evenly() -> None:
    rng = StatelessRng(0, "even")
    counts = np.histogram([rng.uniform(-2.0, 2.0) for _ in range(8000)], bins=8, range=(-2, 2))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 30  # 7 degrees of freedom


@given(seed=keys, bound=st.integers(1, 10**6), data=st.data())
@settings(deadline=None, max_examples=50)
def test_distinct_integers_are_different_and_in_range(seed: int, bound: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, min(bound, 50)))
    drawn = StatelessRng(seed, "distinct").distinct(count, bound)
    assert len(drawn) == len(set(drawn)) == count
    assert all(0 <= value < bound for value in drawn)


def test_distinct_returns_every_ordered_pair_equally_often() -> None:
    counts = Counter(tuple(StatelessRng(seed, "pairs").distinct(2, 4)) for seed in range(6000))
    assert len(counts) == 12
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 33  # 11 degrees of freedom


def test_normal_samples_have_zero_mean_and_unit_power() -> None:
    samples = StatelessRng(0, "noise").normal(100_000)
    assert samples.dtype == np.float32
    assert abs(float(samples.mean())) < 5 / math.sqrt(100_000)
    assert float(np.square(samples).mean()) == pytest.approx(1.0, abs=0.03)
