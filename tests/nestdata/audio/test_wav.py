import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.encoded import EncodedAudio
from nestdata.audio.parts import SoundFileAudio
from nestdata.audio.wav import HEAD_BYTES, PlainWav, parse_header
from tests.synthesis import encoded, hiss


def wav(num_channels: int = 1, num_samples: int = 1000, subtype: str = "PCM_16") -> bytes:
    samples = np.stack([hiss(num_samples, seed, level=0.9) for seed in range(num_channels)], axis=1)
    return encoded(samples, subtype=subtype)


def chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content


def with_chunk(kind: bytes, content: bytes) -> bytes:
    """Returns a WAV file with another chunk before the samples."""
    plain = wav()
    begin = plain.index(b"data")
    return plain[:begin] + chunk(kind, content) + plain[begin:]


# As ffmpeg writes it.
TEXTS = b"INFO" + chunk(b"ISFT", b"Lavf60.16.100\0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wav")


@given(
    num_channels=st.integers(1, 3),
    start=st.integers(0, 1200),
    num_samples=st.integers(0, 1200),
    is_in_memory=st.booleans(),
)
def test_plain_files_are_read_as_by_libsndfile(
    folder: Path, num_channels: int, start: int, num_samples: int, is_in_memory: bool
) -> None:
    content, path = wav(num_channels), folder / "a.wav"
    path.write_bytes(content)
    with (
        soundfile.SoundFile(BytesIO(content)) as theirs,
        EncodedAudio(str(path), content if is_in_memory else None).open() as ours,
    ):
        assert isinstance(ours, PlainWav)
        assert (ours.rate, ours.num_samples, ours.num_channels) == (theirs.samplerate, theirs.frames, theirs.channels)
        ours.seek(start)
        theirs.seek(min(start, 1000))
        expected = theirs.read(num_samples, dtype="float32", always_2d=True)
        np.testing.assert_array_equal(ours.read(num_samples), expected)


@pytest.mark.parametrize("name", ["text behind the samples", "long text before the samples"])
def test_files_on_disk_with_distant_chunks_are_left_to_libsndfile(tmp_path: Path, name: str) -> None:
    texts = b"INFO" + b"".join(chunk(b"ISFT", bytes(900)) for _ in range(5))
    content = wav(num_samples=3000) + chunk(b"LIST", TEXTS) if name.startswith("text") else with_chunk(b"LIST", texts)
    (tmp_path / "a.wav").write_bytes(content)
    with EncodedAudio(str(tmp_path / "a.wav")).open() as file:
        assert isinstance(file, SoundFileAudio)
        plain = wav(num_samples=3000) if name.startswith("text") else wav()
        np.testing.assert_array_equal(file.read(4000)[:, 0], soundfile.read(BytesIO(plain), dtype="float32")[0])


def parse_wav(content: bytes) -> PlainWav | None:
    header = parse_header(content[:HEAD_BYTES], len(content))
    return PlainWav(header, ByteRanges.of_bytes(content)) if header else None


@pytest.mark.parametrize(
    ("kind", "content"),
    [(b"LIST", TEXTS), (b"LIST", b"INFO"), (b"fact", bytes(4)), (b"bext", bytes(602))],
)
def test_chunks_before_the_samples_are_skipped(kind: bytes, content: bytes) -> None:
    content = with_chunk(kind, content)
    file = parse_wav(content)
    assert file is not None
    np.testing.assert_array_equal(file.read(1000)[:, 0], soundfile.read(BytesIO(content), dtype="float32")[0])


def with_form(change: Callable[[bytes], bytes]) -> bytes:
    """Returns a WAV file with another description of its form."""
    content = wav()
    return content[:20] + change(content[20:36]) + content[36:]


# Not parameters of the test: libsndfile writes the time into some of them, and ids of tests must not change.
OTHER_FILES = {
    "empty": b"",
    "header cut off": wav()[:40],
    "last byte missing": wav()[:-1],
    "24 bits": wav(subtype="PCM_24"),
    "float": wav(subtype="FLOAT"),
    "no samples": wav(num_samples=0),
    "odd length without padding": with_chunk(b"LIST", b"INFOodd"),
    "data inside of a list, which libsndfile takes for the samples": with_chunk(
        b"LIST", TEXTS.replace(b"ISFT", b"data")
    ),
    "short fact, which libsndfile refuses": with_chunk(b"fact", bytes(2)),
    "unknown chunk": with_chunk(b"odd?", bytes(8)),
    "two files in one, which libsndfile refuses": wav() + wav(),
    "channels that do not fit the size of a frame": with_form(lambda form: form[:2] + b"\x02" + form[3:]),
    "no sampling rate": with_form(lambda form: form[:4] + bytes(4) + form[8:]),
    "an extensible header": with_form(lambda form: b"\xfe\xff" + form[2:]),
    "12 bits": with_form(lambda form: form[:14] + b"\x0c\x00"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_other_files_are_left_to_libsndfile(name: str) -> None:
    assert parse_wav(OTHER_FILES[name]) is None
