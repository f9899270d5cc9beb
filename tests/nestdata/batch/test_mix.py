from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata import BadCut, Mix, MixConfig, NoiseSpan, SpeakerNoiseMixer
from nestdata.batch.mix import Speech, gain_for_snr
from nestdata.stateless_rng import StatelessRng
from tests.synthesis import Samples, hiss

GONE = BadCut("gone", "missing", "it is gone")
ALWAYS_NOISE = MixConfig(prob=1.0, noise_ratio=1.0)
ALWAYS_SPEECH = MixConfig(prob=1.0, noise_ratio=0.0)


def noise_of(samples: Samples | None = None) -> Callable[[int], NoiseSpan]:
    """Returns a source of noise with the requested number of samples, or at most the given samples."""
    return lambda needed: NoiseSpan(
        samples=hiss(needed, 99) if samples is None else samples[:needed],
        kind="noise",
        cut_id="street",
        num_reads=3,
        bad=(GONE, GONE),
        num_silent_crops=3,
    )


def speech_of(*lengths: int, level: float = 0.1) -> list[Speech]:
    return [Speech(index, f"cut-{index}", hiss(length, index, level=level)) for index, length in enumerate(lengths)]


def mix(
    config: MixConfig,
    microbatch: list[Speech],
    *,
    position: int = 0,
    key: int = 0,
    noise: Callable[[int], NoiseSpan] | None = None,
) -> tuple[Samples | None, Mix]:
    out = np.zeros(len(microbatch[position].samples) + 5, np.float32)
    record = SpeakerNoiseMixer(config)(position, microbatch, StatelessRng(0, "mix", key), noise or noise_of(), out)
    assert not out[-5:].any()  # past the cut is padding
    assert out.any() == (record.mode != "none")
    return (None if record.mode == "none" else out[:-5]), record


def gather(samples: Samples, segments: tuple[tuple[int, int], ...]) -> Samples:
    return np.concatenate([samples[start : start + number] for start, number in segments])


def measured_snr_db(clean: Samples, added: Samples, segments: tuple[tuple[int, int], ...]) -> float:
    clean_power, power = (np.square(gather(s, segments), dtype=np.float64).mean() for s in (clean, added))
    return float(10 * np.log10(clean_power / power))


def find_part(part: Samples, whole: Samples) -> int:
    """Returns the position of a scaled part in a signal: the one with a correlation of 1."""
    windows = np.lib.stride_tricks.sliding_window_view(whole, len(part)).astype(np.float64)
    correlation = windows @ part / np.linalg.norm(windows, axis=1) / np.linalg.norm(part)
    assert correlation.max() == pytest.approx(1.0, abs=1e-6)
    return int(correlation.argmax())


@given(prob=st.floats(0, 1), noise_ratio=st.floats(0, 1), key=st.integers(0, 2**32))
@settings(deadline=None)
def test_the_mode_that_is_drawn_without_audio_is_the_one_that_is_mixed(
    prob: float, noise_ratio: float, key: int
) -> None:
    config, draws = MixConfig(prob=prob, noise_ratio=noise_ratio), list[int]()
    drawn = SpeakerNoiseMixer(config).draw_mode(StatelessRng(0, "mix", key))

    def noise(needed: int) -> NoiseSpan:
        draws.append(needed)
        return noise_of()(needed)

    for num_cuts in (1, 3):
        draws.clear()
        _, record = mix(config, speech_of(*[50] * num_cuts), key=key, noise=noise)
        assert record.mode == ("noise" if num_cuts == 1 and drawn == "speech" else drawn)
        assert len(draws) == (record.mode == "noise")


@given(
    length=st.integers(1, 40_000),
    others=st.lists(st.integers(1, 40_000), max_size=4),
    wants_noise=st.booleans(),
    num_segments=st.integers(1, 6),
    num_speakers=st.integers(1, 4),
    mix_rate=st.floats(0.01, 1.0),
    snr_db=st.floats(-30, 60),
    level_db=st.floats(-70, 0),
    key=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_measured_ratio_over_the_mixed_samples_is_the_requested_one(
    length: int,
    others: list[int],
    wants_noise: bool,
    num_segments: int,
    num_speakers: int,
    mix_rate: float,
    snr_db: float,
    level_db: float,
    key: int,
) -> None:
    config = MixConfig(
        prob=1.0,
        noise_ratio=float(wants_noise),
        noise_snr_db=(snr_db, snr_db),
        speech_snr_db=(snr_db, snr_db),
        mix_rate=(mix_rate, mix_rate),
        num_segments=(num_segments, num_segments),
        num_speakers=(num_speakers, num_speakers),
    )
    microbatch = speech_of(length, *others, level=10 ** (level_db / 20))
    before = [cut.samples.copy() for cut in microbatch]
    added, record = mix(config, microbatch, key=key)

    assert added is not None
    assert (added.dtype, len(added)) == (np.float32, length)
    assert record.mode == ("noise" if wants_noise or not others else "speech")
    assert record.snr_db == pytest.approx(snr_db)
    assert measured_snr_db(before[0], added, record.segments) == pytest.approx(snr_db, abs=0.01)
    assert len(record.sources) == (1 if record.mode == "noise" else min(num_speakers, len(others)))
    for cut, samples in zip(microbatch, before, strict=True):
        np.testing.assert_array_equal(cut.samples, samples)

    num_mixed = max(1, int(length * mix_rate))
    assert sum(number for _, number in record.segments) == num_mixed
    assert len(record.segments) == min(num_segments, num_mixed)
    position = 0
    for start, number in record.segments:
        assert start >= position
        assert number >= 1
        position = start + number
    assert position <= length
    is_mixed = np.zeros(length, bool)
    for start, number in record.segments:
        is_mixed[start : start + number] = True
    assert not added[~is_mixed].any()


def test_cuts_are_selected_with_the_configured_probabilities() -> None:
    config = MixConfig(prob=0.3, noise_ratio=0.25)
    modes = [mix(config, speech_of(100, 100), key=key)[1].mode for key in range(2000)]
    assert modes.count("none") / 2000 == pytest.approx(0.7, abs=0.05)
    assert modes.count("noise") / 2000 == pytest.approx(0.075, abs=0.03)
    assert modes.count("speech") / 2000 == pytest.approx(0.225, abs=0.05)


def test_drawn_ratios_shares_and_counts_fill_their_ranges() -> None:
    config = MixConfig(
        prob=1.0, mix_rate=(0.2, 0.6), num_segments=(1, 3), num_speakers=(1, 2), speech_snr_db=(-40.0, -30.0)
    )
    records = [mix(config, speech_of(1000, 1000, 1000), key=key)[1] for key in range(400)]
    ratios = {mode: [record.snr_db for record in records if record.mode == mode] for mode in ("noise", "speech")}
    assert -5 <= min(ratios["noise"]) < -4
    assert 19 < max(ratios["noise"]) <= 20
    assert -40 <= min(ratios["speech"]) < -39.5
    assert -30.5 < max(ratios["speech"]) <= -30
    shares = [sum(number for _, number in record.segments) / 1000 for record in records]
    assert 0.2 <= min(shares) < 0.22
    assert 0.58 < max(shares) <= 0.6
    assert {len(record.segments) for record in records} == {1, 2, 3}
    assert {len(record.sources) for record in records if record.mode == "speech"} == {1, 2}


def test_segments_are_spread_over_the_whole_cut() -> None:
    starts = [mix(ALWAYS_NOISE, speech_of(1000), key=key)[1].segments[0][0] for key in range(300)]
    assert min(starts) < 20
    assert 480 < max(starts) <= 500


def test_noise_is_changed_only_in_its_level() -> None:
    added, record = mix(ALWAYS_NOISE, speech_of(16000))
    assert added is not None
    assert find_part(gather(added, record.segments), hiss(8000, 99)) == 0
    assert record.sources == ("street",)
    assert (record.num_reads, record.bad_noise, record.num_silent_crops) == (3, (GONE, GONE), 3)


def test_white_noise_is_recorded_as_white_noise() -> None:
    white = NoiseSpan(samples=hiss(8000, 1), kind="white", num_reads=1, bad=(GONE,))
    _, record = mix(ALWAYS_NOISE, speech_of(16000), noise=lambda needed: white)  # noqa: ARG005
    assert (record.mode, record.sources, record.bad_noise) == ("noise", ("white noise",), (GONE,))


def test_interfering_speech_is_a_crop_of_another_cut() -> None:
    microbatch = speech_of(1000, 1500)
    starts = []
    for key in range(20):
        added, record = mix(ALWAYS_SPEECH, microbatch, key=key)
        assert added is not None
        assert record.sources == ("cut-1",)
        starts.append(find_part(gather(added, record.segments), microbatch[1].samples))
    assert min(starts) < 250
    assert 750 < max(starts) <= 1000


@pytest.mark.parametrize(("config", "source"), [(ALWAYS_NOISE, hiss(1500, 5)), (ALWAYS_SPEECH, hiss(1500, 1))])
def test_interference_that_is_shorter_than_the_mixed_span_is_repeated(config: MixConfig, source: Samples) -> None:
    added, record = mix(config, speech_of(8000, 1500), noise=noise_of(source))
    assert added is not None
    mixed = gather(added, record.segments)
    np.testing.assert_array_equal(mixed, np.resize(mixed[:1500], 4000))
    assert find_part(mixed[:1500], source) == 0


def test_several_speakers_are_different_cuts_and_are_summed() -> None:
    config = MixConfig(prob=1.0, noise_ratio=0.0, num_speakers=(3, 3), mix_rate=(1.0, 1.0))
    microbatch = speech_of(2000, 2000, 2000, 2000, 2000)
    for key in range(20):
        added, record = mix(config, microbatch, key=key)
        assert added is not None
        assert len(set(record.sources)) == 3
        total = sum(microbatch[int(source.removeprefix("cut-"))].samples for source in record.sources)
        assert find_part(added, np.asarray(total, np.float32)) == 0


def test_cut_is_never_mixed_with_a_copy_of_itself() -> None:
    twice = speech_of(4000, 4000, 4000)
    microbatch = [twice[0], twice[1], twice[0], twice[2], twice[0]]
    config = MixConfig(prob=1.0, noise_ratio=0.0, num_speakers=(1, 4))
    for key in range(50):
        for position in (0, 2, 4):
            assert "cut-0" not in mix(config, microbatch, position=position, key=key)[1].sources


def test_cut_among_copies_of_itself_is_mixed_with_noise() -> None:
    microbatch = speech_of(4000) * 3
    assert mix(ALWAYS_SPEECH, microbatch, position=1)[1].mode == "noise"


def test_silent_clean_speech_gets_no_interference() -> None:
    silent = Speech(0, "cut-0", np.zeros(4000, np.float32))
    for config in (ALWAYS_NOISE, ALWAYS_SPEECH):
        added, record = mix(config, [silent, *speech_of(4000, 4000)[1:]])
        assert added is None
        assert record.mode == "none"


def test_silent_interference_adds_nothing() -> None:
    added, record = mix(ALWAYS_NOISE, speech_of(4000), noise=noise_of(np.zeros(4000, np.float32)))
    assert added is None
    assert (record.mode, len(record.bad_noise), record.num_silent_crops) == ("none", 2, 3)
    silent = Speech(1, "cut-1", np.zeros(4000, np.float32))
    assert mix(ALWAYS_SPEECH, [speech_of(4000)[0], silent])[1].mode == "none"


def test_interference_near_the_smallest_numbers_is_scaled_without_overflow() -> None:
    dust = np.tile(np.array([1e-42, -1e-42], np.float32), 2000)
    added, record = mix(ALWAYS_NOISE, speech_of(4000), noise=noise_of(dust))
    assert added is not None
    assert measured_snr_db(speech_of(4000)[0].samples, added, record.segments) == pytest.approx(record.snr_db, abs=0.01)


def test_power_of_a_long_span_is_computed_without_loss_of_precision() -> None:
    clean, noise = hiss(1_000_000, 1) + np.float32(0.5), hiss(1_000_000, 2)
    gain = gain_for_snr(clean, noise, 3.0)
    assert gain is not None
    assert measured_snr_db(clean, np.float32(gain) * noise, ((0, len(clean)),)) == pytest.approx(3.0, abs=1e-6)
