"""Formats that FFmpeg decodes; skipped where torchcodec cannot be imported."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nestdata import Corpus, PrepareConfig, load_audio, prepare_corpus
from nestdata.audio import torchcodec_audio
from nestdata.audio.decode import load_samples
from nestdata.prepare.header import AudioInfo, read_header
from nestdata.prepare.inputs.audio import File, Member
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


@with_ffmpeg
def test_a_long_file_is_decoded_in_blocks_to_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = made(tmp_path, "a.m4a")
    monkeypatch.setattr(torchcodec_audio, "_BLOCK_SAMPLES", 16000)
    np.testing.assert_array_equal(load_audio(path), expected)
