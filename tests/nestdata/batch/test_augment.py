import hashlib
import random
from typing import Any

import numpy as np
import pytest

from nestdata import ConfigError
from nestdata.batch.augment import Chain
from tests.synthesis import Samples, chirp, hiss

RATE = 16000
VARIED: list[Any] = [
    {"Gain": {"min_gain_db": -9.0, "max_gain_db": -3.0, "p": 0.9}},
    {"AddGaussianNoise": {"p": 0.5}},
    {"OneOf": {"transforms": [{"HighPassFilter": {"p": 1.0}}, {"LowPassFilter": {"p": 1.0}}], "p": 0.7}},
    {"SomeOf": {"num_transforms": 2, "transforms": ["PolarityInversion", "ClippingDistortion", "TimeMask"]}},
    {"SevenBandParametricEQ": {"p": 0.5}},
    {"PitchShift": {"p": 0.2}},
    {"TimeStretch": {"p": 0.2}},
]
SPEECH = chirp(100, 3000, 1.0) + hiss(RATE, 0, level=0.01)


def chain(specs: list[Any], name: str = "augment.speech") -> Chain:
    return Chain(specs, RATE, name=name)


def digest(samples: Samples) -> str:
    return hashlib.sha256(samples.tobytes()).hexdigest()


def test_empty_chain_returns_its_argument() -> None:
    empty = chain([])
    assert not empty
    assert empty(SPEECH, 0, 1) is SPEECH
    assert chain(["Gain"])


def test_chain_applies_the_transforms_in_order() -> None:
    inverted = chain([{"PolarityInversion": {"p": 1.0}}])(SPEECH, 0)
    np.testing.assert_array_equal(inverted, -SPEECH)
    louder = chain([{"Gain": {"min_gain_db": 6.0, "max_gain_db": 6.0, "p": 1.0}}, {"PolarityInversion": {"p": 1.0}}])
    np.testing.assert_allclose(louder(SPEECH, 0), -SPEECH * 10 ** (6 / 20), rtol=1e-6)


def test_result_has_the_length_of_the_samples_and_depends_only_on_them_and_the_key() -> None:
    varied, before = chain(VARIED), SPEECH.copy()
    keys = [(seed, step, position) for seed in (0, 1) for step in range(4) for position in range(2)]
    found = {key: varied(SPEECH, *key) for key in keys}
    assert {(one.dtype, one.shape, one.flags.c_contiguous) for one in found.values()} == {(SPEECH.dtype, (RATE,), True)}
    np.testing.assert_array_equal(SPEECH, before)
    expected = {key: digest(samples) for key, samples in found.items()}
    assert len(set(expected.values())) > len(keys) / 2
    random.seed(123)
    np.random.seed(321)
    again = chain(VARIED)
    for key in reversed(keys):
        assert digest(varied(SPEECH, *key)) == expected[key]
        assert digest(again(SPEECH, *key)) == expected[key]


def test_chains_of_different_names_use_different_random_numbers() -> None:
    gain = [{"Gain": {"p": 1.0}}]
    one, other = (chain(gain, name)(SPEECH, 0, 1) for name in ("augment.speech", "augment.mixture"))
    assert not np.array_equal(one, other)


def test_global_random_states_are_restored_even_after_an_error() -> None:
    varied = chain(VARIED)
    failing = chain([{"Gain": {"p": 1.0}}, {"AdjustDuration": {"duration_samples": 5, "p": 1.0}}])
    random.seed(7)
    np.random.seed(7)
    states = random.getstate(), str(np.random.get_state())
    varied(SPEECH, 0)
    assert (random.getstate(), str(np.random.get_state())) == states
    with pytest.raises(ConfigError):
        failing(SPEECH, 0)
    assert (random.getstate(), str(np.random.get_state())) == states


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["Gian"], r"augment\.speech\[0\]: audiomentations has no transform 'Gian'; the nearest is 'Gain'\."),
        ([{"Gain": {"min_gain": 3}}], r"Gain has no parameter 'min_gain'; the nearest is 'min_gain_db'"),
        ([{"Gain": {"p": 3.0}}], r"augment\.speech\[0\]: Gain rejects \{'p': 3\.0\}: AssertionError"),
        (
            [{"OneOf": {"transforms": ["Gain", {"TimeMusk": {}}]}}],
            r"augment\.speech\[0\]\.OneOf\.transforms\[1\]: .*'TimeMusk'; the nearest is 'TimeMask'",
        ),
        ([{"Gain": 3}], r"neither the name of a transform nor one name with its parameters"),
        (["RoomSimulator"], r"augment\.speech\[0\]: the ray tracing of RoomSimulator .* Set use_ray_tracing: false\."),
    ],
)
def test_mistakes_are_found_when_a_chain_is_built(specs: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chain(specs)


def test_transform_that_changes_the_length_is_rejected_with_advice() -> None:
    longer = chain([{"AdjustDuration": {"duration_samples": 5000, "p": 1.0}}])
    with pytest.raises(ConfigError, match=r"AdjustDuration returns samples of shape .* Set leave_length_unchanged"):
        longer(SPEECH, 0)


def test_transform_that_returns_nonfinite_samples_is_a_configuration_error() -> None:
    loud = chain([{"Gain": {"min_gain_db": 800.0, "max_gain_db": 800.0, "p": 1.0}}])
    with pytest.raises(ConfigError, match=r"augment\.speech: Gain (returns NaN or Inf|fails)"):
        loud(SPEECH, 0)
