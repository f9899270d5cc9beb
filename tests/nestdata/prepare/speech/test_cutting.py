import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestdata import SegmentConfig
from nestdata.prepare.speech.cutting import FrameRules, plan_cuts, speech_runs

RULES = FrameRules.of(SegmentConfig(max_pause=1.0, padding_seconds=0.16))


def frames(*lengths: int) -> NDArray[np.float32]:
    """Returns probabilities of alternating pauses and speech of these lengths, beginning with a pause."""
    values = [np.full(length, (0.02, 0.95)[number % 2]) for number, length in enumerate(lengths)]
    return np.concatenate(values).astype(np.float32)


def cuts_of(probabilities: NDArray[np.float32], rules: FrameRules = RULES) -> tuple[list[list[int]], int]:
    plan = plan_cuts(speech_runs(probabilities), probabilities, rules)
    return plan.spans.tolist(), plan.num_in_speech


def test_seconds_become_frames_of_32_ms() -> None:
    assert FrameRules(shortest=157, longest=937, max_pause=31, padding=5) == RULES
    assert RULES.longest_speech == 927


@pytest.mark.parametrize(
    ("probabilities", "runs"),
    [
        ([], []),
        ([0.4] * 20, []),  # never reaches the threshold
        ([0.4] * 5 + [0.6] * 9 + [0.1] * 5 + [0.09] * 5, [[5, 19]]),  # begins at 0.5 and lasts until below 0.1
        ([0.9] * 7 + [0.0] * 9, []),  # shorter than a quarter of a second
        ([0.9] * 5 + [0.0] * 2 + [0.9] * 5, [[0, 12]]),  # a gap of two frames is no pause
        ([0.9] * 8 + [0.0] * 3 + [0.9] * 8, [[0, 8], [11, 19]]),
    ],
)
def test_speech_has_two_thresholds_and_shortest_lengths(probabilities: list[float], runs: list[list[int]]) -> None:
    assert speech_runs(np.array(probabilities, np.float32)).tolist() == runs


def test_pauses_longer_than_the_limit_are_left_out_and_shorter_ones_are_kept() -> None:
    assert cuts_of(frames(50, 200, 31, 200, 32, 200, 50)) == ([[45, 486], [508, 718]], 0)


def test_padding_ends_in_the_middle_of_a_short_pause_and_at_the_ends_of_the_recording() -> None:
    rules = FrameRules(shortest=10, longest=60, max_pause=20, padding=5)
    assert cuts_of(frames(2, 45, 7, 45, 1), rules) == ([[0, 50], [50, 100]], 0)


def test_speech_that_is_too_long_is_cut_at_its_longest_pause() -> None:
    probabilities = frames(10, 300, 8, 300, 20, 300, 6, 200, 10)
    assert cuts_of(probabilities) == ([[5, 623], [633, 1149]], 0)


def test_two_cuts_at_long_pauses_are_better_than_one_at_a_short_one() -> None:
    probabilities = frames(10, 160, 30, 420, 4, 420, 30, 160, 10)
    assert cuts_of(probabilities)[0] == [[5, 175], [195, 1049], [1069, 1239]]


def test_short_speech_is_joined_with_the_neighbour_that_is_near() -> None:
    far, near = 40, 20
    assert cuts_of(frames(9, 300, near, 10, far, 300, 9))[0] == [[4, 344], [374, 684]]
    assert cuts_of(frames(9, 300, far, 10, near, 300, 9))[0] == [[4, 314], [344, 684]]


def test_short_speech_without_a_near_neighbour_stays_short() -> None:
    assert cuts_of(frames(99, 20, 99))[0] == [[94, 124]]


def test_running_speech_is_cut_at_its_least_speech_like_frames_and_counted() -> None:
    probabilities = frames(0, 2000)
    probabilities[[650, 1300]] = 0.6
    assert cuts_of(probabilities) == ([[0, 650], [650, 1300], [1300, 2000]], 2)


def test_silence_has_no_cuts() -> None:
    assert cuts_of(frames(100)) == ([], 0)
    assert cuts_of(np.empty(0, np.float32)) == ([], 0)


lengths = st.lists(st.tuples(st.booleans(), st.integers(1, 150)), max_size=40)
rules = st.builds(
    lambda shortest, more, max_pause, padding: FrameRules(
        shortest=shortest, longest=shortest + 4 * padding + more, max_pause=max_pause, padding=padding
    ),
    shortest=st.integers(0, 60),
    more=st.integers(1, 90),
    max_pause=st.integers(0, 40),
    padding=st.integers(0, 8),
)


@given(lengths, rules, st.integers(0, 2**32 - 1))
def test_cuts_hold_all_speech_and_keep_the_rules(parts: list[tuple[bool, int]], rules: FrameRules, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = [random.uniform(0.5, 1.0, n) if is_speech else random.uniform(0.0, 0.12, n) for is_speech, n in parts]
    probabilities = np.concatenate([np.empty(0), *values]).astype(np.float32)
    runs = speech_runs(probabilities)
    spans, num_in_speech = plan_cuts(runs, probabilities, rules)
    bounds = spans.reshape(-1)
    assert (np.diff(bounds.reshape(-1)) >= 0).all()  # ordered, without overlap
    assert not len(bounds) or (bounds[0] >= 0 and bounds[-1] <= len(probabilities))
    assert ((spans[:, 1] - spans[:, 0]) <= rules.longest).all()
    in_cut, is_speech = np.zeros((2, len(probabilities)), bool)
    for start, stop in spans:
        in_cut[start:stop] = True
    for start, stop in runs:
        is_speech[start:stop] = True
    assert in_cut[is_speech].all()
    for start, stop in spans:
        inside = np.flatnonzero(is_speech[start:stop])
        assert len(inside)
        assert (np.diff(inside) - 1 <= rules.max_pause).all()
        assert inside[0] <= rules.padding
        assert stop - start - 1 - inside[-1] <= rules.padding
    meetings = [stop for stop in spans[:-1, 1] if stop in spans[1:, 0] and is_speech[stop - 1] and is_speech[stop]]
    assert num_in_speech == len(meetings)
    if (runs[:, 1] - runs[:, 0] <= rules.longest_speech).all():
        assert num_in_speech == 0
