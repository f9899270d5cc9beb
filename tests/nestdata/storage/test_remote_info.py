"""What a web server says of an object; `tests/remote` has object stores."""

from pathlib import Path

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
