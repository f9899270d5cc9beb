"""What decoders in C write to the standard error of the process: caught, and logged with the name of the file.

libmpg123, which libsndfile contains, and FFmpeg report damage in this way, without the name of the file and once for
each damaged frame, over whatever is on the terminal. They write through the variable `stderr` of the C library, so it
points into memory while audio is opened and decoded. File descriptor 2 stays as it is: Python, and programs that are
started, write there as before. Only the GNU C library is known to have such a variable; elsewhere, nothing is caught.
"""

import ctypes
import logging
import platform
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

_log = logging.getLogger(__name__)
_CAPACITY = 1 << 16
_MAX_NAMES = 100
_lock = threading.Lock()
_names: set[str] = set()


def named_messages(name: str, audio_format: str) -> AbstractContextManager[None]:
    """Returns a context in which messages are caught, if the decoder of a format writes any.

    Args:
        name: Names the audio in the warning.
        audio_format: As `soundfile.SoundFile.format` gives it, or "FFMPEG".
    """
    return _NamedMessages(name) if audio_format in ("MP3", "FFMPEG") else nullcontext()


class _NamedMessages(AbstractContextManager[None]):
    """Catches what decoders write, and logs a warning with its first line, once for each file in each process.

    While another thread is in such a block, the name of its file is given instead.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory: _Memory | None = None

    def __enter__(self) -> None:
        memory = _memory()
        if memory is not None and _lock.acquire(blocking=False):
            self._memory = memory
            memory.start()

    def __exit__(self, *_: object) -> None:
        if self._memory is None:
            return
        text = self._memory.stop()
        self._memory = None
        _lock.release()
        if text:
            _warn(self._name, text)


def _warn(name: str, text: str) -> None:
    if name in _names or len(_names) >= _MAX_NAMES:
        return
    _names.add(name)
    _log.warning("%s: the decoder says: %s", name, text)
    if len(_names) == _MAX_NAMES:
        _log.warning("messages of decoders about further files are left out")


class _Memory:
    """A stream of the C library that writes into memory, as much as fits."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._tell = library.ftell
        self._variable = ctypes.c_void_p.in_dll(library, "stderr")
        self._content = ctypes.create_string_buffer(_CAPACITY)
        library.fmemopen.restype = ctypes.c_void_p
        # Never closed: another thread may be writing to it.
        self._stream = ctypes.c_void_p(library.fmemopen(self._content, ctypes.c_size_t(_CAPACITY), b"w"))
        if not self._stream:
            raise OSError("fmemopen failed")
        self._before: int | None = None

    def start(self) -> None:
        """Lets `stderr` point to this stream."""
        self._before = self._variable.value
        self._variable.value = self._stream.value

    def stop(self) -> str:
        """Lets `stderr` point to what it did before, and returns the first line that was written since."""
        self._variable.value = self._before
        if not self._tell(self._stream):
            return ""
        self._library.fflush(self._stream)
        self._library.rewind(self._stream)
        return self._content.value.decode(errors="replace").strip().partition("\n")[0][:200]


@cache
def _memory() -> _Memory | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        return _Memory(ctypes.CDLL(None))
    except (OSError, AttributeError, ValueError):
        return None
