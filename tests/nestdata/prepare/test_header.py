import io
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata.audio.parts import SoundFileAudio
from nestdata.prepare import read
from nestdata.prepare.inputs.entry import HEAD_BYTES, File, Member, Unusable
from nestdata.prepare.read import AudioInfo, read_header
from nestdata.storage import FileVersion, ObjectInfo
from tests.synthesis import encoded, hiss

FORMS = [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("FLAC", "PCM_S8"), ("WAV", "PCM_16"), ("WAV", "PCM_24")]


def file_of(form: str, subtype: str, num_channels: int = 1) -> bytes:
    return encoded(np.stack([hiss(3000, 1)] * num_channels, axis=1), form, 22050, subtype)


CONTENTS = [file_of(*form, num_channels) for form in FORMS for num_channels in (1, 2)]


def with_block(content: bytes, kind: int, size: int) -> bytes:
    """Returns a FLAC file with a further block of zeros after STREAMINFO."""
    is_last = content[4] & 0x80
    first = bytes([content[4] & 0x7F]) + content[5:42]
    return b"fLaC" + first + bytes([is_last | kind]) + size.to_bytes(3, "big") + bytes(size) + content[42:]


def by_libsndfile(content: bytes) -> AudioInfo | None:
    try:
        with SoundFileAudio(io.BytesIO(content)) as file:
            return read._info_of(file)
    except soundfile.LibsndfileError:
        return None


def member_of(content: bytes) -> Member:
    return Member(ObjectInfo("/gone.tar", len(content), None), 0, len(content), start=content)


@settings(max_examples=300)
@given(st.sampled_from(CONTENTS), st.integers(0, 1 << 30), st.integers(0, 3), st.booleans())
def test_a_damaged_header_that_is_parsed_here_is_read_by_libsndfile_to_the_same_values(
    content: bytes, seed: int, num_changes: int, is_cut: bool
) -> None:
    rng = random.Random(seed)
    damaged = bytearray(content[: rng.randrange(len(content))] if is_cut else content)
    for _ in range(num_changes if damaged else 0):
        damaged[rng.randrange(min(len(damaged), 120))] = rng.randrange(256)
    found = read._plain_header(bytes(damaged), len(damaged))
    assert found is None or found == by_libsndfile(bytes(damaged))


def test_the_header_of_a_file_whose_metadata_is_long_is_read_by_libsndfile(tmp_path: Path) -> None:
    content = with_block(file_of("FLAC", "PCM_16"), 1, HEAD_BYTES)
    (tmp_path / "a.flac").write_bytes(content)
    assert read._plain_header(content[:HEAD_BYTES], len(content)) is None
    assert read_header(File(str(tmp_path / "a.flac")))[:4] == (22050, 3000, 1, False)
    shard = ObjectInfo(str(tmp_path / "a.flac"), len(content), None)
    assert read_header(Member(shard, 0, len(content))) == AudioInfo(22050, 3000, 1)


def test_a_wav_file_that_is_shorter_than_its_header_says_ends_early(tmp_path: Path) -> None:
    content = file_of("WAV", "PCM_16")
    (tmp_path / "a.wav").write_bytes(content[:-1000])
    assert read_header(File(str(tmp_path / "a.wav")))[:4] == (22050, 2500, 1, True)
    no_samples = content[:40] + struct.pack("<I", 0)
    found = read_header(member_of(no_samples))
    assert isinstance(found, Unusable)
    assert found.reason == "empty"


def with_wav_size(content: bytes, size: int) -> bytes:
    """Returns a WAV file whose header gives another number of bytes of samples."""
    at = content.index(b"data") + 4
    riff = min(size + at - 4, 0xFFFFFFFF)
    return content[:4] + struct.pack("<I", riff) + content[8:at] + struct.pack("<I", size) + content[at + 4 :]


@pytest.mark.parametrize(
    ("size", "subtype", "num_channels", "ends_early"),
    [
        (0xFFFFFFFF, "PCM_16", 1, False),  # FFmpeg
        (0x80000000, "PCM_16", 2, False),  # arecord
        (0x7FFFF000 // 9 * 9, "PCM_24", 3, False),  # SoX
        (0x7FFFEFFE, "PCM_16", 1, True),
        (0xFFFFFFFE, "PCM_16", 1, True),
    ],
)
def test_only_the_sizes_that_programs_write_to_pipes_excuse_a_wav_file_that_ends_early(
    size: int, subtype: str, num_channels: int, ends_early: bool
) -> None:
    content = with_wav_size(file_of("WAV", subtype, num_channels), size)
    assert read_header(member_of(content)) == AudioInfo(22050, 3000, num_channels, ends_early=ends_early)


def test_a_wav_file_of_more_than_two_gigabytes_is_read(tmp_path: Path) -> None:
    num_bytes = 2_500_000_000
    content = with_wav_size(file_of("WAV", "PCM_16"), num_bytes)
    begin, frames = content.index(b"data") + 8, num_bytes // 2
    path = tmp_path / "a.wav"
    with path.open("wb") as file:  # a hole takes no space on the disk
        file.write(content[:begin])
        file.truncate(begin + num_bytes)
    version = FileVersion.of(path.stat())
    assert read_header(File(str(path))) == AudioInfo(22050, frames, 1, version=version)
    os.truncate(path, begin + num_bytes - 6000)
    found = read_header(File(str(path)))
    assert isinstance(found, AudioInfo)
    assert found.num_frames < frames
    assert found.ends_early


def with_flac_length(content: bytes, num_samples: int) -> bytes:
    """Returns a FLAC file whose header gives another number of samples, in the last 36 bits before its checksum."""
    packed = int.from_bytes(content[18:26], "big") >> 36 << 36 | num_samples
    return content[:18] + packed.to_bytes(8, "big") + content[26:]


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_flac_header_that_gives_more_samples_than_there_are_does_not_decide(tmp_path: Path, is_plain: bool) -> None:
    content = file_of("FLAC", "PCM_16")
    content = content if is_plain else with_block(content, 2, 100)  # a block that libsndfile has to interpret
    assert (read._plain_header(content, len(content)) is not None) == is_plain
    for length in (3001, 10**6, 2**36 - 1):
        (tmp_path / "a.flac").write_bytes(with_flac_length(content, length))
        for audio in (member_of(with_flac_length(content, length)), File(str(tmp_path / "a.flac"))):
            found = read_header(audio)
            assert isinstance(found, AudioInfo)
            assert found[:4] == (22050, 3000, 1, True)
