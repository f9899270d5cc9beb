import tarfile
from pathlib import Path
from typing import Any

import pytest

from nestdata import ManifestError
from tests.nestdata.prepare.inputs.reading import content_or_reason, detail_of, entries_of, latest
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import write_jsonl


def tarred(folder: Path, rows: list[dict[str, Any]], *tars: dict[str, bytes]) -> Path:
    """Writes tars of the given members, and a manifest."""
    for number, members in enumerate(tars):
        write_tar(folder / f"audio_{number}.tar", members.items())
    return write_jsonl(folder / "m.json", rows)


def row(name: str, shard: int = 0, **more: Any) -> dict[str, Any]:
    return {"audio_filepath": name, "shard_id": shard, "duration": 1.0, **more}


def found_in(path: Path) -> list[str]:
    """Returns the content of the member of each line, or the reason why it is rejected."""
    return [content_or_reason(entry) for entry in latest(entries_of(path)).values()]


@pytest.mark.parametrize(
    ("names", "members", "expected"),
    [
        (["a.wav", "a-sub1.wav"], ["a.wav"], ["a.wav", "a.wav"]),
        (["a-sub1.wav"], ["a-sub1.wav"], ["a-sub1.wav"]),
        (["a-sub1.wav", "a.wav"], ["a.wav", "a-sub1.wav"], ["ambiguous_member", "a.wav"]),
        (["a.wav"], ["./a.wav"], ["./a.wav"]),
        (["a.wav"], ["a.flac"], ["a.flac"]),
        (["a.wav"], ["a.flac", "a.wav", "a.mp3"], ["a.wav"]),
        (["a.wav"], ["a.flac", "a.mp3"], ["ambiguous_member"]),
        (["a.wav"], ["a.txt", "a.json"], ["no_such_member"]),
    ],
)
def test_a_line_finds_its_member(tmp_path: Path, names: list[str], members: list[str], expected: list[str]) -> None:
    path = tarred(tmp_path, [row(name) for name in names], {name: name.encode() for name in members})
    assert found_in(path) == expected


def test_lines_that_nemo_skips_and_blank_lines_have_no_entry(tmp_path: Path) -> None:
    rows = [
        row("a.wav", _skipme=True),
        row("b.wav", _skipme=0),
        row("c.wav", _skipme="low rate"),
        row("d.wav", lang="en"),
    ]
    path = tarred(tmp_path, rows, {f"{name}.wav": name.encode() for name in "abcd"})
    path.write_text(path.read_text().replace("\n", "\n\n"))
    entries = latest(entries_of(path))
    assert [(entry.where, entry.labels) for entry in entries.values()] == [
        (f"{path}:3", {}),
        (f"{path}:7", {"lang": "en"}),
    ]


def test_members_that_must_not_be_used_are_rejected_and_never_written(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "audio_0.tar", "w") as tar:
        for name, kind in (("l.wav", tarfile.SYMTYPE), ("d.wav", tarfile.CHRTYPE), ("/abs.wav", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    path = write_jsonl(tmp_path / "m.json", [row("l.wav"), row("d.wav"), row("/abs.wav")])
    entries = latest(entries_of(path))
    assert [content_or_reason(entry) for entry in entries.values()] == ["unsafe_member"] * 3
    assert detail_of(entries[1]) == f"{tmp_path}/audio_0.tar: the member 'l.wav' is a symbolic link to '/etc/passwd'"


def test_the_members_before_the_damage_of_a_shard_are_used(tmp_path: Path) -> None:
    path = tarred(tmp_path, [row("a.wav"), row("b.wav"), row("a-sub1.wav")], {"a.wav": b"1" * 999, "b.wav": b"2" * 999})
    content = (tmp_path / "audio_0.tar").read_bytes()
    (tmp_path / "audio_0.tar").write_bytes(content[: content.index(b"2" * 999) + 500])
    assert [found[:5] for found in found_in(path)] == ["11111", "shard", "11111"]
    entries = latest(entries_of(path))
    assert detail_of(entries[2]).startswith(f"{tmp_path}/audio_0.tar: ends at byte ")
    (tmp_path / "audio_0.tar").write_bytes(b"\x1f\x8b" + content)
    assert found_in(path) == ["compressed_tar"] * 3


def test_sharded_manifests_are_joined_with_the_tars_of_the_same_numbers(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        write_tar(tmp_path / "tars" / f"audio_{number}.tar", [("a.wav", str(number).encode())])
        # NeMo takes the shard from the name of the manifest, whatever the lines say.
        write_jsonl(tmp_path / "sets" / f"manifest_{number}.json", [row("a.wav", 77)])
    tars = str(tmp_path / "tars" / "audio__OP_8..10_CL_.tar")
    path = tmp_path / "sets" / "manifest_<9..10>.json"
    entries = entries_of(path, tars=(tars,))
    assert [(entry.where, entry.audio.read()) for entry in entries if entry.audio.member] == [
        (f"{tmp_path}/sets/manifest_9.json:1", b"9"),
        (f"{tmp_path}/sets/manifest_10.json:1", b"10"),
    ]


@pytest.mark.parametrize(
    ("rows", "tars", "message"),
    [
        ([row("a.wav", 1)], None, r"m\.json:1: no tar has the shard_id 1; there are 1, from .*audio_0\.tar"),
        ([row("a.wav"), row("b.wav", duration="x")], None, r"m\.json:2: duration is 'x'"),
        ([row("a.wav")], "gone_{0..3}.tar", r"gone_\{0\.\.3\}\.tar: 4 of 4 shards do not exist, such as .*gone_0\.tar"),
        ([row("a.wav")], "audio_{0..1}.tar", r"1 of 2 shards do not exist, such as .*audio_1\.tar"),
        ([row("a.wav")], "audio{,}_0.tar", "are both shard 0"),
        ([row("a.wav")], "{m,audio_0}.tar", "'m.tar' has no number"),
    ],
)
def test_what_does_not_fit_together_is_one_error(
    tmp_path: Path, rows: list[dict[str, Any]], tars: str | None, message: str
) -> None:
    path = tarred(tmp_path, rows, {"a.wav": b"1", "b.wav": b"2"})
    write_tar(tmp_path / "other" / "m.tar", [])
    (tmp_path / "m.tar").touch() if tars and tars.startswith("{m") else None
    with pytest.raises(ManifestError, match=message):
        entries_of(path, tars=() if tars is None else (str(tmp_path / tars),))


def test_tars_that_cannot_be_told_apart_or_found_are_an_error(tmp_path: Path) -> None:
    path = tarred(tmp_path, [row("a.wav")], {"a.wav": b"1"})
    write_tar(tmp_path / "noise_0.tar", [])
    with pytest.raises(
        ManifestError, match=r"several sets of tars in .*, such as audio_0\.tar and noise_0\.tar\. Give"
    ):
        entries_of(path)
    alone = write_jsonl(tmp_path / "alone" / "m.json", [row("a.wav")])
    with pytest.raises(ManifestError, match=r"alone/m\.json: a manifest of a tarred data set, and no tars in"):
        entries_of(alone)
