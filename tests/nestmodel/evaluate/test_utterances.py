from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from nestmodel.evaluate.utterances import ProbeUtterance, limit_per_class, split_held_out


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    held_out=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_the_split_is_stratified_and_independent_of_the_order(
    sizes: list[int], held_out: float, seed: int, data: st.DataObject
) -> None:
    names = [(f"{label}/{i}", str(label)) for label, size in enumerate(sizes) for i in range(size)]
    utterances = [ProbeUtterance(row, name, label, name) for row, (name, label) in enumerate(names)]
    held_out_ids = split_held_out(utterances, held_out, seed)
    assert split_held_out(data.draw(st.permutations(utterances)), held_out, seed) == held_out_ids
    for label, size in enumerate(sizes):
        num_held_out = sum(
            utterance.cut_id in held_out_ids for utterance in utterances if utterance.target == str(label)
        )
        assert abs(num_held_out - held_out * size) <= 1
        assert size == 1 or 0 < num_held_out < size


@given(
    groups=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=12), seed=st.integers(0, 5)
)
def test_a_group_is_never_on_both_sides(groups: list[tuple[int, int]], seed: int) -> None:
    utterances = [
        ProbeUtterance(0, f"{number}/{i}", str(label), f"speaker {number}")
        for number, (label, size) in enumerate(groups)
        for i in range(size)
    ]
    held_out_ids = split_held_out(utterances, 0.3, seed)
    sides = {(utterance.group, utterance.cut_id in held_out_ids) for utterance in utterances}
    assert len(sides) == len(groups)
    num_groups = Counter(label for label, _ in groups)
    for label, number in num_groups.items():
        held_out_groups = {
            utterance.group
            for utterance in utterances
            if utterance.target == str(label) and utterance.cut_id in held_out_ids
        }
        assert number == 1 or 0 < len(held_out_groups) < number


def test_another_seed_gives_another_split() -> None:
    utterances = [ProbeUtterance(i, str(i), "a", str(i)) for i in range(40)]
    assert len({frozenset(split_held_out(utterances, 0.25, seed)) for seed in range(5)}) == 5


@settings(max_examples=20)
@given(limit=st.integers(2, 9), data=st.data())
def test_a_limit_per_class_ignores_the_order_and_selects_a_subset_of_a_higher_limit(
    limit: int, data: st.DataObject
) -> None:
    utterances = [ProbeUtterance(i, str(i), "abb"[i % 3], str(i)) for i in range(12)]
    selected = limit_per_class(utterances, limit, 0)
    assert Counter(utterance.target for utterance in selected) == {"a": min(4, limit), "b": min(8, limit)}
    assert set(limit_per_class(data.draw(st.permutations(utterances)), limit, 0)) == set(selected)
    assert set(selected) <= set(limit_per_class(utterances, limit + 1, 0))
