"""What callers may give as audio: a path, a URL, a corpus, or cuts and recordings of Lhotse; one of them or a list.

All functions and commands that read audio accept the same, by `audio_inputs`.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestdata.errors import ManifestError
from nestdata.redaction import redacted_url
from nestdata.storage import has_scheme
from nestdata.storage.location import parse_url

if TYPE_CHECKING:
    from nestdata.corpus.corpus import Corpus

AudioInput = str | os.PathLike[str] | Any
"""Audio: the path or URL of whatever `nestdata prepare` reads, such as `talk.wav`, `speech.csv`, a folder or a corpus
directory; a `Corpus`; or Lhotse's `CutSet` or `RecordingSet`."""

AudioInputs = AudioInput | Sequence[AudioInput]
"""One `AudioInput`, or a sequence of them, in any combination."""


def audio_inputs(given: AudioInputs) -> list[Any]:
    """Returns inputs as a list, with local paths as `Path` and URLs as `str`.

    Raises:
        ManifestError: There is no input, one has a wrong type, or a URL is given as a `Path`.
        StorageError: A URL holds credentials.
    """
    inputs: list[Any] = [*given] if isinstance(given, Iterable) and _is_list(given) else [given]
    if not inputs:
        raise ManifestError("no input was given: name a file, a folder or a manifest.")
    return [_checked(value) for value in inputs]


def is_lhotse(given: object) -> bool:
    """Returns whether an object is a set of cuts or recordings of Lhotse, without importing Lhotse."""
    lhotse = sys.modules.get("lhotse")
    return lhotse is not None and isinstance(given, (lhotse.CutSet, lhotse.RecordingSet))


def is_corpus(given: object) -> bool:
    """Returns whether an object is a `Corpus`, without importing numpy."""
    module = sys.modules.get("nestdata.corpus.corpus")
    return module is not None and isinstance(given, module.Corpus)


def _is_list(given: Iterable[Any]) -> bool:
    return not (_is_one(given) or isinstance(given, (bytes, Mapping)) or hasattr(given, "__array__"))


def _is_one(given: object) -> bool:
    return isinstance(given, (str, os.PathLike)) or is_lhotse(given) or is_corpus(given)


def _checked(given: Any) -> "Path | str | Corpus | Any":
    if not _is_one(given):
        raise _wrong_type(given)
    if not str(given):
        raise ManifestError("an empty path was given as input. Check the variable that holds it.")
    if isinstance(given, str):
        if not has_scheme(given):
            return Path(given)
        parse_url(given)  # refuses credentials before anything is named after the URL
        return given
    if not isinstance(given, os.PathLike):
        return given
    path = Path(given)
    if has_scheme(str(path).replace(":/", "://", 1)) and not path.exists():
        raise ManifestError(f"{redacted_url(str(path))}: give URLs as str; a Path loses one of the two slashes.")
    return path


def _wrong_type(given: object) -> ManifestError:
    return ManifestError(
        f"{type(given).__name__} where audio was expected ({given!r:.80}). Give a path or URL, a Corpus, a CutSet or "
        "RecordingSet of Lhotse, or a list of these."
    )
