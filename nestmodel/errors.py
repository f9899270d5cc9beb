"""Errors of nestmodel, one tree: catch the root to catch them all.

    NestModelError
    └── ConfigError    a setting, preset or foreign configuration that cannot be used

Every constructor takes one string, so that an error raised in another process can be rebuilt from its text alone.
"""


class NestModelError(Exception):
    """Root of all errors that nestmodel raises on purpose."""


class ConfigError(NestModelError):
    """A setting is out of range, unknown, of the wrong type, or not implemented."""
