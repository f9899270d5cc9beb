"""Keyed draws of a few values of each group, such as three cuts of each language, from any number of values.

A draw keeps the values with the smallest keys. If the key of a value is a hash of its id, the draw is a uniform sample
without replacement that depends neither on the order of the values nor on how they were divided among processes.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

# Values that are kept of each group, and groups: at most a few megabytes.
MAX_DRAWN = 20
_MAX_GROUPS = 1000


def key_of(text: str) -> int:
    """Returns a 64-bit hash of a text, which may have characters that are not Unicode."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class KeyedDraw(Generic[Value]):
    """The values with the smallest keys of each group, at most `MAX_DRAWN`.

    Of several values with the same key, the first one is kept. Groups after the thousandth are ignored.
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[int, Value]]] = {}

    def offer(self, group: str, key: int, value: Value) -> None:
        """Adds a value, or ignores it if its key is too large."""
        kept = self._groups.get(group)
        if kept is None:
            if len(self._groups) < _MAX_GROUPS:
                self._groups[group] = [(key, value)]
            return
        if (len(kept) < MAX_DRAWN or key < kept[-1][0]) and all(key != other for other, _ in kept):
            insort(kept, (key, value), key=lambda pair: pair[0])
            del kept[MAX_DRAWN:]

    def merge(self, other: "KeyedDraw[Value]") -> None:
        """Adds the values of another draw."""
        for group in other:
            kept = self.items(group)
            for key, value in other.items(group):
                # The keys ascend, so that nearly all draws end here once this one is full.
                if len(kept) == MAX_DRAWN and key > kept[-1][0]:
                    break
                self.offer(group, key, value)

    def __iter__(self) -> Iterator[str]:
        """Yields the groups in the order of their first values."""
        return iter(self._groups)

    def __getitem__(self, group: str) -> list[Value]:
        """Returns the values of a group, ascending by key."""
        return [value for _, value in self.items(group)]

    def items(self, group: str) -> list[tuple[int, Value]]:
        """Returns the keys and values of a group, ascending by key."""
        return self._groups.get(group, [])

    def as_json(self) -> dict[str, Any]:
        """Returns the groups for `json.dumps`; their values must be JSON values themselves."""
        return {group: self.items(group) for group in self}

    @classmethod
    def from_json(cls, groups: dict[str, Any], value_of: Callable[[Any], Value]) -> "KeyedDraw[Value]":
        """Returns the draw that `as_json` was called on; `value_of` restores a value from its JSON form."""
        draw = cls()
        for group, kept in groups.items():
            for key, value in kept:
                draw.offer(group, key, value_of(value))
        return draw
