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


AudioReason = Literal["missing", "not_a_file", "empty", "unreadable", "truncated", "not_finite"]


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
