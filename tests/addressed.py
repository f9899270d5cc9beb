"""Copies of corpora whose audio is read by address, and a web server for it."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from nestdata import Corpus
from nestdata.corpus.addresses import ADDRESS
from nestdata.corpus.meta import FORMAT_VERSION


def addressed_copy(corpus: Path, output: Path, *, folder: Path, root: str) -> Path:
    """Copies a prepared corpus so that its audio, files below `folder`, is read by address from `root`.

    A file that does not exist gets an address as well, since it may be deleted after preparing.
    """
    shutil.copytree(corpus, output)
    meta = json.loads((output / "meta.json").read_text())
    lines = (output / "cuts.jsonl").read_bytes()
    index = np.load(output / "index.npy")
    names: dict[str, int] = {}
    addresses, checksums = np.zeros(index.shape[1], ADDRESS), np.zeros(index.shape[1], np.uint32)
    contents: list[bytes] = []
    for number, start in enumerate(index[1]):
        cut = json.loads(lines[start : lines.index(b"\n", start)])
        sources = cut["recording"]["sources"]
        source = next(source["source"] for source in sources if cut["channel"] in source["channels"])
        name = str(Path(source).relative_to(folder))
        if name not in names:
            names[name] = len(contents)
            contents.append(Path(source).read_bytes() if Path(source).exists() else b"x")
        addresses[number] = (0, names[name], len(contents[names[name]]))
        checksums[number] = crc32(contents[names[name]])
    rows = [
        json.dumps({"name": name, "size": len(content), "etag": None, "members": 1}) + "\n"
        for name, content in zip(names, contents, strict=True)
    ]
    (output / "shards.jsonl").write_text("".join(rows))
    np.save(output / "shards.npy", np.cumsum([0, *map(len, rows)]).astype(np.int64))
    np.save(output / "addresses.npy", addresses)
    np.save(output / "checksums.npy", checksums)
    has_urls = "://" in root
    shards = {"num_shards": len(rows), "root": root, "has_urls": has_urls, "has_checksums": True}
    meta |= {"format_version": FORMAT_VERSION, "root": root, "shards": {**meta.get("shards", {}), **shards}}
    (output / "meta.json").write_text(json.dumps(meta))
    Corpus.open(output)
    return output


class WebServer:
    """Serves the files of a folder on loopback, with ranges, and misbehaves on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: Counter[tuple[str, str]] = Counter()
        """Number of requests by path and range."""

        self.is_down = threading.Event()
        """While it is set, every request is answered by 503."""

        self.num_refused = 0
        """Number of these answers."""

        self.flips: set[str] = set()
        """Paths whose next answer has a damaged byte."""

        web, lock = self, threading.Lock()

        class Handler(SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                wanted = self.headers.get("Range", "")
                path = folder / self.path.lstrip("/")
                with lock:
                    web.requests[self.path, wanted] += 1
                    is_flipped = self.path in web.flips
                    web.flips.discard(self.path)
                if web.is_down.is_set():
                    web.num_refused += 1
                    self._answer(503, b"")
                elif not path.is_file():
                    self._answer(404, b"")
                else:
                    self._answer_range(path.read_bytes(), wanted, is_flipped)

            def _answer_range(self, content: bytes, wanted: str, is_flipped: bool) -> None:
                first, last = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
                part = bytearray(content[first : last + 1])
                if is_flipped:
                    part[len(part) // 2] ^= 0xFF
                self._answer(206, bytes(part), f"bytes {first}-{first + len(part) - 1}/{len(content)}")

            def _answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
                self.send_response(status)
                if content_range is not None:
                    self.send_header("Content-Range", content_range)
                    self.send_header("ETag", f'"tag of {Path(self.path).name}"')
                    self.send_header("Last-Modified", "Sun, 22 Nov 2026 12:00:00 GMT")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator["WebServer"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
