import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nestcli.nestdata import main
from nestdata import (
    ConfigError,
    Corpus,
    CorpusError,
    PrepareConfig,
    StorageError,
    VerifyReport,
    prepare_corpus,
    verify_corpus,
)
from tests.synthesis import folder_corpus, hiss, tone


def flip_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def kinds(report: VerifyReport) -> list[tuple[str, str]]:
    """Returns the name of the file and the kind of each problem."""
    return [(Path(problem.location).name, problem.kind) for problem in report.problems]


@pytest.fixture(scope="module")
def intact(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packed set with a corpus of it beside it; each test changes it and restores what it changed."""
    folder = tmp_path_factory.mktemp("verify")
    shutil.copytree(packed, folder / "packed")
    prepare_corpus([folder / "packed"], folder / "packed.corpus")
    return folder


@pytest.fixture
def shard(intact: Path) -> "Path":
    """The tar file of a shard, which is restored after the test."""
    path = intact / "packed/recording.000001.tar"
    content = path.read_bytes()
    yield path
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["packed", "packed.corpus"])
def test_intact_audio_has_no_problems(intact: Path, name: str) -> None:
    done: list[tuple[int, int | None]] = []
    report = verify_corpus(intact / name, on_progress=lambda *counts: done.append(counts))
    assert (report.problems, report.num_cuts, report.num_shards, report.num_checked) == ([], 40, 3, 0)
    num_tasks = 4 if name == "packed" else 3
    assert done == [(number, num_tasks) for number in range(1, num_tasks + 1)]
    report = verify_corpus(intact / name, checksums=True, jobs=2)
    assert (report.problems, report.num_checked) == ([], 40)
    assert report.summary() == f"{intact / name}: 40 cuts, audio of 40 read, 3 shards: no problems"


@pytest.mark.parametrize("name", ["packed", "packed.corpus"])
def test_a_flipped_byte_is_found_by_checksums(intact: Path, name: str, shard: Path) -> None:
    flip_byte(shard, 5000)
    assert verify_corpus(intact / name).problems == []
    report = verify_corpus(intact / name, checksums=True)
    assert set(kinds(report)) == {(shard.name, "corrupt")}
    # The corpus names the cut; the set names the file, and the member in it.
    assert len(report.problems) == (1 if name == "packed.corpus" else 2)


@pytest.mark.parametrize("name", ["packed", "packed.corpus"])
@pytest.mark.parametrize("checksums", [False, True])
def test_a_truncated_or_missing_shard_is_found(intact: Path, name: str, shard: Path, checksums: bool) -> None:
    with shard.open("r+b") as file:
        file.truncate(6000)
    assert kinds(verify_corpus(intact / name, checksums=checksums)) == [(shard.name, "changed")]
    shard.unlink()
    assert kinds(verify_corpus(intact / name, checksums=checksums)) == [(shard.name, "missing")]


@pytest.mark.parametrize("name", ["packed", "packed.corpus"])
def test_a_shard_replaced_by_another_is_found(intact: Path, name: str, shard: Path) -> None:
    size = shard.stat().st_size
    other = shard.with_name("recording.000000.tar").read_bytes()
    shard.write_bytes(other)
    if len(other) != size:
        assert kinds(verify_corpus(intact / name)) == [(shard.name, "changed")]
    # Of the same size, it is found by its content.
    shard.write_bytes(other[:size].ljust(size, b"\0"))
    assert verify_corpus(intact / name).problems == []
    found = kinds(verify_corpus(intact / name, checksums=True))
    assert len(found) > 5
    assert set(found) == {(shard.name, "corrupt")}


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("000001.json", None, "unusable"),
        ("000001.json", b"{", "unusable"),
        ("recording.000001.tar.idx", None, "missing"),
        ("cuts.000001.jsonl.idx", None, "missing"),
        ("left_out.jsonl", None, "missing"),
    ],
)
def test_a_missing_or_damaged_small_file_of_a_packed_set_is_found(
    intact: Path, name: str, content: bytes | None, kind: str, checksums: bool
) -> None:
    path = intact / "packed/cuts.pack" / name
    before = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    try:
        assert kinds(verify_corpus(intact / "packed", checksums=checksums)) == [(name, kind)]
    finally:
        path.write_bytes(before)


def test_wrong_addresses_checksums_and_indexes_in_small_files_are_found(intact: Path) -> None:
    folder = intact / "packed/cuts.pack"

    def found_after(name: str, change: Callable[[bytes], bytes]) -> list[tuple[str, str]]:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(change(before))
        try:
            return kinds(verify_corpus(intact / "packed", checksums=True))
        finally:
            (folder / name).write_bytes(before)

    def with_first(column: str, value: int) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            fields = json.loads(content)
            fields["members"][column][0] = value
            return json.dumps(fields).encode()

        return change

    tar = ("recording.000001.tar", "corrupt")
    assert found_after("000001.json", with_first("crc32", 0)) == [tar]
    for offset in (0, 10**12):
        assert found_after("000001.json", with_first("offsets", offset))[0] == tar
    for length in (-1, 10**12):
        assert found_after("000001.json", with_first("lengths", length)) == [tar]
    for name in ("recording.000001.tar.idx", "cuts.000001.jsonl.idx"):
        assert found_after(name, lambda content: content[:-8] + bytes(8)) == [(name, "corrupt")]


def test_other_files_and_a_missing_manifest_of_a_packed_set_are_found(intact: Path) -> None:
    packed = intact / "packed"
    (packed / "recording.000009.tar").write_bytes(b"")
    assert kinds(verify_corpus(packed)) == [("recording.000009.tar", "unexpected")]
    (packed / "recording.000009.tar").unlink()
    (packed / "cuts.pack/pack.json").rename(packed / "cuts.pack/away")
    with pytest.raises(CorpusError, match=r"not a complete packed set"):
        verify_corpus(packed)
    (packed / "cuts.pack/away").rename(packed / "cuts.pack/pack.json")


def test_files_of_a_corpus_must_exist_and_with_checksums_be_readable(tmp_path: Path) -> None:
    names = ("a", "empty", "folder", "gone", "short")
    corpus = folder_corpus(tmp_path / "in", {f"{name}.wav": hiss(16000, index) for index, name in enumerate(names)})
    (tmp_path / "in/empty.wav").write_bytes(b"")
    (tmp_path / "in/gone.wav").unlink()
    (tmp_path / "in/folder.wav").unlink()
    (tmp_path / "in/folder.wav").mkdir()
    shutil.copyfile(
        folder_corpus(tmp_path / "x", {"t.wav": tone(300, 0.2)}).path.parent / "x/t.wav", tmp_path / "in/short.wav"
    )
    wrong = [("empty.wav", "empty"), ("folder.wav", "not_a_file"), ("gone.wav", "missing")]
    report = verify_corpus(corpus.path)
    assert (sorted(kinds(report)), report.num_shards) == ([*wrong, ("short.wav", "changed")], 0)
    (corpus.path / "addresses.npy").unlink()  # as in corpora that do not know sizes and times
    assert sorted(kinds(verify_corpus(corpus.path))) == wrong
    assert sorted(kinds(verify_corpus(corpus.path, checksums=True))) == [*wrong, ("short.wav", "truncated")]


def test_the_command_lists_problems_and_exits_with_1(
    intact: Path, shard: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(intact / "packed.corpus")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{intact / 'packed.corpus'}: 40 cuts, 3 shards: no problems in sizes and times")
    assert "no audio was read, which --checksums does" in out
    shard.unlink()
    assert main(["verify", str(intact / "packed.corpus")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{shard}: missing: ")
    assert lines[1:] == [f"{intact / 'packed.corpus'}: 40 cuts, 3 shards: 1 problems"]
    assert main(["verify", str(intact / "packed"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"][0]["kind"] == "missing"
    assert found["num_cuts"] == 40


def test_a_moved_corpus_is_verified_there_and_set_to_its_new_root(
    intact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, moved = tmp_path / "packed.corpus", tmp_path / "moved"
    shutil.copytree(intact / "packed.corpus", corpus)
    shutil.copytree(intact / "packed", moved)
    before = (corpus / "meta.json").read_bytes()
    (moved / "recording.000001.tar").rename(moved / "away")
    assert main(["verify", str(corpus), "--root", str(moved), "--set-root"]) == 1
    out = capsys.readouterr().out
    assert f"{moved / 'recording.000001.tar'}: missing: " in out
    assert out.endswith("  the root was not set, because of the problems\n")
    (moved / "away").rename(moved / "recording.000001.tar")
    assert verify_corpus(corpus, root=str(moved), checksums=True).num_checked == 40
    assert (corpus / "meta.json").read_bytes() == before
    assert main(["verify", str(corpus), "--root", str(moved), "--set-root"]) == 0
    assert capsys.readouterr().out.endswith(f"  its audio is read from {moved} from now on\n")
    opened, original = Corpus.open(corpus), Corpus.open(intact / "packed.corpus")
    assert opened.root == str(moved)
    assert opened.meta == original.meta | {"root": str(moved)}
    for path in moved.glob("*.tar"):
        assert verify_corpus(corpus).problems == []
        path.unlink()
        assert kinds(verify_corpus(corpus)) == [(path.name, "missing")]
        break
    verify_corpus(corpus, root=original.root, set_root=True)
    assert (corpus / "meta.json").read_bytes() == before


def test_roots_that_cannot_be_used_are_refused(
    intact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(intact / "packed.corpus"), "--set-root"]) == 2
    assert "--set-root needs --root" in capsys.readouterr().err
    with pytest.raises(StorageError, match=r"s3://\*\*\*@bucket: holds credentials"):
        verify_corpus(intact / "packed.corpus", root="s3://user:word@bucket", set_root=True)
    with pytest.raises(ConfigError, match=r"packed: is a packed set"):
        verify_corpus(intact / "packed", root=str(tmp_path))
    files = folder_corpus(tmp_path / "in", {"a.wav": tone(300, 0.2)})
    with pytest.raises(ConfigError, match=r"its audio is not relative to a root"):
        verify_corpus(files.path, root=str(tmp_path))
    prepare_corpus([intact / "packed"], tmp_path / "bank.corpus", PrepareConfig(pcm=True))
    with pytest.raises(ConfigError, match=r"bank.corpus: its audio is read from its sample bank"):
        verify_corpus(tmp_path / "bank.corpus", root=str(tmp_path))
    report = verify_corpus(tmp_path / "bank.corpus", checksums=True)
    assert (report.num_shards, report.num_checked) == (0, 0)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"jobs is 0"):
        verify_corpus(tmp_path, jobs=0)
    with pytest.raises(CorpusError, match=r"is not a corpus"):
        verify_corpus(tmp_path)
