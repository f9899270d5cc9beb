"""Transforms of the user's own: callables that are given beside the names of audiomentations' transforms."""

import hashlib
import pickle
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.config_checks import require
from nestdata.errors import ConfigError


class OwnTransform:
    """Gives a callable the interface of audiomentations; its generator is seeded from Python's global one.

    Args:
        function: Called with samples, shape (samples,), which it may write to, their rate in Hz, and the generator.
    """

    p = 1.0

    def __init__(self, function: Any) -> None:
        self._function = function
        self.__name__ = name_of(function)

    def apply(self, samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
        """Returns a copy of the transformed samples, because the callable may keep its own array."""
        rng = np.random.Generator(np.random.Philox(key=random.getrandbits(64)))
        return np.asarray(self._function(samples, sample_rate, rng), dtype=np.float32).copy()

    def __call__(self, samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
        """Calls `apply`, which `align` may have replaced."""
        return self.apply(samples, sample_rate)


def name_of(transform: Any) -> str:
    """Returns the name of a transform for messages."""
    return str(getattr(transform, "__name__", type(transform).__name__))


def recorded(value: Any, where: str) -> Any:
    """Returns settings with text in place of callables: their names, and hashes of their pickles.

    Args:
        value: The settings.
        where: Their path, for messages.

    Raises:
        ConfigError: A class is given in place of an object, or a callable cannot be pickled.
    """
    if isinstance(value, list | tuple):
        return [recorded(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: recorded(item, f"{where}.{key}") for key, item in value.items()}
    if not callable(value):
        return value
    require(not isinstance(value, type), where, value, "an object of that class, or its class_path")
    try:
        # A fixed protocol, so that another version of Python does not change the hash.
        digest = hashlib.blake2b(pickle.dumps(value, protocol=4), digest_size=8).hexdigest()
    except Exception as error:  # the callable decides what is raised
        raise ConfigError(
            f"{where}: {name_of(value)} cannot be pickled ({error}). Define it in a module, or give its class_path."
        ) from error
    return f"{name_of(value)} {digest}"
