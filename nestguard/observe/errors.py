"""The only exception that `nestguard` raises on purpose, and those that reading foreign data can raise."""


class GuardError(Exception):
    """The stall guard cannot be set up as requested. The message, a single string, gives the reason and the remedy."""


INVALID_VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that reading data with missing keys or values of the wrong type can raise."""
