<<<<<<< HEAD
"""Every mistake with an object store is one line that says what is wrong and what to do, and exit code 1."""

import dataclasses
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nestdata import Storage
from tests.ports import free_port
from tests.remote.server import OWNER, READER, S3Server
from tests.speech_forms import write_forms
from tests.synthesis import write_jsonl

BUCKET = "s3://speech/bad"
NEMO = (f"{BUCKET}/nemo/speech.json", "--tars", f"{BUCKET}/nemo/audio__OP_0..3_CL_.tar")


@pytest.fixture(scope="module")
def server(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    folder = tmp_path_factory.mktemp("forms")
    write_forms(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        storage = Storage()
        for form in ("nemo", "shar"):
            for path in sorted((folder / form).iterdir()):
                storage.write(f"{BUCKET}/{form}/{path.name}", path)
        storage.write("s3://noise/bad/speech.json", folder / "nemo" / "speech.json")
    return s3


def prepare(environment: dict[str, str], directory: Path, *arguments: str) -> str:
    """Runs `nestdata prepare`, which must fail with exit code 1, and returns its only line of errors."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [Path(sys.executable).parent / "nestdata", "prepare", *arguments, "-o", directory / "out.corpus"],
        env={**inherited, **environment, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert not (directory / "out.corpus").exists()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    assert OWNER.secret_key not in done.stderr + done.stdout
    return line


def test_a_wrong_key_is_named_with_the_variables_to_set(server: S3Server, tmp_path: Path) -> None:
    wrong = dataclasses.replace(OWNER, secret_key="not-the-secret")
    line = prepare(server.environment(wrong), tmp_path, *NEMO)
    assert f"{BUCKET}/nemo/speech.json" in line
    assert "AWS_SECRET_ACCESS_KEY" in line


def test_an_unknown_key_is_named_with_the_variables_to_set(server: S3Server, tmp_path: Path) -> None:
    line = prepare(server.environment(dataclasses.replace(OWNER, access_key="unknown")), tmp_path, *NEMO)
    assert "AWS_ACCESS_KEY_ID" in line


def test_a_bucket_that_does_not_exist(server: S3Server, tmp_path: Path) -> None:
    line = prepare(server.environment(), tmp_path, "s3://speeches/nemo/speech.json")
    assert "s3://speeches/nemo/speech.json" in line
    assert "bucket" in line


def test_no_permission_for_a_bucket(server: S3Server, tmp_path: Path) -> None:
    line = prepare(server.environment(READER), tmp_path, "s3://noise/bad/speech.json")
    assert "s3://noise/bad/speech.json" in line
    assert "no permission" in line


class _Expired(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does to an expired session token, which the server of the tests does not know."""

    def _answer(self) -> None:
        body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = _answer

    def log_message(self, *_: object) -> None: ...


def test_expired_credentials(server: S3Server, tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Expired) as expired:
        threading.Thread(target=expired.serve_forever, daemon=True).start()
        environment = server.environment(endpoint=f"http://127.0.0.1:{expired.server_port}")
        line = prepare({**environment, "AWS_SESSION_TOKEN": "an-expired-token"}, tmp_path, *NEMO)
        expired.shutdown()
    assert f"{BUCKET}/nemo/speech.json" in line
    assert "the credentials have expired" in line
    assert "an-expired-token" not in line


def test_no_network(server: S3Server, tmp_path: Path) -> None:
    unreachable = server.environment(endpoint=f"http://127.0.0.1:{free_port()}")
    line = prepare(unreachable, tmp_path, *NEMO)
    assert "connection refused" in line
    assert "Check host and port" in line


@pytest.mark.parametrize("scheme", ["http instead of https", "https instead of http"])
def test_the_wrong_scheme(server: S3Server, tmp_path: Path, scheme: str) -> None:
    environment = server.environment()
    if scheme.startswith("https"):
        environment["AWS_ENDPOINT_URL"] = server.endpoint.replace("http://", "https://")
    else:
        del environment["AWS_ALLOW_HTTP"]
    line = prepare(environment, tmp_path, *NEMO)
    assert "AWS_ALLOW_HTTP=true" in line


@pytest.mark.parametrize(
    ("tars", "found"),
    [
        (f"{BUCKET}/nemo/audio__OP_7..9_CL_.tar", "audio_7.tar"),
        (f"{BUCKET}/nemo/*.tar.gz", "*.tar.gz"),
    ],
)
def test_a_pattern_that_matches_nothing(server: S3Server, tmp_path: Path, tars: str, found: str) -> None:
    line = prepare(server.environment(), tmp_path, f"{BUCKET}/nemo/speech.json", "--tars", tars)
    assert found in line


def test_a_folder_without_objects(server: S3Server, tmp_path: Path) -> None:
    assert f"{BUCKET}/shards" in prepare(server.environment(), tmp_path, f"{BUCKET}/shards")


@pytest.mark.usefixtures("access")
def test_a_shard_that_is_missing_in_the_middle(server: S3Server, tmp_path: Path) -> None:
    storage = Storage()
    content = storage.read(f"{BUCKET}/nemo/audio_1.tar")
    storage.delete(f"{BUCKET}/nemo/audio_1.tar")
    try:
        assert f"{BUCKET}/nemo/audio_1.tar" in prepare(server.environment(), tmp_path, *NEMO)
    finally:
        storage.write(f"{BUCKET}/nemo/audio_1.tar", content)


@pytest.mark.usefixtures("access")
def test_a_shar_that_lacks_a_tar_in_the_middle(server: S3Server, tmp_path: Path) -> None:
    storage = Storage()
    content = storage.read(f"{BUCKET}/shar/recording.000001.tar")
    storage.delete(f"{BUCKET}/shar/recording.000001.tar")
    try:
        assert "recording.000001.tar" in prepare(server.environment(), tmp_path, f"{BUCKET}/shar")
    finally:
        storage.write(f"{BUCKET}/shar/recording.000001.tar", content)


@pytest.mark.usefixtures("access")
def test_a_shard_id_without_a_tar(server: S3Server, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Storage().read(f"{BUCKET}/nemo/speech.json").splitlines()]
    rows[-1]["shard_id"] = 17
    manifest = write_jsonl(tmp_path / "speech.json", rows)
    line = prepare(server.environment(), tmp_path, str(manifest), *NEMO[1:])
    assert "17" in line
    assert "shard_id" in line
=======
"""One line for each mistake of a user: what is wrong, and what to do. And no secret in any of them."""

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from nestdata.errors import ConfigError, NestDataError, StorageError
from nestdata.storage import Storage, StorageConfig
from tests.ports import free_port
from tests.remote.conftest import Access
from tests.remote.server import OWNER, READER, Identity, S3Server

QUICK = StorageConfig(patience_s=1.0, first_contact_s=0.5)
LOCATION = "s3://speech/test_bad_input/content.bin"
SECRETS = (OWNER.secret_key, READER.secret_key, "wrong-secret-987", "session-secret-123")


@pytest.fixture(autouse=True)
def _content(access: Access) -> None:  # noqa: ARG001  # the owner writes
    Storage().write(LOCATION, b"0123456789")
    Storage().write(LOCATION.replace("speech", "noise"), b"0123456789")


def requests(location: str) -> list[Callable[[], object]]:
    """Returns one call of each kind with a new `Storage`, which knows nothing of earlier answers."""
    return [
        lambda: Storage(QUICK).info(location),
        lambda: Storage(QUICK).read_range(location, 0, 4),
        lambda: Storage(QUICK).read(location),
        lambda: Storage(QUICK).write(location + "2", b"1"),
        lambda: list(Storage(QUICK).list_objects(location)),
    ]


def expect(kind: str, message: str, actions: list[Callable[[], object]]) -> None:
    for action in actions:
        with pytest.raises(StorageError, match=message) as caught:
            action()
        text = str(caught.value)
        assert caught.value.kind == kind, text
        assert "\n" not in text
        assert not [secret for secret in SECRETS if secret in text]
        # What obstore said may hold signed URLs, so no traceback shows it.
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "identity", [Identity("nobody", "wrong-secret-987", ()), Identity("ownerkey", "wrong-secret-987", ())]
)
def test_wrong_key(access: Access, identity: Identity) -> None:
    access.use(identity)
    expect("denied", r"speech.*: wrong key .*Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", requests(LOCATION))


def test_no_permission(access: Access) -> None:
    access.use(READER)
    assert Storage().read(LOCATION) == b"0123456789"
    actions = [*requests(LOCATION.replace("speech", "noise")), lambda: Storage().write(LOCATION, b"1")]
    expect("denied", "no permission .HTTP 403 AccessDenied", actions)


def test_expired_credentials(access: Access) -> None:
    class Expired(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>ExpiredToken</Code><Message>session-secret-123</Message></Error>"
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Expired) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        access.use(endpoint=f"http://127.0.0.1:{server.server_port}", AWS_SESSION_TOKEN="session-secret-123")
        actions = requests(LOCATION)
        expect("denied", "the credentials have expired .*Renew them", [actions[0], actions[1], actions[4]])
        server.shutdown()


def test_no_credentials(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    access.use(AWS_METADATA_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    expect("denied", r"no credentials were found .*Check AWS_ACCESS_KEY_ID", requests(LOCATION)[:2])


def test_wrong_bucket() -> None:
    expect("denied", r"no such bucket .*Check the name of the bucket", [*requests("s3://no-bucket/a.bin")[:3]])
    expect("denied", r"no such bucket", [lambda: list(Storage().list_objects("s3://no-bucket"))])


def test_missing_object() -> None:
    expect("missing", r"^s3://speech/none\.bin: no such object", requests("s3://speech/none.bin")[:3])


def test_wrong_host(access: Access) -> None:
    access.use(endpoint="http://no-such-host.invalid:80")
    expect("unavailable", r"the host name is unknown, after \d+ tr(y|ies) in \d+ s\. Check", requests(LOCATION))


def test_nothing_listens(access: Access) -> None:
    access.use(endpoint=f"http://127.0.0.1:{free_port()}")
    expect("unavailable", r"connection refused, after \d+ tr(y|ies) in \d+ s\. Check host and port", requests(LOCATION))


def test_https_to_a_server_that_speaks_http(access: Access, s3: S3Server) -> None:
    access.use(endpoint=s3.endpoint.replace("http:", "https:"))
    expect("invalid", "the server does not speak https. Change https to http", requests(LOCATION))
    url = f"https://127.0.0.1:{s3.filer_port}/buckets/speech/a.bin"
    expect("invalid", "the server does not speak https. Change https to http", requests(url)[:3])


def test_http_that_is_not_allowed(access: Access) -> None:
    access.use(AWS_ALLOW_HTTP="false")
    expect("invalid", "http is not allowed. .*AWS_ALLOW_HTTP=true", requests(LOCATION))


def test_web_servers_are_not_listed(s3: S3Server) -> None:
    url = f"http://127.0.0.1:{s3.filer_port}/buckets/speech"
    expect("invalid", "web servers cannot list folders. Give a manifest", [lambda: list(Storage().list_objects(url))])


def test_missing_extra() -> None:
    program = """
import sys
sys.modules["obstore"] = None
from nestdata.storage import storage
storage().info("s3://bucket/name")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    expected = "ConfigError: Object stores need obstore. Install it with `pip install 'nest-pretrain[remote]'`."
    assert run.stderr.splitlines()[-1].endswith(expected)
    assert issubclass(ConfigError, NestDataError)


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    with caplog.at_level(logging.DEBUG):
        yield caplog.records


def test_secrets_are_in_no_pickle_repr_or_log(access: Access, records: list[logging.LogRecord]) -> None:
    access.use(AWS_SESSION_TOKEN="session-secret-123")
    used = Storage(QUICK)
    expect("denied", "wrong key", [lambda: used.info(LOCATION)])  # the server knows no session tokens
    access.use(OWNER)
    texts = [repr(used), str(vars(used)), *(record.getMessage() for record in records)]
    pickles = [pickle.dumps(used, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    secrets = (*SECRETS, OWNER.access_key)
    assert not [secret for secret in secrets for text in texts if secret in text]
    assert not [secret for secret in secrets for one in pickles if secret.encode() in one]
    assert pickle.loads(pickles[0]).config == QUICK
>>>>>>> store
