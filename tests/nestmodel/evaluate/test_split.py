from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nestmodel.evaluate.split import Labelled, first_of_each_class, split_held_out


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    held_out=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_the_split_is_stratified_and_knows_no_order(
    sizes: list[int], held_out: float, seed: int, data: st.DataObject
) -> None:
    names = [(f"{label}/{i}", str(label)) for label, size in enumerate(sizes) for i in range(size)]
    everyone = [Labelled(row, name, label, name) for row, (name, label) in enumerate(names)]
    held = split_held_out(everyone, held_out, seed)
    assert split_held_out(data.draw(st.permutations(everyone)), held_out, seed) == held
    for label, size in enumerate(sizes):
        num_held = sum(one.cut_id in held for one in everyone if one.label == str(label))
        assert abs(num_held - held_out * size) <= 1
        assert size == 1 or 0 < num_held < size


@given(
    groups=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=12), seed=st.integers(0, 5)
)
def test_a_group_is_never_on_both_sides(groups: list[tuple[int, int]], seed: int) -> None:
    everyone = [
        Labelled(0, f"{number}/{i}", str(label), f"speaker {number}")
        for number, (label, size) in enumerate(groups)
        for i in range(size)
    ]
    held = split_held_out(everyone, 0.3, seed)
    sides = {(one.group, one.cut_id in held) for one in everyone}
    assert len(sides) == len(groups)
    num_groups = Counter(label for label, _ in groups)
    for label, number in num_groups.items():
        held_groups = {one.group for one in everyone if one.label == str(label) and one.cut_id in held}
        assert number == 1 or 0 < len(held_groups) < number


def test_other_seeds_split_otherwise() -> None:
    everyone = [Labelled(i, str(i), "a", str(i)) for i in range(40)]
    assert len({frozenset(split_held_out(everyone, 0.25, seed)) for seed in range(5)}) == 5


@given(number=st.integers(2, 9), data=st.data())
def test_a_few_of_each_class_are_the_same_in_any_order_and_among_the_more(number: int, data: st.DataObject) -> None:
    everyone = [Labelled(i, str(i), "abb"[i % 3], str(i)) for i in range(12)]
    some = first_of_each_class(everyone, number, 0)
    assert Counter(one.label for one in some) == {"a": min(4, number), "b": min(8, number)}
    assert set(first_of_each_class(data.draw(st.permutations(everyone)), number, 0)) == set(some)
    assert set(some) <= set(first_of_each_class(everyone, number + 1, 0))
