import re
from typing import Any

import pytest

from nestdata import (
    BadAudioConfig,
    ConfigError,
    MixConfig,
    MixtureStage,
    NoiseConfig,
    PlanConfig,
    PrepareConfig,
    SegmentConfig,
    StorageConfig,
)

NAN, INF = float("nan"), float("inf")
# By class: the name of its section, and values that its fields refuse.
OUT_OF_RANGE: dict[type, tuple[str, dict[str, list[Any]]]] = {
    MixConfig: (
        "mix.",
        {
            "prob": [1.1, -0.1, NAN],
            "noise_ratio": [-0.1],
            "speech_snr_db": [(5.0, -5.0), (0.0, 1e4)],
            "noise_snr_db": [(20.0, -5.0), (-INF, 0.0)],
            "mix_rate": [(0.5, 1.5), (0.0, 0.5)],
            "num_speakers": [(2, 1)],
            "num_segments": [(0, 1)],
        },
    ),
    NoiseConfig: ("noise_sampler.", {"max_reads": [0], "max_crops": [0]}),
    BadAudioConfig: ("bad_audio.", {"max_share": [1.5], "max_noise_share": [-0.5], "min_count": [-1]}),
    StorageConfig: ("storage.", {"patience_s": [-1.0], "max_requests": [0], "stall_timeout_s": [0.0]}),
    PrepareConfig: ("", {"sampling_rate": [0], "report_samples": [101]}),
    PlanConfig: (
        "plan.",
        {
            "max_batch_seconds": [0.0],
            "microbatches_per_step": [0],
            "min_seconds": [-1.0],
            "min_audio_seconds": [0.0, 241.0],  # a microbatch has 240 s
            "quadratic_seconds": [0.0],
            "max_cuts": [0],
            "num_shapes": [0],
            "bucket_width": [0.0, 0.2],
            "weights": [(), (1.0, NAN), (INF, 1.0)],
            "temperature": [0.0],
            "language_temperature": [-1.0, 3.0],  # without languages
        },
    ),
}
CASES = [(kind, name, value) for kind, (_, fields) in OUT_OF_RANGE.items() for name in fields for value in fields[name]]


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_a_setting_out_of_range_is_named_with_its_value(kind: type, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{OUT_OF_RANGE[kind][0]}{name} is {re.escape(repr(value))}: expected "):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_seconds": 2.0, "max_seconds": 1.0}, r"max_seconds \(1\) is below min_seconds \(2\)"),
        ({"min_seconds": 2.0, "window_seconds": 1.0}, r"window_seconds \(1\) is below min_seconds \(2\)"),
        ({"segment": SegmentConfig(), "window_seconds": 20.0}, "segment and window_seconds exclude each other"),
        ({"min_speech_share": 0.1, "probe": "missing"}, "finding speech decodes all audio: leave out --probe"),
        ({"segment": SegmentConfig(), "max_seconds": 20.0}, r"max_seconds \(20\) is below segment.max_seconds \(30\)"),
    ],
)
def test_settings_of_prepare_that_exclude_each_other_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(**values)


def stage(from_step: int, **mixture: Any) -> MixtureStage:
    return MixtureStage(from_step=from_step, **mixture)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((stage(-1),), r"\[0\]\.from_step is -1: expected 0 or more"),
        ((stage(5), stage(5)), r"\[1\]\.from_step is 5: expected more than 5"),
        ((stage(0), stage(9, temperature=0.0)), r"\[1\]\.temperature is 0\.0"),
        ((stage(0, language_temperature=3.0),), r"\[0\]\.language_temperature is 3\.0"),
        ((stage(0, weights=(1.0, 0.0)),), r"\[0\]\.weights is \(1\.0, 0\.0\): .* positive"),
    ],
)
def test_a_stage_that_is_wrong_is_named_by_its_number(stages: tuple[MixtureStage, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"plan\.stages{message}"):
        PlanConfig(stages=stages)
