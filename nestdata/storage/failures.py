"""Classification of the failures of requests: transient, missing, changed, denied or invalid.

obstore has few exception classes, so the HTTP status and the store's error code are read from its messages. Nothing
else of a message is passed on: it may hold signed URLs and parts of credentials.
"""

import errno
import os
import re
from typing import NamedTuple

from nestdata.errors import StorageErrorKind


class Failure(NamedTuple):
    """Why one request failed."""

    kind: StorageErrorKind
    """Kind of the `StorageError` that is raised, at once or when the patience has ended."""

    reason: str
    """What happened, in a few words, without secrets."""

    cure: str = ""
    """What to do, as a sentence. Empty if the general advice for this kind is enough."""

    is_transient: bool = False
    """Whether the same request may succeed later."""

    is_unreachable: bool = False
    """Whether the server was not reached at all."""


class ShortAnswer(Exception):
    """A body ended early, or is longer than what was asked for."""


class ObjectChanged(Exception):
    """An answer belongs to another version of the object; the message says how it differs."""


_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_OWN_RETRIES = re.compile(r"after (\d+) retries")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>|\"code\"\s*:\s*\"(\w+)\"")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerDisabled", "ContainerBeingDeleted"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "InvalidSecurity"}
_WRONG_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_CREDENTIAL_SERVICES = (
    "169.254.169.254",
    "169.254.170.2",
    "/latest/api/token",
    "/latest/meta-data/",
    "metadata.google.internal",
    "login.microsoftonline.com",
)
"""Parts of the URLs at which clouds give credentials to their machines."""

_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted"}

_VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ALLOW_HTTP"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_ALLOW_HTTP"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_ALLOW_HTTP"),
}
"""Environment variables with the keys, and the one that allows http, by scheme."""

_TRANSIENT_SYSTEM_ERRORS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EINTR,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ECONNRESET,
    errno.ENOTCONN,
}


def classify(error: Exception, scheme: str = "") -> Failure:
    """Classifies an exception of obstore, or one of this module's own.

    Args:
        error: What was raised.
        scheme: Of the URL, for the advice.
    """
    text = str(error)
    name = type(error).__name__
    if isinstance(error, ShortAnswer):
        return Failure("unavailable", text, is_transient=True)
    if isinstance(error, ObjectChanged):
        return Failure("changed", text)
    if name in ("ValueError", "InvalidPathError"):
        return Failure("invalid", "stores cannot hold an object of this name")
    if name == "NotSupportedError":
        cure = "Copy the data to a server that does."
        return Failure("invalid", "the server does not answer requests for a range of bytes", cure)
    if any(part in text for part in _CREDENTIAL_SERVICES):
        problem = "no credentials were found in the environment, and no service of the cloud gave any"
        cure = f"{_set_keys(scheme)}{_unread_profile() if scheme == 's3' else ''}"
        return Failure("denied", problem, cure, is_transient=True, is_unreachable=True)
    if match := _STATUS.search(text):
        code = _CODE.search(text)
        return _of_status(int(match[1]), (code[1] or code[2]) if code else "", text, scheme)
    if name == "UnknownConfigurationKeyError" or "Generic Config" in text:
        return Failure("invalid", "a setting of the store in the environment is wrong", _set_keys(scheme))
    if "incorrectly configured region" in text:
        return Failure("denied", "the bucket is in another region", "Set AWS_REGION to the region of the bucket.")
    if isinstance(error, FileNotFoundError):
        return Failure("missing", "no such object")
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Failure("denied", "no permission", _set_keys(scheme))
    return _of_connection(text, scheme)


def num_own_retries(error: Exception) -> int:
    """Returns how many times obstore has repeated the request itself."""
    match = _OWN_RETRIES.search(str(error))
    return int(match[1]) if match else 0


def classify_system_error(error: OSError) -> Failure:
    """Classifies a failure of a local file."""
    reason = error.strerror or type(error).__name__
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Failure("missing", "no such file")
    if isinstance(error, IsADirectoryError):
        return Failure("invalid", "is a directory, expected a file")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return Failure("denied", f"no permission ({reason})", "Check the permissions of the file and its folders.")
    if error.errno in _TRANSIENT_SYSTEM_ERRORS:
        return Failure("unavailable", reason, "Check the disk, or the server of the file system.", is_transient=True)
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
        return Failure("invalid", reason)
    return Failure("unavailable", reason)


def _of_status(status: int, code: str, text: str, scheme: str) -> Failure:
    answer = f"HTTP {status}{f' {code}' if code else ''}"
    if code in _NO_BUCKET or "bucket does not exist" in text:
        return Failure("denied", f"no such bucket ({answer})", "Check the name of the bucket, and the endpoint.")
    if code in _EXPIRED:
        return Failure("denied", f"the credentials have expired ({answer})", "Renew them and start again.")
    if code in _WRONG_KEY:
        return Failure("denied", f"wrong key ({answer})", _set_keys(scheme))
    if code in _WRONG_REGION:
        return Failure("denied", f"the bucket is in another region ({answer})", "Set AWS_REGION to its region.")
    if code == "RequestTimeTooSkewed":
        return Failure("denied", f"the clock of this machine is wrong ({answer})", "Set the clock.")
    if status in (401, 403):
        return Failure("denied", f"no permission ({answer})", f"The object may also be missing. {_set_keys(scheme)}")
    if code in _TRANSIENT_CODES or status in (408, 409, 429) or (status >= 500 and status not in (501, 505)):
        return Failure("unavailable", answer, is_transient=True)
    if status in (404, 410):
        return Failure("missing", f"no such object ({answer})")
    if status == 412:
        return Failure("changed", f"the store holds another version ({answer})")
    if status == 416:
        return Failure("changed", f"the object is shorter than expected ({answer})")
    if status == 400 and "HTTPS" in text.partition("status code")[2].upper():
        return Failure(
            "invalid", f"the server expects https ({answer})", "Change http to https in the endpoint or URL."
        )
    if status == 400 and not code:
        return Failure(
            "denied", f"the server refused the request ({answer})", f"The keys may be wrong. {_set_keys(scheme)}"
        )
    return Failure("invalid", answer, "Check the endpoint.")


def _of_connection(text: str, scheme: str) -> Failure:
    if "builder error" in text or "BadScheme" in text or "URL scheme is not allowed" in text:
        return Failure("invalid", "the endpoint has an http URL, and http is not allowed", _allow_http(scheme))
    if "InvalidContentType" in text or "WrongVersionNumber" in text or "wrong version number" in text.lower():
        return Failure(
            "invalid", "the server does not speak https", f"Change https to http in the URL. {_allow_http(scheme)}"
        )
    if "invalid peer certificate" in text or "UnknownIssuer" in text or "InvalidCertificate" in text:
        return Failure("denied", "the server's certificate is not trusted", "Check the host name and its certificate.")
    if "dns error" in text:
        return Failure("unavailable", "the host name is unknown", "Check the name and the network.", True, True)
    if "Connection refused" in text or "ConnectionRefused" in text:
        return Failure("unavailable", "connection refused", "Check host and port.", True, True)
    if "kind: Connect" in text or "tcp connect error" in text:
        return Failure("unavailable", "no connection", "Check host, port and network.", True, True)
    if "TimedOut" in text or "operation timed out" in text or "kind: Timeout" in text:
        return Failure("unavailable", "no answer within the time limit", is_transient=True)
    if "ConnectionReset" in text or "reset by peer" in text:
        return Failure("unavailable", "connection reset", is_transient=True)
    if "IncompleteBody" in text or "end of file before message length" in text or "IncompleteMessage" in text:
        return Failure("unavailable", "the answer ended early", is_transient=True)
    return Failure("unavailable", "the connection failed", is_transient=True)


def _set_keys(scheme: str) -> str:
    return f"Check {_VARIABLES[scheme][0]} in the environment." if scheme in _VARIABLES else ""


def _unread_profile() -> str:
    """Returns how to use the profile of the AWS tools, which obstore does not read; empty if there is none."""
    if "AWS_PROFILE" in os.environ:
        found = f"The profile {os.environ['AWS_PROFILE']!r} in AWS_PROFILE"
    elif os.path.exists(os.path.expanduser("~/.aws/credentials")):
        found = "The file ~/.aws/credentials"
    else:
        return ""
    return f' {found} is not read: run `eval "$(aws configure export-credentials --format env)"`.'


def _allow_http(scheme: str) -> str:
    if scheme not in _VARIABLES:
        return ""
    return f"For http, which is not encrypted, set {_VARIABLES[scheme][1]}=true; otherwise give an https endpoint."
