import json
import shutil
from pathlib import Path

import pytest

from nestcli.nestdata import main
from nestdata import ConfigError, CorpusError, VerifyReport, prepare_corpus, verify_corpus
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
    assert len(done) >= 3
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
    assert (sorted(kinds(report)), report.num_shards) == (wrong, 0)
    assert sorted(kinds(verify_corpus(corpus.path, checksums=True))) == [*wrong, ("short.wav", "truncated")]


def test_the_command_lists_problems_and_exits_with_1(
    intact: Path, shard: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(intact / "packed.corpus")]) == 0
    assert capsys.readouterr().out == f"{intact / 'packed.corpus'}: 40 cuts, 3 shards: no problems\n"
    shard.unlink()
    assert main(["verify", str(intact / "packed.corpus")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{shard}: missing: ")
    assert lines[1:] == [f"{intact / 'packed.corpus'}: 40 cuts, 3 shards: 1 problems"]
    assert main(["verify", str(intact / "packed"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"][0]["kind"] == "missing"
    assert found["num_cuts"] == 40


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"jobs is 0"):
        verify_corpus(tmp_path, jobs=0)
    with pytest.raises(CorpusError, match=r"is not a corpus"):
        verify_corpus(tmp_path)
