"""Passes the environment variables of object stores to workers: their fork server has the values of its own start."""

import os
from multiprocessing.context import assert_spawning

_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


class StoreEnvironment:
    """Passes the variables of the process that starts a worker to the worker.

    The variables contain secrets. They are read while the worker is being started, and are sent through a pipe;
    pickling at any other time raises RuntimeError.
    """

    _variables: dict[str, str] | None = None

    def __getstate__(self) -> dict[str, str]:
        assert_spawning(self)
        return _current()

    def __setstate__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def apply(self) -> None:
        """Sets the variables in a worker. Does nothing in a forked one, which has them already."""
        if self._variables is None:
            return
        for name in _current().keys() - self._variables.keys():
            del os.environ[name]
        os.environ.update(self._variables)
        self._variables = None


def _current() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
