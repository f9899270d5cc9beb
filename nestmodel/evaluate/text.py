"""Text for recognition by characters: its normalisation, and the alphabet of the characters of training texts.

Every experiment that compares recognised text with a transcript uses these rules, and writes them beside its result:
error rates under different rules cannot be compared.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nestmodel.errors import ConfigError

NORMALISATION = (
    "Unicode normal form C, lower case",
    "apostrophes (' and U+2019) are removed",
    "every other character that is not a letter, mark or number (categories L, M, N) becomes a space",
    "runs of spaces become one space; leading and trailing spaces are removed",
)
"""The rules of `normalise_text`, in the order of their application."""

BLANK = 0
"""Number of the blank of CTC. The characters of an alphabet are numbered from 1."""

_APOSTROPHES = frozenset("'\N{RIGHT SINGLE QUOTATION MARK}")


def normalise_text(text: str) -> str:
    """Returns text under the rules of `NORMALISATION`. The result may be empty; normalising it again changes nothing.

    Numbers stay digits, although they are spoken as words: write them out in transcripts if they are frequent.
    """
    lower = unicodedata.normalize("NFC", text).lower()
    spaced = "".join(_keep(character) for character in lower)
    # Again, because lower case and removed apostrophes can bring a letter and a mark together.
    return unicodedata.normalize("NFC", " ".join(spaced.split()))


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The characters that a recogniser can write, each with a number from 1; 0 is the blank of CTC."""

    characters: str
    """Different characters, sorted by code point. The space is one of them if a text has two words."""

    def __post_init__(self) -> None:
        if not self.characters or sorted(set(self.characters)) != list(self.characters):
            raise ConfigError(f"characters is {self.characters!r}: give different characters, sorted by code point.")

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> "Alphabet":
        """Returns the alphabet of the characters of normalised texts.

        Raises:
            ConfigError: All texts are empty.
        """
        return cls("".join(sorted(set().union(*texts))))

    def __len__(self) -> int:
        """Returns the number of labels: the characters and the blank."""
        return len(self.characters) + 1

    def encode(self, text: str) -> list[int]:
        """Returns the numbers of the characters of a text.

        Raises:
            ConfigError: The text has a character that is not in the alphabet.
        """
        numbers = {character: number for number, character in enumerate(self.characters, start=1)}
        try:
            return [numbers[character] for character in text]
        except KeyError as error:
            raise ConfigError(f"{text!r} has the character {error}, which is not in the alphabet.") from None

    def decode(self, labels: Sequence[int]) -> str:
        """Returns the text of the most likely label of each frame: repeats are merged, then blanks are removed."""
        changes = [label for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
        text = "".join(self.characters[label - 1] for label in changes if label != BLANK)
        return " ".join(text.split())  # blanks between two spaces would leave both of them


def _keep(character: str) -> str:
    if character in _APOSTROPHES:
        return ""
    return character if unicodedata.category(character)[0] in "LMN" else " "
