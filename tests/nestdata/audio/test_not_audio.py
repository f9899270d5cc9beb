import gzip
import io
import tarfile
from pathlib import Path

import pytest

from nestdata import PrepareConfig, prepare_corpus
from nestdata.audio.encoded import EncodedAudio
from nestdata.audio.not_audio import HEAD_BYTES, kind_of, may_name_files
from nestdata.errors import ManifestError
from nestdata.prepare.inputs.entry import File, Unusable
from nestdata.prepare.read import read_header
from tests.synthesis import encoded, hiss, read_jsonl, write_audio

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 63 + b"7\nsize 72862\n"


def tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.wav"))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "kind", "remedy"),
    [
        (POINTER, "git-lfs pointer", "git lfs pull"),
        (b"<!DOCTYPE html><title>403</title>", "HTML page", "download it again"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML", "download it again"),
        ("nicht gefunden: Größe\n".encode() * 100, "plain text", "download it again"),
        (gzip.compress(b"RIFF", mtime=0), "gzip", "unpack it"),
        (tarred(), "tar archive", "as an input"),
        (bytes(5000), "zeros only", "download it again"),
        (b"#EXTM3U\nhttp://localhost/a.mp3\n", "playlist", "download the audio"),
    ],
)
def test_what_is_not_audio_is_named_with_a_remedy(tmp_path: Path, content: bytes, kind: str, remedy: str) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    found = read_header(File(str(path)))
    assert isinstance(found, Unusable)
    assert found.reason == "not_audio"
    assert str(path) in found.detail
    assert kind in found.detail
    assert remedy in found.detail


@pytest.mark.parametrize(
    "content",
    [
        b"<!-- \x7f -->" + b" " * 5000 + b"<MPD profiles='a'>",
        b"#EXTM3U\x7f\nhttp://localhost/a.mp3\n",
        b"ffconcat version 1.0\n\x7f\nfile a.wav\n",
    ],
)
def test_ffmpeg_gets_no_list_of_files(content: bytes) -> None:
    assert may_name_files(content)


def test_audio_behind_zeros_is_not_taken_for_zeros() -> None:
    assert EncodedAudio("a", bytes(5000)).kind_if_not_audio()
    assert not EncodedAudio("a", bytes(5000) + b"\xff\xfb\x90\xc4" * 100).kind_if_not_audio()


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64", "NIST", "VOC", "RF64"])
def test_audio_is_not_taken_for_something_else(form: str) -> None:
    content = encoded(hiss(4000, 1), form)
    assert not kind_of(content[:HEAD_BYTES]) or form == "NIST"  # whose header is text; it is recognised before
    assert not may_name_files(content)


def test_prepare_says_what_the_files_are(tmp_path: Path) -> None:
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "a.wav").write_bytes(POINTER)
    with pytest.raises(ManifestError, match="run git lfs pull"):
        prepare_corpus([tmp_path / "audio"], tmp_path / "out", PrepareConfig())
    write_audio(tmp_path / "audio" / "b.wav", hiss(16000, 1))
    prepare_corpus([tmp_path / "audio"], tmp_path / "out", PrepareConfig())
    assert [reject["reason"] for reject in read_jsonl(tmp_path / "out" / "rejected.jsonl")] == ["not_audio"]
