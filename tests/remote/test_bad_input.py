"""One line for each mistake of a user: what is wrong, and what to do. And no secret in any of them."""

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from nestdata.errors import ConfigError, NestError, StorageError
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
    """Returns one call of each kind with a new `Storage`, which knows nothing of earlier answers; the last one lists.

    obstore has no error class of its own for lists that are refused.
    """
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


def test_wrong_key(access: Access) -> None:
    access.use(Identity("ownerkey", "wrong-secret-987", ()))
    expect("denied", r"speech.*: .*403.*Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", requests(LOCATION)[:4])
    expect("unavailable", "403 Forbidden.*Check AWS_ACCESS_KEY_ID", requests(LOCATION)[4:])


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
        expect("unavailable", "400 Bad Request.*Check AWS_ACCESS_KEY_ID", [actions[0], actions[1], actions[4]])
        server.shutdown()


def test_no_credentials(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    access.use(AWS_METADATA_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    expect("unavailable", r"latest/api/token.*Check AWS_ACCESS_KEY_ID", requests(LOCATION)[:2])


def test_nothing_listens(access: Access) -> None:
    access.use(endpoint=f"http://127.0.0.1:{free_port()}")
    expect("unavailable", r"after \d+ retries, .*\. Check the store, the endpoint and the network", requests(LOCATION))


def test_http_that_is_not_allowed(access: Access) -> None:
    access.use(AWS_ALLOW_HTTP="false")
    expect("invalid", "is not encrypted. Set AWS_ALLOW_HTTP=true", requests(LOCATION))


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
    assert issubclass(ConfigError, NestError)


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    with caplog.at_level(logging.DEBUG):
        yield caplog.records


def test_secrets_are_in_no_pickle_repr_or_log(access: Access, records: list[logging.LogRecord]) -> None:
    access.use(AWS_SESSION_TOKEN="session-secret-123")
    used = Storage(QUICK)
    expect("denied", "403", [lambda: used.info(LOCATION)])  # the server knows no session tokens
    access.use(OWNER)
    texts = [repr(used), str(vars(used)), *(record.getMessage() for record in records)]
    pickles = [pickle.dumps(used, protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    secrets = (*SECRETS, OWNER.access_key)
    assert not [secret for secret in secrets for text in texts if secret in text]
    assert not [secret for secret in secrets for pickled in pickles if secret.encode() in pickled]
    assert pickle.loads(pickles[0]).config == QUICK
