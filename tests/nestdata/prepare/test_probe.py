import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import example, given
from hypothesis import strategies as st
from lhotse import AudioSource, MonoCut, Recording, SupervisionSegment

import nestdata.prepare.judge
import nestdata.prepare.read
import nestdata.prepare.speech
from nestdata import PrepareConfig
from nestdata.audio.decode import load_samples
from nestdata.prepare.found import Cut, Note, Reject
from nestdata.prepare.inputs.entry import Entry, File, LhotseCut
from nestdata.prepare.read import AudioInfo
from nestdata.prepare.run import probe
from tests.nestdata.bad_files import without_length
from tests.synthesis import hiss, read_audio, tone, write_audio

LIMITS = PrepareConfig(max_seconds=20.0)
TRUSTING = replace(LIMITS, probe="missing")
DECODING = replace(LIMITS, probe="decode")


def entry_of(path: Path, **values: Any) -> Entry:
    return Entry(where="m.json:1", cut_id="a", audio=File(str(path)), **values)


def cuts_of(entry: Entry, limits: PrepareConfig = LIMITS) -> list[MonoCut]:
    cuts = []
    for probed in (outcome for outcome in probe(entry, limits) if not isinstance(outcome, Note)):
        assert isinstance(probed, Cut)
        cut = MonoCut.from_dict(copy.deepcopy(probed.row))
        assert cut.num_samples == probed.num_samples
        cuts.append(cut)
    return cuts


def cut_of(entry: Entry, limits: PrepareConfig = LIMITS) -> MonoCut:
    (cut,) = cuts_of(entry, limits)
    return cut


def reject_of(entry: Entry, limits: PrepareConfig = LIMITS) -> tuple[str, str]:
    (reject,) = probe(entry, limits)
    assert isinstance(reject, Reject)
    assert (reject.where, reject.cut_id) == (entry.where, entry.cut_id)
    return reject.reason, reject.detail


def lhotse_entry(
    path: Path,
    *,
    start: float = 0.0,
    duration: float = 1.0,
    channel: int = 0,
    recording: Recording | None = None,
    **values: Any,
) -> Entry:
    recording = recording or Recording("r", [AudioSource("file", [0], str(path))], 16000, 16000, 1.0)
    cut = MonoCut("a", start, duration, channel, recording=recording, **values)
    return Entry(where="cuts.jsonl:1", cut_id="a", audio=LhotseCut(cut.to_dict()))


def test_a_duration_that_was_rounded_up_is_cut_to_the_file(tmp_path: Path) -> None:
    cut = cut_of(entry_of(write_audio(tmp_path / "a.wav", hiss(15300, 1)), duration=1.0))
    assert cut.num_samples == 15300


@pytest.mark.parametrize("name", ["a.wav", "a\0b.wav", "caf\udce9.wav"])
def test_a_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert reject_of(entry_of(path)) == ("missing", f"{path} does not exist")
    assert reject_of(lhotse_entry(path)) == ("missing", f"{path} does not exist")


def test_a_span_without_samples_is_rejected_as_empty_even_if_any_length_is_allowed(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(16000, 1))
    limits = replace(LIMITS, min_seconds=0.0)
    assert reject_of(entry_of(path, duration=0.0), limits)[0] == "empty"
    assert cut_of(entry_of(path, duration=1 / 16000), limits).num_samples == 1


def test_a_flac_stream_of_unknown_length_is_as_long_as_its_samples(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", hiss(15432, 1))
    path.write_bytes(without_length(path.read_bytes()))
    assert soundfile.info(path).frames == 2**63 - 1
    for limits in (LIMITS, TRUSTING, DECODING):
        assert cut_of(entry_of(path), limits).num_samples == 15432
    expected = read_audio(write_audio(tmp_path / "b.flac", hiss(15432, 1)))
    cut = cut_of(entry_of(path))
    np.testing.assert_array_equal(load_samples(cut), expected)
    np.testing.assert_array_equal(load_samples(cut, start=9000), expected[9000:])


@pytest.mark.parametrize(
    ("span", "bound"),
    [
        ({"duration": 1.06}, "ends at 1.060 s"),
        ({"offset": 0.5, "duration": 0.6}, "ends at 1.100 s"),
        ({"offset": 1.0}, "starts at 1.000 s"),
        ({"num_frames": 17000}, "ends at 1.062 s"),
    ],
)
def test_a_span_beyond_the_end_is_rejected(tmp_path: Path, span: dict[str, float], bound: str) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(16000, 1))
    detail = f"the span in the manifest {bound}, the audio lasts 1.000 s"
    assert reject_of(entry_of(path, **span)) == ("wrong_duration", detail)


def test_a_file_of_a_low_rate_is_rejected(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(8000, 1), 8000)
    limits = replace(LIMITS, min_rate=8001)
    assert reject_of(entry_of(path), limits) == ("rate_too_low", "8000 Hz, the minimum is 8001 Hz")
    recording = Recording.from_file(path)
    for variant in (recording, recording.resample(16000), recording.resample(16000).resample(8000)):
        assert reject_of(lhotse_entry(path, recording=variant), limits)[0] == "rate_too_low"
        assert reject_of(lhotse_entry(path, recording=variant), replace(limits, probe="missing"))[0] == "rate_too_low"
        assert cut_of(lhotse_entry(path, recording=variant), replace(LIMITS, min_rate=8000)).num_samples == 16000


def test_the_header_of_the_file_behind_a_lhotse_cut_is_read(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(12000, 1))
    assert reject_of(lhotse_entry(path)) == (
        "wrong_duration",
        "the span in the manifest ends at 1.000 s, the audio lasts 0.750 s",
    )
    assert cut_of(lhotse_entry(path, duration=0.7)).num_samples == 11200
    stereo = Recording("r", [AudioSource("file", [0, 1], str(path))], 16000, 12000, 0.75)
    assert reject_of(lhotse_entry(path, duration=0.75, channel=1, recording=stereo)) == (
        "no_such_channel",
        "channel 1 was requested, and the number of channels is 1",
    )
    path.write_bytes(b"not audio" * 1000)
    assert reject_of(lhotse_entry(path))[0] == "not_audio"


def test_nothing_is_opened_if_the_manifest_gives_the_duration(tmp_path: Path) -> None:
    gone = tmp_path / "gone.wav"
    cut = cut_of(entry_of(gone, offset=0.5, duration=1.25, labels={"lang": "de"}), TRUSTING)
    assert (cut.start, cut.num_samples, cut.sampling_rate) == (0.5, 20000, 16000)
    assert (cut.recording.num_samples, cut.supervisions[0].language) == (28000, "de")
    assert cut_of(entry_of(gone, num_frames=8000), TRUSTING).num_samples == 8000
    assert cut_of(entry_of(gone, duration=1.0), replace(TRUSTING, channel=3)).channel == 3
    assert cut_of(lhotse_entry(gone, start=0.25, duration=0.5), TRUSTING).num_samples == 8000
    assert list(tmp_path.iterdir()) == []


@given(
    offset_ms=st.integers(0, 100_000),
    length_ms=st.integers(1, 100_000),
    rate=st.sampled_from([8000, 16000, 44100]),
    limits=st.sampled_from([LIMITS, TRUSTING]),
)
def test_a_span_as_long_as_a_limit_is_accepted_at_any_offset(
    offset_ms: int, length_ms: int, rate: int, limits: PrepareConfig
) -> None:
    limits = replace(limits, min_seconds=length_ms / 1000, max_seconds=length_ms / 1000)
    entry = entry_of(Path("/gone.wav"), offset=offset_ms / 1000, duration=length_ms / 1000)
    header = AudioInfo(rate, math.ceil((offset_ms + length_ms) * rate / 1000), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nestdata.prepare.read, "read_header", lambda *_, **__: header)
        assert cut_of(entry, limits).num_samples == 16 * length_ms
        longer = replace(limits, min_seconds=length_ms / 1000 + 1e-4, max_seconds=None)
        assert reject_of(entry, longer)[0] == "too_short"
        shorter = replace(limits, min_seconds=0.0, max_seconds=max(0.0, length_ms / 1000 - 1e-4))
        assert reject_of(entry, shorter)[0] == "too_long"


@given(
    offset=st.floats(0, 1000),
    duration=st.floats(0.001, 1000),
    rate=st.sampled_from([8000, 11025, 16000, 44100]),
)
def test_a_trusted_span_has_the_length_that_lhotse_gives_it(offset: float, duration: float, rate: int) -> None:
    limits = PrepareConfig(sampling_rate=rate, min_seconds=0.0, probe="missing")
    cut = cut_of(entry_of(Path("/gone.wav"), offset=offset, duration=duration), limits)
    assert abs(cut.num_samples - duration * rate) <= 1
    assert cut.end <= cut.recording.duration + 1 / rate


def test_audio_below_minus_90_db_of_full_scale_is_rejected_as_silent(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    detail = "the level of the whole cut is below -90 dB of full scale"
    for level_db, is_silent in ((-90.1, True), (-89.9, False)):
        level = 10 ** (level_db / 20) * math.sqrt(2)
        write_audio(path, tone(440, 1.0, level=level), subtype="FLOAT")
        assert not is_silent or reject_of(entry_of(path), DECODING) == ("silent", detail)
        assert is_silent or cut_of(entry_of(path), DECODING).num_samples == 16000
        assert cut_of(entry_of(path)).num_samples == 16000


WINDOW = replace(LIMITS, window_seconds=1.0, min_seconds=0.0)


@given(
    num_frames=st.integers(1, 300_000),
    rate=st.sampled_from([8000, 16000, 22050, 44100]),
    window_seconds=st.one_of(st.floats(0.01, 20), st.integers(1, 200).map(lambda n: n / 10)),
)
@example(num_frames=4800, rate=16000, window_seconds=0.1)
@example(num_frames=3 * 48000 + 1, rate=48000, window_seconds=1.0)
@example(num_frames=16001, rate=16000, window_seconds=1.0)
@example(num_frames=16000, rate=16000, window_seconds=1.0)
def test_windows_have_one_length_are_as_few_as_possible_and_cover_the_recording(
    num_frames: int, rate: int, window_seconds: float
) -> None:
    limits = replace(WINDOW, max_seconds=None, window_seconds=window_seconds, probe="missing")
    recording = Recording("r", [AudioSource("file", [0], "/gone.wav")], rate, num_frames, num_frames / rate)
    entry = lhotse_entry(Path("/gone.wav"), duration=num_frames / rate, recording=recording)
    if round(num_frames / rate * 16000) < 1:
        return
    cuts = cuts_of(entry, limits)
    lengths = {cut.num_samples for cut in cuts}
    total = round(16000 * num_frames / rate)
    max_samples = math.floor(window_seconds * 16000 + 1e-6)
    assert len(lengths) == 1
    assert max(lengths) <= max_samples or total <= max_samples
    assert len(cuts) == max(1, math.ceil(total / max_samples))
    assert total - len(cuts) - 1 <= sum(cut.num_samples for cut in cuts) <= total + 1
    assert [round(cut.start * 16000) for cut in cuts] == [i * cuts[0].num_samples for i in range(len(cuts))]


def test_the_audio_of_all_windows_is_the_audio_of_the_span(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", hiss(80000, 1))
    cuts = cuts_of(entry_of(path, offset=0.5, duration=3.3), WINDOW)
    assert [cut.id for cut in cuts] == [f"a@{0.5 + i * 0.825:.3f}+0.825" for i in range(4)]
    audio = np.concatenate([load_samples(cut) for cut in cuts])
    np.testing.assert_array_equal(audio, read_audio(path)[8000:60800])


def test_windows_keep_language_and_speaker_but_not_text(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(24000, 1))
    labels = {"text": "two words", "lang": "de", "speaker": "s1", "emotion": "happy"}
    for cut in cuts_of(entry_of(path, labels=labels), WINDOW):
        (supervision,) = cut.supervisions
        assert (supervision.id, supervision.start, supervision.duration) == (cut.id, 0.0, cut.duration)
        assert (supervision.text, supervision.language, supervision.speaker) == (None, "de", "s1")
        assert cut.custom == {"emotion": "happy"}
    (whole,) = cuts_of(entry_of(path, labels=labels), LIMITS)
    assert whole.supervisions[0].text == "two words"


def test_windows_of_a_lhotse_cut_are_inside_its_span_and_valid_for_lhotse(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(48000, 1), 48000)
    supervision = SupervisionSegment("s", "r", 0.1, 0.5, text="words", language="de", speaker="s1")
    recording = Recording.from_file(path)
    entry = lhotse_entry(path, start=0.2, duration=0.7, recording=recording, supervisions=[supervision])
    cuts = cuts_of(entry, replace(WINDOW, window_seconds=0.4))
    assert [(cut.start, cut.num_samples) for cut in cuts] == [(0.2, 5600), (pytest.approx(0.55), 5600)]
    for cut in cuts:
        assert (cut.supervisions[0].text, cut.supervisions[0].speaker) == (None, "s1")
        np.testing.assert_allclose(load_samples(cut), cut.load_audio()[0], rtol=0, atol=1e-6)


def test_only_unusable_windows_are_rejected(tmp_path: Path) -> None:
    samples = hiss(64000, 1)
    samples[16000:32000] = 0.0
    samples[40000] = np.nan
    path = write_audio(tmp_path / "a.wav", samples, subtype="FLOAT")
    first, silent, broken, last = probe(entry_of(path), replace(WINDOW, probe="decode"))
    assert isinstance(silent, Reject)
    assert (silent.cut_id, silent.reason) == ("a@1.000+1.000", "silent")
    assert isinstance(broken, Reject)
    assert (broken.cut_id, broken.reason) == ("a@2.000+1.000", "not_finite")
    assert [cut.row["id"] for cut in (first, last) if isinstance(cut, Cut)] == ["a@0.000+1.000", "a@3.000+1.000"]


@pytest.mark.parametrize(("name", "rate"), [("a.flac", 16000), ("a.wav", 44100)])
def test_a_long_cut_is_decoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rate: int) -> None:
    monkeypatch.setattr(nestdata.prepare.judge, "_MAX_DECODED", 30_000)
    lengths = []

    def noting(*arguments: Any, **options: Any) -> Any:
        lengths.append(options["num_samples"])
        return load_samples(*arguments, **options)

    monkeypatch.setattr(nestdata.prepare.speech, "load_samples", noting)
    stereo = np.stack([hiss(3 * rate, 1), hiss(3 * rate, 2)], axis=1)
    cut_of(entry_of(write_audio(tmp_path / name, stereo, rate)), DECODING)
    assert sum(lengths) == 48000
    assert max(lengths) == int(30_000 / (rate / 16000) / 2)
    quiet = write_audio(tmp_path / "quiet.flac", np.zeros(48000, np.float32))
    assert reject_of(entry_of(quiet), DECODING)[0] == "silent"
