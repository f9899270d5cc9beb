"""Bytes of members that are read when they are needed."""

import io
from typing import Any

import numpy as np
import pytest
import soundfile

from nestdata.audio.byte_ranges import SplicedStream
from nestdata.audio.parts import SoundFileAudio
from nestdata.prepare.inputs.entry import Member
from nestdata.storage import ObjectInfo, Storage
from tests.synthesis import hiss


def encoded(form: str, seconds: float) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, hiss(round(16000 * seconds), 1), 16000, format=form)
    return stream.getvalue()


def remote(content: bytes, start: bytes = b"") -> Member:
    return Member(ObjectInfo("s3://bucket/a", len(content), None), 0, len(content), start=start)


@pytest.mark.parametrize("form", ["OGG", "MP3", "FLAC", "WAV"])
@pytest.mark.parametrize("num_known", [0, 100])
def test_long_content_is_the_same_as_in_memory(monkeypatch: pytest.MonkeyPatch, form: str, num_known: int) -> None:
    content = encoded(form, 80)
    assert len(content) > 1 << 18

    def read_range(_: Storage, __: str, start: int, length: int, **___: Any) -> bytes:
        assert start + length <= len(content)
        return content[start : start + length]

    monkeypatch.setattr(Storage, "read_range", read_range)
    stream = SplicedStream(remote(content, content[:num_known]).ranges())
    with SoundFileAudio(stream) as file, SoundFileAudio(io.BytesIO(content)) as expected:
        num_samples = expected.num_samples or 0
        assert num_samples
        np.testing.assert_array_equal(file.read(num_samples), expected.read(num_samples))
