"""`prepare` with inputs in a bucket: the corpus is that of the same files on disk."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nestdata import Corpus, ManifestError, PrepareConfig, prepare_corpus
from nestdata.storage import storage
from tests.cli import commands
from tests.nestdata.prepare.corpora import tree
from tests.nestdata.prepare.inputs.reading import lhotse_cut
from tests.nestdata.prepare.inputs.shards import write_nemo_tarred, write_speech
from tests.remote.conftest import Access, upload
from tests.remote.server import READER
from tests.synthesis import hiss, read_jsonl, write_audio, write_jsonl

BUCKET = "s3://speech/test_prepare"
NUM_FILES = 60


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Audio in a folder and a subfolder, with manifests of several formats beside it."""
    folder = tmp_path_factory.mktemp("speech") / "set"
    names = [f"wavs/{'deep/' if i % 3 == 0 else ''}{i:02d}.{'wav' if i % 7 == 0 else 'flac'}" for i in range(NUM_FILES)]
    for i, name in enumerate(names):
        write_audio(folder / name, hiss(4000 + 10 * i, i))
    rows = [{"audio_filepath": name, "text": f"wort ü{i}"} for i, name in enumerate(names)]
    rows += [{"audio_filepath": names[5], "offset": 0.1, "duration": 0.1}]
    write_jsonl(folder / "nemo.json", rows)
    (folder / "nemo.json.gz").write_bytes(gzip.compress((folder / "nemo.json").read_bytes()))
    lines = [f"{name}\t{4000 + 10 * i}\n" for i, name in enumerate(names)]
    (folder / "train.tsv").write_text("./\n" + "".join(lines))
    cuts = [lhotse_cut(f"cut-{i}", name) | {"duration": 0.25} for i, name in enumerate(names)]
    (folder / "cuts.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder / "cuts.jsonl", cuts).read_bytes()))
    return folder


@pytest.fixture
def uploaded(speech: Path, access: Access) -> str:  # noqa: ARG001, the access is needed, not used
    """The same folder in a bucket."""
    if not any(storage().list_objects(BUCKET)):
        upload(speech, BUCKET)
    return BUCKET


@pytest.mark.parametrize(
    "name", [pytest.param("nemo.json", marks=pytest.mark.smoke), "nemo.json.gz", "train.tsv", "cuts.jsonl.gz", "wavs/"]
)
def test_an_input_in_a_bucket_gives_the_corpus_of_the_same_files_on_disk(
    speech: Path, uploaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(speech)  # Lhotse takes relative paths from there
    local = prepare_corpus([speech / name], tmp_path / "local.corpus")
    report = prepare_corpus([f"{uploaded}/{name}"], tmp_path / "remote.corpus", jobs=2 if name == "nemo.json" else 1)
    assert (report.num_cuts, report.hours, report.rejected) == (local.num_cuts, local.hours, local.rejected)
    corpus, expected = Corpus.open(tmp_path / "remote.corpus"), Corpus.open(tmp_path / "local.corpus")
    assert corpus.fingerprint == expected.fingerprint
    assert corpus.is_remote
    for row in (0, len(corpus) // 2, len(corpus) - 1):
        address = corpus.address(row)
        assert address is not None
        assert (address.offset, address.length == address.shard_size, address.crc32 is None) == (0, True, False)
        assert address.location.startswith(uploaded)
        assert corpus[row].id == expected[row].id
        np.testing.assert_array_equal(corpus.load(row)[1], expected.load(row)[1])


def test_a_bucket_that_was_moved_gives_the_same_fingerprint(speech: Path, uploaded: str, tmp_path: Path) -> None:
    upload(speech, "s3://noise/another/place")
    fingerprints = {
        Corpus.open(prepare_corpus([f"{url}/nemo.json"], tmp_path / f"{number}.corpus").path).fingerprint
        for number, url in enumerate([uploaded, "s3://noise/another/place"])
    }
    assert len(fingerprints) == 1


def test_lines_of_a_local_manifest_may_be_urls(uploaded: str, tmp_path: Path) -> None:
    write_audio(tmp_path / "here.wav", hiss(8000, 1))
    rows = [{"audio_filepath": f"{uploaded}/wavs/01.flac"}, {"audio_filepath": "here.wav"}]
    rows += [{"audio_filepath": f"{uploaded}/wavs/gone.flac"}]
    report = prepare_corpus([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "speech.corpus")
    assert (report.num_cuts, report.rejected) == (2, {"missing": 1})
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert {cut.id for cut in (corpus[0], corpus[1])} == {f"{uploaded}/wavs/01", "here"}
    assert [corpus.address(row) is None for row in range(2)] == [False, True]
    assert "gone.flac" in read_jsonl(report.path / "rejected.jsonl")[0]["detail"]


def test_durations_in_the_manifest_are_trusted_without_reading_audio(uploaded: str, tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"{uploaded}/wavs/{name}", "duration": 0.25} for name in ("01.flac", "gone.flac")]
    manifest = write_jsonl(tmp_path / "m.json", rows)
    before = storage().stats.bytes_read
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", PrepareConfig(probe="missing"))
    assert (report.num_cuts, report.rejected, storage().stats.bytes_read) == (1, {"missing": 1}, before)
    assert len(Corpus.open(tmp_path / "speech.corpus").load(0)[1]) == 4000


# Prepares a manifest with every sample decoded, prints the bytes read after each task, and waits after the number of
# entries in `sys.argv[3]`.
PROGRAM = """
import sys
from nestdata import PrepareConfig, prepare_corpus
def show(found):
    if found.entries:
        print(found.entries, found.bytes_read, flush=True)
    if 0 < found.entries == int(sys.argv[3]):
        print("waiting", flush=True)
        sys.stdin.read()
prepare_corpus([sys.argv[1]], sys.argv[2], PrepareConfig(probe="decode"), on_progress=show)
"""


def run(manifest: str, output: Path, *, kill_after: int = 0) -> list[list[int]]:
    """Prepares a corpus in another process, which may be killed; returns the entries and bytes after each task."""
    command = [sys.executable, "-c", PROGRAM, manifest, str(output), str(kill_after)]
    pipe, seen = subprocess.PIPE, []
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "waiting\n":
                process.kill()
            else:
                seen.append([int(word) for word in line.split()])
        process.wait(timeout=300)
    return seen


@pytest.mark.multiprocess
def test_a_killed_run_is_continued_without_reading_finished_tasks_again(uploaded: str, tmp_path: Path) -> None:
    output = tmp_path / "speech.corpus"
    manifest = f"{uploaded}/nemo.json"
    unbroken = run(manifest, output)
    tasks = [entries for entries, _ in unbroken]
    assert tasks[-1] == 61
    expected = tree(output)
    output.rename(tmp_path / "unbroken")
    assert [entries for entries, _ in run(manifest, output, kill_after=tasks[-3])] == tasks[:-2]
    last_tasks = unbroken[-1][1] - unbroken[-3][1]
    second = run(manifest, output)
    assert [entries for entries, _ in second] == tasks
    assert second[-1][1] == last_tasks
    assert tree(output) == expected


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["s3://no-such-bucket/m.json"], {}, "404 Not Found|no such"),
        ([f"{BUCKET}/nemo.json"], {"AWS_SECRET_ACCESS_KEY": "wrong"}, "403 Forbidden"),
        (["s3://noise/m.json"], {"AWS_ACCESS_KEY_ID": READER.access_key, "AWS_SECRET_ACCESS_KEY": READER.secret_key},
         "403 Forbidden"),
        ([f"{BUCKET}/gone.json"], {}, "no object of this name, and no audio below it|no such object"),
        ([f"{BUCKET}/gone/"], {}, "no audio below it"),
        ([f"{BUCKET}/wavs", "--format", "kaldi"], {}, "a Kaldi directory is not read from a URL"),
        ([f"{BUCKET}/wavs", "-o", "s3://speech/a.corpus"], {}, "written to a local path"),
        (["s3://key:secret@speech/m.json"], {}, "holds credentials"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("uploaded")
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    changes: dict[str, str],
    message: str,
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    outcome = commands.run("nestdata", "prepare", *arguments, cwd=tmp_path)
    assert outcome.code == 1, outcome.err
    (line,) = outcome.error_lines
    assert any(part in line for part in message.split("|")), line
    assert "secret" not in outcome.err + outcome.out
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_is_missing_in_a_bucket_is_one_error(access: Access, tmp_path: Path) -> None:  # noqa: ARG001
    write_speech(tmp_path / "files")
    write_nemo_tarred(tmp_path / "files", tmp_path / "nemo")
    upload(tmp_path / "nemo", "s3://speech/missing")
    config = PrepareConfig(tars=("s3://speech/missing/audio_{0..2}.tar",))
    with pytest.raises(ManifestError, match=r"1 of 3 shards do not exist, such as .*audio_2\.tar"):
        prepare_corpus(["s3://speech/missing/tarred_audio_manifest.json"], tmp_path / "a.corpus", config)
