import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestmodel import Alphabet, ConfigError, normalise_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Co je to za divnou loď?", "co je to za divnou loď"),
        ("Vrak letadla LC-10 Lemura...", "vrak letadla lc 10 lemura"),
        ("  No\ttohle! ", "no tohle"),
        ("Don't. It\N{RIGHT SINGLE QUOTATION MARK}s", "dont its"),
        ("slovo\N{EN DASH}slovo (50 %)", "slovo slovo 50"),
        ("c\N{COMBINING CARON}as", "čas"),
        ("हिन्दी", "हिन्दी"),  # vowel signs are marks, without which words change
        ("...", ""),
    ],
)
def test_text_is_normalised_by_the_written_rules(text: str, expected: str) -> None:
    assert normalise_text(text) == unicodedata.normalize("NFC", expected)


@given(st.text())
def test_normalised_text_does_not_change_again(text: str) -> None:
    once = normalise_text(text)
    assert normalise_text(once) == once


def test_an_alphabet_has_the_characters_of_all_texts_and_a_blank() -> None:
    alphabet = Alphabet.of_texts(["ba c", "ď"])
    assert alphabet.characters == " abcď"
    assert len(alphabet) == 6
    assert alphabet.encode("ab ď") == [2, 3, 1, 5]


def test_decoding_merges_repeats_and_removes_blanks() -> None:
    alphabet = Alphabet(" ab")
    assert alphabet.decode([0, 2, 2, 0, 2, 3, 3, 0, 1, 0, 1, 2, 1]) == "aab a"
    assert alphabet.decode([0, 0]) == ""


@given(st.lists(st.sampled_from([1, 2, 3]), max_size=12))
def test_decoding_restores_what_was_encoded(numbers: list[int]) -> None:
    alphabet = Alphabet("abc")
    text = "".join(alphabet.characters[number - 1] for number in numbers)
    with_blanks = [label for number in alphabet.encode(text) for label in (0, number)]
    assert alphabet.decode(with_blanks) == text


def test_unusable_alphabets_and_unknown_characters_are_refused() -> None:
    with pytest.raises(ConfigError, match="characters is '': give different characters"):
        Alphabet.of_texts([""])
    with pytest.raises(ConfigError, match="characters is 'ba'"):
        Alphabet("ba")
    with pytest.raises(ConfigError, match="'abx' has the character 'x', which is not in the alphabet"):
        Alphabet("ab").encode("abx")
