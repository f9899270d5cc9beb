"""Files whose header does not give the length of all audio in them: what is decoded decides."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from nestdata import Corpus, PrepareConfig, load_audio, prepare_corpus
from nestdata.audio import mpeg, ogg, wav
from nestdata.audio.byte_ranges import ByteRanges
from nestdata.audio.encoded import EncodedAudio
from nestdata.audio.parts import JoinedAudio, SoundFileAudio
from nestdata.prepare.inputs.entry import File, Member, Unusable
from nestdata.prepare.read import AudioInfo, read_header
from nestdata.storage import ObjectInfo
from tests.nestdata.audio.ogg_pages import flac_in_ogg
from tests.nestdata.bad_files import without_length
from tests.synthesis import Samples, chirp, encoded, hiss

ID3 = b"ID3\x04\0\0\0\0\x07\x76" + bytes(1014)
"""A tag of version 2 with 1014 bytes of padding, more than libmpg123 skips as damage."""


def decoded(content: bytes) -> Samples:
    with EncodedAudio("a", content).open() as file:
        samples: Samples = file.read(1_000_000)[:, 0]
    return samples


def speech(num_samples: int, seed: int = 1) -> Samples:
    """Returns a quiet first half, whose frames are short at a variable bit rate, and a loud second half."""
    samples = chirp(100, 3000, num_samples / 16000)[:num_samples] + hiss(num_samples, seed)
    samples[: num_samples // 2] *= 1e-4
    return samples


def without_tag(mp3: bytes) -> bytes:
    """Returns an MP3 file without the frame that holds its tag, as `lame -t` and pipes write it."""
    header = mpeg.parse_frame(mp3)
    assert header is not None
    return mp3[header.num_bytes :]


def num_frames_of(mp3: bytes) -> int:
    """Counts the frames of an intact MP3 file."""
    position = num_frames = 0
    while header := mpeg.parse_frame(mp3[position : position + 4]):
        position, num_frames = position + header.num_bytes, num_frames + 1
    assert position == len(mp3)
    return num_frames


MP3 = encoded(speech(60_000), "MP3", bitrate_mode="VARIABLE")
SECOND_MP3 = encoded(speech(41_000, 2), "MP3", bitrate_mode="CONSTANT")
UNTAGGED = without_tag(MP3)
OGG, SECOND_OGG = (encoded(speech(n, n), "OGG", subtype="VORBIS") for n in (30_000, 20_001))
LONG_OGG = encoded(speech(300_000), "OGG", subtype="VORBIS")
OPUS, SECOND_OPUS = (encoded(speech(n, n), "OGG", subtype="OPUS") for n in (30_000, 20_001))
FLAC, SECOND_FLAC = (encoded(speech(n, n), "FLAC", subtype="PCM_16") for n in (30_000, 20_001))
WAV, SECOND_WAV = (encoded(speech(n, n), "WAV", subtype="PCM_16") for n in (30_000, 20_001))


def header_of(path: Path, content: bytes) -> AudioInfo | Unusable:
    """Reads the header of a file, of a member on disk, and of one in memory, which are the same."""
    path.write_bytes(content)
    shard = ObjectInfo(str(path), len(content), None)
    first, *others = [read_header(File(str(path)))] + [
        read_header(Member(shard, 0, len(content), start=start)) for start in (b"", content)
    ]
    for other in others:
        if isinstance(first, Unusable):
            assert isinstance(other, Unusable)
            assert other.reason == first.reason
        else:
            assert other == first._replace(version=None)
    return first


def check_all_ways(tmp_path: Path, name: str, content: bytes, expected: Samples) -> None:
    """Checks that a file is prepared and decoded to these samples, as a whole and in spans, on disk and in memory."""
    (tmp_path / "audio").mkdir()
    path = tmp_path / "audio" / name
    info = header_of(path, content)
    assert isinstance(info, AudioInfo), info
    assert (info.num_frames, info.ends_early) == (len(expected), False)
    for probe in ("all", "decode"):
        prepare_corpus([path.parent], tmp_path / "corpus", PrepareConfig(probe=probe), overwrite=True)
        corpus = Corpus.open(tmp_path / "corpus")
        assert corpus[0].num_samples == len(expected)
        np.testing.assert_array_equal(corpus.load(0)[1], expected)
    np.testing.assert_array_equal(load_audio(path), expected)
    # libmpg123 computes with another phase of its filters after a seek, which rounds otherwise.
    atol = 1e-6 if name.endswith(".mp3") else 0
    for start in (1, len(expected) // 3, 2 * len(expected) // 3, len(expected) - 300):
        for num_samples in (1, 300):
            part = corpus.load(0, start=start, num_samples=num_samples)[1]
            np.testing.assert_allclose(part, expected[start : start + num_samples], rtol=0, atol=atol)


def test_an_mp3_file_without_a_tag_has_the_samples_of_all_its_frames(tmp_path: Path) -> None:
    num_samples = 576 * num_frames_of(UNTAGGED)
    with soundfile.SoundFile(io.BytesIO(UNTAGGED)) as file:
        assert file.frames != num_samples  # libsndfile's estimate
    # The frame of the tag is silent to a decoder, and what follows it is decoded as in the file with the tag.
    expected = decoded(UNTAGGED)
    assert len(expected) == num_samples
    np.testing.assert_allclose(expected[1105 : 1105 + 60_000], decoded(MP3), rtol=0, atol=1e-6)
    check_all_ways(tmp_path, "a.mp3", UNTAGGED, expected)


def test_the_file_behind_an_mp3_file_with_a_tag_is_not_lost(tmp_path: Path) -> None:
    joined = decoded(MP3 + SECOND_MP3)
    np.testing.assert_array_equal(joined[:60_000], decoded(MP3))
    assert len(joined) == 60_000 + 576 * num_frames_of(SECOND_MP3)
    start = 60_000 + 576 + 1105  # the frame of the tag, and the delay of the encoder
    np.testing.assert_allclose(joined[start : start + 41_000], decoded(SECOND_MP3), rtol=0, atol=1e-6)
    check_all_ways(tmp_path, "a.mp3", MP3 + SECOND_MP3, joined)


@pytest.mark.parametrize("between", [b"TAG" + bytes(125), bytes(5000), b"\xff\xfb\xff" * 900, ID3 * 3])
def test_what_is_between_and_before_mp3_frames_is_left_out(between: bytes) -> None:
    end = 0
    for _ in range(5):
        header = mpeg.parse_frame(UNTAGGED[end : end + 4])
        assert header is not None
        end += header.num_bytes
    damaged = ID3 + UNTAGGED[:end] + between + UNTAGGED[end:] + between
    with EncodedAudio("a", UNTAGGED).open() as plain, EncodedAudio("a", damaged).open() as file:
        assert isinstance(file, JoinedAudio)
        np.testing.assert_array_equal(file.read(10**6), plain.read(10**6))


def test_more_streams_than_memory_should_hold_are_rejected() -> None:
    second = OGG.index(b"OggS", 4)
    stream = OGG[: OGG.index(b"OggS", second + 4)]
    with pytest.raises(ValueError, match="more than 10,000 streams"):
        ogg.links_of(ByteRanges.of_bytes(stream * 10_001))


@pytest.mark.parametrize("first", [MP3, UNTAGGED])
def test_mp3_streams_of_different_form_are_rejected_with_the_place(tmp_path: Path, first: bytes) -> None:
    found = header_of(tmp_path / "a.mp3", first + encoded(speech(20_000), "MP3", rate=22050))
    assert isinstance(found, Unusable)
    assert f"byte {len(first)} begins" in found.detail
    assert "divide the file" in found.detail


@pytest.mark.parametrize("content", [MP3, MP3 + b"TAG" + bytes(125), ID3 + MP3])
def test_an_mp3_file_whose_tag_accounts_for_it_is_decoded_as_one_stream(content: bytes) -> None:
    with EncodedAudio("a", content).open() as file:
        assert isinstance(file, SoundFileAudio)
        assert file.num_samples == 60_000


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.ogg", [OGG, SECOND_OGG, OGG]),
        ("a.opus", [OPUS, SECOND_OPUS]),
        ("a.flac", [SECOND_FLAC, SECOND_FLAC, FLAC]),
        ("a.flac", [FLAC, FLAC]),
        ("a.flac", [without_length(FLAC), without_length(SECOND_FLAC)]),
        ("a.wav", [WAV, SECOND_WAV]),
    ],
    ids=["ogg", "opus", "flac", "flac of one length", "flac without a length", "wav"],
)
def test_joined_files_have_the_samples_of_all_of_them(tmp_path: Path, name: str, parts: list[bytes]) -> None:
    with_length = {without_length(part): part for part in (FLAC, SECOND_FLAC)}
    expected = np.concatenate([decoded(with_length.get(part, part)) for part in parts])
    check_all_ways(tmp_path, name, b"".join(parts), expected)


@pytest.mark.parametrize("form", ["WAV", "WAVEX", "AIFF", "RF64", "W64", "CAF", "FLAC"])
@pytest.mark.parametrize("subtype", ["PCM_16", "ULAW", "FLOAT"])
@pytest.mark.parametrize("num_samples", [20_001, 30_000, 10_000])
@pytest.mark.parametrize("before", [b"", ID3], ids=["", "ID3"])
def test_files_of_samples_that_are_joined_are_read_to_the_end(
    form: str, subtype: str, num_samples: int, before: bytes
) -> None:
    if form == "FLAC" and subtype != "PCM_16":
        pytest.skip("FLAC has integers only")
    parts = [encoded(speech(number), form, subtype=subtype) for number in (num_samples, 20_001, num_samples)]
    expected = np.concatenate([decoded(part) for part in parts])
    with EncodedAudio("a", before + b"".join(parts)).open(len(expected) / 16000) as file:
        np.testing.assert_array_equal(file.read(1_000_000)[:, 0], expected)


@pytest.mark.parametrize("form", ["RF64", "W64", "CAF"])
@pytest.mark.parametrize("length", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_length_in_a_header_that_is_none_leads_to_no_other_file(tmp_path: Path, form: str, length: int) -> None:
    content = bytearray(encoded(speech(3000), form, subtype="PCM_16"))
    place = {"RF64": 20, "W64": 16, "CAF": content.index(b"data") + 4 if form == "CAF" else 0}[form]
    content[place : place + 8] = length.to_bytes(8, "big" if form == "CAF" else "little")
    (tmp_path / "a").write_bytes(content)
    with (tmp_path / "a").open("rb") as file:
        for ranges in (ByteRanges.of_file(file.fileno(), len(content)), ByteRanges.of_bytes(bytes(content))):
            assert wav.starts_of_files(ranges, 0) == [0]


def test_streams_of_different_rates_are_rejected(tmp_path: Path) -> None:
    found = header_of(tmp_path / "a", OGG + encoded(hiss(9000, 1), "OGG", 8000, "VORBIS"))
    assert isinstance(found, Unusable)
    assert "stream 2 of the file has 8000 Hz and 1 channels, the first one 16000 Hz and 1" in found.detail


def test_flac_in_ogg_is_decoded_as_the_flac_file_in_it(tmp_path: Path) -> None:
    check_all_ways(tmp_path, "a.ogg", flac_in_ogg(FLAC), decoded(FLAC))


def test_chained_flac_in_ogg_without_lengths_is_decoded_to_the_end(tmp_path: Path) -> None:
    chain = flac_in_ogg(without_length(FLAC)) + flac_in_ogg(SECOND_FLAC, 8)
    check_all_ways(tmp_path, "a.ogg", chain, np.concatenate([decoded(FLAC), decoded(SECOND_FLAC)]))


def test_ogg_with_bytes_between_its_pages_is_as_long_as_what_is_decoded(tmp_path: Path) -> None:
    middle = LONG_OGG.index(b"OggS", len(LONG_OGG) // 2)
    damaged = LONG_OGG[:middle] + hiss(3000, 5).tobytes() + LONG_OGG[middle:]
    check_all_ways(tmp_path, "a.ogg", damaged, decoded(damaged))


def test_ogg_that_was_cut_off_has_the_samples_of_its_whole_pages(tmp_path: Path) -> None:
    cut = LONG_OGG[: 2 * len(LONG_OGG) // 3]
    check_all_ways(tmp_path, "a.ogg", cut, decoded(cut))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from([OGG, OPUS, SECOND_OGG]), st.booleans()), min_size=1, max_size=4))
def test_the_links_of_a_chain_are_its_files(parts: list[tuple[bytes, bool]]) -> None:
    content = b""
    expected = []
    for part, has_garbage in parts:
        expected.append(ogg.OggLink([(len(content), len(part) + 9 * has_garbage)], not has_garbage, is_flac=False))
        content += part + b"no page, " * has_garbage
    assert ogg.links_of(ByteRanges.of_bytes(content)) == expected


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c[:5000] + bytes(40) + c[5000:]])
def test_damaged_and_joined_mp3_files_decode_to_what_the_header_says(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    for content in (change(MP3), change(UNTAGGED)):
        found = header_of(tmp_path / "a.mp3", content)
        assert isinstance(found, AudioInfo)
        with EncodedAudio("a", content).open() as file:
            assert len(file.read(10**6)) == found.num_frames
