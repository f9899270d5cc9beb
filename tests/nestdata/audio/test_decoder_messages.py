import io
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from nestdata import Corpus, PrepareConfig, prepare_corpus
from tests.synthesis import hiss

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")

PROGRAM = """
import ctypes, sys
from nestdata.audio.decoder_messages import named_messages
library = ctypes.CDLL(None)
def write(text):
    library.fputs(text, ctypes.c_void_p.in_dll(library, "stderr"))
    library.fflush(None)
write(b"before\\n")
for name in ("a.mp3", "a.mp3", "b.mp3"):
    with named_messages(name, "MP3"):
        for _ in range(10_000):
            write(b"damaged\\n")
        print("from Python", file=sys.stderr, flush=True)
with named_messages("c.mp3", "MP3"):
    pass
with named_messages("d.wav", "WAV"):
    write(b"not caught\\n")
write(b"after\\n")
"""


def test_messages_of_c_are_caught_and_named_once_and_others_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "before",
        "from Python",
        "a.mp3: the decoder says: damaged",
        "from Python",
        "from Python",
        "b.mp3: the decoder says: damaged",
        "not caught",
        "after",
    ]


def damaged_mp3() -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, hiss(100_000, 1), 16000, format="MP3")
    content, rng = bytearray(stream.getvalue()), np.random.default_rng(0)
    # Headers of frames stay as they are.
    for position in rng.integers(2000, len(content), 400).tolist():
        if content[position] != 0xFF and content[position - 1] != 0xFF and content[position - 2] != 0xFF:
            content[position] ^= 1 << rng.integers(8)
    return bytes(content)


def test_damage_of_an_mp3_file_is_logged_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "audio").mkdir()
    path = tmp_path / "audio" / f"damaged-{os.getpid()}.mp3"
    path.write_bytes(damaged_mp3())
    prepare_corpus([path.parent], tmp_path / "out", PrepareConfig())
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            Corpus.open(tmp_path / "out").load(0)
    messages = [record.getMessage() for record in caplog.records if "the decoder says" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith(f"{path}: the decoder says: ")
    assert "libmpg123" not in capfd.readouterr().err.replace(messages[0], "")
