"""What a web server says of an object; `tests/remote` has object stores."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nestdata import Storage, StorageError
from tests.addressed import WebServer
from tests.extras import needs


@needs("remote", "obstore")
def test_an_object_is_found_although_its_server_answers_no_head_requests(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"12345")
    with WebServer(tmp_path).running() as server:  # looks for HEAD requests in the current directory
        assert Storage().info(f"{server.url}/a.wav").size == 5
        with pytest.raises(StorageError, match=r"b\.wav: no such object"):
            Storage().info(f"{server.url}/b.wav")


@needs("remote", "obstore")
def test_an_answer_without_an_end_is_read_as_far_as_was_asked() -> None:
    sent: list[int] = []

    class Endless(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.send_response(200)
            for name, value in (("Content-Length", "5000"), ("ETag", '"e"')):
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(206)
            for name, value in (("Content-Length", 10**11), ("Content-Range", "bytes 0-999/5000"), ("ETag", '"e"')):
                self.send_header(name, str(value))
            self.end_headers()
            try:
                while sum(sent) < 1 << 30:
                    sent.append(self.wfile.write(bytes(1 << 16)))
            except OSError:
                pass

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(StorageError, match=r"expected 1000|asked for"):
                Storage().read_range(f"http://127.0.0.1:{server.server_port}/a.flac", 0, 1000, etag=None, size=5000)
        finally:
            server.shutdown()
    assert sum(sent) < 64 << 20
