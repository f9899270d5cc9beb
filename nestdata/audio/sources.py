"""Bytes of audio that is neither a local file nor at an address: of URLs in lines of cuts."""

from collections.abc import Mapping
from typing import Any

from nestdata.errors import AudioError, StorageError
from nestdata.storage import is_url, storage


def content_of(source: Mapping[str, Any], cut_id: str) -> bytes:
    """Returns the bytes of the audio file that a Lhotse source stands for.

    Args:
        source: The source as a dict, of any type but "file".
        cut_id: Names the cut in messages.

    Raises:
        AudioError: There is no such object, or it has changed.
        StorageError: The store cannot be read for another reason, which says nothing about the cut.
        ValueError: The type or the URL is not supported.
    """
    kind, location = source["type"], source["source"]
    if kind != "url" or not is_url(str(location)):
        raise ValueError(f"an audio source of type {kind!r} is not supported here")
    try:
        return storage().read(location)
    except StorageError as error:
        if error.kind not in ("missing", "changed"):
            raise
        raise AudioError.because(error.kind, f"cut {cut_id!r}: {error}") from error
