"""Strategies of hypothesis for hostile inputs: valid ones with some bytes changed, and values of every kind of JSON."""

import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

# Values at which sizes and counts overflow, in several widths.
_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1)
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_MAX_EDITS = 4

CREATED_BY_COMMANDS = "PWNED"
"""The file that a command in an input would create."""

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from([
        "", ".", "..", "/", "-", "a" * 5000, "\0", "\n", "\ud800", "é" * 300, "nan", "-inf", "1e999", "0x10", "true",
        "$(touch PWNED)", "`touch PWNED`", "; touch PWNED", "| touch PWNED", "pipe:touch PWNED", "touch PWNED |",
        "file:///etc/passwd", "s3://bucket/a", "http://127.0.0.1:1/a", "\u202e", "<script>alert(1)</script>",
        "/dev/zero", "/dev/stdin", "/proc/self/mem", "../../../etc/passwd", "%s%n", "a.tar?o=0&e=512",
    ]),
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-2, 70000),
    st.sampled_from(_EDGES),
    st.floats(),
    st.sampled_from([1e-300, 1e300, -0.0, 2.0**53, 16000.5]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
"""Any JSON value, with NaN and infinities, which Python writes as well."""


def mutated(*seeds: bytes) -> st.SearchStrategy[bytes]:
    """Returns valid inputs in which a few bytes are changed, removed, repeated or replaced by edge values."""
    return st.builds(_edit, st.sampled_from(seeds), st.lists(_edits(), max_size=_MAX_EDITS))


def altered(rows: Sequence[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Returns valid JSON objects in which values, at any depth, are replaced by other ones or removed."""
    paths = [(number, path) for number, row in enumerate(rows) for path in _paths(row)]
    edits = st.lists(st.tuples(st.sampled_from(paths), st.one_of(st.just(_REMOVED), VALUES)), min_size=1, max_size=3)
    return edits.map(lambda chosen: _with_values(rows[chosen[0][0][0]], [(path[1], value) for path, value in chosen]))


_REMOVED = object()


def _edits() -> st.SearchStrategy[tuple[str, int, Any]]:
    # Half of the positions are in the header, where most of the structure is.
    positions = st.one_of(st.integers(0, 127), st.integers(0, 1 << 20), st.integers(-64, -1))
    sized = st.tuples(st.sampled_from(sorted(_WIDTHS)), st.sampled_from(_EDGES), st.sampled_from("<>"))
    return st.one_of(
        st.tuples(st.just("edge"), positions, sized),
        st.tuples(st.just("replace"), positions, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("insert"), positions, st.binary(min_size=1, max_size=600)),
        st.tuples(st.just("remove"), positions, st.integers(1, 2000)),
        st.tuples(st.just("repeat"), positions, st.integers(1, 2000)),
        st.tuples(st.just("cut"), positions, st.none()),
    )


def _edit(content: bytes, edits: Sequence[tuple[str, int, Any]]) -> bytes:
    for kind, position, value in edits:
        at = position % (len(content) + 1)
        before, after = content[:at], content[at:]
        if kind == "edge":
            width, edge, order = value
            packed = struct.pack(order + _WIDTHS[width], edge % (1 << 8 * width))
            content = before + packed + after[width:]
        elif kind == "replace":
            content = before + value + after[len(value) :]
        elif kind == "insert":
            content = before + value + after
        elif kind == "remove":
            content = before + after[value:]
        elif kind == "repeat":
            content = before + after[:value] + after
        else:
            content = before
    return content


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in a JSON value: keys and indices."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in items for found in [(*path, key), *_paths(inner, (*path, key))]]


def _with_values(row: dict[str, Any], changes: Sequence[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    for path, value in changes:
        row = _with_value(row, path, value)
    return row


def _with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    key, *rest = path
    if isinstance(value, dict) and (key in value or not rest):
        if rest:
            return {**value, key: _with_value(value[key], tuple(rest), new)}
        return {name: item for name, item in value.items() if name != key} | ({} if new is _REMOVED else {key: new})
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        if rest:
            return [_with_value(item, tuple(rest), new) if i == key else item for i, item in enumerate(value)]
        return [new if i == key else item for i, item in enumerate(value) if i != key or new is not _REMOVED]
    return value  # an earlier change has replaced the way there
