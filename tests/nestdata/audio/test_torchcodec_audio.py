"""Formats that FFmpeg decodes; skipped where torchcodec cannot be imported."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nestdata import Corpus, PrepareConfig, load_audio, prepare_corpus
from nestdata.audio import torchcodec_audio
from nestdata.audio.decode import load_samples
from nestdata.audio.encoded import EncodedAudio
from nestdata.prepare.inputs.entry import File, Member
from nestdata.prepare.read import AudioInfo, read_header
from nestdata.storage import ObjectInfo
from tests.synthesis import Samples, chirp, hiss, write_audio

with_ffmpeg = pytest.mark.skipif(
    bool(torchcodec_audio.problem()) or shutil.which("ffmpeg") is None,
    reason=f"{torchcodec_audio.problem() or 'the program ffmpeg makes the files'}",
)

FORMS = {
    "a.m4a": ("-c:a", "aac"),
    "fragments.m4a": ("-c:a", "aac", "-movflags", "frag_keyframe+empty_moov"),
    "a.aac": ("-c:a", "aac", "-f", "adts"),
    "a.wma": ("-c:a", "wmav2"),
    "a.webm": ("-c:a", "libopus", "-f", "webm"),
    "a.mka": ("-c:a", "aac", "-f", "matroska"),
}


def ffmpeg(*arguments: str | Path) -> bytes:
    return subprocess.run(["ffmpeg", "-v", "error", *arguments], check=True, stdout=subprocess.PIPE).stdout


def made(tmp_path: Path, name: str) -> tuple[Path, Samples]:
    """Writes a file, from a pipe where its form can be piped, and returns what the program ffmpeg decodes."""
    source = write_audio(tmp_path / "source.wav", chirp(100, 3000, 3.3) + hiss(52_800, 1))
    path = tmp_path / "audio" / ("a.m4a" if name.endswith(("m4a", "aac")) else "a.wma")
    path.parent.mkdir()
    if name.endswith(("webm", "mka", "aac")):
        path.write_bytes(ffmpeg("-i", source, *FORMS[name], "-"))
    else:
        ffmpeg("-i", source, *FORMS[name], path)
    expected = np.frombuffer(ffmpeg("-i", path, "-f", "f32le", "-"), np.float32)
    # torchcodec leaves out the last block of WMA, which has no time stamp.
    return path, expected[:-512] if name == "a.wma" else expected


@with_ffmpeg
@pytest.mark.parametrize("name", FORMS)
def test_the_decoded_length_is_the_length(tmp_path: Path, name: str) -> None:
    path, expected = made(tmp_path, name)
    content = path.read_bytes()
    info = read_header(File(str(path)))
    assert isinstance(info, AudioInfo)
    assert info.num_frames == len(expected)
    member = Member(ObjectInfo("a.tar", len(content), None), 0, len(content), start=content)
    assert read_header(member) == info._replace(version=None)
    for probe in ("all", "decode"):
        config = PrepareConfig(probe=probe, sampling_rate=info.rate)
        prepare_corpus([path.parent], tmp_path / "corpus", config, overwrite=True)
        corpus = Corpus.open(tmp_path / "corpus")
        assert corpus[0].num_samples == len(expected)
        np.testing.assert_array_equal(corpus.load(0)[1], expected)
    line = corpus.line(0)
    np.testing.assert_array_equal(load_samples(line, content=content), expected)
    np.testing.assert_array_equal(corpus.load(0, start=7001, num_samples=5003)[1], expected[7001:12004])
    np.testing.assert_array_equal(load_audio(path, info.rate), expected)


# Containers whose time stamps count samples, with codecs that remember what they have decoded.
NO_NOISE = ("-c:a", "aac", "-aac_pns", "0")
EXACT_FORMS = {
    "a.m4a": NO_NOISE,
    "a.3gp": NO_NOISE,
    "stereo.mp4": (*NO_NOISE, "-ac", "2"),
    "fragments.mp4": (*NO_NOISE, "-movflags", "frag_keyframe+empty_moov", "-frag_duration", "2000000"),
    "without_edits.m4a": (*NO_NOISE, "-use_editlist", "0"),
    "late.m4a": (*NO_NOISE, "-output_ts_offset", "1.5"),
    "alac.m4a": ("-c:a", "alac"),
    "opus.mp4": ("-c:a", "libopus"),
    "mp3.mp4": ("-c:a", "libmp3lame"),
    "flac.mp4": ("-c:a", "flac", "-strict", "-2"),
    "pcm.mov": ("-c:a", "pcm_s16le"),
}


@with_ffmpeg
@pytest.mark.parametrize("name", [*EXACT_FORMS, "a.aac", "a.webm", "a.mka"])
@pytest.mark.parametrize("rate", [16000, 48000])
def test_a_window_has_the_samples_of_the_whole_file(tmp_path: Path, name: str, rate: int) -> None:
    source = write_audio(tmp_path / "source.wav", 0.3 * chirp(100, 3000, 20.0) + hiss(320_000, 1))
    path = tmp_path / name
    ffmpeg("-i", source, "-ar", str(rate), *(EXACT_FORMS.get(name) or FORMS[name]), path)
    with EncodedAudio(str(path)).open() as file:
        whole = file.read(40 * file.rate)
    assert len(whole) >= 20 * rate - 4000
    rng = np.random.default_rng(rate)
    for number in range(12):
        start, stop = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
        audio = EncodedAudio(str(path), path.read_bytes() if number % 2 else None)
        with audio.open(stop / rate) as file:
            file.seek(start)
            found = file.read(stop - start)
            np.testing.assert_array_equal(found, whole[start:stop], err_msg=f"{start} to {stop}")
            np.testing.assert_array_equal(file.read(1000), whole[stop : stop + 1000])
    with EncodedAudio(str(path)).open() as file:
        file.seek(len(whole) + 5)
        assert not len(file.read(1000))


@with_ffmpeg
def test_a_long_file_is_decoded_in_blocks_to_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = made(tmp_path, "a.m4a")
    monkeypatch.setattr(torchcodec_audio, "_BLOCK_SAMPLES", 16000)
    np.testing.assert_array_equal(load_audio(path), expected)
