import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import nestguard
from nestguard import Heartbeat, Identity, Phase, read_heartbeat
from nestguard.observe.heartbeat_file import FILE_SIZE
from tests.nestguard.views import reading_of

ME = Identity(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, host="gpu-b")


def test_reading_returns_what_the_heartbeat_wrote(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    reading = reading_of(tmp_path, "rank-3")
    assert reading.identity == ME
    assert (reading.pid, reading.phase, reading.step, reading.microbatch) == (os.getpid(), Phase.STARTING, None, None)
    before = time.monotonic_ns()
    heartbeat.beat(Phase.FORWARD, 7, 2)
    reading = reading_of(tmp_path, "rank-3")
    assert (reading.phase, reading.step, reading.microbatch, reading.first_step) == (Phase.FORWARD, 7, 2, 7)
    assert before <= reading.beat_ns <= time.monotonic_ns()
    assert not reading.has_stepped
    heartbeat.beat(Phase.LOADING, 8, 0)
    assert reading_of(tmp_path, "rank-3").has_stepped


def test_beats_keep_step_and_microbatch_that_are_not_given_and_count_collectives(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    heartbeat.beat(Phase.FORWARD, 7, 2)
    heartbeat.beat(Phase.BACKWARD)
    reading = reading_of(tmp_path, "rank-3")
    assert (reading.phase, reading.step, reading.microbatch) == (Phase.BACKWARD, 7, 2)
    heartbeat.beat_collective(8)
    heartbeat.beat_collective()
    reading = reading_of(tmp_path, "rank-3")
    assert (reading.phase, reading.step, reading.collectives) == (Phase.COLLECTIVE, 8, 2)


def test_noted_cuts_are_a_list_or_one_cut_or_none(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    heartbeat.note_cuts(f"cut-{number}" for number in range(3))
    assert reading_of(tmp_path, "rank-3").cuts == ("cut-0", "cut-1", "cut-2")
    heartbeat.note_cut("a\nb")
    assert reading_of(tmp_path, "rank-3").cuts == ("a b",)
    heartbeat.note_wait("a\nb", "s3://speech/audio 3.tar\n")
    reading = reading_of(tmp_path, "rank-3")
    assert (reading.cuts, reading.waits_for) == (("a b",), "s3://speech/audio 3.tar ")
    heartbeat.note_cut("c")
    assert (reading_of(tmp_path, "rank-3").cuts, reading_of(tmp_path, "rank-3").waits_for) == (("c",), None)
    heartbeat.note_cuts([])
    assert reading_of(tmp_path, "rank-3").cuts == ()


@pytest.mark.parametrize("letter", ["x", "語"])
def test_cut_ids_that_exceed_the_space_end_in_an_ellipsis(tmp_path: Path, letter: str) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    heartbeat.note_cuts(letter * 30 for _ in range(1000))
    cuts = reading_of(tmp_path, "rank-3").cuts
    assert cuts[0] == letter * 30
    assert cuts[-1].endswith("…")
    assert len("\n".join(cuts).encode()) <= 4096
    heartbeat.note_cut(letter * 5000)
    (cut,) = reading_of(tmp_path, "rank-3").cuts
    assert cut.endswith(f"{letter}…")


def test_noting_cuts_and_refreshing_update_the_time_of_the_heartbeat(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    times = [reading_of(tmp_path, "rank-3").beat_ns]
    for update in (lambda: heartbeat.note_cut("a"), heartbeat.refresh, lambda: heartbeat.note_cuts(["b"])):
        update()
        times.append(reading_of(tmp_path, "rank-3").beat_ns)
    assert times == sorted(set(times))


def test_a_running_process_describes_itself_until_it_ends(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    heartbeat.describe("takes 2.00 times as long")
    assert reading_of(tmp_path, "rank-3").detail == "takes 2.00 times as long"
    heartbeat.finish(Phase.DONE)
    heartbeat.describe("late")
    assert reading_of(tmp_path, "rank-3").detail == ""


def test_a_failure_is_permanent_and_its_traceback_is_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    heartbeat.finish(Phase.DONE)
    heartbeat.finish(Phase.FAILED, "ValueError: no", "Traceback:\nValueError: no\n")
    heartbeat.finish(Phase.DONE)
    heartbeat.beat(Phase.FORWARD, 9)
    heartbeat.beat_collective(9)
    heartbeat.note_cut("a")
    reading = reading_of(tmp_path, "rank-3")
    assert (reading.phase, reading.step, reading.detail, reading.cuts) == (Phase.FAILED, None, "ValueError: no", ())
    assert (tmp_path / "rank-3.traceback.txt").read_text() == "Traceback:\nValueError: no\n"


def test_an_incomplete_record_leaves_the_previous_one_readable(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    heartbeat.beat(Phase.FORWARD, 1)
    heartbeat.beat(Phase.BACKWARD, 1)
    newest = max(heartbeat._file.records, key=lambda record: record.sequence)
    newest.sequence, newest.phase = 99, Phase.DONE  # the writer stopped before it wrote the second sequence number
    assert reading_of(tmp_path, "rank-3").phase is Phase.FORWARD


def test_readings_are_consistent_while_another_thread_writes(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            heartbeat.beat(Phase.FORWARD, number, number)
            heartbeat.note_cuts([str(number)] * 3)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            reading = read_heartbeat(tmp_path / "rank-3.beat")
            if reading is not None:
                assert reading.step == reading.microbatch
                assert len(set(reading.cuts)) <= 1
    finally:
        is_over.set()
        writer.join()


def test_a_file_that_is_not_a_heartbeat_is_not_read(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path / "rank-0.beat") is None
    for data in (b"", b"x" * FILE_SIZE, b"\0" * FILE_SIZE):
        (tmp_path / "rank-0.beat").write_bytes(data)
        assert read_heartbeat(tmp_path / "rank-0.beat") is None


@pytest.mark.multiprocess
def test_an_armed_process_exits_with_44_even_while_it_holds_the_gil(tmp_path: Path) -> None:
    program = f"""
import ctypes
from pathlib import Path
from nestguard import Heartbeat, Identity
Heartbeat(Path({str(tmp_path)!r}), Identity(
    rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, host="gpu-b")).arm()
print("armed", flush=True)
ctypes.PyDLL(None).sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"armed\n"
        process.send_signal(nestguard.EXIT_STALLED)
        assert process.wait(10) == nestguard.EXIT_STALLED
    assert reading_of(tmp_path, "rank-3").is_armed
