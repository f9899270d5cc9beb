"""A server on loopback that answers as the Hugging Face hub does, as far as downloading a file needs it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name, each with the contents of its files."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    revisions: tuple[str, ...] = ("main", COMMIT)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Methods and paths, in order."""

    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if is_api else parts[:2])
        files = self.hub.repositories.get(repository)
        if files is None:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        revision = (parts[5:6] if is_api else parts[3:4]) or ["main"]
        if revision[0] not in self.hub.revisions:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if is_api:
            siblings = [{"rfilename": name} for name in files]
            return self._send(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())
        if repository in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        name = "/".join(parts[4:])
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        digest = hashlib.sha256(files[name]).hexdigest()
        return self._send(200, files[name], {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves a hub at `hub.url` inside the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
