"""Stacks of a process whose threads run Python code while it is asked for them."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestguard.observe.directory import STACK_SUFFIX
from nestguard.observe.process import start_ticks
from nestguard.observe.stacks import StackWriter, ask_for_stacks, interrupt_for_stacks
from tests.nestguard.runs import PATIENCE_S

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

NAME = "rank-0"
ASKED = f"""
import itertools, os, sys, threading
from pathlib import Path
from nestguard.observe.stacks import StackWriter

def run_on():
    while True:
        all(Path("a") / str(number) for number in range(3))  # frames and generators come and go

def hold_the_gil():
    sum(itertools.chain(map(os.write, [1], [b"ready\\n"]), itertools.repeat(0, 10**11)))  # one call in C

def wait_for_others():
    threading.Event().wait()

writer = StackWriter(Path(), "{NAME}")
if sys.argv[1] == "hold_the_gil":
    hold_the_gil()
for _ in range(2):
    threading.Thread(target=run_on, daemon=True).start()
print("ready", flush=True)
wait_for_others()
"""


@contextlib.contextmanager
def asked(directory: Path, what: str) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-c", ASKED, what]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def stacks_once(directory: Path, text: str, count: int) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (stacks := (directory / f"{NAME}{STACK_SUFFIX}").read_text()).count(text) < count:
        assert time.monotonic() < deadline, stacks
        time.sleep(0.001)
    return stacks


def test_a_process_whose_threads_run_on_survives_each_of_600_requests(tmp_path: Path) -> None:
    # Without the GIL, the writer reads frames that another thread frees: the process crashed within 300 requests.
    with asked(tmp_path, "wait_for_others") as process:
        for count in range(1, 601):
            ask_for_stacks(tmp_path, NAME)
            if count % 100 == 0:
                stacks = stacks_once(tmp_path, "in <module>", count)
        assert process.poll() is None
        *others, main = stacks.strip().split("\n\n")[-4:]
        assert ["in run_on" in stack for stack in others].count(True) == 2
        assert "in wait_for_others" in main


def test_a_thread_that_keeps_the_gil_is_interrupted(tmp_path: Path) -> None:
    with asked(tmp_path, "hold_the_gil") as process:
        started = start_ticks(process.pid)
        assert started is not None
        interrupt_for_stacks(process.pid, started)
        stacks_once(tmp_path, "in hold_the_gil", 1)
        ask_for_stacks(tmp_path, NAME)
        interrupt_for_stacks(process.pid, started)
        stacks = stacks_once(tmp_path, "in hold_the_gil", 2)
        assert re.findall(r"Current thread .*\n.* in (\w+)\n", stacks) == ["hold_the_gil"] * 2


def test_requests_after_the_end_and_to_unknown_processes_do_nothing(tmp_path: Path) -> None:
    StackWriter(tmp_path, NAME).close()
    size = (tmp_path / f"{NAME}{STACK_SUFFIX}").stat().st_size
    ask_for_stacks(tmp_path, NAME)
    ask_for_stacks(tmp_path, "rank-1")
    interrupt_for_stacks(-1, 0)
    assert size == (tmp_path / f"{NAME}{STACK_SUFFIX}").stat().st_size == 0
