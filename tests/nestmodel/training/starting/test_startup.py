"""The watch of the start of a run, in processes of its own. `tests/distributed/test_startup.py` starts whole runs."""

import os
import signal
import subprocess
import sys

import pytest

from nestmodel.training.starting.startup import EXIT_INTERRUPTED, EXIT_NOT_SAVED, EXIT_PREEMPTED

PRELUDE = """
import os, signal, subprocess, sys, time
from nestmodel.training.starting import origin, startup
"""


def run(source: str, *, stderr: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NESTMODEL_STARTER")}
    command = [sys.executable, "-c", PRELUDE + source]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, env=environment)


def test_the_exit_codes_are_those_that_the_documentation_promises() -> None:
    assert (EXIT_PREEMPTED, EXIT_NOT_SAVED, EXIT_INTERRUPTED) == (75, 74, 130)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, EXIT_PREEMPTED),
        (signal.SIGUSR1, EXIT_PREEMPTED),
        (signal.SIGINT, EXIT_INTERRUPTED),
    ],
)
def test_a_signal_during_start_up_exits_with_its_code(number: signal.Signals, code: int) -> None:
    done = run(f"""
with startup.watch_startup():
    os.kill(os.getpid(), {int(number)})
    time.sleep(30)
""")
    assert done.returncode == code
    assert done.stderr == f"error: {number.name} before training; there is nothing to save.\n"


def test_a_signal_just_before_the_end_of_start_up_is_not_lost() -> None:
    done = run("""
with startup.watch_startup():
    time.sleep(0.1)
    sys.setswitchinterval(1000)  # the thread cannot run before the main thread ends the watch
    os.kill(os.getpid(), signal.SIGTERM)
    startup.end_startup()
print("continues")
""")
    assert (done.returncode, done.stdout) == (EXIT_PREEMPTED, "")


def test_a_signal_exits_although_nobody_reads_stderr() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run("with startup.watch_startup(): os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", stderr=writer)
    os.close(writer)
    assert done.returncode == EXIT_PREEMPTED


def test_previous_handlers_return_after_start_up_and_later_ones_stay() -> None:
    done = run("""
later = lambda *_: None
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
before = [signal.getsignal(number) for number in numbers]
with startup.watch_startup():
    signal.signal(signal.SIGTERM, later)
assert [signal.getsignal(number) for number in numbers] == [later, *before[1:]]
assert signal.set_wakeup_fd(-1) == -1
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 75, "was killed by SIGTERM"),  # asked to leave before it has handlers
        ("os.kill(os.getpid(), 44)", 1, "was killed by SIGRTMIN+10"),
    ],
)
def test_a_rank_that_fails_during_start_up_is_noticed_without_polling(ending: str, code: int, message: str) -> None:
    done = run(f"""
startup._POLL_S = 60.0
with startup.watch_startup():
    ranks = []
    startup.watch_ranks(lambda: ranks)
    for ending in ("time.sleep(60)", {ending!r}):
        ranks.append(subprocess.Popen([sys.executable, "-c", "import os, signal, sys, time; " + ending]))
    time.sleep(30)
""")
    assert done.returncode == code
    assert done.stderr == f"error: a rank that this process started {message} during start-up.\n"


def test_a_rank_whose_launching_process_is_a_zombie_exits() -> None:
    done = run("""
launching = subprocess.Popen(["true"])
os.waitid(os.P_PID, launching.pid, os.WEXITED | os.WNOWAIT)
os.environ |= {"LOCAL_RANK": "1", origin.STARTER: str(launching.pid)}
with startup.watch_startup():
    time.sleep(30)
""")
    assert done.returncode == EXIT_PREEMPTED
    assert done.stderr == "error: the process that started this rank has ended.\n"
