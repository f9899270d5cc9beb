"""Shar that is written to, prepared from and verified on a real S3 server."""

from pathlib import Path

import numpy as np
import pytest

from nestdata import Corpus, OutputError, PrepareConfig, prepare_corpus, verify_corpus
from nestdata.storage import Storage, storage
from tests.cli.commands import run
from tests.nestdata.pack.packing import DEMO, SHARD_HOURS, pack, samples_by_id, shar_of
from tests.remote.conftest import Access
from tests.synthesis import chirp, write_audio


@pytest.fixture(autouse=True)
def _new_client(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001, sets the environment
    """Lets `storage()` read the environment again."""
    monkeypatch.setattr("nestdata.storage.access._of_process", Storage())


@pytest.mark.smoke
@pytest.mark.multiprocess
def test_shards_are_uploaded_and_an_interrupted_run_goes_on(demo_speech: Path, tmp_path: Path) -> None:
    url = "s3://speech/packed"
    # In processes of its own, because those of this one may have been started with another environment.
    command = ("pack", demo_speech, "-o", url, "--shard-hours", SHARD_HOURS, "--jobs", 2)
    outcome = run("nestdata", *command, cwd=DEMO)
    assert outcome.code == 0, outcome.err
    assert f"{url}: 40 cuts" in outcome.out
    assert f"nestdata prepare {url} -o packed.corpus" in outcome.out
    with pytest.raises(OutputError, match=r"s3://speech/packed: holds shards of other codec"):
        pack(demo_speech, url, codec="wav")
    # What a run leaves behind that was killed while it wrote the last shard.
    for name in ("cuts.pack/000002.json", "cuts.000002.jsonl.gz"):
        storage().delete(f"{url}/{name}")
    assert pack(demo_speech, url).num_kept_shards == 2
    prepare_corpus([url], tmp_path / "packed.corpus")
    assert Corpus.open(tmp_path / "packed.corpus").fingerprint == Corpus.open(demo_speech).fingerprint
    expected, found = samples_by_id(demo_speech), samples_by_id(tmp_path / "packed.corpus")
    assert all(np.array_equal(found[name], samples) for name, samples in expected.items())


def test_what_is_wrong_in_a_bucket_is_found(demo_speech: Path, tmp_path: Path) -> None:
    url = "s3://speech/verified"
    pack(demo_speech, url)
    corpus = tmp_path / "packed.corpus"
    prepare_corpus([url], corpus)
    report = verify_corpus(corpus, decode=True)
    assert (report.problems, report.num_decoded, report.num_shards) == ([], 40, 3)
    again = pack(corpus, tmp_path / "again")
    assert (again.num_cuts, again.left_out, again.num_rounded) == (40, {}, 0)
    expected, found = samples_by_id(demo_speech), shar_of(tmp_path / "again")
    assert all(np.array_equal(found[name].load_audio()[0], samples) for name, samples in expected.items())
    changed = f"{url}/recording.000001.tar"
    content = bytearray(storage().read(changed))
    content[5000] ^= 1
    storage().write(changed, bytes(content))
    storage().delete(f"{url}/recording.000002.tar")
    assert pack(corpus, tmp_path / "rest").left_out.keys() == {"changed", "missing"}
    # The store's ETag is another one, so no audio is read to find it.
    found = {problem.location: problem.kind for problem in verify_corpus(corpus).problems}
    assert found == {changed: "changed", f"{url}/recording.000002.tar": "missing"}


def test_windows_of_a_recording_fetch_it_once(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "long.flac", chirp(100, 3000, 12.0))
    storage().write("s3://speech/long/long.flac", path)
    prepare_corpus(["s3://speech/long/"], tmp_path / "windows.corpus", PrepareConfig(window_seconds=1.0))
    before = storage().stats.bytes_read
    assert pack(tmp_path / "windows.corpus", tmp_path / "packed", shard_hours=1.0).num_cuts == 12
    assert storage().stats.bytes_read - before == path.stat().st_size
