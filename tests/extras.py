"""Marks for tests that need the packages of an extra: they are skipped if one of them is missing."""

import importlib.util

import pytest


def needs(extra: str, *packages: str) -> pytest.MarkDecorator:
    """Returns the mark. The packages are only looked for: importing some of them takes a second in every worker."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} of the extra {extra} is not installed")
