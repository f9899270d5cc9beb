"""Listings of folders in object stores, each made once although detection and reading both need it."""

from functools import lru_cache

from nestdata.storage import ObjectInfo, storage


@lru_cache(maxsize=8)
def objects_below(url: str) -> tuple[ObjectInfo, ...]:
    """Returns the objects below a URL, sorted by location, as of the first call since `forget_listings`.

    Raises:
        StorageError: The folder cannot be listed.
    """
    return tuple(storage().list_objects(url))


def forget_listings() -> None:
    """Makes the next calls list again; to be called before inputs are opened."""
    objects_below.cache_clear()
