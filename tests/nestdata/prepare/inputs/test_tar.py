import gzip
import io
import lzma
import tarfile
import zlib
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nestdata.prepare.inputs import shard as shard_module
from nestdata.prepare.inputs import tar as tar_module
from nestdata.prepare.inputs.content import HEAD_BYTES, LoadedContent, StoredContent
from nestdata.prepare.inputs.shard import ForwardReader, OpenShard
from nestdata.prepare.inputs.tar import (
    BLOCK,
    ReadAt,
    TarError,
    TarMember,
    plain_name,
    stem_and_suffix,
    walk,
)
from nestdata.storage import ObjectInfo

_FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
_LONG = "long/" * 40 + "name"


def tar_of(*members: tuple[str | tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT, **options: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def info_of(name: str, **values: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(info, key, value)
    return info


def reader_of(content: bytes) -> ReadAt:
    return lambda offset, length: content[offset : offset + length]


def members_of(content: bytes) -> list[TarMember]:
    return list(walk(reader_of(content), len(content)))


def until_damage(content: bytes) -> tuple[list[TarMember], str, str]:
    """Returns the members before the damage, the reason and the message."""
    members = []
    try:
        for member in walk(reader_of(content), len(content)):
            members.append(member)
    except TarError as error:
        return members, error.reason, str(error)
    raise AssertionError("no damage was found")


_names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=150
).filter(lambda name: name not in (".", ".."))
_paths = st.lists(_names, min_size=1, max_size=3).map("/".join)
_kinds = st.sampled_from([tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])


@given(
    st.lists(st.tuples(_paths, st.binary(max_size=1500), _kinds, st.floats(0, 2**33)), max_size=6),
    st.sampled_from(_FORMATS),
)
def test_members_are_those_that_tarfile_finds(entries: list[tuple[str, bytes, bytes, float]], form: int) -> None:
    infos = []
    for name, content, kind, time in entries:
        info = info_of(name, type=kind, mtime=time if form == tarfile.PAX_FORMAT else int(time))
        if kind == tarfile.SYMTYPE:
            info.linkname = name
        infos.append((info, content if info.isreg() else b""))
    try:
        content = tar_of(*infos, form=form, errors="surrogateescape")
    except ValueError:
        assume(False)  # a name that is too long for USTAR
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar if info.isreg()]
        num_links = sum(info.issym() for info in tar)
    members = members_of(content)
    assert [member[:3] for member in members if not member.problem.startswith("a symbolic")] == expected
    assert sum(bool(member.problem) for member in members) == num_links


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=3000), min_size=1, max_size=5), st.integers(1, 3000), st.booleans())
def test_a_stream_in_pieces_gives_the_same_members_and_contents_as_a_file(
    contents: list[bytes], piece: int, reads: bool
) -> None:
    tar = tar_of(*((info_of(f"{i}.wav", mtime=0.5), content) for i, content in enumerate(contents)))

    class Pieces(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:piece])

    read_at = ForwardReader(Pieces(tar))
    found: list[tuple[TarMember, bytes]] = []
    for member in walk(read_at, len(tar)):
        found.append((member, read_at(member.offset, member.size) if reads else contents[len(found)]))
    assert found == list(zip(members_of(tar), contents, strict=True))


def test_the_checksum_of_a_long_member_is_computed_without_holding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "_CHUNK", 1000)
    monkeypatch.setattr(shard_module, "MAX_HELD", 5000)
    contents = [bytes([number]) * size for number, size in enumerate([5000, 50_000, 10])]
    archive = tar_of(*((info_of(f"{number}.wav"), content) for number, content in enumerate(contents)))
    reader = ForwardReader(io.BytesIO(archive))
    shard = OpenShard(ObjectInfo("s3://bucket/a.tar", len(archive), "etag"), reader)
    for found, content in zip(shard.members(), contents, strict=True):
        member = shard.member(found)
        assert archive[member.offset : member.offset + member.length] == content
        if len(content) <= 5000:
            assert (member.content, member.crc32) == (LoadedContent(content), None)
        else:
            assert member.content.head() == content[:HEAD_BYTES]
            assert (member.content, member.crc32) == (
                StoredContent("s3://bucket/a.tar", found.offset, found.size, "etag", start=content[:HEAD_BYTES]),
                zlib.crc32(content),
            )
        assert len(reader._buffer) <= HEAD_BYTES


@pytest.mark.parametrize("padding", [0, BLOCK, 100 * BLOCK, 1000 * BLOCK])
def test_members_behind_an_end_mark_are_read_from_a_file_and_from_a_stream(padding: int) -> None:
    first, second = tar_of(("a.wav", b"abc"), ("b.wav", b"")), tar_of(("c.wav", b"defg"))
    joined = tar_of() + first + bytes(padding) + second + second
    with tarfile.open(fileobj=io.BytesIO(joined), ignore_zeros=True) as tar:
        expected = [TarMember(info.name, info.offset_data, info.size) for info in tar]
    assert [member.name for member in expected] == ["a.wav", "b.wav", "c.wav", "c.wav"]
    assert members_of(joined) == expected
    assert list(walk(ForwardReader(io.BytesIO(joined)), len(joined))) == expected


def test_a_global_pax_header_ends_with_its_archive() -> None:
    first = io.BytesIO()
    with tarfile.open(fileobj=first, mode="w", pax_headers={"path": "global.wav"}) as tar:
        tar.addfile(info_of("a.wav"))
    joined = first.getvalue() + tar_of(("b.wav", b""))
    assert [member.name for member in members_of(joined)] == ["global.wav", "b.wav"]


@pytest.mark.parametrize(
    "rest", [b"x", b"garbage" * 1000, bytes(700) + b"x", gzip.compress(b"abc", mtime=0), b"\0" * 511 + b"\1"]
)
def test_something_else_behind_the_end_mark_is_damage(rest: bytes) -> None:
    whole = tar_of(("a.wav", b"abc"))
    members, reason, message = until_damage(whole + rest)
    assert (members, reason) == (members_of(whole), "shard_unreadable")
    at = len(whole) + (len(rest) - len(rest.lstrip(b"\0"))) // BLOCK * BLOCK
    assert message == f"has an end mark, and behind it, at byte {at}, something that is not a tar"


def test_damage_in_a_second_archive_is_found() -> None:
    whole, second = tar_of(("a.wav", b"abc")), bytearray(tar_of(("b.wav", b"abc"), ("c.wav", b"abc")))
    second[2 * BLOCK] ^= 1
    members, _, message = until_damage(whole + second)
    assert [member.name for member in members] == ["a.wav", "b.wav"]
    assert message == f"the header at byte {len(whole) + 2 * BLOCK} is damaged"
    assert until_damage(whole + second[: BLOCK + 1])[2].startswith("ends at byte")


def test_zeros_behind_the_end_mark_are_the_end_unless_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tar_of(("a.wav", b"abc"))
    end = 2 * BLOCK
    monkeypatch.setattr(tar_module, "_MAX_PADDING", 1 << 20)
    for num_bytes in (end + (1 << 20), end + (1 << 20) - 1, end + BLOCK + 1, end + BLOCK):
        assert members_of(whole.ljust(num_bytes, b"\0")[:num_bytes]) == members_of(whole)
    members, reason, message = until_damage(whole.ljust(end + (1 << 20) + 1, b"\0"))
    assert (members, reason) == (members_of(whole), "shard_unreadable")
    assert message == f"has more than 1 MiB of zeros behind the end mark at byte {end}; what follows was not read"


def test_a_size_of_too_many_digits_is_damage() -> None:
    content = tar_of((info_of("a.wav", pax_headers={"size": "9" * 5000}), b""))
    assert until_damage(content)[2].startswith("the header at byte 5632 has a size of '999")


@pytest.mark.parametrize("form", _FORMATS)
def test_long_and_unicode_names_are_read_in_every_format(form: int) -> None:
    names = ["ü/日本.wav", f"{'f' * 90}/{'b' * 60}.wav", *([] if form == tarfile.USTAR_FORMAT else [_LONG])]
    members = members_of(tar_of(*((name, b"abc") for name in names), form=form))
    assert [member.name for member in members] == names
    assert all(member.size == 3 and not member.problem for member in members)


def test_the_last_header_directly_precedes_the_content_behind_a_pax_header() -> None:
    content = tar_of((info_of("a.wav", mtime=1.25), b"abc"))
    (member,) = members_of(content)
    assert member == TarMember("a.wav", 3 * BLOCK, 3)
    assert content[member.offset - BLOCK :].startswith(b"a.wav\0")


def test_global_pax_headers_and_members_own_headers_are_told_apart() -> None:
    first = io.BytesIO()
    with tarfile.open(fileobj=first, mode="w", pax_headers={"comment": "x", "path": "global.wav"}) as tar:
        tar.addfile(info_of("a.wav"))
        tar.addfile(info_of("b" * 101 + ".wav"))
        tar.addfile(info_of("c.wav"))
    assert [member.name for member in members_of(first.getvalue())] == ["global.wav", "b" * 101 + ".wav", "global.wav"]


def test_a_size_in_base_256_or_in_a_pax_record_is_read() -> None:
    size = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        header = info_of("a.wav", size=size).tobuf(form)
        padded = len(header) + size

        def read_at(offset: int, length: int, header: bytes = header, padded: int = padded) -> bytes:
            return header[offset : offset + length] if offset < padded else bytes(2 * BLOCK)[:length]

        (member,) = walk(read_at, padded + 2 * BLOCK)
        assert member == TarMember("a.wav", len(header), size)


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (info_of("/etc/a.wav"), "an absolute name"),
        (info_of("a/../../b.wav"), "a name with `..`"),
        (info_of("a.wav", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a symbolic link to '/etc/passwd'"),
        (info_of("a.wav", type=tarfile.LNKTYPE, linkname="b.wav"), "a hard link to 'b.wav'"),
        (info_of("a.wav", type=tarfile.SYMTYPE, linkname="l" * 200), f"a symbolic link to '{'l' * 200}'"),
        (info_of("a.wav", type=tarfile.CHRTYPE), "a character device"),
        (info_of("a.wav", type=tarfile.BLKTYPE), "a block device"),
        (info_of("a.wav", type=tarfile.FIFOTYPE), "a pipe"),
        (info_of("a.wav", type=tarfile.GNUTYPE_SPARSE), "a sparse file"),
        (info_of("a.wav", pax_headers={"GNU.sparse.major": "1"}), "a sparse file"),
        (info_of("a.wav", type=b"Z"), "of the unknown type 'Z'"),
    ],
)
def test_a_member_that_must_not_be_used_is_named_and_the_next_one_is_found(info: tarfile.TarInfo, problem: str) -> None:
    first, second = members_of(tar_of((info, b""), ("next.wav", b"abc")))
    assert (first.problem, second.name, second.problem) == (problem, "next.wav", "")


def test_folders_are_skipped_in_new_and_old_headers() -> None:
    content = tar_of((info_of("a", type=tarfile.DIRTYPE), b""), ("a/b.wav", b"abc"), form=tarfile.USTAR_FORMAT)
    old = bytearray(content)
    old[156] = 0  # a folder of the format before POSIX is a file whose name ends with a slash
    old[148:156] = b"%06o\0 " % (sum(old[:BLOCK]) - sum(old[148:156]) + 8 * 32)
    assert [member.name for member in members_of(content)] == ["a/b.wav"] == [m.name for m in members_of(bytes(old))]


@pytest.mark.parametrize("kept", ["half of the last member", "half of its header", "no end mark"])
def test_the_members_before_the_end_of_a_truncated_archive_are_yielded(kept: str) -> None:
    content = tar_of(("a.wav", b"a" * 1000), ("b.wav", b"b" * 1000))
    start = 3 * BLOCK
    length = {"half of the last member": start + BLOCK + 500, "half of its header": start + 200, "no end mark": start}
    members, reason, message = until_damage(content[: length[kept]])
    assert ([member.name for member in members], reason) == (["a.wav"], "shard_unreadable")
    expected = {
        "half of the last member": "ends at byte 2548, inside 'b.wav', which begins at byte 1536: it is truncated",
        "half of its header": "ends at byte 1736, inside a header",
        "no end mark": "ends after 1536 bytes without the end mark of a tar: it may be truncated",
    }
    assert message == expected[kept]


@given(st.integers(0, 4000))
def test_no_length_of_a_truncated_archive_gives_a_wrong_member(length: int) -> None:
    content = tar_of((info_of("a.wav", mtime=0.5), b"a" * 1000), (info_of("b.wav", mtime=0.5), b"b" * 700))
    whole = members_of(content)
    if length >= len(whole) and content[length - BLOCK : length] == bytes(BLOCK) and length > whole[-1].offset + 1024:
        assume(False)  # the end mark was reached
    members, reason, _ = until_damage(content[:length])
    assert members == whole[: len(members)]
    assert len(members) < 2 or length >= whole[1].offset + 700
    assert reason == "shard_unreadable"


@given(st.integers(0, BLOCK - 1), st.integers(1, 255))
def test_a_changed_byte_in_a_header_is_noticed_by_its_checksum(position: int, change: int) -> None:
    content = bytearray(tar_of(("a.wav", b"a" * 100), ("b.wav", b"b" * 100), form=tarfile.USTAR_FORMAT))
    content[2 * BLOCK + position] ^= change
    try:
        members = members_of(bytes(content))
    except TarError as error:
        assert str(error) == "the header at byte 1024 is damaged"  # noqa: PT017, most changes, but not all
    else:  # such as a blank that became a NUL byte, beside the digits of the checksum
        assert 148 <= position < 156
        assert [member.name for member in members] == ["a.wav", "b.wav"]


def test_the_sum_of_signed_bytes_is_accepted_as_old_programs_wrote_it() -> None:
    content = bytearray(tar_of(("ü.wav", b"abc"), form=tarfile.USTAR_FORMAT))
    signed = sum(byte - 256 if byte > 127 else byte for byte in [*content[:148], *content[156:BLOCK]]) + 8 * 32
    content[148:156] = b"%06o\0 " % signed
    assert [member.name for member in members_of(bytes(content))] == ["ü.wav"]


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (b"", "shard_unreadable", "has no bytes"),
        (b"RIFF" + bytes(1000), "shard_unreadable", "not a tar archive"),
        (gzip.compress(tar_of(("a.wav", b"abc")), mtime=0), "compressed_tar", "compressed with gzip"),
        (lzma.compress(tar_of(("a.wav", b"abc"))), "compressed_tar", "compressed with xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed_tar", "compressed with zstd"),
    ],
    ids=["empty", "other", "gzip", "xz", "zstd"],
)
def test_files_that_are_no_plain_tar_are_named(content: bytes, reason: str, message: str) -> None:
    members, found, text = until_damage(content)
    assert (members, found) == ([], reason)
    assert text.startswith(message)


def test_damaged_extended_headers_are_errors() -> None:
    content = bytearray(tar_of((info_of("a.wav", mtime=0.5), b"abc")))
    assert content[BLOCK : BLOCK + 9] == b"13 mtime="
    content[BLOCK : BLOCK + 2] = b"99"
    assert until_damage(bytes(content))[2] == "the extended header at byte 0 is damaged"
    huge = info_of("x", type=tarfile.XHDTYPE, size=1 << 30).tobuf(tarfile.USTAR_FORMAT)
    assert until_damage(huge + bytes(BLOCK))[2] == "the extended header at byte 0 has 1073741824 bytes"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b.c.FLAC", ("a/b.c", ".flac")),
        ("a.b/c", ("a.b/c", "")),
        (".hidden", (".hidden", "")),
        ("a/.wav", ("a/.wav", "")),
    ],
)
def test_a_name_is_split_before_its_last_dot(name: str, parts: tuple[str, str]) -> None:
    assert stem_and_suffix(name) == parts


def test_a_leading_dot_folder_is_dropped() -> None:
    assert [plain_name(name) for name in ("./a/b", ".//a", "././a", ".a", "a/./b")] == ["a/b", "a", "a", ".a", "a/./b"]
