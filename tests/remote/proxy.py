"""A proxy on loopback that delays requests and injects faults between an HTTP client and its server.

It runs in a process of its own, so that it takes no time from the one that is tested. Which request gets which fault is
drawn from a key: the kind of fault, the request, and how often that request was made before. A run with the same
requests therefore meets the same faults, whatever their order.

    python -m tests.remote.proxy PORT TARGET_PORT      # reads faults as lines of JSON, answers with counts

Only the standard library is imported here, so that it starts within a tenth of a second.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.ports import free_port

REPOSITORY = Path(__file__).parents[2]
_CHUNK = 1 << 18
_KINDS = ("unavailable", "throttled", "reset", "short", "stalled", "flipped")
_BODY_FAULTS = ("short", "stalled", "flipped")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the proxy does to requests. Shares are of all requests, in [0, 1]; at most one fault hits a request."""

    delay_s: float = 0.0
    """Time before each request is passed on."""

    unavailable: float = 0.0
    """Answered with status 503."""

    throttled: float = 0.0
    """Answered with status 429."""

    reset: float = 0.0
    """The connection is reset."""

    short: float = 0.0
    """The connection is closed in the middle of the body of the answer."""

    stalled: float = 0.0
    """Nothing is sent after the middle of the body of the answer, and the connection stays open."""

    flipped: float = 0.0
    """One bit in the middle of the body of the answer is inverted."""

    stopped: bool = False
    """Connections are refused, and those that exist are reset."""

    seed: int = 0


class FaultProxy:
    """A proxy in a process of its own.

    Use it as a context manager; the process ends with the block, and also if this process is killed.
    """

    def __init__(self, target_port: int, faults: Faults | None = None) -> None:
        """Starts the proxy.

        Args:
            target_port: Of the server on this machine.
            faults: What to do from the beginning. Default: nothing.
        """
        self.faults = faults or Faults()
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.remote.proxy", str(self.port), str(target_port)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ask(self.faults)

    @property
    def url(self) -> str:
        """URL to use instead of the server's."""
        return f"http://127.0.0.1:{self.port}"

    def set(self, **changes: Any) -> None:
        """Changes fields of `Faults` for the requests from now on."""
        self.faults = replace(self.faults, **changes)
        self._ask(self.faults)

    def counts(self) -> Mapping[str, int]:
        """Returns how many requests there were, as `requests`, and how many met each fault."""
        return self._ask(self.faults)

    @contextlib.contextmanager
    def with_faults(self, **changes: Any) -> Iterator[None]:
        """Changes fields of `Faults` during the block."""
        before = self.faults
        self.set(**changes)
        try:
            yield
        finally:
            self.faults = before
            self._ask(before)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, faults: Faults) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(faults)) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


class _Proxy:
    """The proxy itself, in its process."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port = port
        self.target_port = target_port
        self.faults = Faults()
        self.counts: Counter[str] = Counter(requests=0)
        self._seen: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def apply(self, faults: Faults) -> None:
        """Takes over new faults; opens or closes the port."""
        self.faults = faults
        if faults.stopped and self._server is not None:
            self._server.close()
            self._server = None
            for writer in list(self._writers):
                _reset(writer)
        if not faults.stopped and self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20, backlog=512)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        upstream: list[asyncio.StreamWriter] = []
        try:
            above, below = await asyncio.open_connection("127.0.0.1", self.target_port, limit=1 << 20)
            upstream.append(below)
            while await self._exchange(reader, writer, above, below):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled at the end of the process only
        finally:
            self._writers.discard(writer)
            for stream in (writer, *upstream):
                with contextlib.suppress(OSError):
                    stream.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        above: asyncio.StreamReader,
        below: asyncio.StreamWriter,
    ) -> bool:
        """Passes on one request and its answer. Returns whether the connection can be used again."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await _body(reader, head, is_answer=False)
        self.counts["requests"] += 1
        fault = self._draw(head)
        if fault:
            self.counts[fault] += 1
        if self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s)
        if fault == "reset":
            _reset(writer)
            return False
        if fault in ("unavailable", "throttled"):
            writer.write(_refusal(503 if fault == "unavailable" else 429, has_body=not head.startswith(b"HEAD")))
            await writer.drain()
            return True
        below.write(head + body)
        await below.drain()
        return await self._answer(above, writer, fault, is_head=head.startswith(b"HEAD"))

    async def _answer(
        self, above: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str | None, *, is_head: bool
    ) -> bool:
        head = await above.readuntil(b"\r\n\r\n")
        while head.split(b" ", 2)[1].startswith(b"1"):  # 100 Continue
            writer.write(head)
            head = await above.readuntil(b"\r\n\r\n")
        writer.write(head)
        length = 0 if is_head else _content_length(head)
        if length is None or fault not in _BODY_FAULTS:
            if length is None:
                writer.write(await _body(above, head, is_answer=True))
            else:
                await _copy(above, writer, length)
            await writer.drain()
            return b"connection: close" not in head.lower()
        middle = length // 2
        await _copy(above, writer, middle)
        await writer.drain()
        if fault == "flipped":
            if length:
                byte = await above.readexactly(1)
                writer.write(bytes([byte[0] ^ 1]))
                await _copy(above, writer, length - middle - 1)
            return True
        if fault == "stalled" and length:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 600)
        return False

    def _draw(self, head: bytes) -> str | None:
        """Returns the fault of a request, or None."""
        line, *fields = head.decode("latin-1").split("\r\n")
        span = next((field for field in fields if field.lower().startswith("range:")), "")
        request = f"{line.partition('?')[0]} {span}"
        self._seen[request] += 1
        key = f"{self.faults.seed}/{request}/{self._seen[request]}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64
        for kind in _KINDS:
            draw -= getattr(self.faults, kind)
            if draw < 0:
                return kind
        return None


def _content_length(head: bytes) -> int | None:
    """Returns the length of a body, 0 if there is none, or None if it comes in chunks."""
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return None
    return int(fields.get(b"content-length", b"0"))


async def _body(reader: asyncio.StreamReader, head: bytes, *, is_answer: bool) -> bytes:
    length = _content_length(head)
    if length is not None:
        return b"" if is_answer else await reader.readexactly(length)
    parts = []
    while True:
        line = await reader.readline()
        chunk = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
        parts += [line, chunk]
        if len(chunk) == 2:
            return b"".join(parts)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int) -> None:
    while length:
        chunk = await reader.read(min(length, _CHUNK))
        if not chunk:
            raise asyncio.IncompleteReadError(b"", length)
        writer.write(chunk)
        await writer.drain()
        length -= len(chunk)


def _refusal(status: int, *, has_body: bool) -> bytes:
    code = b"SlowDown" if status == 429 else b"ServiceUnavailable"
    body = b"<Error><Code>" + code + b"</Code></Error>" if has_body else b""
    return b"HTTP/1.1 %d %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        code,
        len(body),
        body,
    )


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection such that the other side sees a reset, not an end."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _main(port: int, target_port: int) -> None:
    proxy = _Proxy(port, target_port)
    loop = asyncio.get_running_loop()
    # Ends with standard input, which ends when the process that started this one does.
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        await proxy.apply(Faults(**json.loads(line)))
        sys.stdout.write(json.dumps(proxy.counts) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
