"""All errors that nestdata and nestmodel raise deliberately.

    NestError
    ├── ConfigError      a setting is out of range, or two settings contradict each other
    ├── ManifestError    a manifest is missing, is not a manifest, or has a line that cannot be read
    ├── CorpusError      a corpus directory is missing or damaged
    ├── OutputError      an output exists already, cannot be written, or is being written by another run
    ├── PlanError        the cuts cannot be arranged in batches within the budget
    ├── StorageError     a file or object cannot be read or written: missing, changed, denied or unavailable
    ├── AudioError       the audio of a cut cannot be used: missing, unreadable, damaged or not finite
    │   in `nestmodel.errors`:
    ├── ExtractError     features cannot be computed or written
    ├── ProbeError       the labels or texts do not suffice for a probe
    ├── TrainingError    training or a preflight cannot continue
    └── WeightsError     a model file cannot be read or does not fit the model

Every constructor takes one string, because an error that is raised in a loader worker is rebuilt in the parent process
from its text alone.
"""

from typing import Literal

from nestdata.redaction import redacted

# A path has at most 4096 bytes, and the lines of a traceback are shorter.
_MAX_LINE, _MAX_MESSAGE = 2000, 20_000


class NestError(Exception):
    """Root of all errors of nestdata and nestmodel; the message names the problem, its location and the remedy.

    URLs in the message are shown without their secrets. A very long message, for example with a long name from an
    input, is shortened in the middle.
    """

    def __init__(self, message: str = "") -> None:
        message = redacted(message)
        if len(message) > _MAX_LINE:
            message = shortened("\n".join(shortened(line, _MAX_LINE) for line in message.split("\n")), _MAX_MESSAGE)
        super().__init__(message)


class ConfigError(NestError):
    """A setting is unknown, out of range, of the wrong type or not implemented, or two contradict each other."""


class ManifestError(NestError):
    """A manifest is missing, is not a manifest, or has a line that cannot be read."""


class CorpusError(NestError):
    """A corpus directory is missing or damaged."""


class OutputError(NestError):
    """An output exists already, cannot be written, or is being written by another run."""


class PlanError(NestError):
    """The cuts cannot be arranged in batches within the budget."""


StorageErrorKind = Literal["missing", "changed", "denied", "unavailable", "invalid"]


class StorageError(NestError):
    """A file or an object of a store cannot be read or written."""

    kind: StorageErrorKind = "unavailable"
    """Category of the failure:

    - "missing": there is no such file, object or bucket.
    - "changed": it has another size or ETag than expected.
    - "denied": no permission, or wrong credentials.
    - "unavailable": no usable answer within the patience.
    - "invalid": the location or the request itself is wrong.

    Not preserved when the error leaves a loader worker; the message is.
    """

    @classmethod
    def because(cls, kind: StorageErrorKind, message: str) -> "StorageError":
        """Returns an error with its kind set."""
        error = cls(message)
        error.kind = kind
        return error


AudioReason = Literal["missing", "not_a_file", "empty", "unreadable", "truncated", "not_finite", "changed", "corrupt"]


class AudioError(NestError):
    """The audio of a cut cannot be used."""

    reason: AudioReason = "unreadable"
    """Category of the failure, for counting. Not preserved when the error leaves a loader worker; the message is."""

    @classmethod
    def because(cls, reason: AudioReason, message: str) -> "AudioError":
        """Returns an error with its reason set."""
        error = cls(message)
        error.reason = reason
        return error


def shortened(text: str, max_length: int) -> str:
    """Returns a text, or its beginning and its end if it has more than `max_length` characters, at least 100."""
    if len(text) <= max_length:
        return text
    kept = (max_length - 50) // 2
    return f"{text[:kept]} ... ({len(text) - 2 * kept} more characters) ... {text[-kept:]}"


def in_one_line(error: Exception) -> str:
    """Returns the type and the message of an error of any kind, for a message."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)


def last_error_line(error: BaseException) -> str:
    """Returns the last non-empty line of an error's message, or the name of its type if the message is empty.

    An error that was raised in a loader worker is rebuilt with the worker's traceback as its message. The last line of
    that traceback names the type before the message; the name is removed.
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    name, separator, message = lines[-1].partition(": ")
    is_type_name = name.replace(".", "").isidentifier() and name.endswith(("Error", type(error).__name__))
    return message if "Traceback" in text and separator and is_type_name else lines[-1]
