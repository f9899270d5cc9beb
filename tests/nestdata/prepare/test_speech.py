"""Speech that Silero VAD finds, and the cuts that are joined from it."""

import importlib.util
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata import ConfigError, SegmentConfig
from nestdata.prepare.speech import RATE, Span, Speech, detector_name, join_speech

CONFIG = SegmentConfig(min_seconds=5.0, max_seconds=20.0, max_pause=2.0, padding_seconds=0.25)


def cuts_of(*seconds: tuple[float, float], total: float = 100.0) -> list[tuple[float, float]]:
    spans = [(round(start * RATE), round(end * RATE)) for start, end in seconds]
    return [(start / RATE, end / RATE) for start, end in join_speech(Speech(spans, round(total * RATE), None), CONFIG)]


def test_speech_is_joined_until_it_is_long_enough() -> None:
    assert cuts_of((1, 3), (4, 7), (8, 14)) == [(0.75, 7.25), (7.75, 14.25)]
    assert cuts_of((1, 3), (5.5, 12)) == [(0.75, 3.25), (5.25, 12.25)]  # the pause is too long


def test_speech_that_stays_short_is_joined_with_the_one_before() -> None:
    assert cuts_of((1, 7), (8, 9)) == [(0.75, 9.25)]
    assert cuts_of((1, 20), (20.5, 21)) == [(0.75, 20.25), (20.25, 21.25)]  # longer than a cut may be


def test_padding_ends_at_the_middle_of_a_pause_and_at_the_ends_of_a_recording() -> None:
    assert cuts_of((0.1, 6), (6.2, 12), total=12.1) == [(0.0, 6.1), (6.1, 12.1)]
    assert cuts_of() == []


@given(
    gaps=st.lists(st.tuples(st.integers(0, 3 * RATE), st.integers(1, 19 * RATE)), max_size=30),
    end=st.integers(0, RATE),
    padding=st.sampled_from([0.0, 0.25]),
)
def test_cuts_hold_all_speech_in_order_and_within_limits(gaps: list[tuple[int, int]], end: int, padding: float) -> None:
    spans, position = list[Span](), 0
    for gap, length in gaps:
        spans.append((position + gap, position + gap + length))
        position += gap + length
    found = Speech(spans, position + end, None)
    cuts = join_speech(found, SegmentConfig(min_seconds=5.0, max_seconds=20.0, padding_seconds=padding))
    assert all(0 <= start < stop <= found.num_samples and stop - start <= 20 * RATE for start, stop in cuts)
    assert all(before[1] <= after[0] for before, after in pairwise(cuts))
    assert sum(found.within(*cut) for cut in cuts) == sum(stop - start for start, stop in spans)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "silero_vad" else object())
    with pytest.raises(ConfigError, match=r"silero-vad .*`pip install 'nest-pretrain\[vad\]'`"):
        detector_name()
