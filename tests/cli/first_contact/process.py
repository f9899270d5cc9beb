"""Runs single command lines and small programs as a user does, in a checkout of any age.

`Commands` starts one server, which forks a process for each command line. The process has its own working directory,
signals and files for the output, as if a shell had started it. A warm server has imported torch and Lightning, so that
a command line takes a fraction of a second; the processes of a cold server start a new interpreter, whose whole time is
measured. This file is the program of the server as well, and imports nothing but the standard library: the packages
of the checkout come from `PYTHONPATH`.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

TIMEOUT_S = 300.0
_WARM = ("torch", "lhotse", "pytorch_lightning", "tyro", "matplotlib.pyplot", "rich.console", "yaml")
_POLL_S = 0.02


class Outcome(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str
    cpu_s: float
    """CPU time of its processes, which depends less on other load than the time on a clock."""


class Commands:
    """Runs command lines in a checkout.

    Args:
        checkout: Root of the repository.
        work: A directory for the server's files.
        warm: Whether the server imports the large dependencies before it forks.
    """

    def __init__(self, checkout: Path, work: Path, *, warm: bool) -> None:
        packages = work / "packages"
        packages.mkdir(parents=True)
        (packages / "nestcli").symlink_to(checkout / "cli")
        self._work = work
        self._num_runs = 0
        self._warm = warm
        kept = {"PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
        environment = {
            **{name: value for name, value in os.environ.items() if name in kept},
            "PYTHONPATH": os.pathsep.join([str(checkout), str(packages)]),
            "HOME": str(work),
            "MPLCONFIGDIR": str(work / "matplotlib"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__, *(["--warm"] if warm else [])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        *,
        hidden: Sequence[str] = (),
        interrupt_at: str = "",
    ) -> Outcome:
        """Runs a command line.

        Args:
            arguments: `nestdata`, `nestmodel` or `python`, and its arguments.
            cwd: The working directory.
            hidden: Modules that cannot be imported, as if they were not installed.
            interrupt_at: A pattern; Ctrl-C is pressed when it is found in the output.
        """
        self._num_runs += 1
        streams = [self._work / f"{self._num_runs}-{name}" for name in ("stdout", "stderr")]
        for path in streams:
            path.touch()
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd),
            "hidden": list(hidden),
            "interrupt_at": interrupt_at,
            "streams": [str(path) for path in streams],
            "fresh": not self._warm,
        }
        requests, answers = self._server.stdin, self._server.stdout
        assert requests is not None
        assert answers is not None
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        answer = json.loads(answers.readline())
        out, err = (path.read_bytes().decode(errors="backslashreplace") for path in streams)
        return Outcome(answer["code"], out, err, answer["cpu_s"])

    def close(self) -> None:
        """Ends the server."""
        for stream in (self._server.stdin, self._server.stdout):
            assert stream is not None
            stream.close()
        self._server.wait()


@contextlib.contextmanager
def commands(checkout: Path, work: Path, *, warm: bool) -> Iterator[Commands]:
    """Yields a server, which ends with the block."""
    server = Commands(checkout, work, warm=warm)
    try:
        yield server
    finally:
        server.close()


def _serve(*, warm: bool) -> None:
    """Answers requests, which are lines of JSON on standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0))
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in _WARM if warm else ():
        importlib.import_module(name)
    for line in requests:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _start(request)
        try:
            code, cpu_s = _wait(pid, request)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # ranks may have outlived it
        answers.write(json.dumps({"code": code, "cpu_s": cpu_s}) + "\n")
        answers.flush()


def _start(request: dict[str, Any]) -> None:
    """Becomes the process of a command line. Does not return."""
    os.setpgid(0, 0)  # Ctrl-C reaches the processes that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    for number, path in enumerate(request["streams"], start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    if request["fresh"]:
        os.execv(sys.executable, [sys.executable, __file__, "--run", json.dumps(request)])
    os._exit(_run(request))


def _wait(pid: int, request: dict[str, Any]) -> tuple[int, float]:
    """Returns the exit code and the CPU time; presses Ctrl-C when it is due, and kills what runs for too long."""
    due, end = request["interrupt_at"], time.monotonic() + TIMEOUT_S
    while True:
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        if due and any(re.search(due, Path(path).read_text(errors="replace")) for path in request["streams"]):
            os.killpg(pid, signal.SIGINT)
            due = ""
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _run(request: dict[str, Any]) -> int:
    """Runs a command line in this process, and returns its exit code."""
    _obey_file_modes()
    sys.modules.update(dict.fromkeys(request["hidden"]))
    program, *arguments = request["arguments"]
    try:
        if program == "python":
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
            code: Any = 0
        else:
            # Where the ranks of several devices find the program.
            sys.argv = [str(Path(sys.executable).parent / program), *arguments]
            code = importlib.import_module(f"nestcli.{program}").main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        kind, raised, trace = sys.exc_info()
        assert kind is not None
        assert raised is not None
        (sys.excepthook if sys.excepthook is not sys.__excepthook__ else traceback.print_exception)(kind, raised, trace)
        code = 1
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    return code if isinstance(code, int) else 0 if code is None else 1


def _flush(stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def _obey_file_modes() -> None:
    """Takes from root the right to read and write every file, in this process and in those that it starts."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the structure, this process
    data = (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
        for word in range(3):
            data[word] &= ~(1 << capability)
    libc.capset(header, data)


if __name__ == "__main__":
    del sys.path[0]  # the directory of this file, whose modules could hide others
    if "--run" in sys.argv:
        os._exit(_run(json.loads(sys.argv[-1])))
    _serve(warm="--warm" in sys.argv)
