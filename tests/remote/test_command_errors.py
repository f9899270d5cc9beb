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
    assert "404 Not Found" in line or "no such" in line


def test_no_permission_for_a_bucket(server: S3Server, tmp_path: Path) -> None:
    line = prepare(server.environment(READER), tmp_path, "s3://noise/bad/speech.json")
    assert "s3://noise/bad/speech.json" in line
    assert "403 Forbidden" in line


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
    assert "400 Bad Request" in line
    assert "AWS_SECRET_ACCESS_KEY" in line
    assert "an-expired-token" not in line


def test_no_network(server: S3Server, tmp_path: Path) -> None:
    unreachable = server.environment(endpoint=f"http://127.0.0.1:{free_port()}")
    line = prepare(unreachable, tmp_path, *NEMO)
    assert "Check the store, the endpoint and the network" in line


def test_an_http_endpoint_that_is_not_allowed(server: S3Server, tmp_path: Path) -> None:
    environment = server.environment()
    del environment["AWS_ALLOW_HTTP"]
    assert "AWS_ALLOW_HTTP=true" in prepare(environment, tmp_path, *NEMO)


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
