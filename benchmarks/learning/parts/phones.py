"""Texts in phones, by espeak-ng: its rules and word lists, not what a speaker really said.

Each phone becomes one character that has no case, so that the content probe counts errors in phones. A long vowel and
an affricate are phones of their own; stress is left out, and so are the spaces between words.
"""

import re
from collections.abc import Sequence

from benchmarks.harness.children import run_peer
from benchmarks.learning.parts.manifests import Line
from nestmodel.evaluate.text import normalise_text

_STRESS = str.maketrans("", "", "ˈˌ")
_OTHER_LANGUAGE = re.compile(r"\([a-z-]+\)")  # espeak-ng marks where it takes a word for one of another language
_FIRST_CHARACTER = 0x4E00
"""Characters of phones are numbered from here: letters that have no case and no decomposition."""


def as_phones(texts: Sequence[str], espeak_voice: str) -> list[list[str]]:
    """Returns the phones of each text in IPA.

    Args:
        texts: The texts; they are normalised as by the content probe, so that punctuation makes no pause.
        espeak_voice: Voice of espeak-ng, such as `cs`.
    """
    command = ["espeak-ng", "-q", "--ipa", "--sep=_", "-v", espeak_voice]
    spoken = [run_peer([*command, normalise_text(text)]) for text in texts]
    return [_OTHER_LANGUAGE.sub(" ", one).translate(_STRESS).replace("_", " ").split() for one in spoken]


def in_phones(sides: Sequence[Sequence[Line]], espeak_voice: str) -> tuple[list[list[Line]], int]:
    """Returns lines whose text has one character for each phone, and the number of different phones.

    Args:
        sides: Lists of lines of one language, which get the same characters.
        espeak_voice: Voice of espeak-ng.
    """
    phones = [as_phones([line["text"] for line in lines], espeak_voice) for lines in sides]
    names = sorted({phone for texts in phones for text in texts for phone in text})
    characters = {phone: chr(_FIRST_CHARACTER + number) for number, phone in enumerate(names)}
    written = [
        [
            {**line, "text": "".join(characters[phone] for phone in text)}
            for line, text in zip(lines, texts, strict=True)
        ]
        for lines, texts in zip(sides, phones, strict=True)
    ]
    return written, len(names)
