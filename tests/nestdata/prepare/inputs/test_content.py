import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nestdata import StorageError
from nestdata.audio.encoded import open_stream
from nestdata.prepare.inputs.content import GuardedStream, StoredContent
from nestdata.storage import Storage
from tests.synthesis import hiss


def encoded(form: str, seconds: float) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, hiss(round(16000 * seconds), 1), 16000, format=form)
    return stream.getvalue()


def test_waiting_for_a_store_keeps_no_other_thread_from_opening_audio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encoded("OGG", 3)
    (tmp_path / "a.ogg").write_bytes(content)
    asked: list[tuple[int, int]] = []
    others: list[int] = []

    def open_local() -> None:
        others.append(soundfile.info(tmp_path / "a.ogg").frames)

    def read_range(_: Storage, __: str, start: int, length: int, **___: Any) -> bytes:
        """Answers when another thread has opened a file, or after 20 s, so that a failure is not a deadlock."""
        asked.append((start, length))
        other = threading.Thread(target=open_local, daemon=True)
        other.start()
        other.join(20)
        return content[start : start + length]

    monkeypatch.setattr(Storage, "read_range", read_range)
    opened = StoredContent("s3://bucket/a.ogg", 0, len(content)).open()
    with opened as stream, open_stream(stream) as file:
        np.testing.assert_array_equal(file.read(file.frames), soundfile.read(io.BytesIO(content))[0])
    assert asked == [(0, len(content))]
    assert others == [48000]


@pytest.mark.parametrize("form", ["OGG", "MP3", "FLAC", "WAV"])
@pytest.mark.parametrize("num_known", [0, 100, 1 << 18])
def test_long_content_is_the_same_as_in_memory_and_its_start_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, form: str, num_known: int
) -> None:
    content = encoded(form, 80)
    assert len(content) > 1 << 18
    starts: list[int] = []

    def read_range(_: Storage, __: str, start: int, length: int, **___: Any) -> bytes:
        starts.append(start)
        return content[start : start + length]

    monkeypatch.setattr(Storage, "read_range", read_range)
    stored = StoredContent("s3://bucket/a", 0, len(content), start=content[:num_known])
    with stored.open() as stream, open_stream(stream) as file, open_stream(io.BytesIO(content)) as expected:
        np.testing.assert_array_equal(file.read(file.frames), expected.read(file.frames))
    assert starts.count(0) == (num_known < 1 << 18)


def test_content_that_cannot_be_read_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a\.flac: no such file"):
        StoredContent(str(tmp_path / "a.flac"), 0, 100).open()


def test_a_position_before_the_start_is_the_start_for_libsndfile(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    for stream in (io.BytesIO(b"abc"), StoredContent(str(tmp_path / "a"), 0, 3).open()):
        guarded = GuardedStream(stream)
        guarded.seek(2)
        assert (guarded.seek(-1), guarded.read(5)) == (0, b"abc")
        guarded.check()
