"""Targets of storage: addresses, and what a web server answers to requests for a range of bytes."""

import os
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

from hypothesis import strategies as st

from nestdata import StorageConfig
from nestdata.storage import Storage, is_url, join, parent
from nestdata.storage.location import common_folder, parse_url
from tests.fuzz.inputs import TEXTS
from tests.fuzz.target import Target

_CONTENT = bytes(range(256)) * 16
_SCHEMES = ("s3://", "gs://", "az://", "http://", "https://", "ftp://", "S3://", "", "s3:/", "://")


class Answer(NamedTuple):
    """What the server answers to each request of one input."""

    status: int
    headers: tuple[tuple[str, str], ...]
    length: int
    """Number of bytes of the body."""


class _Handler(BaseHTTPRequestHandler):
    answer: ClassVar[Answer]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Sends the answer, whatever was asked for, and closes the connection."""
        self.send_response_only(self.answer.status)
        for name, value in self.answer.headers:
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(_CONTENT[: self.answer.length])
        self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@cache
def _server() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _answers() -> st.SearchStrategy[Answer]:
    numbers = st.one_of(st.integers(-1, 5000), st.sampled_from([2**31, 2**63 - 1, 2**64]))
    ranges = st.one_of(
        st.builds("bytes {}-{}/{}".format, numbers, numbers, st.one_of(numbers, st.just("*"))),
        st.sampled_from(["bytes 10-109/4096", "bytes */4096", "bytes", "", "bytes 10-109", "items 1-2/3", "a" * 9000]),
    )
    headers = st.fixed_dictionaries(
        {},
        optional={
            "Content-Range": ranges,
            "Content-Length": st.one_of(numbers.map(str), st.sampled_from(["100", "", "x", "1, 2"])),
            "ETag": st.sampled_from(['"a"', "W/", "", "a" * 9000]),
            "Last-Modified": st.sampled_from(["Mon, 23 Nov 2026 10:00:00 GMT", "yesterday", ""]),
            "Content-Encoding": st.sampled_from(["gzip", "identity", "x"]),
            "Location": st.sampled_from(["/b", "http://127.0.0.1:1/", "file:///etc/passwd", "::"]),
        },
    )
    valid = st.just(Answer(206, (("Content-Range", "bytes 10-109/4096"), ("Content-Length", "100")), 100))
    statuses = st.sampled_from([200, 204, 206, 301, 304, 400, 403, 404, 416, 418, 500, 503, 599])
    odd = st.builds(lambda status, fields, size: Answer(status, tuple(fields.items()), size), statuses, headers,
                    st.integers(0, len(_CONTENT)))  # fmt: skip
    return st.one_of(valid, odd)


def _read_range(answer: Answer, _: Path) -> bool:
    """Reads 100 bytes of an object, without repeating anything."""
    _Handler.answer = answer
    config = StorageConfig(patience_s=0.0, first_contact_s=0.0, connect_timeout_s=5.0, stall_timeout_s=0.5)
    with patch.dict(os.environ, AWS_ALLOW_HTTP="true"):
        content = Storage(config).read_range(f"http://127.0.0.1:{_server().server_port}/a.tar", 10, 100)
    assert len(content) == 100
    return True


def _split(location: str, _: Path) -> bool:
    """Takes a location apart and puts it together."""
    for other in (location, "s3://bucket/folder", "/folder"):
        common_folder(location, other)
        join(other, location)
    parent(location)
    return is_url(location) and bool(parse_url(location))


STORAGE_TARGETS: dict[str, Target] = {
    "address": Target(
        lambda: st.builds("".join, st.tuples(st.sampled_from(_SCHEMES), TEXTS, st.sampled_from("/@:?#%\\"), TEXTS)),
        _split,
        num_tested=150,
    ),
    "HTTP range": Target(_answers, _read_range, packages=("obstore",)),
}
