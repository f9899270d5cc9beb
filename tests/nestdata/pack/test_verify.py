import json
import shutil
from pathlib import Path

import pytest

from nestcli.nestdata import main
from nestdata import ConfigError, Corpus, PrepareConfig, StorageError, VerifyReport, prepare_corpus, verify_corpus
from tests.synthesis import folder_corpus, hiss, tone, write_audio


def flip_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def kinds(report: VerifyReport) -> list[tuple[str, str]]:
    """Returns the name of the file and the kind of each problem."""
    return [(Path(problem.location).name, problem.kind) for problem in report.problems]


@pytest.fixture(scope="module")
def intact(demo_packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shar with a corpus of it beside it; each test changes it and restores what it changed."""
    folder = tmp_path_factory.mktemp("verify")
    shutil.copytree(demo_packed, folder / "packed")
    prepare_corpus([folder / "packed"], folder / "packed.corpus")
    return folder


@pytest.fixture
def shard(intact: Path) -> "Path":
    """The tar file of a shard, which is restored after the test."""
    path = intact / "packed/recording.000001.tar"
    content = path.read_bytes()
    yield path
    path.write_bytes(content)


def test_intact_audio_has_no_problems(intact: Path) -> None:
    done: list[tuple[int, int | None]] = []
    report = verify_corpus(intact / "packed.corpus", on_progress=lambda *counts: done.append(counts))
    assert (report.problems, report.num_cuts, report.num_shards, report.num_decoded) == ([], 40, 3, 0)
    assert done == [(1, 3), (2, 3), (3, 3)]
    report = verify_corpus(intact / "packed.corpus", decode=True, jobs=2)
    assert (report.problems, report.num_decoded) == ([], 40)
    assert report.summary() == f"{intact / 'packed.corpus'}: 40 cuts, audio of 40 read, 3 shards: no problems"


def test_a_flipped_byte_is_found_by_the_decoder_or_by_checksums(intact: Path, shard: Path) -> None:
    flip_byte(shard, 5000)
    assert verify_corpus(intact / "packed.corpus").problems == []
    report = verify_corpus(intact / "packed.corpus", decode=True)
    assert kinds(report) == [(shard.name, "unreadable")]


def test_a_truncated_or_missing_shard_is_found(intact: Path, shard: Path) -> None:
    with shard.open("r+b") as file:
        file.truncate(6000)
    assert kinds(verify_corpus(intact / "packed.corpus")) == [(shard.name, "changed")]
    shard.unlink()
    assert kinds(verify_corpus(intact / "packed.corpus", decode=True)) == [(shard.name, "missing")]


def test_files_of_a_corpus_must_exist_and_with_decode_be_readable(tmp_path: Path) -> None:
    names = ("a", "empty", "folder", "gone", "short")
    corpus = folder_corpus(tmp_path / "in", {f"{name}.wav": hiss(16000, index) for index, name in enumerate(names)})
    (tmp_path / "in/empty.wav").write_bytes(b"")
    (tmp_path / "in/gone.wav").unlink()
    (tmp_path / "in/folder.wav").unlink()
    (tmp_path / "in/folder.wav").mkdir()
    write_audio(tmp_path / "in/short.wav", tone(300, 0.2))
    wrong = [("empty.wav", "empty"), ("folder.wav", "not_a_file"), ("gone.wav", "missing")]
    report = verify_corpus(corpus.path)
    assert (sorted(kinds(report)), report.num_shards) == ([*wrong, ("short.wav", "changed")], 0)
    (corpus.path / "versions.npy").unlink()  # as in corpora that do not know sizes and times
    assert sorted(kinds(verify_corpus(corpus.path))) == wrong
    assert sorted(kinds(verify_corpus(corpus.path, decode=True))) == [*wrong, ("short.wav", "truncated")]


def test_the_command_lists_problems_and_exits_with_1(
    intact: Path, shard: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(intact / "packed.corpus")]) == 0
    assert capsys.readouterr().out.startswith(f"{intact / 'packed.corpus'}: 40 cuts, 3 shards: no problems")
    shard.unlink()
    assert main(["verify", str(intact / "packed.corpus")]) == 1
    problem, summary = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"{shard}: missing: ")
    assert summary == f"{intact / 'packed.corpus'}: 40 cuts, 3 shards: 1 problems"
    assert main(["verify", str(intact / "packed.corpus"), "--json"]) == 1
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
    assert verify_corpus(corpus, root=str(moved), decode=True).num_decoded == 40
    assert (corpus / "meta.json").read_bytes() == before
    assert main(["verify", str(corpus), "--root", str(moved), "--set-root"]) == 0
    assert capsys.readouterr().out.endswith(f"  its audio is read from {moved} from now on\n")
    opened, original = Corpus.open(corpus), Corpus.open(intact / "packed.corpus")
    assert opened.root == str(moved)
    assert opened.meta == original.meta | {"root": str(moved)}
    assert verify_corpus(corpus).problems == []
    (moved / "recording.000001.tar").unlink()
    assert kinds(verify_corpus(corpus)) == [("recording.000001.tar", "missing")]
    verify_corpus(corpus, root=original.root, set_root=True)
    assert (corpus / "meta.json").read_bytes() == before


def test_roots_that_cannot_be_used_are_refused(
    intact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(intact / "packed.corpus"), "--set-root"]) == 2
    assert "--set-root needs --root" in capsys.readouterr().err
    with pytest.raises(StorageError, match=r"s3://\*\*\*@bucket: holds credentials"):
        verify_corpus(intact / "packed.corpus", root="s3://user:word@bucket", set_root=True)
    files = folder_corpus(tmp_path / "in", {"a.wav": tone(300, 0.2)})
    with pytest.raises(ConfigError, match=r"not relative to a root"):
        verify_corpus(files.path, root=str(tmp_path))
    prepare_corpus([intact / "packed"], tmp_path / "bank.corpus", PrepareConfig(pcm=True))
    with pytest.raises(ConfigError, match=r"bank.corpus: its audio is in its sample bank"):
        verify_corpus(tmp_path / "bank.corpus", root=str(tmp_path))
