"""Listings of folders, and answers of object stores that are needed more than once."""

import os
from functools import lru_cache
from pathlib import Path

from nestdata.errors import ManifestError
from nestdata.storage import ObjectInfo, storage


@lru_cache(maxsize=8)
def objects_below(url: str) -> tuple[ObjectInfo, ...]:
    """Returns the objects below a URL, sorted by location, as of the first call since `forget_answers`.

    Raises:
        StorageError: The folder cannot be listed.
    """
    return tuple(storage().list_objects(url))


@lru_cache(maxsize=4096)
def object_info(url: str) -> ObjectInfo:
    """Returns size and ETag of an object, as of the first call since `forget_answers`.

    Raises:
        StorageError: The object does not exist, or the store does not answer.
    """
    return storage().info(url)


def forget_answers() -> None:
    """Makes the next calls ask again; to be called before inputs are opened."""
    objects_below.cache_clear()
    object_info.cache_clear()


def names_in(path: Path) -> list[str]:
    """Returns the absolute paths of the files and folders in a folder.

    Raises:
        ManifestError: It cannot be listed.
    """
    folder = os.path.abspath(path)
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError as error:
        raise cannot_be_listed(folder, error) from error


def cannot_be_listed(directory: str, error: OSError) -> ManifestError:
    """Returns the error for a folder that cannot be listed."""
    return ManifestError(
        f"{directory}: cannot be listed ({error.strerror}). Grant read permission, or move the folder away."
    )
