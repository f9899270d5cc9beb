import io
import threading
from pathlib import Path
from typing import Any

import pytest
import soundfile

from nestdata import StorageError
from nestdata.corpus.encoded import open_stream
from nestdata.prepare.inputs.content import StoredContent
from nestdata.storage import Storage
from tests.synthesis import hiss


def test_waiting_for_a_store_keeps_no_other_thread_from_opening_audio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = io.BytesIO()
    soundfile.write(encoded, hiss(3000, 1), 16000, format="OGG")
    content = encoded.getvalue()
    (tmp_path / "a.ogg").write_bytes(content)
    is_asked, answers = threading.Event(), threading.Event()

    def read_range(_: Storage, __: str, start: int, length: int, **___: Any) -> bytes:
        is_asked.set()
        answers.wait()
        return content[start : start + length]

    monkeypatch.setattr(Storage, "read_range", read_range)
    opened: list[int] = []

    def open_remote() -> None:
        with StoredContent("s3://bucket/a.ogg", 0, len(content)).open() as stream, open_stream(stream) as file:
            opened.append(file.frames)

    def open_local() -> None:
        opened.append(soundfile.info(tmp_path / "a.ogg").frames)

    remote, local = (threading.Thread(target=target, daemon=True) for target in (open_remote, open_local))
    remote.start()
    assert is_asked.wait(30)
    local.start()
    local.join(30)
    assert opened == [3000]
    answers.set()
    remote.join(30)
    assert opened == [3000, 3000]


def test_content_that_cannot_be_read_is_an_error_when_it_is_opened(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"a\.flac: no such file"):
        StoredContent(str(tmp_path / "a.flac"), 0, 100).open()
