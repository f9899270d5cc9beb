"""Clients of object stores, made by obstore: one a bucket and process, with the credentials of the environment.

The threads of obstore do not survive a fork, and a forked child that uses it hangs. Therefore a child that was forked
after its parent had begun to use one raises instead.
"""

import os
import threading
from datetime import timedelta
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nestdata.errors import ConfigError, StorageError
from nestdata.storage.config import StorageConfig
from nestdata.storage.location import ObjectAddress
from nestdata.storage.patience import LONGEST_PAUSE_S, SHORTEST_PAUSE_S

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_WRITE_TIMEOUT_S = 180

_is_used = False
_was_forked_after_use = False


def _after_fork_in_child() -> None:
    global _was_forked_after_use
    _was_forked_after_use = _was_forked_after_use or _is_used


os.register_at_fork(after_in_child=_after_fork_in_child)


def check_not_forked(location: str) -> None:
    """Notes that this process uses object stores; refuses them if it was forked after its parent had used one.

    The first request counts as use, before there is a client: another thread may fork while this one holds a lock.

    Raises:
        StorageError: "invalid": this is such a process.
    """
    global _is_used
    if _was_forked_after_use:
        raise StorageError.because(
            "invalid",
            f"{location}: this process was forked after its parent had used an object store, whose client does not "
            "survive a fork. Start processes by forkserver or spawn (multiprocessing.get_context('forkserver'), "
            "start_method='forkserver' of the loader).",
        )
    _is_used = True


@cache
def import_obstore() -> ModuleType:
    """Returns the module `obstore`.

    Raises:
        ConfigError: The extra `remote` is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise ConfigError(
            "Object stores need obstore. Install it with `pip install 'nest-pretrain[remote]'`."
        ) from None
    return obstore


class Client:
    """The connections to one bucket."""

    def __init__(self, address: ObjectAddress, config: StorageConfig) -> None:
        self._address = address
        self._config = config
        self._lock = threading.Lock()
        self._reading: ObjectStore | None = None
        self._patient: ObjectStore | None = None
        self.was_reached = False
        """Whether the server has answered a request."""

    @property
    def reading(self) -> "ObjectStore":
        """Tries each request once, because `Patience` repeats them.

        Raises:
            ConfigError: The extra `remote` is not installed.
        """
        if self._reading is None:
            with self._lock:
                self._reading = self._reading or _make_store(self._address, self._config, is_patient=False)
        return self._reading

    @property
    def patient(self) -> "ObjectStore":
        """Repeats requests itself: for uploads and listings, which make many requests each.

        Raises:
            ConfigError: The extra `remote` is not installed.
        """
        with self._lock:
            self._patient = self._patient or _make_store(self._address, self._config, is_patient=True)
            return self._patient


class Clients:
    """The clients of this process, by bucket. Thread-safe."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], Client] = {}

    def get(self, address: ObjectAddress) -> Client:
        """Returns the client of a bucket."""
        key = (address.scheme, address.bucket)
        client = self._clients.get(key)
        if client is None:
            with self._lock:
                client = self._clients.get(key) or Client(address, self._config)
                self._clients[key] = client
        return client

    def renew(self, address: ObjectAddress, old: Client) -> None:
        """Replaces a client whose credentials were refused, unless another thread has done so already."""
        with self._lock:
            key = (address.scheme, address.bucket)
            if self._clients.get(key) is old:
                self._clients[key] = Client(address, self._config)
                self._clients[key].was_reached = old.was_reached


def _make_store(address: ObjectAddress, config: StorageConfig, *, is_patient: bool) -> "ObjectStore":
    import_obstore()
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    options: Any = {"client_options": _client_options(address, config, is_patient=is_patient)}
    options["retry_config"] = _retries(config) if is_patient else {"max_retries": 0}
    if address.scheme == "s3":
        return S3Store(address.bucket, **options)
    if address.scheme == "gs":
        return GCSStore(address.bucket, **options)
    if address.scheme == "az":
        return AzureStore(address.bucket, **options)
    return HTTPStore(f"{address.scheme}://{address.bucket}", **options)


def _client_options(address: ObjectAddress, config: StorageConfig, *, is_patient: bool) -> "ClientConfig":
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "allow_http": address.scheme == "http" or _is_http_allowed(address.scheme),
        "pool_max_idle_per_host": str(config.max_requests),
        "user_agent": "nestdata",
    }
    if is_patient:
        # A stall limit would also end an upload of one part that takes longer than it.
        options["timeout"] = timedelta(seconds=_WRITE_TIMEOUT_S)
    else:
        options["read_timeout"] = timedelta(seconds=config.stall_timeout_s)
        options["timeout"] = timedelta(seconds=max(_WRITE_TIMEOUT_S, 2 * config.stall_timeout_s))
    return options


def _is_http_allowed(scheme: str) -> bool:
    """Returns what the environment says, because obstore forgets that when other options are given."""
    prefix = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}.get(scheme)
    return os.environ.get(f"{prefix}_ALLOW_HTTP", "").strip().lower() in ("1", "true", "yes", "on")


def _retries(config: StorageConfig) -> "RetryConfig":
    return {
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=config.patience_s),
        "backoff": {
            "init_backoff": timedelta(seconds=SHORTEST_PAUSE_S),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
            "base": 3,
        },
    }
