"""The only exception that `nestguard` raises on purpose."""


class GuardError(Exception):
    """The stall guard cannot be set up as requested. The message, a single string, gives the reason and the remedy."""
