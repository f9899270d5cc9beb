"""Objects of stores: requests through obstore, which repeats them, and checks of their answers."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nestdata.errors import StorageError
from nestdata.storage.clients import check_not_forked, import_obstore, make_store, request_errors, storage_error
from nestdata.storage.location import ObjectAddress, ObjectInfo, parse_url
from nestdata.storage.storage_config import MIB, StorageConfig

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

UPLOAD_PART_BYTES = 8 * MIB
"""Size of the parts of uploads. S3 takes at most 10,000 parts; all but the last must have 5 MiB or more."""

_PART_BYTES = MIB
"""Size of the parts in which an answer is read, so that an endless one is noticed."""

Result = TypeVar("Result")


class RemoteObjects:
    """Reads and writes objects of stores. Thread-safe."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._slots = threading.BoundedSemaphore(config.max_requests)
        self._stores: dict[tuple[str, str, float, bool], ObjectStore] = {}
        self._reached: set[tuple[str, str]] = set()
        """Buckets whose store has answered."""

    def info(self, location: str) -> ObjectInfo:
        """Asks for size and ETag of an object."""
        deadline = self._deadline(location)
        try:
            return _info(location, self._request(location, lambda store, key: import_obstore().head(store, key)))
        except StorageError as error:
            if error.kind == "unavailable" and time.monotonic() >= deadline:
                raise

        # Some servers refuse HEAD requests, and a URL may be signed for GET only.
        def get(store: "ObjectStore", key: str) -> ObjectInfo:
            return _info(location, import_obstore().get(store, key, options={"range": (0, 1)}).meta)

        return self._request(location, get)

    def read_range(self, location: str, offset: int, length: int, *, etag: str | None, size: int | None) -> bytes:
        """Returns a range of an object."""
        end = offset + length

        def get(store: "ObjectStore", key: str) -> bytes:
            answer = import_obstore().get(store, key, options={"range": (offset, end)})
            _check_version(_info(location, answer.meta), etag=etag, size=size, end=end)
            content = bytearray()
            for part in answer.stream(min_chunk_size=_PART_BYTES):
                content += part
                if len(content) > length:  # not what was requested, and perhaps endless
                    break
            return bytes(content)

        deadline = self._deadline(location)
        try:
            content = self._request(location, get)
        except StorageError as error:
            failure = error
        else:
            if len(content) == length:
                return content
            text = f"{location}: the answer has {len(content)} bytes, expected {length}."
            failure = StorageError.because("unavailable", text)
        if failure.kind == "unavailable" and time.monotonic() < deadline:
            # A range beyond the end of an object that is shorter now, or one that was replaced during the answer.
            try:
                found = self.info(location)
            except StorageError:
                raise failure from None
            _check_version(found, etag=etag, size=size, end=end)
        raise failure

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        """Yields the objects below a folder, sorted by location. Sorting takes 300 bytes of memory for each."""
        address = parse_url(folder)
        root = f"{address.scheme}://{address.bucket}/"
        if address.scheme in ("http", "https"):
            raise StorageError.because(
                "invalid", f"{folder}: web servers cannot list folders. Give a manifest, or the URLs themselves."
            )

        def list_all(store: "ObjectStore", key: str) -> list[ObjectInfo]:
            pages = import_obstore().list(store, key.rstrip("/") or None, chunk_size=1000)
            return [_info(root + meta["path"], meta) for page in pages for meta in page]

        yield from sorted(self._request(folder, list_all))

    def write(self, location: str, source: bytes | Path) -> ObjectInfo:
        """Uploads an object, in parts if it is large. It appears when all of it has arrived."""

        def put(store: "ObjectStore", key: str) -> None:
            import_obstore().put(store, key, source, chunk_size=UPLOAD_PART_BYTES, max_concurrency=4)

        self._request(location, put, is_upload=True)
        return self.info(location)

    def delete(self, location: str) -> None:
        """Deletes an object. One that does not exist counts as deleted."""
        try:
            self._request(location, lambda store, key: import_obstore().delete(store, key))
        except StorageError as error:
            if error.kind != "missing":
                raise

    def _request(
        self, location: str, request: Callable[["ObjectStore", str], Result], *, is_upload: bool = False
    ) -> Result:
        """Makes a request, which the client repeats until it succeeds or the patience ends.

        Raises:
            ConfigError: The extra `remote` is not installed.
            StorageError: The request failed for good.
        """
        address = parse_url(location)
        check_not_forked(location)
        try:
            with self._slots:
                result = request(self._store(address, is_upload), address.key)
        except request_errors() as error:
            failure = storage_error(error, location)
            if failure.kind != "unavailable":
                self._reached.add((address.scheme, address.bucket))
            raise failure from None
        self._reached.add((address.scheme, address.bucket))
        return result

    def _deadline(self, location: str) -> float:
        """Returns when the patience ends for a request that begins now; if it fails earlier, it was not repeated."""
        return time.monotonic() + self._patience_s(parse_url(location))

    def _patience_s(self, address: ObjectAddress) -> float:
        """Returns the patience with a bucket, which is shorter before the first answer."""
        is_reached = (address.scheme, address.bucket) in self._reached
        patience_s = self._config.patience_s
        return patience_s if is_reached else min(patience_s, self._config.first_contact_s)

    def _store(self, address: ObjectAddress, is_upload: bool) -> "ObjectStore":
        patience_s = self._patience_s(address)
        key = (address.scheme, address.bucket, patience_s, is_upload)
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = make_store(address, self._config, patience_s=patience_s, is_upload=is_upload)
        return store


def _info(location: str, meta: "ObjectMeta | Any") -> ObjectInfo:
    return ObjectInfo(location, meta["size"], _normalised_etag(meta["e_tag"]))


def _normalised_etag(etag: str | None) -> str | None:
    """Returns an ETag without quotes and without the mark of weak ETags, which proxies add; None if it is empty."""
    return (etag or "").removeprefix("W/").strip('"') or None


def _check_version(found: ObjectInfo, *, etag: str | None, size: int | None, end: int) -> None:
    """Compares an answer with what is known of the object.

    The condition `If-Match` is not sent, because some servers ignore it and others cannot compare weak ETags.
    """
    problem = None
    if size is not None and found.size != size:
        problem = f"has {found.size} bytes, expected {size}"
    elif etag is not None and found.etag is not None and found.etag != _normalised_etag(etag):
        problem = f"has ETag {found.etag}, expected {_normalised_etag(etag)}"
    elif found.size < end:
        problem = f"has {found.size} bytes, expected {end} or more"
    if problem is not None:
        raise StorageError.because("changed", f"{found.location}: {problem}.")
