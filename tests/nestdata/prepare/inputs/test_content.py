"""Bytes of members that are read when they are needed."""

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nestdata.audio.byte_ranges import SplicedStream
from nestdata.audio.encoded import open_stream
from nestdata.prepare.header import AudioInfo, read_header
from nestdata.prepare.inputs.audio import HEAD_BYTES, Member
from nestdata.storage import ObjectInfo, Storage
from tests.synthesis import hiss


def encoded(form: str, seconds: float) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, hiss(round(16000 * seconds), 1), 16000, format=form)
    return stream.getvalue()


def remote(content: bytes, start: bytes = b"") -> Member:
    return Member(ObjectInfo("s3://bucket/a", len(content), None), 0, len(content), start=start)


def test_waiting_for_a_store_keeps_no_other_thread_from_opening_audio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encoded("CAF", 3)
    (tmp_path / "a.caf").write_bytes(content)
    asked: list[tuple[int, int]] = []
    others: list[int] = []

    def open_local() -> None:
        others.append(soundfile.info(tmp_path / "a.caf").frames)

    def read_range(_: Storage, __: str, start: int, length: int, **___: Any) -> bytes:
        """Answers when another thread has opened a file, or after 20 s, so that a failure is not a deadlock."""
        asked.append((start, length))
        other = threading.Thread(target=open_local, daemon=True)
        other.start()
        other.join(20)
        return content[start : start + length]

    monkeypatch.setattr(Storage, "read_range", read_range)
    assert read_header(remote(content)) == AudioInfo(16000, 48000, 1)
    assert asked == [(0, HEAD_BYTES), (HEAD_BYTES, len(content) - HEAD_BYTES)]
    assert others == [48000, 48000]


@pytest.mark.parametrize("form", ["OGG", "MP3", "FLAC", "WAV"])
@pytest.mark.parametrize("num_known", [0, 100, 1 << 18])
def test_long_content_is_the_same_as_in_memory(monkeypatch: pytest.MonkeyPatch, form: str, num_known: int) -> None:
    content = encoded(form, 80)
    assert len(content) > 1 << 18

    def read_range(_: Storage, __: str, start: int, length: int, **___: Any) -> bytes:
        assert start + length <= len(content)
        return content[start : start + length]

    monkeypatch.setattr(Storage, "read_range", read_range)
    stream = SplicedStream(remote(content, content[:num_known]).ranges())
    with open_stream(stream) as file, open_stream(io.BytesIO(content)) as expected:
        np.testing.assert_array_equal(file.read(file.frames), expected.read(file.frames))


def test_a_position_before_the_start_is_the_start_for_libsndfile() -> None:
    stream = SplicedStream(remote(b"abc", b"abc").ranges())
    stream.seek(2)
    assert (stream.seek(-1), stream.read(5), stream.seek(9), stream.read(5)) == (0, b"abc", 9, b"")
