"""Locations, which are absolute local paths or URLs of objects as plain strings, and what is known of an object.

The key of an `s3://`, `gs://` or `az://` URL is taken as it stands: `%20` means these three characters. The path of an
`http://` or `https://` URL is percent-encoded, as everywhere.
"""

import os
import posixpath
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from nestdata.errors import StorageError
from nestdata.redaction import has_plain_authority, redacted_url

SCHEMES = ("s3", "gs", "az", "https", "http")
"""URL schemes of object stores."""

# The last time that is stored, in 2262.
_LAST_NS = (1 << 63) - 1
_WITH_BUCKETS = ("s3", "gs", "az")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# A key of S3, GCS or Azure may contain these characters, so that only the names of secrets are refused.
_SECRET_QUERY = re.compile(
    r"[?&;#][^=?&;#]*(sig|signature|token|credential|secret|password|pwd|key(?:id)?|auth|jwt|code|policy|hdnts)=",
    re.IGNORECASE,
)


class ObjectInfo(NamedTuple):
    """One object of a store, or one local file."""

    location: str
    size: int
    """Length in bytes."""

    etag: str | None
    """The store's identifier of this content, without quotes. None for local files and for servers that give none."""


class FileVersion(NamedTuple):
    """What distinguishes a local file from one that replaces it."""

    mtime_ns: int
    """Modification time, in ns since 1970; at most the last that is stored in 64 bits, in 2262."""

    size: int
    """Lower 32 bits of the size in bytes."""

    @classmethod
    def of(cls, status: os.stat_result) -> "FileVersion":
        """Returns the version of a file with this status."""
        return cls(min(status.st_mtime_ns, _LAST_NS), status.st_size & 0xFFFFFFFF)


class StorageStats(NamedTuple):
    """Counters since a `Storage` was built."""

    bytes_read: int = 0
    """Bytes of ranges, streams and whole objects; streams of local files do not count."""


class ObjectAddress(NamedTuple):
    """The parts of a URL."""

    scheme: str
    bucket: str
    """Bucket of S3 and GCS, container of Azure, or host and port."""

    key: str
    """Name of the object in the bucket. Empty for the bucket itself."""


def has_scheme(text: str) -> bool:
    """Returns whether a text begins with any `scheme://`, so that it cannot be meant as a local path."""
    return _URL.match(text.lstrip()) is not None


def is_url(text: str) -> bool:
    """Returns whether a text begins with one of the schemes of object stores, such as `s3://`."""
    match = _URL.match(text)
    return match is not None and match[1].lower() in SCHEMES


@lru_cache(maxsize=8192)
def parse_url(location: str) -> ObjectAddress:
    """Splits a URL into scheme, bucket and key.

    Raises:
        StorageError: "invalid": another scheme, no bucket, a user name, a password or a signature in the URL, or a key
            that stores cannot hold.
    """
    match = _URL.match(location)
    if match is None or match[1].lower() not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise _invalid(location, f"is not a URL of an object store: expected one of {known}")
    scheme, rest = match[1].lower(), location[match.end() :]
    bucket, _, key = rest.partition("/")
    # A colon is legal before a port only. Elsewhere, it separates a user name from a password, which may have a slash.
    if not has_plain_authority(rest) or (":" in bucket and scheme in _WITH_BUCKETS) or _SECRET_QUERY.search(rest):
        raise _invalid(
            location,
            "holds credentials, which would be written to the corpus. Pass the URL without them, and set the "
            "environment variables of your store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if not bucket or any(character in bucket for character in "?# \\"):
        raise _invalid(location, f"names no bucket: expected {scheme}://BUCKET/NAME")
    if scheme in ("http", "https"):
        if "?" in rest or "#" in rest:
            raise _invalid(location, "has a query or a fragment, which are not supported. Pass the URL of a plain file")
        key = unquote(key)
    if any(part in ("", ".", "..") for part in key.rstrip("/").split("/")) and key.strip("/"):
        raise _invalid(location, "has an empty part, '.' or '..' between slashes. Pass the name as the store lists it")
    return ObjectAddress(scheme, bucket, key)


def location_of(given: str | Path) -> str:
    """Returns a path or URL that a user gives as a location: absolute, and without a slash at its end.

    Raises:
        StorageError: "invalid": as for `parse_url`.
    """
    if not has_scheme(str(given)):
        return str(Path(given).resolve())
    parse_url(str(given))
    return str(given).rstrip("/")


def join(folder: str, name: str) -> str:
    """Returns the location of a name relative to a folder. An absolute path or a URL as name is returned as it is.

    Neither `..` nor `.` is resolved; `name` may contain slashes.
    """
    if is_url(name) or name.startswith("/") or not folder:
        return name
    return f"{folder.rstrip('/')}/{name}" if folder.strip("/") else f"/{name}"


def parent(location: str) -> str:
    """Returns the folder of a location, without a slash at the end. The parent of a bucket is the bucket itself."""
    if not is_url(location):
        return posixpath.dirname(location.rstrip("/")) or "/"
    start = location.index("://") + 3
    root, slash, path = location[start:].rstrip("/").partition("/")
    folder = posixpath.dirname(path)
    return location[:start] + root + (slash + folder if folder else "")


def common_folder(first: str, second: str) -> str:
    """Returns the deepest folder that holds two folders, both absolute paths or URLs; empty if there is none."""
    if is_url(first) != is_url(second):
        return ""
    parts = []
    for one, other in zip(first.rstrip("/").split("/"), second.rstrip("/").split("/"), strict=False):
        if one != other:
            break
        parts.append(one)
    # The first three parts of a URL are its scheme and its bucket or host. The first part of a path is empty.
    if is_url(first) and len(parts) < 3:
        return ""
    return "/".join(parts) or "/"


def name_of(location: str) -> str:
    """Returns the last part of a location: the file's name, or the bucket's if there is no key."""
    return location.rstrip("/").rpartition("/")[2]


def _invalid(location: str, problem: str) -> StorageError:
    return StorageError.because("invalid", f"{redacted_url(location)}: {problem}.")
