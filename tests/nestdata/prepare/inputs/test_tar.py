import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nestdata.prepare.inputs.tar import (
    TarError,
    TarMember,
    member_at,
    walk,
)
from nestdata.storage import ObjectInfo
from tests.nestdata.prepare.inputs.shards import tar_of

BLOCK = tarfile.BLOCKSIZE
_FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
_LONG = "long/" * 40 + "name"


def info_of(name: str, **values: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(info, key, value)
    return info


def members_of(content: bytes) -> list[TarMember]:
    return list(walk(io.BytesIO(content), len(content)))


def until_damage(content: bytes) -> tuple[list[TarMember], str, str]:
    """Returns the members before the damage, the reason and the message."""
    members = []
    try:
        for member in walk(io.BytesIO(content), len(content)):
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
    st.integers(0, 3),
)
def test_members_are_those_of_the_archive(
    entries: list[tuple[str, bytes, bytes, float]], form: int, padding: int
) -> None:
    infos = []
    for name, content, kind, time in entries:
        info = info_of(name, type=kind, mtime=time if form == tarfile.PAX_FORMAT else int(time))
        if kind == tarfile.SYMTYPE:
            info.linkname = name
        infos.append((info, content if info.isreg() else b""))
    try:
        content = tar_of(*infos, form=form, errors="surrogateescape") + bytes(padding * BLOCK)
    except ValueError:
        assume(False)  # a name that is too long for USTAR
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar if info.isreg()]
        num_links = sum(info.issym() for info in tar)
    members = members_of(content)
    assert [member[:3] for member in members if not member.problem.startswith("a symbolic")] == expected
    assert sum(bool(member.problem) for member in members) == num_links


def test_the_member_at_a_header_is_found_in_the_middle_of_a_tar(tmp_path: Path) -> None:
    content = tar_of(("a.wav", b"abc"), (_LONG, b"defg"), (info_of("l", type=tarfile.SYMTYPE, linkname="a.wav"), b""))
    (tmp_path / "a.tar").write_bytes(content)
    info = ObjectInfo(str(tmp_path / "a.tar"), len(content), None)
    member, link, end = (member_at(info.location, start, info) for start in (2 * BLOCK, 6 * BLOCK, 7 * BLOCK))
    assert member.read() == b"defg"
    assert [found.reason for found in (link, end)] == ["unsafe_member", "no_such_member"]  # type: ignore[union-attr]


@pytest.mark.parametrize("padding", [0, 100 * BLOCK])
def test_members_behind_an_end_mark_are_read(padding: int) -> None:
    first, second = tar_of(("a.wav", b"abc"), ("b.wav", b"")), tar_of(("c.wav", b"defg"))
    joined = tar_of() + first + bytes(padding) + second + second
    with tarfile.open(fileobj=io.BytesIO(joined), ignore_zeros=True) as tar:
        expected = [TarMember(info.name, info.offset_data, info.size) for info in tar]
    assert [member.name for member in expected] == ["a.wav", "b.wav", "c.wav", "c.wav"]
    assert members_of(joined) == expected


@pytest.mark.parametrize("rest", [b"garbage" * 1000, bytes(700) + b"x"])
def test_something_else_behind_the_end_mark_is_damage(rest: bytes) -> None:
    whole = tar_of(("a.wav", b"abc"))
    members, reason, message = until_damage(whole + rest)
    assert (members, reason) == (members_of(whole), "shard_unreadable")
    at = len(whole) + (len(rest) - len(rest.lstrip(b"\0"))) // BLOCK * BLOCK
    assert message == f"has an end mark, and behind it, at byte {at}, something that is not a tar"


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (info_of("/etc/a.wav"), "stored under an absolute name"),
        (info_of("a/../../b.wav"), "stored under a name with `..`"),
        (info_of("a.wav", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a symbolic link to '/etc/passwd'"),
        (info_of("a.wav", type=tarfile.FIFOTYPE), "a pipe"),
        (info_of("a.wav", type=tarfile.GNUTYPE_SPARSE), "a sparse file"),
        (info_of("a.wav", pax_headers={"GNU.sparse.major": "1"}), "a sparse file"),
    ],
)
def test_a_member_that_must_not_be_used_is_named_and_the_next_one_is_found(info: tarfile.TarInfo, problem: str) -> None:
    first, second = members_of(tar_of((info, b""), ("next.wav", b"abc")))
    assert (first.problem, second.name, second.problem) == (problem, "next.wav", "")


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


@given(st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(0, 255)), max_size=20), st.sampled_from(_FORMATS))
def test_members_of_an_archive_with_any_damage_are_inside_of_it(changes: list[tuple[int, int]], form: int) -> None:
    content = bytearray(tar_of((_LONG if form != tarfile.USTAR_FORMAT else "a", b"abc"), ("b", b"defg"), form=form))
    for position, value in changes:
        content[position] = value
    for start in range(0, 3 * BLOCK, BLOCK):  # so that headers are read as such
        header = content[start : start + BLOCK]
        content[start + 148 : start + 156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    try:
        for member in walk(io.BytesIO(content), len(content)):
            assert member.problem or 0 <= member.offset <= member.offset + member.size <= len(content)
    except TarError:
        pass


@pytest.mark.parametrize(
    ("content", "reason", "message"),
    [
        (b"", "shard_unreadable", "has no bytes"),
        (b"RIFF" + bytes(1000), "shard_unreadable", "not a tar archive"),
        (gzip.compress(tar_of(("a.wav", b"abc")), mtime=0), "compressed_tar", "compressed with gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed_tar", "compressed with zstd"),
    ],
    ids=["empty", "other", "gzip", "zstd"],
)
def test_files_that_are_no_plain_tar_are_named(content: bytes, reason: str, message: str) -> None:
    members, found, text = until_damage(content)
    assert (members, found) == ([], reason)
    assert text.startswith(message)


def test_an_extended_header_of_a_gigabyte_is_not_read() -> None:
    huge = info_of("x", type=tarfile.XHDTYPE, size=1 << 30).tobuf(tarfile.USTAR_FORMAT)
    assert "has 1073741824 bytes" in until_damage(huge + bytes(BLOCK))[2]
