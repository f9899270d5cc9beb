import pytest

from nestdata import redacted
from nestdata.errors import StorageError
from nestdata.storage import SCHEMES, is_url
from nestdata.storage.location import ObjectAddress, parse_url


def test_urls_are_told_from_paths() -> None:
    assert [is_url(f"{scheme}://bucket/name") for scheme in SCHEMES] == [True] * len(SCHEMES)
    for text in ("/data/s3://odd", "s3:/bucket/name", "relative/name", "file:///data", "S3", "", "ftp://host/name"):
        assert not is_url(text)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("s3://bucket/a/b.tar", ObjectAddress("s3", "bucket", "a/b.tar")),
        ("S3://bucket/a/b.tar", ObjectAddress("s3", "bucket", "a/b.tar")),
        ("az://container/a/", ObjectAddress("az", "container", "a/")),
        ("s3://bucket/a%20b?c#d", ObjectAddress("s3", "bucket", "a%20b?c#d")),
        ("s3://bucket/a@b.wav", ObjectAddress("s3", "bucket", "a@b.wav")),
        ("https://host:8080/a%20b", ObjectAddress("https", "host:8080", "a b")),
        ("https://host:8080/a%40b.wav", ObjectAddress("https", "host:8080", "a@b.wav")),
        ("http://[::1]:8080/a.wav", ObjectAddress("http", "[::1]:8080", "a.wav")),
    ],
)
def test_urls_are_split_into_bucket_and_key(location: str, expected: ObjectAddress) -> None:
    assert parse_url(location) == expected


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("ftp://host/name", "is not a URL of an object store"),
        ("s3://", "names no bucket: expected s3://BUCKET/NAME"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/a/../b", "empty part, '.' or '..'"),
        ("https://host/a?version=2", "has a query or a fragment"),
    ],
)
def test_wrong_urls_are_one_error(location: str, message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        parse_url(location)
    assert caught.value.kind == "invalid"


@pytest.mark.parametrize(
    "location",
    [
        "https://user:hunter2/x@host/name",
        "s3://key:hunter2/x@bucket/name",
        "s3://key:hunter2%40bucket/name",
        "gs://key:hunter2",
        "https://host/name?X-Amz-Algorithm=AWS4&X-Amz-Signature=hunter2",
        "https://account.blob.core.windows.net/c/name?sv=2020&sig=hunter2",
        "https://host/name;token=hunter2",
        "https://host/name?jwt=hunter2",
        "https://host/name#token=hunter2",
    ],
)
def test_urls_with_credentials_are_refused_and_never_shown(location: str) -> None:
    with pytest.raises(StorageError, match=r"holds credentials.*AWS_ACCESS_KEY_ID") as caught:
        parse_url(location)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in redacted(location)
