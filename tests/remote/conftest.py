"""Servers that the tests of object stores share, and an environment without credentials of the user."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestdata import Storage
from tests.remote.proxy import FaultProxy
from tests.remote.server import OWNER, Identity, S3Server, find_weed, s3_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.remote)


@pytest.fixture(autouse=True)
def no_settings_of_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the credentials and endpoints of the user from the environment."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server with the buckets `speech` and `noise`."""
    if find_weed() is None:
        pytest.skip("needs SeaweedFS: make lane LANE=remote installs it")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def _proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A proxy before the S3 server, without faults at first."""
    with _proxy.with_faults():
        yield _proxy


def upload(folder: Path, url: str) -> None:
    """Writes all files below a folder to the same names below a URL."""
    store = Storage()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.write(f"{url}/{path.relative_to(folder).as_posix()}", path)


class Access:
    """Sets the environment of this process to that of an identity, at the server or through the proxy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
        self._monkeypatch = monkeypatch
        self._server = server

    def use(self, identity: Identity = OWNER, *, endpoint: str | None = None, **others: str) -> None:
        for name, value in (self._server.environment(identity, endpoint=endpoint) | others).items():
            self._monkeypatch.setenv(name, value)


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch, s3: S3Server) -> Access:
    """The owner's access to the S3 server; `use` changes it."""
    access = Access(monkeypatch, s3)
    access.use()
    return access
