"""What a fuzzer tries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from nestdata import NestError


class Target(NamedTuple):
    """Something that is read from outside."""

    inputs: Callable[[], st.SearchStrategy[Any]]
    read: Callable[[Any, Path], object]
    """Reads an input; may write to an empty directory. A false result says that the input was refused."""

    errors: tuple[type[Exception], ...] = (NestError,)
    """The errors that refuse an input."""

    num_tested: int = 25
    """Number of inputs that `make test` tries."""

    packages: tuple[str, ...] = ()
    """Optional packages that it needs."""
