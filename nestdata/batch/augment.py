"""Chains of transforms, of audiomentations or one's own, as pure functions of the samples and a key.

audiomentations draws random numbers from the global generators of Python and NumPy. They are seeded from the key before
a chain runs and restored afterwards. They also seed the generators that are passed to own transforms.
audiomentations is imported only if a chain names one of its transforms.
"""

import hashlib
import inspect
import logging
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nestdata.batch.alignment import align, lags_of, name_of
from nestdata.class_path import build_object
from nestdata.config_checks import nearest_name_hint, require
from nestdata.errors import ConfigError
from nestdata.field_docs import with_field_docs
from nestdata.stateless_rng import derive_key

_log = logging.getLogger(__name__)

TransformSpec = str | dict[str, Any] | Any
"""The class name of a transform, or a dict from one class name to its parameters: `Gain`, or `{Gain: {p: 0.5}}`.

A transform of one's own is a callable, or a dict with its `class_path` and `init_args`. It is called with samples,
shape (samples,), their rate in Hz and a `numpy.random.Generator`, and returns as many samples."""

# Transforms with a parameter `transforms`, which is again a list of transforms.
_COMPOSITIONS = ("Compose", "OneOf", "SomeOf")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Chains of audiomentations transforms, each given by class name: `Gain`, or `{Gain: {p: 0.5}}`.

    A transform of your own is an object that is called with samples, sampling rate and a random generator, or in YAML
    `{class_path: my_package.Echo, init_args: {delay_s: 0.2}}`.
    """

    speech: list[TransformSpec] = field(default_factory=list)
    """Applied to speech before interference is added."""

    speech_on: Literal["noisy", "both"] = "noisy"
    """Whether `speech` changes only the noisy audio, or the clean target as well."""

    noise: list[TransformSpec] = field(default_factory=list)
    """Applied to noise before it is scaled to its ratio; not applied to interfering speech."""

    mixture: list[TransformSpec] = field(default_factory=list)
    """Applied to the noisy audio after interference is added."""

    def recorded(self) -> dict[str, Any]:
        """Returns the fields as a resume compares them, with names and hashes of callables.

        Raises:
            ConfigError: A callable is a class, or cannot be pickled.
        """
        return {part.name: _recorded(getattr(self, part.name), f"augment.{part.name}") for part in fields(self)}


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


class Chain:
    """Transforms that are applied one after the other.

    Args:
        specs: The transforms.
        sampling_rate: Sampling rate of the samples, in Hz.
        name: Name of the chain in messages, such as `augment.speech`. It is part of the random key.
        remedy: What to do about a transform that moves the samples by different times, for messages; constant delays
            are removed. With None, transforms may move the samples.

    Raises:
        ConfigError: A transform or a parameter does not exist, a transform rejects its parameters or needs a package
            that is not installed, or it moves the samples by different times and `remedy` is given.
    """

    def __init__(
        self, specs: Sequence[TransformSpec], sampling_rate: int, *, name: str, remedy: str | None = None
    ) -> None:
        require(isinstance(specs, list | tuple), name, specs, "a list of transforms")
        self._specs = list(specs)
        self._sampling_rate = sampling_rate
        self._name = name
        self._remedy = remedy
        with _seeded_global_generators(0) if specs else nullcontext():
            self._transforms = self._build_all(self._specs, name)

    def __bool__(self) -> bool:
        return bool(self._transforms)

    def __call__(self, samples: NDArray[np.float32], seed: int, *counters: int) -> NDArray[np.float32]:
        """Returns the transformed samples, shape (samples,), without writing to the argument.

        Args:
            samples: Shape (samples,).
            seed: Seed of all random numbers, together with the counters.
            counters: Numbers that differ between any two calls of a run.

        Raises:
            ConfigError: A transform fails, changes the number of samples, or returns NaN or infinite samples.
        """
        if not self._transforms:
            return samples
        changed = samples.copy()
        with _seeded_global_generators(derive_key(seed, self._name, *counters)):
            for transform in self._transforms:
                changed = self._apply(transform, changed, self._name)
        return np.ascontiguousarray(changed, dtype=np.float32)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built again in other processes, because some transforms cannot be pickled.
        return _rebuild, (self._specs, self._sampling_rate, self._name, self._remedy)

    def _build_all(self, specs: Sequence[TransformSpec], path: str) -> list[Any]:
        return [self._build(spec, f"{path}[{number}]") for number, spec in enumerate(specs)]

    def _build(self, spec: TransformSpec, path: str) -> Any:
        """Builds a transform; `path` is its setting in messages, such as `augment.speech[0]`."""
        if isinstance(spec, dict) and "class_path" in spec:
            spec = build_object(spec, path)
            require(callable(spec), path, spec, "a callable object")
        if callable(spec):
            transform = OwnTransform(spec)
            self._check(transform, path)
            return transform
        name, parameters = _parse(spec, path)
        kinds = _transform_classes()
        if name not in kinds:
            own = ". For your own, give `class_path: module.Class`" if "." in name else nearest_name_hint(name, kinds)
            raise ConfigError(f"{path}: audiomentations has no transform {name!r}{own}.")
        kind = kinds[name]
        known = [parameter for parameter in inspect.signature(kind).parameters if parameter != "self"]
        for parameter in parameters:
            if parameter not in known:
                hint = nearest_name_hint(parameter, known)
                raise ConfigError(f"{path}: {name} has no parameter {parameter!r}{hint}.")
        if name in _COMPOSITIONS and isinstance(parameters.get("transforms"), list):
            nested = self._build_all(parameters["transforms"], f"{path}.{name}.transforms")
            parameters = {**parameters, "transforms": nested}
        if name == "RoomSimulator" and parameters.get("use_ray_tracing", True):
            raise ConfigError(
                f"{path}: the ray tracing of RoomSimulator has its own random numbers, which cannot be seeded, so "
                "batches could not be reproduced. Set use_ray_tracing: false."
            )
        try:
            transform = kind(**parameters)
        except Exception as error:  # assertions, type errors, and optional packages of single transforms
            detail = " ".join(str(error).split()) or "an assertion failed"
            raise ConfigError(f"{path}: {name} rejects {parameters}: {type(error).__name__}: {detail}") from error
        if name not in _COMPOSITIONS:
            self._check(transform, path)
        return transform

    def _check(self, transform: Any, path: str) -> None:
        """Calls a transform, so that a missing package is found, and removes its delay if necessary."""
        if isinstance(transform, OwnTransform):
            self._check_own(transform, path)
        try:
            if self._remedy is not None:
                align(transform, self._sampling_rate, path, self._remedy)
            else:
                lags_of(transform, self._sampling_rate)
        except ConfigError:
            raise
        except ImportError as error:
            name = name_of(transform)
            raise ConfigError(f"{path}: {name} needs a package that is not installed ({error}).") from error
        except Exception:  # of any library; perhaps only bursts are unsuitable, otherwise speech fails as well
            _log.debug("%s cannot be tried", path, exc_info=True)

    def _check_own(self, transform: OwnTransform, path: str) -> None:
        """Raises ConfigError unless a transform works, and returns the same for the same samples and generator."""
        found: dict[int, NDArray[np.float32]] = {}
        lengths = [round(seconds * self._sampling_rate) for seconds in (1.0, 1.3, 1.7, 2.0)]
        for num_samples in (*lengths, *reversed(lengths)):
            with _seeded_global_generators(num_samples):
                samples = np.random.normal(0.0, 0.1, num_samples).astype(np.float32)
                changed = self._apply(transform, samples, path)
            expected = "equal results for equal calls: draw from rng only, and keep nothing between calls"
            require(np.array_equal(changed, found.setdefault(num_samples, changed)), path, name_of(transform), expected)

    def _apply(self, transform: Any, samples: NDArray[np.float32], path: str) -> NDArray[np.float32]:
        kind = name_of(transform)
        try:
            changed: NDArray[np.float32] = transform(samples=samples, sample_rate=self._sampling_rate)
        except Exception as error:  # transforms raise the errors of many libraries
            called = " when called with (samples, sampling_rate, rng)" if isinstance(transform, OwnTransform) else ""
            raise ConfigError(f"{path}: {kind} fails{called}: {type(error).__name__}: {error}") from error
        if np.shape(changed) != samples.shape:
            remedy = "Set leave_length_unchanged: true if it has that parameter, or remove it."
            if isinstance(transform, OwnTransform):
                remedy = "It has to return as many samples as it gets."
            raise ConfigError(
                f"{path}: {kind} returns samples of shape {np.shape(changed)} for {samples.shape}, so noisy and clean "
                f"audio would not be aligned. {remedy}"
            )
        if not np.isfinite(changed).all():
            raise ConfigError(f"{path}: {kind} returns NaN or Inf for finite samples. Change its parameters.")
        return changed


def _rebuild(specs: list[TransformSpec], sampling_rate: int, name: str, remedy: str | None) -> Chain:
    return Chain(specs, sampling_rate, name=name, remedy=remedy)


@contextmanager
def _seeded_global_generators(key: int) -> Iterator[None]:
    """Seeds the global generators of Python and NumPy, and restores their states at the end of the block."""
    states = random.getstate(), np.random.get_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _parse(spec: Any, path: str) -> tuple[str, dict[str, Any]]:
    """Returns the class name and the parameters of a transform."""
    if isinstance(spec, str):
        return spec, {}
    if isinstance(spec, dict) and len(spec) == 1:
        ((name, parameters),) = spec.items()
        if isinstance(name, str) and isinstance(parameters, dict | None):
            return name, dict(parameters or {})
    raise ConfigError(f"{path}: {spec!r} is neither the name of a transform nor one name with its parameters.")


def _transform_classes() -> dict[str, Any]:
    import audiomentations  # slow to import

    return {name: kind for name, kind in vars(audiomentations).items() if inspect.isclass(kind) and name != "Lambda"}


def _recorded(value: Any, where: str) -> Any:
    """Returns settings with text in place of callables: their names, and hashes of their pickles.

    Args:
        value: The settings.
        where: Their path, for messages.

    Raises:
        ConfigError: A class is given in place of an object, or a callable cannot be pickled.
    """
    if isinstance(value, list | tuple):
        return [_recorded(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _recorded(item, f"{where}.{key}") for key, item in value.items()}
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
