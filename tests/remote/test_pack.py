"""Packed sets that are written to, and verified on, a real S3 server."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nestdata import Corpus, OutputError, StorageError, prepare_corpus, verify_corpus
from nestdata.storage import storage
from tests.cli.commands import run
from tests.nestdata.pack.packing import DEMO, SHARD_BYTES, digests, pack, samples_by_id, shar_of
from tests.remote.conftest import Access
from tests.remote.proxy import FaultProxy
from tests.remote.server import OWNER


@pytest.fixture(scope="module")
def speech(demo_speech: Path) -> Path:
    return demo_speech


@pytest.fixture(scope="module")
def packed(demo_packed: Path) -> Path:
    return demo_packed


@pytest.fixture(autouse=True)
def new_clients(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets `storage()` read the environment again; called once before each test."""

    def forget() -> None:
        monkeypatch.setattr("nestdata.storage.access._of_process", None)

    forget()
    return forget


def contents(url: str) -> dict[str, bytes]:
    """Returns the objects below a URL by their relative names."""
    return {info.location[len(url) + 1 :]: storage().read(info.location) for info in storage().list_objects(url)}


def local_contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in digests(folder)}


@pytest.mark.multiprocess
def test_objects_are_those_of_a_local_set_and_an_interrupted_run_goes_on(
    access: Access, speech: Path, packed: Path
) -> None:
    access.use()
    url = "s3://speech/packed"
    # In processes of its own, because those of this one may have been started with another environment.
    command = ("pack", speech, "-o", url, "--shard-bytes", SHARD_BYTES, "--jobs", 2)
    outcome = run("nestdata", *command, cwd=DEMO)
    assert outcome.code == 0, outcome.err
    assert f"{url}: 40 cuts" in outcome.out
    assert f"nestdata prepare {url} -o packed.corpus" in outcome.out
    assert contents(url) == local_contents(packed)
    with pytest.raises(OutputError, match=r"s3://speech/packed: exists already"):
        pack(speech, url)
    # What a run leaves behind that was killed while it wrote the last shard.
    for name in ("cuts.pack/pack.json", "cuts.pack/000002.json", "recording.000002.tar"):
        storage().delete(f"{url}/{name}")
    with pytest.raises(OutputError, match=r"begun with other seed"):
        pack(speech, url, seed=1)
    assert pack(speech, url).num_kept_shards == 2
    assert contents(url) == local_contents(packed)


def test_a_server_with_faults_gives_the_same_objects(
    access: Access, proxy: FaultProxy, speech: Path, packed: Path, new_clients: Callable[[], None]
) -> None:
    proxy.set(unavailable=0.1, throttled=0.1, reset=0.1, short=0.1)
    access.use(endpoint=proxy.url)
    pack(speech, "s3://speech/faults")
    access.use()
    new_clients()
    assert contents("s3://speech/faults") == local_contents(packed)


def test_what_is_wrong_in_a_bucket_is_found(access: Access, speech: Path, tmp_path: Path) -> None:
    access.use()
    url = "s3://speech/verified"
    pack(speech, url)
    prepare_corpus([url], tmp_path / "packed.corpus", on_progress=(progress := []).append)
    num_bytes = sum(info.size for info in storage().list_objects(url) if info.location.endswith(".tar"))
    assert 0 < progress[-1].bytes_read < num_bytes / 4, "the tar files were read"
    corpus = tmp_path / "packed.corpus"
    assert Corpus.open(corpus).fingerprint == Corpus.open(speech).fingerprint
    for place in (url, corpus):
        report = verify_corpus(place, checksums=True)
        assert (report.problems, report.num_checked, report.num_shards) == ([], 40, 3)
    again = pack(corpus, tmp_path / "again")
    assert (again.num_cuts, again.left_out, again.num_rounded) == (40, {}, 0)
    expected, found = samples_by_id(speech), shar_of(tmp_path / "again")
    assert all(np.array_equal(found[name].load_audio()[0], samples) for name, samples in expected.items())
    changed = f"{url}/recording.000001.tar"
    content = bytearray(storage().read(changed))
    content[5000] ^= 1
    storage().write(changed, bytes(content))
    storage().delete(f"{url}/recording.000002.tar")
    left_out = pack(corpus, tmp_path / "rest").left_out
    assert left_out.keys() == {"changed", "missing"}
    for place, first in ((url, "corrupt"), (corpus, "changed")):
        found = {problem.location: problem.kind for problem in verify_corpus(place, checksums=True).problems}
        assert found == {changed: first, f"{url}/recording.000002.tar": "missing"}
    # The store's ETag is another one, so the corpus needs no checksum to find it.
    assert [problem.kind for problem in verify_corpus(corpus).problems] == ["changed", "missing"]


def test_a_wrong_key_ends_verifying_with_one_error(
    access: Access, speech: Path, tmp_path: Path, new_clients: Callable[[], None]
) -> None:
    access.use()
    url = "s3://speech/denied"
    pack(speech, url)
    prepare_corpus([url], tmp_path / "packed.corpus")
    access.use(dataclasses.replace(OWNER, secret_key="not-the-secret"))
    new_clients()
    for place in (url, tmp_path / "packed.corpus"):
        with pytest.raises(StorageError, match="AWS_SECRET_ACCESS_KEY"):
            verify_corpus(place)
