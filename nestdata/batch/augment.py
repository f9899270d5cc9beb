"""Chains of audiomentations transforms, as pure functions of samples and a key.

audiomentations draws from the global generators of Python and NumPy; they are set from the key before a chain runs, and
put back after it. It is imported only where a chain is not empty.
"""

import difflib
import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nestdata.errors import ConfigError
from nestdata.stateless_rng import derive_key

TransformSpec = str | dict[str, Any]
"""The name of a class, or one name with its parameters: `Gain`, or `{Gain: {p: 0.5}}`."""

# Their first parameter, or the one of this name, is again a list of transforms.
_COMPOSITIONS = ("Compose", "OneOf", "SomeOf")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Chains of audiomentations transforms, each given by class name: `Gain`, or `{Gain: {p: 0.5}}`."""

    speech: list[TransformSpec] = field(default_factory=list)
    """Applied to speech before anything is mixed into it."""

    speech_on: Literal["noisy", "both"] = "noisy"
    """Whether `speech` changes only what the noisy audio is made of, or the clean target as well."""

    noise: list[TransformSpec] = field(default_factory=list)
    """Applied to noise before it is scaled to its ratio; not to interfering speech."""

    mixture: list[TransformSpec] = field(default_factory=list)
    """Applied to the noisy audio, when all is mixed."""


class Chain:
    """Transforms that are applied one after the other.

    Args:
        specs: The transforms.
        sampling_rate: Of the samples, in Hz.
        name: What messages call the chain, such as `augment.speech`.

    Raises:
        ConfigError: A transform or a parameter does not exist, a transform refuses its parameters, or audiomentations
            is not installed.
    """

    def __init__(self, specs: Sequence[TransformSpec], sampling_rate: int, *, name: str) -> None:
        self._specs = list(specs)
        self._sampling_rate = sampling_rate
        self._name = name
        self._transforms = _build_all(self._specs, name)

    def __bool__(self) -> bool:
        return bool(self._transforms)

    def __call__(self, samples: NDArray[np.float32], seed: int, *counters: int) -> NDArray[np.float32]:
        """Returns the samples as the chain leaves them, shape (samples,); the argument is not written to.

        Args:
            samples: Shape (samples,).
            seed: With the counters, decides all that is random.
            counters: What tells one use of the chain from the next.

        Raises:
            ConfigError: A transform fails, changes the number of samples, or makes NaN or Inf of them.
        """
        if not self._transforms:
            return samples
        changed = samples.copy()
        with _global_generators_from(derive_key(seed, self._name, *counters)):
            for transform in self._transforms:
                changed = self._apply(transform, changed)
        return np.ascontiguousarray(changed, dtype=np.float32)

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew in other processes: some transforms hold what cannot be pickled.
        return _remade, (self._specs, self._sampling_rate, self._name)

    def _apply(self, transform: Any, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        kind = type(transform).__name__
        try:
            changed: NDArray[np.float32] = transform(samples=samples, sample_rate=self._sampling_rate)
        except Exception as error:  # transforms raise what the libraries behind them do
            raise ConfigError(f"{self._name}: {kind} fails: {type(error).__name__}: {error}") from error
        if changed.shape != samples.shape:
            raise ConfigError(
                f"{self._name}: {kind} makes {changed.shape} of {samples.shape} samples, so that noisy and clean audio "
                "would no longer lie on each other. Set leave_length_unchanged: true if it has that, or leave it out."
            )
        if not np.isfinite(changed).all():
            raise ConfigError(f"{self._name}: {kind} makes NaN or Inf of finite samples. Change its parameters.")
        return changed


def _remade(specs: list[TransformSpec], sampling_rate: int, name: str) -> Chain:
    return Chain(specs, sampling_rate, name=name)


@contextmanager
def _global_generators_from(key: int) -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _build_all(specs: Sequence[TransformSpec], place: str) -> list[Any]:
    return [_build(spec, f"{place}[{number}]") for number, spec in enumerate(specs)]


def _build(spec: TransformSpec, place: str) -> Any:
    name, parameters = _parse(spec, place)
    kinds = _kinds(place)
    if name not in kinds:
        raise ConfigError(f"{place}: audiomentations has no transform {name!r}{_nearest(name, kinds)}.")
    kind = kinds[name]
    known = [each for each in inspect.signature(kind).parameters if each != "self"]
    for parameter in parameters:
        if parameter not in known:
            raise ConfigError(f"{place}: {name} has no parameter {parameter!r}{_nearest(parameter, known)}.")
    if name in _COMPOSITIONS and isinstance(parameters.get("transforms"), list):
        nested = _build_all(parameters["transforms"], f"{place}.{name}.transforms")
        parameters = {**parameters, "transforms": nested}
    if name == "RoomSimulator" and parameters.get("use_ray_tracing", True):
        raise ConfigError(
            f"{place}: RoomSimulator traces rays with random numbers of its own, which no key decides, so that no "
            "batch could be made a second time. Set use_ray_tracing: false."
        )
    try:
        return kind(**parameters)
    except Exception as error:  # assertions, type errors, and missing packages of single transforms
        detail = " ".join(str(error).split()) or "it asserts otherwise"
        raise ConfigError(f"{place}: {name} refuses {parameters}: {type(error).__name__}: {detail}") from error


def _parse(spec: Any, place: str) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if isinstance(spec, dict) and len(spec) == 1:
        ((name, parameters),) = spec.items()
        if isinstance(name, str) and isinstance(parameters, dict | None):
            return name, dict(parameters or {})
    raise ConfigError(f"{place}: {spec!r} is neither the name of a transform nor one name with its parameters.")


def _kinds(place: str) -> dict[str, Any]:
    try:
        import audiomentations
    except ImportError:
        raise ConfigError(
            f"{place}: transforms need audiomentations. Install it with `pip install 'nest-pretrain[augment]'`."
        ) from None
    return {name: kind for name, kind in vars(audiomentations).items() if inspect.isclass(kind) and name != "Lambda"}


def _nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; the nearest is {near[0]!r}" if near else ""
