"""Where audio ends: what can be decoded decides, whatever the header says and whatever follows."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import soundfile
from lhotse import Recording, SupervisionSegment

from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestdata.prepare.inputs.entry import File, Unusable
from nestdata.prepare.read import AudioInfo, read_header
from tests.nestdata.bad_files import without_length
from tests.synthesis import Samples, hiss, read_audio, read_jsonl, write_audio, write_jsonl

RATE = 16000
SPEECH = hiss(5 * RATE, 1, level=0.1)
NOISE = np.random.default_rng(0).bytes(60_000)
ID3V1 = b"TAG" + b"title".ljust(125, b"\0")
ID3V2 = b"ID3\x04\0\0\0\0\x20\0" + bytes(0x1000)


def mpeg_in_wav(mpeg: bytes, claimed_samples: int, rate: int = RATE) -> bytes:
    """Returns MPEG audio of layer 3 in a WAV file, whose `fact` gives a number of samples."""
    form = b"\x55\0\1\0" + rate.to_bytes(4, "little") + (8000).to_bytes(4, "little") + b"\1\0\0\0\x0c\0" + bytes(12)
    chunks = [(b"fmt ", form), (b"fact", claimed_samples.to_bytes(4, "little")), (b"data", mpeg)]
    body = b"".join(
        kind + len(content).to_bytes(4, "little") + content + bytes(len(content) % 2) for kind, content in chunks
    )
    return b"RIFF" + (4 + len(body)).to_bytes(4, "little") + b"WAVE" + body


def damaged(content: bytes) -> bytes:
    """Returns a file with 100 zeros in its middle."""
    middle = len(content) // 2
    return content[:middle] + bytes(100) + content[middle + 100 :]


def check_that_all_of_it_loads(path: Path, seconds: float) -> Samples:
    """Prepares a file with two kinds of probes; the cut has to have this length, within 10 ms, and has to load."""
    for probe in ("all", "decode"):
        output = path.with_suffix(f".{probe}.corpus")
        report = prepare_corpus(path, output, PrepareConfig(probe=probe))  # type: ignore[arg-type]
        assert report.rejected == {}
        samples = Corpus.open(output).load(0)[1]
        assert len(samples) / RATE == pytest.approx(seconds, abs=0.01)
    return samples


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("behind", [b"", bytes(9000), ID3V1, b"junk" * 3000, NOISE])
def test_flac_ends_with_its_last_frame_whatever_follows(tmp_path: Path, behind: bytes, has_length: bool) -> None:
    path = write_audio(tmp_path / "a.flac", SPEECH)
    expected = read_audio(path)
    content = path.read_bytes() if has_length else without_length(path.read_bytes())
    path.write_bytes(content + behind)
    np.testing.assert_array_equal(check_that_all_of_it_loads(path, 5.0), expected)


@pytest.mark.parametrize("endian", ["LITTLE", "BIG"])
def test_wav_of_either_byte_order_that_is_cut_off_ends_early(tmp_path: Path, endian: str) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, SPEECH, RATE, format="WAV", subtype="PCM_16", endian=endian)
    path.write_bytes(path.read_bytes()[:-RATE])
    info = read_header(File(str(path)))
    assert isinstance(info, AudioInfo)
    assert (info.num_frames, info.ends_early) == (len(SPEECH) - RATE // 2, True)


@pytest.mark.parametrize("share", [0.2, 0.777])
@pytest.mark.parametrize(
    ("name", "has_length"), [("a.flac", True), ("a.flac", False), ("a.wav", True), ("a.mp3", True)]
)
def test_what_is_left_of_a_file_that_is_cut_off_is_used_with_a_note(
    tmp_path: Path, name: str, has_length: bool, share: float
) -> None:
    path = write_audio(tmp_path / name, SPEECH)
    expected = read_audio(path)
    content = path.read_bytes() if has_length else without_length(path.read_bytes())
    path.write_bytes(content[: round(share * len(content))])
    info = read_header(File(str(path)))
    assert isinstance(info, AudioInfo)
    assert info.ends_early == has_length
    assert (share - 0.1) * len(SPEECH) < info.num_frames <= share * len(SPEECH) * 1.1
    samples = check_that_all_of_it_loads(path, info.num_frames / RATE)
    if name != "a.mp3":
        np.testing.assert_array_equal(samples, expected[: len(samples)])
    if has_length:
        assert [note["kind"] for note in read_jsonl(tmp_path / "a.all.corpus" / "notes.jsonl")] == ["ends_early"]


def test_a_text_of_all_of_a_file_is_not_that_of_what_is_left_of_it(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.wav", SPEECH)
    path.write_bytes(path.read_bytes()[:50_000])
    rows = [
        {"audio_filepath": "a.wav", "text": "all of it"},
        {"audio_filepath": "a.wav", "offset": 0.5, "duration": 0.5},
    ]
    report = prepare_corpus(write_jsonl(tmp_path / "m.json", rows), tmp_path / "c.corpus")
    assert (report.num_cuts, report.rejected) == (1, {"truncated": 1})


@pytest.mark.parametrize(("probe", "seconds"), [("all", 5.0), ("decode", 10.0)])
def test_flac_files_of_one_length_that_are_mostly_silent_are_found_by_reading_all_bytes(
    tmp_path: Path, probe: Literal["all", "decode"], seconds: float
) -> None:
    path = write_audio(tmp_path / "in" / "a.flac", SPEECH * np.repeat([1e-3, 1.0], [4 * RATE, RATE]))
    path.write_bytes(path.read_bytes() * 2)
    prepare_corpus(tmp_path / "in", tmp_path / "c.corpus", PrepareConfig(probe=probe))
    assert Corpus.open(tmp_path / "c.corpus").hours * 3600 == seconds


def test_flac_without_a_length_that_goes_on_behind_damage_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(damaged(without_length(write_audio(tmp_path / "a.flac", SPEECH).read_bytes())))
    found = read_header(File(str(tmp_path / "a.flac")))
    assert isinstance(found, Unusable)
    assert found.detail.endswith("s follow")


def test_damage_that_decoding_finds_is_the_end_of_a_cut_without_text(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", SPEECH)
    expected = read_audio(path)
    path.write_bytes(damaged(path.read_bytes()))
    rows = [{"audio_filepath": "a.flac"}, {"audio_filepath": "a.flac", "offset": 0.0, "text": "all"}]
    report = prepare_corpus(
        write_jsonl(tmp_path / "m.json", rows), tmp_path / "c.corpus", PrepareConfig(probe="decode")
    )
    assert (report.num_cuts, report.rejected) == (1, {"unreadable": 1})
    samples = Corpus.open(tmp_path / "c.corpus").load(0)[1]
    assert 1.5 * RATE < len(samples) < 2.6 * RATE
    np.testing.assert_array_equal(samples, expected[: len(samples)])
    assert [note["kind"] for note in read_jsonl(report.path / "notes.jsonl")] == ["damaged"]


@pytest.mark.parametrize("claimed", [1, 80_000, 10**7])
@pytest.mark.parametrize(("num_files", "before"), [(1, b""), (2, b""), (1, ID3V2)])
def test_mpeg_in_wav_is_as_long_as_its_frames(tmp_path: Path, claimed: int, num_files: int, before: bytes) -> None:
    mp3 = write_audio(tmp_path / "b.mp3", SPEECH).read_bytes()
    (tmp_path / "frames.mp3").write_bytes(mp3)
    info = read_header(File(str(tmp_path / "frames.mp3")))
    assert isinstance(info, AudioInfo)
    (tmp_path / "a.wav").write_bytes(before + mpeg_in_wav(mp3, claimed) * num_files)
    found = read_header(File(str(tmp_path / "a.wav")))
    assert isinstance(found, AudioInfo)
    assert found.num_frames == pytest.approx(info.num_frames * num_files, abs=2 * 1152 * num_files)
    samples = check_that_all_of_it_loads(tmp_path / "a.wav", found.num_frames / RATE)
    assert np.square(samples[-RATE:]).mean() == pytest.approx(np.square(SPEECH).mean(), rel=0.5)


@pytest.mark.parametrize("subtype", ["PCM_16", "ULAW", "FLOAT"])
def test_the_samples_of_au_end_with_the_file(tmp_path: Path, subtype: str) -> None:
    path = write_audio(tmp_path / "a.au", SPEECH, subtype=subtype)
    expected = read_audio(path)
    path.write_bytes(path.read_bytes() * 2)
    samples = check_that_all_of_it_loads(path, 10.0)
    np.testing.assert_array_equal(samples[: len(expected)], expected)
    np.testing.assert_array_equal(samples[-RATE:], expected[-RATE:])


def test_labels_behind_damage_go_and_those_across_it_end_there(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", SPEECH)
    recording = Recording.from_file(path)
    spans = [SupervisionSegment(str(i), "a", start, 1.5, speaker="x") for i, start in enumerate((0.0, 1.0, 4.0))]
    cut = recording.to_cut()
    cut.supervisions = spans
    path.write_bytes(damaged(path.read_bytes()))
    manifest = write_jsonl(tmp_path / "cuts.jsonl", [cut.to_dict()])
    prepare_corpus(manifest, tmp_path / "c.corpus", PrepareConfig(probe="decode"))
    row = Corpus.open(tmp_path / "c.corpus").line(0)
    assert 1.5 < row["duration"] < 2.5
    assert [(label["start"], label["duration"]) for label in row["supervisions"]] == [
        (0.0, 1.5), (1.0, min(1.5, row["duration"] - 1.0)),
    ]  # fmt: skip
