"""Arms a process: it writes its Python stacks when the monitor asks for them or when it crashes, and ends on a signal.

A thread is asked for the stacks first. It holds the GIL while it writes, so no other thread runs Python code meanwhile.
If it cannot have the GIL, because a call in C does not return it, the main thread is interrupted by a signal and writes
without the GIL. The frames of the other threads then stand still as well: they wait for the GIL. Asking by the signal
alone would read frames that change meanwhile, and the process could crash.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
from io import FileIO
from pathlib import Path

from nestguard.observe.directory import CRASH_SUFFIX, STACK_REQUEST_SUFFIX, STACK_SUFFIX, create_file
from nestguard.observe.process import END_SIGNAL, STACK_SIGNAL, process_state, send_signal

_ASK, _END = b"?", b"."
_JOIN_S = 1.0
_dumps_crashes = False
"""Whether this process, or the process that it was forked from, has enabled faulthandler for the stall guard."""


class StackWriter:
    """Writes the stacks of this process whenever it is asked, until `close`.

    Args:
        directory: Where the processes of this node write their heartbeats.
        name: Base name of the files of this process.

    Raises:
        OSError: A file cannot be created.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._file = create_file(directory / (name + STACK_SUFFIX))  # must stay open for the lifetime of the process
        request = directory / (name + STACK_REQUEST_SUFFIX)
        request.unlink(missing_ok=True)
        os.mkfifo(request, 0o600)
        self._requests = os.open(request, os.O_RDWR)  # opened for writing as well, the pipe never ends
        # faulthandler restores the previous handler when the interpreter exits. It must be SIG_IGN, because the default
        # action would kill the process. A forked process first removes the registration that it inherited.
        faulthandler.unregister(STACK_SIGNAL)
        _handle(STACK_SIGNAL, signal.SIG_IGN.value)
        faulthandler.register(STACK_SIGNAL, self._file, all_threads=True, chain=False)
        self._thread = threading.Thread(target=self._run, name="nestguard-stacks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops writing stacks."""
        faulthandler.unregister(STACK_SIGNAL)
        os.write(self._requests, _END)
        self._thread.join(_JOIN_S)
        os.close(self._requests)
        self._file.close()

    def _run(self) -> None:
        while os.read(self._requests, 1) != _END:
            faulthandler.dump_traceback(self._file, all_threads=True)


def end_on_signal() -> None:
    """Makes `END_SIGNAL` end this process with exit code 44, even while a thread holds the GIL."""
    # A handler written in Python would wait for the GIL, which a stuck thread may hold. `_exit` does not need it.
    _handle(END_SIGNAL, ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p))


def _handle(number: int, handler: int | ctypes.c_void_p) -> None:
    """Sets the handler of a signal, from any thread; Python's own function works in the main thread only."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, handler)


def dump_crashes(directory: Path, name: str) -> FileIO | None:
    """Makes fatal signals write the stacks to a file before they end the process.

    Args:
        directory: Where the processes of this node write their heartbeats.
        name: Base name of the files of this process.

    Returns:
        The file, for `stop_dumping_crashes`; None if faulthandler is already in use.
    """
    global _dumps_crashes
    if faulthandler.is_enabled() and not _dumps_crashes:
        return None
    crash = create_file(directory / (name + CRASH_SUFFIX))
    faulthandler.enable(crash, all_threads=True)
    _dumps_crashes = True
    return crash


def stop_dumping_crashes(crash: FileIO) -> None:
    """Undoes `dump_crashes`."""
    global _dumps_crashes
    faulthandler.disable()
    crash.close()
    _dumps_crashes = False


def ask_for_stacks(directory: Path, name: str) -> None:
    """Makes an armed process write the stacks of all threads, once it has the GIL; does nothing if it has ended.

    Args:
        directory: Where the processes of this node write their heartbeats.
        name: Base name of the files of the process.
    """
    with contextlib.suppress(OSError):
        request = os.open(directory / (name + STACK_REQUEST_SUFFIX), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.write(request, _ASK)
        finally:
            os.close(request)


def interrupt_for_stacks(pid: int, started: int) -> None:
    """Makes the main thread of an armed process write the stacks of all threads, although another call has the GIL.

    Any thread may take a signal that is sent to a process, and write while the main thread runs on.

    Args:
        pid: Its process id.
        started: Its start time in clock ticks; nothing is done if the process has ended.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None:  # glibc before 2.30
        send_signal(pid, started, STACK_SIGNAL)
    elif pid > 0 and not process_state(pid, started).has_ended:
        tgkill(pid, pid, STACK_SIGNAL)
