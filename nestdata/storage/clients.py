"""Clients of object stores, made by obstore, with the credentials of the environment, and the errors of their requests.

The threads of obstore do not survive a fork, and a forked child that uses it hangs. Therefore a child that was forked
after its parent had begun to use one raises instead.
"""

import os
from datetime import timedelta
from functools import cache
from multiprocessing.context import assert_spawning
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nestdata.errors import ConfigError, StorageError
from nestdata.redaction import redacted
from nestdata.storage.location import ObjectAddress
from nestdata.storage.storage_config import StorageConfig

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_REQUEST_TIMEOUT_S = 180
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0

_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""Prefixes of the environment variables, by scheme."""

_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Environment variables with the keys, by scheme."""

_is_used = False
_was_forked_after_use = False


def _after_fork_in_child() -> None:
    global _was_forked_after_use
    _was_forked_after_use = _was_forked_after_use or _is_used


os.register_at_fork(after_in_child=_after_fork_in_child)


def check_not_forked(location: str) -> None:
    """Notes that this process uses object stores; refuses them if it was forked after its parent had used one.

    The first request counts as use, before there is a client: another thread may fork meanwhile.

    Raises:
        StorageError: "invalid": this process was forked in that way.
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


class StoreEnvironment:
    """Passes the variables of the process that starts a worker to the worker.

    The variables contain secrets. They are read while the worker is being started, and are sent through a pipe;
    pickling at any other time raises RuntimeError.
    """

    _variables: dict[str, str] | None = None

    def __getstate__(self) -> dict[str, str]:
        assert_spawning(self)
        return _store_variables()

    def __setstate__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def apply(self) -> None:
        """Sets the variables in a worker. Does nothing in a forked one, which has them already."""
        if self._variables is None:
            return
        for name in _store_variables().keys() - self._variables.keys():
            del os.environ[name]
        os.environ.update(self._variables)
        self._variables = None


def _store_variables() -> dict[str, str]:
    prefixes = tuple(f"{prefix}_" for prefix in _PREFIXES.values())
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def make_store(address: ObjectAddress, config: StorageConfig, *, patience_s: float, is_upload: bool) -> "ObjectStore":
    """Returns a client of one bucket, which repeats requests by itself.

    Args:
        address: Address of any object in the bucket.
        config: The time limits.
        patience_s: Seconds for which a request is repeated.
        is_upload: Whether the client is for uploads, whose parts may take longer than the limit for a stall.

    Raises:
        ConfigError: The extra `remote` is not installed.
        StorageError: "invalid": The endpoint has an http URL, which is not allowed.
    """
    import_obstore()
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    is_http_allowed = _is_http_allowed(address.scheme)
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT", "")
    if address.scheme == "s3" and endpoint.startswith("http://") and not is_http_allowed:
        raise StorageError.because(
            "invalid",
            f"s3://{address.bucket}: the endpoint {redacted(endpoint)} is not encrypted. Set AWS_ALLOW_HTTP=true, or "
            "give an https endpoint.",
        )
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "timeout": timedelta(seconds=max(_REQUEST_TIMEOUT_S, 2 * config.stall_timeout_s)),
        "allow_http": is_http_allowed,
        "pool_max_idle_per_host": str(config.max_requests),
        "user_agent": "nestdata",
    }
    if not is_upload:
        client["read_timeout"] = timedelta(seconds=config.stall_timeout_s)
    longest, first = timedelta(seconds=_LONGEST_PAUSE_S), timedelta(seconds=_FIRST_PAUSE_S)
    retries: RetryConfig = {
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=patience_s),
        "backoff": {"init_backoff": first, "max_backoff": longest, "base": 3},
    }
    options: Any = {"client_options": client, "retry_config": retries}
    if address.scheme == "s3":
        return S3Store(address.bucket, **options)
    if address.scheme == "gs":
        return GCSStore(address.bucket, **options)
    if address.scheme == "az":
        return AzureStore(address.bucket, **options)
    return HTTPStore(f"{address.scheme}://{address.bucket}", **options)


def request_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that a failed request raises; all others are errors of this program."""
    return (import_obstore().exceptions.BaseError, OSError, ValueError)


def storage_error(error: Exception, location: str) -> StorageError:
    """Returns the StorageError for an exception of obstore, whose class decides about the kind.

    A request that fails for a transient reason was repeated before; so a failure without a class of its own is
    "unavailable".
    """
    classes = import_obstore().exceptions
    scheme = location.partition(":")[0].lower()
    reason = f"{location}: {_first_line(error)}."
    if isinstance(error, FileNotFoundError | classes.NotFoundError):
        return StorageError.because("missing", f"{location}: no such object, or no such bucket.")
    if isinstance(error, (classes.PermissionDeniedError, classes.UnauthenticatedError)):
        return StorageError.because("denied", f"{reason} {_advice_on_keys(scheme)}".rstrip())
    if isinstance(error, classes.NotSupportedError):
        return StorageError.because("invalid", f"{location}: the server does not answer requests for a range of bytes.")
    if isinstance(error, (ValueError, classes.InvalidPathError, classes.UnknownConfigurationKeyError)):
        return StorageError.because("invalid", reason)
    advice = f"Check the store, the endpoint and the network. {_advice_on_keys(scheme)}".rstrip()
    return StorageError.because("unavailable", f"{reason} {advice}")


def _first_line(error: Exception) -> str:
    """Returns the first line of an error, without the body of the server's answer, which may hold a session token."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    until_status, status, body = line.partition("status code: ")
    line = until_status + status + body.partition(":")[0]
    for start_of_body in "<{":
        line = line.partition(start_of_body)[0]
    return redacted(line).rstrip(" :.")


def _advice_on_keys(scheme: str) -> str:
    """Returns which variables to check, and how to use a profile of the AWS tools, which obstore does not read."""
    if scheme not in _KEYS:
        return ""
    advice = f"Check {_KEYS[scheme]} in the environment."
    if scheme == "s3" and "AWS_ACCESS_KEY_ID" not in os.environ:
        if "AWS_PROFILE" in os.environ or os.path.exists(os.path.expanduser("~/.aws/credentials")):
            advice += (
                " Profiles of AWS and the file ~/.aws/credentials are not read: run "
                '`eval "$(aws configure export-credentials --format env)"`.'
            )
    return advice


def _is_http_allowed(scheme: str) -> bool:
    """Returns whether http is allowed; reads the environment, which obstore ignores when other options are given."""
    allowed = os.environ.get(f"{_PREFIXES.get(scheme)}_ALLOW_HTTP", "").strip().lower() in ("1", "true", "yes", "on")
    return scheme == "http" or allowed
