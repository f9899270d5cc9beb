"""What every `AudioReader` promises."""

import io
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nestdata.audio import torchcodec_audio
from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.parts import AudioPart, JoinedAudio, SoundFileAudio
from nestdata.audio.reader import AudioReader
from nestdata.audio.torchcodec_audio import TorchcodecAudio
from nestdata.audio.wav import PlainWav, parse_header
from tests import synthesis
from tests.synthesis import hiss


def encoded(form: str, num_channels: int) -> bytes:
    return synthesis.encoded(np.stack([hiss(3000, seed) for seed in range(num_channels)], axis=1), form, 8000)


def plain(content: bytes) -> AudioReader:
    header = parse_header(content, len(content))
    assert header
    return PlainWav(header, ByteRanges.of_bytes(content))


def joined(content: bytes) -> AudioReader:
    ranges = ByteRanges.of_bytes(content)
    whole = [(0, len(content))]
    return JoinedAudio([AudioPart(ranges, whole), AudioPart(ranges, whole, is_clean=False), AudioPart(ranges, whole)])


READERS: dict[str, tuple[str, Callable[[bytes], AudioReader]]] = {
    "plain": ("WAV", plain),
    "libsndfile": ("FLAC", lambda content: SoundFileAudio(io.BytesIO(content))),
    "joined": ("OGG", joined),
}
if not torchcodec_audio.problem():
    READERS["FFmpeg"] = "WAV", TorchcodecAudio


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("num_channels", [1, 2])
@given(start=st.integers(0, 12_000), lengths=st.lists(st.integers(0, 4000), max_size=4))
@example(start=1, lengths=[0])
def test_samples_are_read_in_order_from_any_position_to_the_end(
    name: str, num_channels: int, start: int, lengths: list[int]
) -> None:
    form, opened = READERS[name]
    content = encoded(form, num_channels)
    with opened(content) as file:
        whole = file.read(20_000)
    with opened(content) as file:
        assert (file.rate, file.num_channels, file.count()) == (8000, num_channels, len(whole))
        assert file.num_samples in (None, len(whole))
    with opened(content) as file:
        file.seek(start)
        position = min(start, len(whole))
        for number, length in enumerate(lengths):
            expected = whole[position : position + length]
            if number % 3 == 0:
                np.testing.assert_array_equal(file.read(length), expected)
            elif number % 3 == 1 and num_channels == 1:
                out = np.empty(length, np.float32)
                assert file.read_into(out) == len(expected)
                np.testing.assert_array_equal(out[: len(expected)], expected[:, 0])
            else:
                assert file.skip(length) == len(expected)
            position += len(expected)
        assert file.skip() == len(whole) - position
