"""Everything that `nestdata` raises on purpose.

    NestDataError
    ├── ConfigError      a setting is out of range, or two settings contradict each other
    ├── ManifestError    a manifest is missing, is no manifest, or holds a line that cannot be read
    ├── CorpusError      a corpus directory is missing, damaged, or in the way
    ├── PlanError        these cuts cannot be laid out under this budget
    └── AudioError       the audio of one cut cannot be used: unreadable, truncated, not finite

Each takes one string: an error raised in a loader worker is rebuilt in the parent process from its text alone.
"""


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


class AudioError(NestDataError):
    """The audio of one cut cannot be used."""
