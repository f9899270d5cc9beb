from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata.plan.stages import Interleaving


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any), st.integers(0, 2**32))
@settings(deadline=None, max_examples=10)
def test_counts_are_those_of_all_earlier_turns_and_stay_close_to_the_weights(weights: list[int], seed: int) -> None:
    order = Interleaving(weights, seed, "test", 3)
    again = Interleaving(weights, seed, "test", 3)
    seen: Counter[int] = Counter()
    items = [item for item, weight in enumerate(weights) if weight]
    for turn in range(200):
        item, earlier = order.at(turn)
        assert earlier == seen[item]
        seen[item] += 1
        for each in items:
            assert again.count(each, turn + 1) == seen[each]
            # One turn at most is rounded away at each of the five levels of the tree.
            assert abs(seen[each] - (turn + 1) * weights[each] / sum(weights)) < 5
    assert set(seen) <= set(items)


def test_a_turn_far_away_is_found_directly() -> None:
    order = Interleaving([3, 1, 0, 4], 7, "test")
    counts = [order.count(item, 8 * 10**15) for item in (0, 1, 3)]
    assert counts == [3 * 10**15, 10**15, 4 * 10**15]
    item, earlier = order.at(8 * 10**15)
    assert earlier == counts[(0, 1, 3).index(item)]


def test_turns_are_the_same_in_every_version() -> None:
    order = Interleaving([3, 1, 2], 7, "test", 1)
    assert [order.at(turn)[0] for turn in range(12)] == [1, 0, 2, 0, 0, 2, 1, 0, 2, 0, 0, 2]
