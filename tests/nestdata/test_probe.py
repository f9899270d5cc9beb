from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import AudioSource, MonoCut, Recording

from nestdata.audio import load_samples
from nestdata.manifest import Entry
from nestdata.probe import Limits, Reject, probe
from tests.synthesis import hiss, tone, write_audio

LIMITS = Limits(sampling_rate=16000, channel=0, min_seconds=0.1, max_seconds=20.0)


def entry_of(path: Path, **values: Any) -> Entry:
    return Entry(where="m.json:1", cut_id="a", path=path, **values)


def cut_of(entry: Entry, limits: Limits = LIMITS) -> MonoCut:
    found = probe(entry, limits)
    assert isinstance(found, MonoCut)
    return found


def reject_of(entry: Entry, limits: Limits = LIMITS) -> tuple[str, str]:
    found = probe(entry, limits)
    assert isinstance(found, Reject)
    assert (found.where, found.cut_id) == (entry.where, entry.cut_id)
    return found.reason, found.detail


def lhotse_entry(path: Path, *, start: float = 0.0, duration: float = 1.0, channel: int = 0) -> Entry:
    recording = Recording(
        id="r", sources=[AudioSource("file", [0], str(path))], sampling_rate=16000, num_samples=16000, duration=1.0
    )
    cut = MonoCut(id="a", start=start, duration=duration, channel=channel, recording=recording)
    return Entry(where="cuts.jsonl:1", cut_id="a", cut=cut)


def test_a_file_becomes_a_cut_of_all_of_it(tmp_path: Path) -> None:
    cut = cut_of(entry_of(write_audio(tmp_path / "a.flac", hiss(23456, 1))))
    assert (cut.id, cut.start, cut.num_samples, cut.sampling_rate, cut.channel) == ("a", 0.0, 23456, 16000, 0)
    assert cut.recording.sources[0].source == str(tmp_path / "a.flac")
    assert not cut.recording.transforms


def test_an_offset_without_a_duration_goes_to_the_end_of_the_file(tmp_path: Path) -> None:
    cut = cut_of(entry_of(write_audio(tmp_path / "a.wav", hiss(24000, 1)), offset=0.5))
    assert (cut.start, cut.num_samples) == (0.5, 16000)


def test_a_duration_that_was_rounded_up_ends_with_the_file(tmp_path: Path) -> None:
    cut = cut_of(entry_of(write_audio(tmp_path / "a.wav", hiss(15300, 1)), duration=1.0))
    assert cut.num_samples == 15300


def test_labels_become_a_supervision_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(24000, 1))
    labels = {"text": "grüß dich", "lang": "de", "speaker": "s1", "emotion": "happy", "score": 0.5}
    cut = cut_of(entry_of(path, offset=0.5, labels=labels))
    (supervision,) = cut.supervisions
    assert (supervision.text, supervision.language, supervision.speaker) == ("grüß dich", "de", "s1")
    assert (supervision.start, supervision.duration) == (0.0, 1.0)
    assert cut.custom == {"emotion": "happy", "score": 0.5}


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
@pytest.mark.parametrize("num_samples", [5003, 12345, 30001])
def test_a_resampled_cut_has_the_length_that_loading_gives(tmp_path: Path, rate: int, num_samples: int) -> None:
    path = write_audio(tmp_path / "a.wav", tone(200, num_samples / rate, rate), rate)
    cut = cut_of(entry_of(path))
    assert cut.sampling_rate == 16000
    assert abs(cut.num_samples - num_samples * 16000 / rate) <= 1
    samples = load_samples(cut)
    assert len(samples) == cut.num_samples
    assert samples[-1] != 0  # the tone goes on to the end: nothing had to be filled up with zeros


def test_the_wanted_channel_is_taken(tmp_path: Path) -> None:
    stereo = np.stack([hiss(16000, 1), tone(440, 1.0)], axis=1)
    cut = cut_of(entry_of(write_audio(tmp_path / "a.wav", stereo)), replace(LIMITS, channel=1))
    np.testing.assert_allclose(load_samples(cut), tone(440, 1.0), atol=1e-4)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    assert reject_of(entry_of(tmp_path / "a.wav")) == ("missing", f"{tmp_path / 'a.wav'} does not exist")
    assert reject_of(lhotse_entry(tmp_path / "a.wav")) == ("missing", f"{tmp_path / 'a.wav'} does not exist")


def test_a_folder_in_place_of_a_file_is_rejected_as_missing(tmp_path: Path) -> None:
    assert reject_of(entry_of(tmp_path))[0] == "missing"


def test_a_file_without_bytes_is_rejected_as_empty(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    assert reject_of(entry_of(tmp_path / "a.wav")) == ("empty", f"{tmp_path / 'a.wav'} has no bytes")


def test_a_file_without_samples_is_rejected_as_empty(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", np.zeros(0, np.float32))
    assert reject_of(entry_of(path)) == ("empty", f"{path} holds no samples")


def test_a_span_without_samples_is_rejected_as_empty_where_any_length_is_allowed(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(16000, 1))
    limits = replace(LIMITS, min_seconds=0.0)
    assert reject_of(entry_of(path, duration=0.0), limits)[0] == "empty"
    assert cut_of(entry_of(path, duration=1 / 16000), limits).num_samples == 1


@pytest.mark.parametrize("content", [b"no audio at all" * 100, b"RIFF", b"fLaC" + bytes(50)])
def test_a_file_that_is_no_audio_is_rejected_as_unreadable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    reason, detail = reject_of(entry_of(path))
    assert reason == "unreadable"
    assert str(path) in detail
    assert "\n" not in detail


def test_a_flac_stream_of_unknown_length_is_rejected(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", hiss(16000, 1))
    header = bytearray(path.read_bytes())
    # STREAMINFO gives the number of samples in 36 bits; zero means that the encoder could not go back to write it.
    header[21] &= 0xF0
    header[22:26] = bytes(4)
    path.write_bytes(header)
    reason, detail = reject_of(entry_of(path))
    assert reason == "unknown_length"
    assert "re-encode" in detail


@pytest.mark.parametrize(
    ("span", "end"),
    [
        ({"duration": 1.06}, "1.060"),
        ({"offset": 0.5, "duration": 0.6}, "1.100"),
        ({"offset": 1.0}, "1.000"),
        ({"offset": 3.0, "duration": 0.5}, "3.500"),
    ],
)
def test_a_span_beyond_the_end_is_rejected(tmp_path: Path, span: dict[str, float], end: str) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(16000, 1))
    detail = f"the manifest's span ends at {end} s of 1.000 s"
    assert reject_of(entry_of(path, **span)) == ("beyond_end", detail)


def test_a_lhotse_cut_beyond_its_recording_is_rejected(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(16000, 1))
    found = reject_of(lhotse_entry(path, start=0.5, duration=0.75))
    assert found == ("beyond_end", "the cut ends at 1.250 s of 1.000 s")


def test_audio_shorter_than_the_limit_is_rejected(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(1599, 1))
    assert reject_of(entry_of(path)) == ("too_short", "0.0999375 s, less than the 0.1 s asked for")
    assert cut_of(entry_of(write_audio(path, hiss(1600, 1)))).num_samples == 1600


def test_audio_longer_than_the_limit_is_rejected(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(16001, 1))
    limits = replace(LIMITS, max_seconds=1.0)
    assert reject_of(entry_of(path), limits) == ("too_long", "1.00006 s, more than the 1 s asked for")
    assert cut_of(entry_of(write_audio(path, hiss(16000, 1))), limits).num_samples == 16000


def test_a_channel_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", hiss(16000, 1))
    assert reject_of(entry_of(path), replace(LIMITS, channel=1)) == (
        "no_such_channel",
        "channel 1 of 1 was asked for",
    )
    assert reject_of(lhotse_entry(path, channel=2))[0] == "no_such_channel"


def test_a_lhotse_cut_keeps_its_span_and_gets_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_audio(tmp_path / "a.wav", hiss(16000, 1))
    monkeypatch.chdir(tmp_path)
    cut = cut_of(lhotse_entry(Path("a.wav"), start=0.25, duration=0.5))
    assert (cut.start, cut.num_samples) == (0.25, 8000)
    assert cut.recording.sources[0].source == str(tmp_path / "a.wav")
