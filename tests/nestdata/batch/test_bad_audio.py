import logging

import pytest

from nestdata import AudioError, BadAudioConfig, BadCut, ConfigError
from nestdata.batch.bad_audio import BadAudioCounter

GONE = BadCut("a", "missing", "cut 'a': cannot read a.wav")


def test_a_cut_is_logged_once_and_counted_every_time(caplog: pytest.LogCaptureFixture) -> None:
    tally = BadAudioCounter("speech", 1.0, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tally.add(10, [GONE])
        tally.add(10, [BadCut("b", "empty", "cut 'b': b.wav is empty")])
    assert tally.reasons == {"missing": 3, "empty": 1}
    assert [record.message for record in caplog.records] == [
        "speech replaced, missing: cut 'a': cannot read a.wav",
        "speech replaced, empty: cut 'b': b.wav is empty",
    ]


def test_the_share_counts_only_beyond_the_first_few() -> None:
    tally = BadAudioCounter("speech", 0.1, 3)
    for _ in range(3):
        tally.add(1, [GONE])
    with pytest.raises(AudioError, match=r"4 of 4 reads of speech failed \(4 missing\), more than the 10 %"):
        tally.add(1, [GONE])


def test_a_share_that_stays_within_its_limit_never_ends_a_run() -> None:
    tally = BadAudioCounter("speech", 0.1, 1)
    tally.add(100, [])
    for _ in range(50):
        tally.add(10, [GONE])
    with pytest.raises(AudioError, match=r"61 of 600 reads"):
        tally.add(0, [GONE] * 11)


def test_the_list_of_an_error_ends_somewhere() -> None:
    tally = BadAudioCounter("noise", 0.0, 0)
    cuts = [BadCut(str(number), "missing", "gone") for number in range(25)]
    with pytest.raises(AudioError, match=r"0 \(missing\), 1 \(missing\).*19 \(missing\) and 5 more\. See that"):
        tally.add(25, cuts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_share": 1.5}, r"bad_audio\.max_share is 1\.5: expected a share"),
        ({"max_noise_share": -0.5}, r"bad_audio\.max_noise_share is -0\.5"),
        ({"min_count": -1}, r"bad_audio\.min_count is -1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BadAudioConfig(**changes)  # type: ignore[arg-type]
