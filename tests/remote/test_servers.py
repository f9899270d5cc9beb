"""The servers and the proxy of these tests themselves: they end with their process, and faults are drawn by request."""

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.remote.proxy import REPOSITORY, FaultProxy, Faults
from tests.remote.server import find_weed

HOLD = """
import sys, time
from pathlib import Path
from tests.remote.proxy import FaultProxy
from tests.remote.server import s3_server
with s3_server(Path(sys.argv[1])) as server, FaultProxy(server.port) as proxy:
    print(server.port, server.filer_port, proxy.port, flush=True)
    time.sleep(600)
"""


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(find_weed() is None, reason="needs SeaweedFS")
def test_servers_end_when_their_process_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    ports = [int(port) for port in holder.stdout.readline().split()]
    assert [is_open(port) for port in ports] == [True] * 3
    holder.kill()
    holder.wait()
    holder.stdout.close()
    deadline = time.monotonic() + 30
    while any(is_open(port) for port in ports):
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Numbers(BaseHTTPRequestHandler):
    """Answers every request with ten bytes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"0123456789")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Numbers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def answer(port: int, path: str) -> tuple[int, bytes] | str:
    """Returns status and body of an answer, or the name of the exception."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=0.5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def test_each_fault_is_what_a_client_sees(numbers: int) -> None:
    expected = {
        "unavailable": (503, b"<Error><Code>ServiceUnavailable</Code></Error>"),
        "throttled": (429, b"<Error><Code>SlowDown</Code></Error>"),
        "reset": "ConnectionResetError",
        "short": "IncompleteRead",
        "stalled": "TimeoutError",
        "flipped": (200, b"01234\x346789"),
    }
    with FaultProxy(numbers) as proxy:
        assert answer(proxy.port, "/a") == (200, b"0123456789")
        for fault, seen in expected.items():
            with proxy.with_faults(**{fault: 1.0}):
                assert answer(proxy.port, "/a") == seen, fault
        with proxy.with_faults(stopped=True):
            assert answer(proxy.port, "/a") == "ConnectionRefusedError"
        assert answer(proxy.port, "/a") == (200, b"0123456789")
        assert proxy.counts() == {"requests": 8} | dict.fromkeys(expected, 1)


def test_a_share_of_requests_meets_faults_that_depend_on_the_request_alone(numbers: int) -> None:
    paths = [f"/{number}" for number in range(200)]
    seen = []
    for order in (paths, paths[::-1]):
        with FaultProxy(numbers, Faults(unavailable=0.2, seed=3)) as proxy:
            answers = {path: answer(proxy.port, path) for path in order}
            refused = {path for path in paths if answers[path][0] == 503}
            assert proxy.counts() == {"requests": 200, "unavailable": len(refused)}
            seen.append(refused)
    assert seen[0] == seen[1]
    assert 20 < len(seen[0]) < 60  # a fifth of 200, more or less; the draw is the same in every run
