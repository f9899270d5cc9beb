"""Objects of stores: requests through obstore, repeated with patience, with checked answers."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nestdata.errors import StorageError
from nestdata.storage.clients import Client, Clients, check_not_forked, import_obstore
from nestdata.storage.config import MIB, StorageConfig
from nestdata.storage.failures import ObjectChanged, ShortAnswer, classify, num_own_retries
from nestdata.storage.info import ObjectInfo, StatsCounter
from nestdata.storage.location import ObjectAddress, parse_url
from nestdata.storage.patience import Patience

if TYPE_CHECKING:
    from obstore import ObjectMeta

UPLOAD_PART_BYTES = 8 * MIB
"""Size of the parts of uploads. S3 takes none below 5 MiB but the last, and at most 10,000."""

Result = TypeVar("Result")


class RemoteObjects:
    """Reads and writes objects of stores. Thread-safe."""

    def __init__(self, config: StorageConfig, stats: StatsCounter) -> None:
        self._config = config
        self._stats = stats
        self._clients = Clients(config)
        self._slots = threading.BoundedSemaphore(config.max_requests)

    def info(self, location: str) -> ObjectInfo:
        """Asks for size and ETag of an object."""

        def head(client: Client, key: str) -> ObjectInfo:
            try:
                return _info(location, import_obstore().head(client.reading, key))
            except request_errors() as error:
                if classify(error).is_transient:
                    raise
                # Answers to HEAD have no body, which would tell a missing bucket from a missing object.
                return _info(location, import_obstore().get(client.reading, key, options={"range": (0, 1)}).meta)

        return self._persist(location, head)

    def read_range(
        self,
        location: str,
        offset: int,
        length: int,
        *,
        etag: str | None,
        size: int | None,
        stop: threading.Event | None = None,
    ) -> bytes:
        """Returns a range of an object. After a failure, only the bytes that are still missing are requested."""
        received: list[bytes] = []
        end = offset + length
        patience = self._patience(location, stop)

        def get(client: Client, key: str) -> bytes:
            nonlocal etag, size
            start = offset + sum(map(len, received))
            answer = import_obstore().get(client.reading, key, options={"range": (start, end)})
            meta = answer.meta
            _check_version(meta, etag=etag, size=size, end=end)
            etag, size = meta["e_tag"], meta["size"]  # later tries must not add bytes of another version
            if answer.range != (start, end):
                raise ShortAnswer(f"the answer holds bytes {answer.range}, expected {(start, end)}")
            for chunk in answer.stream(min_chunk_size=MIB):
                received.append(chunk)
                patience.made_progress()
            return _checked(b"".join(received), length)

        content = self._persist(location, get, patience)
        self._stats.add(bytes_read=length)
        return content

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        """Yields the objects whose names begin with a folder's, sorted by location. Takes 300 bytes each until then."""
        address = self._address(folder)
        root = f"{address.scheme}://{address.bucket}/"
        if address.scheme in ("http", "https"):
            raise StorageError.because(
                "invalid", f"{folder}: web servers cannot list folders. Give a manifest, or the URLs themselves."
            )

        def list_all(client: Client, key: str) -> list[ObjectInfo]:
            _reach(client, key)
            pages = import_obstore().list(client.patient, key.rstrip("/") or None, chunk_size=1000)
            return [_info(root + meta["path"], meta) for page in pages for meta in page]

        yield from sorted(self._persist(folder, list_all))

    def write(self, location: str, source: bytes | Path) -> ObjectInfo:
        """Uploads an object, in parts if it is large. It appears when all of it has arrived."""
        size = source.stat().st_size if isinstance(source, Path) else len(source)

        def put(client: Client, key: str) -> None:
            _reach(client, key)
            import_obstore().put(client.patient, key, source, chunk_size=UPLOAD_PART_BYTES, max_concurrency=4)

        self._persist(location, put)
        self._stats.add(bytes_written=size)
        info = self.info(location)
        if info.size != size:
            raise StorageError.because(
                "changed",
                f"{location}: has {info.size} bytes after {size} were written. Another run may be writing it.",
            )
        return info

    def delete(self, location: str) -> None:
        """Deletes an object. One that does not exist counts as deleted."""

        def delete(client: Client, key: str) -> None:
            import_obstore().delete(client.reading, key)

        try:
            self._persist(location, delete)
        except StorageError as error:
            if error.kind != "missing":
                raise

    def _address(self, location: str) -> ObjectAddress:
        address = parse_url(location)
        check_not_forked(location)
        return address

    def _patience(self, location: str, stop: threading.Event | None = None) -> Patience:
        address = self._address(location)
        return Patience(
            location, self._config, self._stats, stop=stop, was_reached=lambda: self._clients.get(address).was_reached
        )

    def _persist(
        self, location: str, request: Callable[[Client, str], Result], patience: Patience | None = None
    ) -> Result:
        """Makes a request until it succeeds. Refused credentials are read anew once.

        Raises:
            ConfigError: The extra `remote` is not installed.
            StorageError: The request failed for good.
        """
        address = self._address(location)
        patience = patience or self._patience(location)
        has_renewed, num_requests = False, 0
        started = time.monotonic()
        try:
            while True:
                client = self._clients.get(address)
                num_requests += 1
                try:
                    with self._slots:
                        result = request(client, address.key)
                    client.was_reached = True
                    return result
                except request_errors() as error:
                    failure, num_tries = classify(error, address.scheme), num_own_retries(error) + 1
                client.was_reached = client.was_reached or not failure.is_unreachable
                if failure.kind == "denied" and not failure.is_transient and not has_renewed:
                    has_renewed = True
                    self._clients.renew(address, client)
                    continue
                patience.failed(failure, num_tries=num_tries)
        finally:
            self._stats.add(requests=num_requests, seconds_waited=time.monotonic() - started)


def request_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that a failed request raises; all others are errors of this program."""
    return (import_obstore().exceptions.BaseError, OSError, ValueError, ShortAnswer, ObjectChanged)


def normalised_etag(etag: str | None) -> str | None:
    """Returns an ETag without quotes and without the mark of weak ETags, which proxies add; None if it is empty."""
    return (etag or "").removeprefix("W/").strip('"') or None


def _info(location: str, meta: "ObjectMeta") -> ObjectInfo:
    return ObjectInfo(location, meta["size"], normalised_etag(meta["e_tag"]))


def _check_version(meta: Any, *, etag: str | None, size: int | None, end: int) -> None:
    """Compares an answer with what is known of the object.

    The condition `If-Match` is not sent, because some servers ignore it and others cannot compare weak ETags.
    """
    found = normalised_etag(meta["e_tag"])
    if size is not None and meta["size"] != size:
        raise ObjectChanged(f"has {meta['size']} bytes, expected {size}")
    if etag is not None and found is not None and found != normalised_etag(etag):
        raise ObjectChanged(f"has ETag {found}, expected {normalised_etag(etag)}")
    if meta["size"] < end:
        raise ObjectChanged(f"has {meta['size']} bytes, expected {end} or more")


def _reach(client: Client, key: str) -> None:
    """Raises if a server that has not answered before cannot be reached: the patient client would wait for long."""
    if client.was_reached:
        return
    try:
        import_obstore().head(client.reading, key or "any")
    except request_errors() as error:
        if classify(error).is_transient:
            raise
    client.was_reached = True


def _checked(content: bytes, length: int) -> bytes:
    if len(content) != length:
        raise ShortAnswer(f"the answer has {len(content)} bytes, expected {length}")
    return content
