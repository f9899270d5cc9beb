"""A read-only S3 server that needs little CPU time, and answers after a delay.

It answers GET and HEAD of the files below a folder, whole or in one range of bytes, at the path that S3 gives them
(`/BUCKET/KEY` is the file `FOLDER/BUCKET/KEY`), and sends them from the page cache by `sendfile`. It lists them, too.
Signatures are not checked. A real server, such as SeaweedFS, needs about as much CPU time for a request as the
decoding of an utterance; on a machine of few cores, it would be measured together with the client.

    python benchmarks/remote/range_server.py FOLDER DELAY_MS     # prints its port; ends with standard input
"""

import hashlib
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

_DATE = "Sun, 01 Nov 2026 00:00:00 GMT"


class RunningServer(NamedTuple):
    """A server in a process of its own."""

    url: str
    pid: int


@contextmanager
def range_server(folder: Path, *, delay_ms: float = 0) -> Iterator[RunningServer]:
    """Runs a server during the block; it also ends if this process is killed."""
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), str(delay_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield RunningServer(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
        process.stdin.close()


class _Connection(socketserver.BaseRequestHandler):
    """Answers the requests of one connection, one after the other, in a thread."""

    folder: ClassVar[Path]
    delay_s: ClassVar[float]

    def handle(self) -> None:
        """Reads heads of requests until the client closes the connection."""
        head = b""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while received := self.request.recv(65536):
                head += received
                if head.endswith(b"\r\n\r\n"):
                    time.sleep(self.delay_s)
                    self._answer(head.decode("latin-1"))
                    head = b""
        except OSError:
            pass  # the client has gone

    def _answer(self, head: str) -> None:
        method, target, _ = head.split(" ", 2)
        path, _, query = target.partition("?")
        if "list-type=2" in query:
            body = _listing(self.folder / path.strip("/"), urllib.parse.parse_qs(query).get("prefix", [""])[0])
            self._send_head("200 OK", len(body), has_body=True)
            self.request.sendall(body)
            return
        found = _open(self.folder, urllib.parse.unquote(path))
        if found is None:
            self._send_head("404 Not Found", 0, has_body=False)
            return
        file, size, etag = found
        start, end, status = 0, size, "200 OK"
        if (position := head.lower().find("\r\nrange: bytes=")) >= 0:
            first, _, last = head[position + 15 : head.index("\r\n", position + 2)].partition("-")
            start, end = int(first), min(int(last) + 1, size) if last else size
            status = f"206 Partial Content\r\nContent-Range: bytes {start}-{end - 1}/{size}"
        self._send_head(f'{status}\r\nETag: "{etag}"', end - start, has_body=method == "GET" and start < end)
        while method == "GET" and start < end:
            start += os.sendfile(self.request.fileno(), file, start, end - start)

    def _send_head(self, status: str, length: int, *, has_body: bool) -> None:
        self.request.sendall(
            f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nLast-Modified: {_DATE}\r\n\r\n".encode(),
            socket.MSG_MORE if has_body else 0,  # one packet with the body; Linux waits 200 ms for one that never comes
        )


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 512


@lru_cache(maxsize=4096)
def _open(folder: Path, path: str) -> tuple[int, int, str] | None:
    """Returns descriptor, size and ETag of a file; None if it does not exist."""
    target = folder / path.lstrip("/")
    if ".." in target.parts or not target.is_file():
        return None
    return os.open(target, os.O_RDONLY | os.O_CLOEXEC), target.stat().st_size, _etag(target)


def _etag(path: Path) -> str:
    return hashlib.blake2b(f"{path.name}/{path.stat().st_size}".encode(), digest_size=16).hexdigest()


def _listing(bucket: Path, prefix: str) -> bytes:
    """Returns all objects of a bucket below a prefix, on one page."""
    found = [path for path in sorted(bucket.glob("*/*")) if str(path.relative_to(bucket)).startswith(prefix)]
    rows = "".join(
        f"<Contents><Key>{path.relative_to(bucket)}</Key><Size>{path.stat().st_size}</Size>"
        f'<ETag>"{_etag(path)}"</ETag><LastModified>2026-11-01T00:00:00.000Z</LastModified></Contents>'
        for path in found
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()


def main(folder: Path, delay_s: float) -> None:
    """Serves until standard input ends, which happens at the latest when the process that started this one ends."""
    _Connection.folder, _Connection.delay_s = folder, delay_s
    with _Server(("127.0.0.1", 0), _Connection) as server:
        threading.Thread(target=server.serve_forever, args=(0.5,), daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), float(sys.argv[2]) / 1000)
