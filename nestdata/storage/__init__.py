"""Bytes by location: local files and object stores (S3, GCS, Azure, HTTP) behind one interface.

A location is an absolute local path or a URL, always a plain `str`. `Storage` reads ranges, whole objects and streams,
lists, writes and deletes. The client of object stores repeats requests that fail for a transient reason; every other
failure is a `StorageError` whose `kind` says what the caller can do about it. Object stores need the extra `remote`,
which is imported at first use.
"""

from nestdata.storage.access import Storage, storage
from nestdata.storage.clients import StoreEnvironment
from nestdata.storage.location import (
    SCHEMES,
    FileVersion,
    ObjectInfo,
    common_folder,
    has_scheme,
    is_url,
    join,
    location_of,
    name_of,
    parent,
)
from nestdata.storage.storage_config import StorageConfig
from nestdata.storage.stream import DaemonPool, SizedStream

__all__ = [
    "SCHEMES",
    "DaemonPool",
    "FileVersion",
    "ObjectInfo",
    "SizedStream",
    "Storage",
    "StorageConfig",
    "StoreEnvironment",
    "common_folder",
    "has_scheme",
    "is_url",
    "join",
    "location_of",
    "name_of",
    "parent",
    "storage",
]
