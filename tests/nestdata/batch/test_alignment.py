from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import ConfigError
from nestdata.batch.augment import Chain
from tests.synthesis import Samples, chirp, hiss, write_audio

RATE = 16000
SPEECH = chirp(200, 3000, 2.0) * (0.1 + np.hanning(2 * RATE)).astype(np.float32) + hiss(2 * RATE, 0, level=0.01)
STILL: list[Any] = [
    "Gain", "AddGaussianNoise", "AddColorNoise", "BandPassFilter", "LowPassFilter", "HighShelfFilter", "PitchShift",
    "TimeMask", "ClippingDistortion", "BitCrush", "GainTransition", "Padding", "PolarityInversion", "TanhDistortion",
]  # fmt: skip
MOVING: list[Any] = ["Shift", "Reverse", {"TimeStretch": {"min_rate": 0.9, "max_rate": 1.1}}]


def chain(specs: list[Any], **options: Any) -> Chain:
    return Chain(specs, RATE, name="augment.speech", **options)


def lag_of(changed: Samples, samples: Samples) -> int:
    size = 1 << (2 * len(samples)).bit_length()
    correlation = np.fft.irfft(np.fft.rfft(changed, size) * np.conj(np.fft.rfft(samples, size)), size)
    place = int(np.abs(correlation).argmax())
    return place - size if place > size // 2 else place


def responses(folder: Path, delays: list[int]) -> Path:
    for number, delay in enumerate(delays):
        decay = np.exp(-np.arange(4000) / 600) * 0.05
        response = np.zeros(12500)
        response[delay] = 1.0
        response[delay + 1 : delay + 4001] = decay * np.random.default_rng(number).standard_normal(4000)
        write_audio(folder / f"{number}.wav", response.astype(np.float32))
    return folder


@pytest.mark.parametrize("name", STILL)
def test_transforms_that_leave_speech_in_its_place_are_what_they_are(name: str) -> None:
    np.random.seed(7)
    state = np.random.get_state()[1].tolist()  # that of Python is used by the type checker of the tests
    aligned, free = chain([{name: {"p": 1.0}}], remedy="Remove it."), chain([{name: {"p": 1.0}}])
    assert np.random.get_state()[1].tolist() == state
    for key in range(4):
        np.testing.assert_array_equal(aligned(SPEECH, key), free(SPEECH, key))


@pytest.mark.parametrize("spec", MOVING)
@pytest.mark.parametrize("inside", [False, True])
def test_transforms_that_move_speech_by_different_times_are_refused(spec: Any, inside: bool) -> None:
    specs = [{"OneOf": {"transforms": ["Gain", spec], "p": 0.1}}] if inside else ["Gain", spec]
    with pytest.raises(ConfigError, match=r"moves speech by -?\d.* not be aligned\. Set it to both\."):
        chain(specs, remedy="Set it to both.")
    assert len(chain(specs)(SPEECH, 0)) == len(SPEECH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a module that audiomentations reads files with
@pytest.mark.parametrize("inside", [False, True])
def test_each_recorded_response_has_its_own_delay_taken_out(tmp_path: Path, inside: bool) -> None:
    delays = [0, 5, 320, 3200, 8000]
    spec: Any = {"ApplyImpulseResponse": {"ir_path": str(responses(tmp_path, delays)), "p": 1.0}}
    spec = {"OneOf": {"transforms": [spec], "p": 1.0}} if inside else spec
    aligned, free = chain([spec], remedy="Remove it."), chain([spec])
    share_at_end = float(np.square(SPEECH[-RATE // 4 :]).sum() / np.square(SPEECH).sum())
    found = {lag_of(free(SPEECH, key), SPEECH) for key in range(30)}
    assert found == set(delays)
    for key in range(30):
        changed = aligned(SPEECH, key)
        assert lag_of(changed, SPEECH) == 0
        # All of the speech is there, up to its end.
        assert np.square(changed[-RATE // 4 :]).sum() > 0.2 * np.square(free(SPEECH, key)).sum() * share_at_end


@pytest.mark.parametrize("samples", [-900, 900])
def test_a_constant_delay_is_taken_out(samples: int) -> None:
    spec = {"Shift": {"min_shift": samples, "max_shift": samples, "shift_unit": "samples", "rollover": False, "p": 1.0}}
    changed = chain([spec], remedy="Remove it.")(SPEECH, 0)
    assert lag_of(changed, SPEECH) == 0
    np.testing.assert_allclose(changed[1000:-1000], SPEECH[1000:-1000], atol=1e-6)


def test_a_transform_whose_package_is_missing_is_an_error_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numpy_audio_limiter", None)
    for options in ({}, {"remedy": "Remove it."}):
        with pytest.raises(ConfigError, match=r"augment\.speech\[0\]: Limiter needs a package .* numpy_audio_limiter"):
            chain(["Limiter"], **options)
