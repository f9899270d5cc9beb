"""What callers may give as audio: all functions and commands that read audio accept the same inputs.

Local inputs are `Path`, and inputs at URLs are `str`.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestdata.errors import ManifestError
from nestdata.redaction import redacted_url
from nestdata.storage import has_scheme
from nestdata.storage.location import parse_url

AudioInput = str | os.PathLike[str] | Any
"""Audio: the path or URL of whatever `nestdata prepare` reads, such as `talk.wav`, `speech.csv`, a folder or a corpus
directory; a `Corpus`; or Lhotse's `CutSet` or `RecordingSet`."""

# Commas between inputs, without those in braces of a pattern.
_SEVERAL = re.compile(r",(?![^{}]*\})")

AudioInputs = AudioInput | Sequence[AudioInput]
"""One `AudioInput`, or a sequence of them, in any combination."""


def audio_inputs(given: AudioInputs) -> list[Any]:
    """Returns inputs as a list, with local paths as `Path` and URLs as `str`.

    Raises:
        ManifestError: There is no input, one has a wrong type, or a URL is given as a `Path`.
        StorageError: A URL holds credentials.
    """
    is_one = _is_input(given) or isinstance(given, (bytes, Mapping)) or hasattr(given, "__array__")
    inputs: list[Any] = [given] if is_one or not isinstance(given, Iterable) else [*given]
    inputs = [part for value in inputs for part in (_listed(value) if isinstance(value, str) else [value])]
    if not inputs:
        raise ManifestError("no input was given: name a file, a folder or a manifest.")
    return [_checked(value) for value in inputs]


def _listed(text: str) -> list[str]:
    """Returns the inputs in a text: itself, or several as NeMo's configurations list them: `[[a.json],[b.json]]`.

    Source: NVIDIA NeMo 3.0, `manifest_filepath` of its data loaders.
    """
    if os.path.exists(text) or not (text.startswith("[") or _SEVERAL.search(text)):
        return [text]
    parts = [part.strip(" []'\"") for part in _SEVERAL.split(text)]
    is_listed = text.startswith("[") and text.endswith("]") and len(parts) > 1
    is_there = is_listed or all(has_scheme(part) or os.path.exists(part) for part in parts)
    return parts if all(parts) and is_there else [text]


def is_lhotse(given: object) -> bool:
    """Returns whether an object is a set of cuts or recordings of Lhotse, without importing Lhotse."""
    lhotse = sys.modules.get("lhotse")
    return lhotse is not None and isinstance(given, (lhotse.CutSet, lhotse.RecordingSet))


def is_corpus(given: object) -> bool:
    """Returns whether an object is a `Corpus`, without importing numpy."""
    module = sys.modules.get("nestdata.corpus.corpus")
    return module is not None and isinstance(given, module.Corpus)


def _is_input(given: object) -> bool:
    return isinstance(given, (str, os.PathLike)) or is_lhotse(given) or is_corpus(given)


def _checked(given: Any) -> Any:
    if not _is_input(given):
        raise ManifestError(
            f"{type(given).__name__} where audio was expected ({given!r:.80}). Give a path or URL, a Corpus, a CutSet "
            "or RecordingSet of Lhotse, or a list of these."
        )
    if not str(given):
        raise ManifestError("an empty path was given as input. Check the variable that holds it.")
    if isinstance(given, str) and has_scheme(given):
        parse_url(given)  # refuses credentials before anything is named after the URL
        return given
    if not isinstance(given, (str, os.PathLike)):
        return given
    path = Path(given)
    if has_scheme(str(path).replace(":/", "://", 1)) and not isinstance(given, str) and not path.exists():
        raise ManifestError(f"{redacted_url(str(path))}: give URLs as str; a Path loses one of the two slashes.")
    return path
