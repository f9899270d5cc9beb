"""Everything that `nestguard` raises on purpose: GuardError, which takes one string."""


class GuardError(Exception):
    """The guard cannot be set up as asked; the message says why, and what to do."""
