"""Answers of object stores that are needed more than once: listings of folders, and sizes of tars."""

from functools import lru_cache

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
