"""The error of a command line that cannot be understood."""


class UsageError(Exception):
    """The command line or a configuration file is invalid."""
