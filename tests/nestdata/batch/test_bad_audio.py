from typing import Any

import pytest

from nestdata import AudioError, BadAudioConfig, BadCut, ConfigError
from nestdata.batch.bad_audio import BadAudioCounter

GONE = BadCut("a", "missing", "cut 'a': cannot read a.wav")


def test_share_is_limited_only_above_the_minimum_count() -> None:
    counter = BadAudioCounter("speech", 0.1, 3)
    for _ in range(3):
        counter.add(1, [GONE])
    with pytest.raises(AudioError, match=r"4 of 4 reads of speech failed \(4 missing\), more than the allowed 10 %"):
        counter.add(1, [GONE])


def test_share_within_its_limit_never_ends_a_run() -> None:
    counter = BadAudioCounter("speech", 0.1, 1)
    counter.add(100, [])
    for _ in range(50):
        counter.add(10, [GONE])
    with pytest.raises(AudioError, match=r"61 of 600 reads"):
        counter.add(0, [GONE] * 11)


@pytest.mark.parametrize("changes", [{"max_share": 1.5}, {"max_noise_share": -0.5}, {"min_count": -1}])
def test_settings_out_of_range_are_rejected_by_name(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match=rf"bad_audio\.{name} is {value}"):
        BadAudioConfig(**changes)
