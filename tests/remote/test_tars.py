"""Tars in a bucket, read as streams, give the corpora of the same tars on disk."""

from pathlib import Path

import pytest

from nestdata import Corpus, ManifestError, PrepareConfig, prepare_corpus
from nestdata.storage import storage
from tests.nestdata.prepare.inputs.shards import write_nemo_tarred, write_shar, write_speech, write_webdataset
from tests.nestdata.prepare.inputs.test_same_speech import assert_same
from tests.remote.conftest import Access
from tests.synthesis import write_jsonl

BUCKET = "s3://speech/test_tars"
INPUTS = {
    "nemo/tarred_audio_manifest.json": None,
    "nemo/sharded_manifests/manifest_{0..1}.json": None,
    "lines/manifest.json": "nemo/audio__OP_0..1_CL_.tar",
    "shar": None,
    "wds/": None,
    "wds/set-{000000..000001}.tar": None,
}


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_speech(folder / "files")
    manifest = write_nemo_tarred(folder / "files", folder / "nemo", reverse=True)
    rows = manifest.read_bytes().splitlines(keepends=True)
    (folder / "lines").mkdir()
    (folder / "lines" / "manifest.json").write_bytes(b"".join(rows[::2] + rows[1::2]))  # not in the order of shards
    name = "audio/a.flac"
    write_shar(folder / "shar", [[("one", ".flac", (folder / "files" / name).read_bytes(), 24000)]])
    write_webdataset(folder / "files", folder / "wds")
    return folder


@pytest.fixture
def uploaded(speech: Path, access: Access) -> str:  # noqa: ARG001, the access is needed, not used
    if not any(storage().list_objects(BUCKET)):
        for path in speech.rglob("*"):
            if path.is_file():
                storage().write(f"{BUCKET}/{path.relative_to(speech)}", path)
    return BUCKET


@pytest.mark.parametrize("name", INPUTS)
def test_tars_in_a_bucket_give_the_corpus_of_the_same_tars_on_disk(
    speech: Path, uploaded: str, tmp_path: Path, name: str
) -> None:
    tars = INPUTS[name]
    corpora = []
    for base in (str(speech), uploaded):
        config = PrepareConfig(tars=(f"{base}/{tars}",) if tars else ())
        report = prepare_corpus([f"{base}/{name}"], tmp_path / f"{len(corpora)}.corpus", config)
        assert not report.rejected
        corpora.append(Corpus.open(report.path))
    local, remote = corpora
    assert remote.is_remote
    assert_same(remote, local)


def test_a_shard_that_is_missing_in_a_bucket_is_one_error(uploaded: str, tmp_path: Path) -> None:
    manifest = f"{uploaded}/nemo/tarred_audio_manifest.json"
    config = PrepareConfig(tars=(f"{uploaded}/nemo/audio_{{0..2}}.tar",))
    with pytest.raises(ManifestError, match=r"audio_2\.tar does not exist, of 3 shards"):
        prepare_corpus([manifest], tmp_path / "a.corpus", config)
    path = write_jsonl(tmp_path / "m.json", [{"audio_filepath": "a.flac", "shard_id": 5}])
    config = PrepareConfig(tars=(f"{uploaded}/nemo/audio_{{0..1}}.tar",))
    with pytest.raises(ManifestError, match=r"m\.json:1: shard_id 5 has no tar; there are 2"):
        prepare_corpus([path], tmp_path / "b.corpus", config)
