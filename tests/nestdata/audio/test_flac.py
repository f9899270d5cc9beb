"""Compares dr_flac with libsndfile: the same samples of intact files, and the same verdict on damaged ones."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestdata import AudioError
from nestdata.audio import flac
from nestdata.audio.decode import load_samples
from nestdata.audio.flac import read_flac
from nestdata.audio.parts import SoundFileAudio
from tests.nestdata.bad_files import without_length
from tests.synthesis import chirp, hiss, write_audio

pytestmark = pytest.mark.skipif(flac._dr_flac() is None, reason="needs miniaudio")

METADATA = 42
"""Bytes of the marker and STREAMINFO."""


def cut_of(path: Path, start: int = 0, num_samples: int | None = None, channel: int = 0) -> dict[str, Any]:
    """Returns a cut of an intact FLAC file, at its rate."""
    info = soundfile.info(path)
    channels, rate = list(range(info.channels)), info.samplerate
    return {
        "id": "a",
        "start": start / rate,
        "duration": (info.frames - start if num_samples is None else num_samples) / rate,
        "channel": channel,
        "recording": {
            "id": "a",
            "sources": [{"type": "file", "channels": channels, "source": str(path)}],
            "sampling_rate": rate,
            "num_samples": info.frames,
            "duration": info.frames / rate,
            "channel_ids": channels,
        },
    }


def result(cut: dict[str, Any]) -> bytes | tuple[str, str]:
    """Returns the bytes of the samples, or the reason and the message of the error."""
    try:
        return load_samples(cut).tobytes()
    except AudioError as error:
        return error.reason, str(error)


def result_of_libsndfile(cut: dict[str, Any]) -> bytes | tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flac, "_dr_flac", lambda: None)
        return result(cut)


def decoded(path: Path) -> NDArray[Any] | None:
    """Returns the samples that dr_flac finds, shape (num_samples, num_channels), or None."""
    file = read_flac(str(path))
    if file is None or file.header.num_samples > 10**6:  # no intact file of these tests is as long
        return None
    out = np.empty((file.header.num_samples, file.header.num_channels), np.float32)
    return out if file.decode(out) else None


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize("level", [0.0, 1.0])
@pytest.mark.parametrize("num_channels", [1, 2, 8])
def test_samples_are_those_of_libsndfile_bit_for_bit(
    tmp_path: Path, subtype: str, level: float, num_channels: int
) -> None:
    extremes = np.resize(np.array([-1.0, 1.0, 0.0, -1.0, 2.0**-15, 2.0**-23], np.float32), 9000)
    one = np.concatenate([chirp(100, 3000, 1.5), hiss(24000, 1, level=0.5), extremes, np.zeros(9000, np.float32)])
    channels = np.stack([np.roll(one, 111 * i) * (1.0 - 0.1 * i) for i in range(num_channels)], axis=1)
    soundfile.write(tmp_path / "a.flac", channels, 16000, subtype=subtype, compression_level=level)
    found = decoded(tmp_path / "a.flac")
    assert found is not None
    expected = soundfile.read(tmp_path / "a.flac", dtype="float32", always_2d=True)[0]
    assert found.tobytes() == expected.tobytes()


@given(
    num_samples=st.integers(1, 20000),
    num_channels=st.integers(1, 2),
    level=st.sampled_from([0.0, 1e-4, 0.1, 3.0]),
    data=st.data(),
)
def test_any_cut_is_that_of_libsndfile(
    tmp_path_factory: pytest.TempPathFactory, num_samples: int, num_channels: int, level: float, data: st.DataObject
) -> None:
    samples = np.stack([hiss(num_samples, seed, level=level) for seed in range(num_channels)], axis=1)
    path = write_audio(tmp_path_factory.mktemp("any") / "a.flac", samples)
    start = data.draw(st.integers(0, num_samples - 1) | st.just(0))
    length = data.draw(st.integers(1, num_samples - start) | st.just(num_samples - start))
    cut = cut_of(path, start, length, channel=data.draw(st.integers(0, num_channels - 1)))
    assert result(cut) == result_of_libsndfile(cut)


def test_without_miniaudio_libsndfile_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_audio(tmp_path / "a.flac", hiss(24000, 1))
    expected = load_samples(cut_of(path))
    monkeypatch.setitem(sys.modules, "miniaudio", None)
    monkeypatch.setattr(flac, "_dr_flac", flac._dr_flac.__wrapped__)  # without the library that was found before
    assert flac._dr_flac() is None
    np.testing.assert_array_equal(load_samples(cut_of(path)), expected)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file of speech-like sound with comments and padding, as the tools of FLAC write it."""
    path = tmp_path_factory.mktemp("intact") / "a.flac"
    with soundfile.SoundFile(path, "w", 16000, 1, "PCM_16") as file:
        file.title, file.artist = "a title", "an artist"
        file.write(chirp(100, 3000, 0.8) + hiss(12800, 1))
    whole = path.read_bytes()
    padding = b"\x01" + (100).to_bytes(3, "big") + bytes(100)
    seek_table = b"\x03" + (18).to_bytes(3, "big") + bytes(16) + (4096).to_bytes(2, "big")
    path.write_bytes(whole[:METADATA] + padding + seek_table + whole[METADATA:])
    assert read_flac(str(path)) is not None
    return path


def is_wrongly_accepted(path: Path) -> bool:
    """Returns whether dr_flac accepts a file that libsndfile rejects, or decodes it to other samples."""
    found = decoded(path)
    if found is None:
        return False
    try:
        with SoundFileAudio(os.open(path, os.O_RDONLY)) as reference:
            expected, rate = reference.read(reference.count()), reference.rate
    except soundfile.LibsndfileError:
        return True
    file = read_flac(str(path))
    return file is None or file.header.rate != rate or found.tobytes() != expected.tobytes()


@pytest.mark.slow
def test_every_flipped_bit_of_the_metadata_is_judged_as_by_libsndfile(intact: Path, tmp_path: Path) -> None:
    whole = intact.read_bytes()
    end = whole.index(b"\xff\xf8") + 8  # the header of the first frame is included
    wrong = []
    for position in (*range(8 * 27), *range(8 * METADATA, 8 * end)):  # without the MD5 digest, which is never compared
        content = bytearray(whole)
        content[position // 8] ^= 1 << position % 8
        (tmp_path / "a.flac").write_bytes(content)
        if is_wrongly_accepted(tmp_path / "a.flac"):
            wrong.append(position)
    assert wrong == []


@given(data=st.data())
def test_damaged_audio_is_judged_as_by_libsndfile(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(intact.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, len(whole) - 1))
        whole[first : first + 512] = bytes(len(whole[first : first + 512]))
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole)))]
    path = tmp_path_factory.mktemp("damaged") / "a.flac"
    path.write_bytes(whole)
    assert not is_wrongly_accepted(path)


@pytest.mark.parametrize("position", [4, 25, 2000])
@pytest.mark.parametrize("cut_short", [False, True])
def test_damaged_file_has_the_samples_or_the_error_of_libsndfile(intact: Path, position: int, cut_short: bool) -> None:
    cut, content = cut_of(intact), bytearray(intact.read_bytes())
    content[position] ^= 0x08
    damaged = intact.with_name(f"damaged{position}.flac")
    damaged.write_bytes(content[:-5000] if cut_short else content)
    cut["recording"]["sources"][0]["source"] = str(damaged)
    assert result(cut) == result_of_libsndfile(cut)


def other_block(content: bytes, kind: int, block: bytes) -> bytes:
    return content[:METADATA] + bytes([kind]) + len(block).to_bytes(3, "big") + block + content[METADATA:]


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10) + whole,
        without_length,
        lambda whole: whole[:30],
        lambda whole: other_block(whole, 0, whole[8:METADATA]),  # a second STREAMINFO
        lambda whole: other_block(whole, 4, b"\x04\x00\x00\x00abcd\x01\x00\x00\x00"),  # a comment that is missing
    ],
)
def test_file_that_is_not_plain_flac_is_left_to_libsndfile(intact: Path, tmp_path: Path, change: Any) -> None:
    (tmp_path / "a.flac").write_bytes(change(intact.read_bytes()))
    assert read_flac(str(tmp_path / "a.flac")) is None


def test_other_names_and_special_files_are_left_to_libsndfile(intact: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(intact.read_bytes())
    os.mkfifo(tmp_path / "pipe.flac")  # opening it would wait for a writer
    (tmp_path / "folder.flac").mkdir()
    for name in ("a.wav", "pipe.flac", "folder.flac", "missing.flac", "null\0.flac"):
        assert read_flac(str(tmp_path / name)) is None
    (tmp_path / "A.FLAC").write_bytes(intact.read_bytes())
    assert read_flac(str(tmp_path / "A.FLAC")) is not None
