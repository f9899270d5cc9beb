"""Everything that `nestdata` raises on purpose.

    NestDataError
    ├── ConfigError      a setting is out of range, or two settings contradict each other
    ├── ManifestError    a manifest is missing, is no manifest, or holds a line that cannot be read
    ├── CorpusError      a corpus directory is missing, damaged, or in the way
    ├── PlanError        these cuts cannot be laid out under this budget
    └── AudioError       the audio of one cut cannot be used: unreadable, truncated, not finite

Each takes one string: an error raised in a loader worker is rebuilt in the parent process from its text alone.
"""

from typing import Literal


class NestDataError(Exception):
    """Root of the errors of this package; the message says what was wrong, where, and what to do."""


class ConfigError(NestDataError):
    """A setting is out of range, or two settings contradict each other."""


class ManifestError(NestDataError):
    """A manifest is missing, is no manifest, or holds a line that cannot be read."""


class CorpusError(NestDataError):
    """A corpus directory is missing, damaged, or in the way."""


class PlanError(NestDataError):
    """These cuts cannot be laid out under this budget."""


AudioReason = Literal["missing", "empty", "unreadable", "truncated", "not_finite"]


class AudioError(NestDataError):
    """The audio of one cut cannot be used."""

    reason: AudioReason = "unreadable"
    """In one word, for counting. Lost on the way out of a loader worker, unlike the message."""

    @classmethod
    def because(cls, reason: AudioReason, message: str) -> "AudioError":
        """Returns the error with its reason."""
        error = cls(message)
        error.reason = reason
        return error


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
