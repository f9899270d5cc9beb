import io
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata.corpus.encoded import open_stream
from nestdata.prepare import header
from nestdata.prepare.header import AudioInfo, read_header
from nestdata.prepare.inputs.content import HEAD_BYTES, LoadedContent, StoredContent
from nestdata.prepare.inputs.entry import Member, Problem
from nestdata.storage import ObjectInfo
from tests.synthesis import hiss

FORMS = [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("FLAC", "PCM_S8"), ("WAV", "PCM_16"), ("WAV", "PCM_24")]


def encoded(form: str, subtype: str, num_channels: int = 1) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, np.stack([hiss(3000, 1)] * num_channels, axis=1), 22050, format=form, subtype=subtype)
    return stream.getvalue()


CONTENTS = [encoded(*form, num_channels) for form in FORMS for num_channels in (1, 2)]


def with_block(content: bytes, kind: int, size: int) -> bytes:
    """Returns a FLAC file with a further block of zeros after STREAMINFO."""
    is_last = content[4] & 0x80
    first = bytes([content[4] & 0x7F]) + content[5:42]
    return b"fLaC" + first + bytes([is_last | kind]) + size.to_bytes(3, "big") + bytes(size) + content[42:]


def by_libsndfile(content: bytes) -> AudioInfo | None:
    try:
        with open_stream(io.BytesIO(content)) as file:
            return header._info_of(file)
    except soundfile.LibsndfileError:
        return None


def member_of(content: bytes) -> Member:
    return Member(ObjectInfo("/gone.tar", len(content), None), 0, len(content), LoadedContent(content))


@settings(max_examples=300)
@given(st.sampled_from(CONTENTS), st.integers(0, 1 << 30), st.integers(0, 3), st.booleans())
def test_a_damaged_header_that_is_parsed_here_is_read_by_libsndfile_to_the_same_values(
    content: bytes, seed: int, num_changes: int, is_cut: bool
) -> None:
    rng = random.Random(seed)
    damaged = bytearray(content[: rng.randrange(len(content))] if is_cut else content)
    for _ in range(num_changes if damaged else 0):
        damaged[rng.randrange(min(len(damaged), 120))] = rng.randrange(256)
    found = header._plain_header(bytes(damaged), len(damaged))
    assert found is None or found == by_libsndfile(bytes(damaged))


@pytest.mark.parametrize("content", [content for content in CONTENTS if content[:4] == b"fLaC"][:4])
@pytest.mark.parametrize("size", [0, 8192])
def test_the_header_of_flac_with_padding_is_parsed_here(content: bytes, size: int) -> None:
    padded = with_block(content, 1, size)
    found = header._plain_header(padded[:HEAD_BYTES], len(padded))
    assert found is not None
    assert found == by_libsndfile(padded) == by_libsndfile(content)


def test_plain_members_are_read_without_libsndfile_and_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def noting(stream: Any) -> Any:
        opened.append(stream)
        return open_stream(stream)

    monkeypatch.setattr(header, "open_stream", noting)
    plain, other = encoded("FLAC", "PCM_16"), encoded("WAV", "FLOAT")
    assert read_header("", member_of(plain)) == AudioInfo(22050, 3000, 1)
    assert not opened
    assert read_header("", member_of(other)) == AudioInfo(22050, 3000, 1)
    assert read_header("", member_of(with_block(plain, 1, HEAD_BYTES)[:-10])) == AudioInfo(22050, 3000, 1)
    assert len(opened) == 1  # all bytes of a member in memory are parsed


def test_the_header_of_a_file_whose_metadata_is_long_is_read_by_libsndfile(tmp_path: Path) -> None:
    content = with_block(encoded("FLAC", "PCM_16"), 1, HEAD_BYTES)
    (tmp_path / "a.flac").write_bytes(content)
    assert header._plain_header(content[:HEAD_BYTES], len(content)) is None
    assert read_header(str(tmp_path / "a.flac"), None) == AudioInfo(22050, 3000, 1)
    stored = StoredContent(str(tmp_path / "a.flac"), 0, len(content))
    shard = ObjectInfo(str(tmp_path / "a.flac"), len(content), None)
    assert read_header("", Member(shard, 0, len(content), stored)) == AudioInfo(22050, 3000, 1)


def test_a_wav_file_that_is_shorter_than_its_header_says_ends_early(tmp_path: Path) -> None:
    content = encoded("WAV", "PCM_16")
    (tmp_path / "a.wav").write_bytes(content[:-1000])
    assert read_header(str(tmp_path / "a.wav"), None) == AudioInfo(22050, 2500, 1, ends_early=True)
    no_samples = content[:40] + struct.pack("<I", 0)
    assert read_header("", member_of(no_samples))[0] == "empty"
    assert isinstance(read_header("", member_of(no_samples)), Problem)
