"""Labels as the values of inputs: which of them are missing, and what the others are as text."""

import math
import re
from collections.abc import Mapping
from typing import Any

LABELS = {
    "text": "text",
    "sentence": "text",
    "transcription": "text",
    "transcript": "text",
    "raw_text": "text",
    "normalized_text": "text",
    "txt": "text",
    "lang": "language",
    "language": "language",
    "locale": "language",
    "speaker": "speaker",
    "speaker_id": "speaker",
    "client_id": "speaker",
}
"""Label names in the inputs, and the supervision fields that they become."""

# Labels of a text that give way to any other, because data sets have them beside it.
_SECOND_TEXTS = ("raw_text", "normalized_text", "txt")
# Whole numbers above this are not exact as floats.
_MAX_WHOLE = 1 << 53
# How pandas and Python write a missing value into a table, and a whole number of a column with missing values.
_NOT_A_NUMBER = frozenset({"nan", "NaN"})
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
# The language code of Min Nan Chinese (ISO 639-3).
_MIN_NAN = "nan"


def label_text(value: Any) -> str | None:
    """Returns a label as text; None if it is missing, as NaN is, by which pandas marks missing values of any type.

    A float that is a whole number is written without `.0`: pandas stores a column of integers with gaps as floats.
    """
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if value.is_integer() and abs(value) < _MAX_WHOLE:
            return str(int(value))
    return str(value)


def divide_labels(labels: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the supervision fields among the labels of an entry, and its custom fields.

    Of several labels for one field, the one with the name of the field is taken, or else the last one; the others are
    custom fields. Missing values are none.
    """
    texts = {key: text for key, value in labels.items() if key in LABELS and (text := label_text(value)) is not None}
    key_of = {LABELS[key]: key for key in sorted(texts, key=lambda key: key not in _SECOND_TEXTS)}
    key_of |= {field: field for field in key_of if field in texts}
    others = texts.keys() - key_of.values()
    custom = {key: value for key, value in labels.items() if key not in LABELS or key in others}
    return {field: texts[key] for field, key in key_of.items()}, custom


def table_labels(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels among the fields of a table, which are all text: without empty ones and `nan`.

    Numbers of speakers lose `.0`, as by `label_text`. A text that is a number is kept as it is written, and so is the
    language `nan`, which is Min Nan.
    """
    labels = {}
    for name, value in fields.items():
        kind = LABELS.get(name)
        if not value or (value in _NOT_A_NUMBER and not (kind == "language" and value == _MIN_NAN)):
            continue
        labels[name] = value[:-2] if kind == "speaker" and _WHOLE_FLOAT.fullmatch(value) else value
    return labels
