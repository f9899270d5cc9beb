from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import ManifestError
from nestdata.prepare.inputs.patterns import (
    default_output,
    expand,
    is_pattern,
    numbered,
)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a_{0..3}.tar", ["a_0.tar", "a_1.tar", "a_2.tar", "a_3.tar"]),
        ("a__OP_0..1_CL_.tar", ["a_0.tar", "a_1.tar"]),
        ("a_[0..1].tar", ["a_0.tar", "a_1.tar"]),
        ("a-{08..10}.tar", ["a-08.tar", "a-09.tar", "a-10.tar"]),
        ("a-{000..4..2}.tar", ["a-000.tar", "a-002.tar", "a-004.tar"]),
        ("{en,de}/a_{0..1}.tar", ["en/a_0.tar", "en/a_1.tar", "de/a_0.tar", "de/a_1.tar"]),
        ("a{,_v2}.tar", ["a.tar", "a_v2.tar"]),
        ("a (copy)/[x]/{b}.tar", ["a (copy)/[x]/{b}.tar"]),
    ],
)
def test_a_pattern_stands_for_its_names(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names
    assert is_pattern(pattern) == (names != [pattern])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("data/speech.json", "speech"),
        ("data/shard-{000000..000009}.tar", "shard"),
        ("data/audio__OP_0..127_CL_.tar", "audio"),
        ("s3://bucket/tars/manifest_{0..511}.json", "manifest"),
        ("data/{en,de}/{0..7}.tar", "data"),
        ("data/*.parquet", "data"),
    ],
)
def test_a_corpus_is_named_after_its_input_without_patterns(given: str, name: str) -> None:
    assert default_output(given) == Path(f"{name}.corpus")


def test_a_pattern_of_too_many_names_is_an_error() -> None:
    for pattern in ("a_{0..10000000}.tar", "{0..9999}{0..9999}.tar"):
        with pytest.raises(ManifestError, match="stands for more than 1000000 names"):
            expand(pattern)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 4))
def test_expanded_names_have_the_numbers_of_the_range(first: int, last: int, width: int) -> None:
    names = expand(f"/x/audio_{{{first:0{width}d}..{last}}}.tar")
    assert sorted(numbered(names, "x")) == list(range(min(first, last), max(first, last) + 1))


def test_the_only_range_of_a_pattern_gives_the_numbers() -> None:
    pattern = "v2/audio_{3..4}_16k.tar"
    assert numbered(expand(pattern), pattern, pattern) == {3: "v2/audio_3_16k.tar", 4: "v2/audio_4_16k.tar"}
    with pytest.raises(ManifestError, match="are both shard 16"):
        numbered(expand(pattern), pattern)
