"""Keyed draws keep the values with the smallest keys, in any order and any division."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata.prepare.writing.draw import MAX_DRAWN, KeyedDraw, key_of

offers = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=80)


def drawn(values: list[tuple[str, int]]) -> KeyedDraw[int]:
    draw = KeyedDraw[int]()
    for group, key in values:
        draw.offer(group, key, key)
    return draw


@settings(max_examples=30)
@given(offers, st.integers(0, 80), st.randoms(use_true_random=False))
def test_a_draw_does_not_depend_on_the_order_or_the_division_of_values(
    values: list[tuple[str, int]], first: int, random: object
) -> None:
    shuffled = sorted(values, key=lambda _: random.random())  # type: ignore[attr-defined]
    merged = drawn(shuffled[:first])
    merged.merge(drawn(shuffled[first:]))
    for group in "abc":
        assert merged[group] == sorted({key for other, key in values if other == group})[:MAX_DRAWN]


def test_the_first_of_several_values_with_the_same_key_is_kept() -> None:
    draw = KeyedDraw[str]()
    for value in ("first", "second"):
        draw.offer("a", 1, value)
    assert draw["a"] == ["first"]


def test_a_draw_is_restored_from_json_and_unknown_groups_are_empty() -> None:
    draw = drawn([("a", 3), ("a", 1), ("b", 2)])
    restored = KeyedDraw.from_json(json.loads(json.dumps(draw.as_json())), int)
    assert list(restored) == ["a", "b"]
    assert restored["a"] == [1, 3]
    assert restored["c"] == []


def test_keys_of_names_that_are_not_unicode_are_computed() -> None:
    assert key_of("a\udc80") != key_of("a\udc81")
    assert 0 <= key_of("a\udc80") < 1 << 64
