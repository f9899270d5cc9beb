import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

import nestguard
from nestguard import Heartbeat, Identity, NoHeartbeat, Phase, current, read_heartbeat, set_current
from nestguard.observe.heartbeat import start_worker
from nestguard.observe.process import STACK_SIGNAL
from tests.nestguard.devices import StandIn

ME = Identity(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, host="gpu-b")


@pytest.fixture(autouse=True)
def _reset_current_heartbeat() -> Iterator[None]:
    yield
    set_current(NoHeartbeat())


def reading_of(directory: Path, name: str = "rank-3") -> nestguard.Reading:
    reading = read_heartbeat(directory / f"{name}.beat")
    assert reading is not None
    return reading


def test_without_a_stall_guard_every_heartbeat_method_does_nothing() -> None:
    heartbeat = current()
    assert isinstance(heartbeat, NoHeartbeat)
    heartbeat.beat(Phase.FORWARD, 1, 2)
    heartbeat.beat_collective(1)
    heartbeat.note_cut("a")
    heartbeat.note_cuts(["a"])
    heartbeat.note_wait("a", "s3://speech/a.tar")
    heartbeat.refresh()
    device = StandIn()
    handler, num_threads = signal.getsignal(STACK_SIGNAL), threading.active_count()
    heartbeat.arm()
    heartbeat.watch_device(device.new_event)
    heartbeat.mark_device(Phase.COLLECTIVE)
    assert (signal.getsignal(STACK_SIGNAL), threading.active_count()) == (handler, num_threads)
    heartbeat.finish(Phase.FAILED, "detail", "traceback")
    heartbeat.close()
    assert heartbeat.slot is None
    start_worker(0, 1)
    assert current() is heartbeat


def in_worker(number: int) -> None:
    assert isinstance(current(), NoHeartbeat)  # a forked process does not inherit the heartbeat of its rank
    start_worker(number, 2)
    current().note_cut("a")


@pytest.mark.multiprocess
def test_a_forked_worker_writes_its_own_heartbeat_and_records_its_end(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    set_current(heartbeat)
    heartbeat.beat(Phase.FORWARD, 3)
    before = reading_of(tmp_path)
    worker = multiprocessing.get_context("fork").Process(target=in_worker, args=(1,))
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0
    reading = reading_of(tmp_path, "rank-3.worker-1")
    assert (reading.identity.worker, reading.pid, reading.phase) == (1, worker.pid, Phase.DONE)
    assert reading.is_armed
    assert reading_of(tmp_path) == before


@pytest.mark.multiprocess
def test_a_spawned_worker_receives_the_slot_of_its_rank(tmp_path: Path) -> None:
    slot = Heartbeat(tmp_path, ME).slot
    worker = multiprocessing.get_context("spawn").Process(target=start_worker, args=(0, 1, slot))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert reading_of(tmp_path, "rank-3.worker-0").pid == worker.pid


def wait_in_worker(started: Event, is_over: Event) -> None:
    start_worker(0, 1)
    started.set()
    is_over.wait(20)


@pytest.mark.multiprocess
def test_workers_of_two_loaders_with_the_same_id_have_different_names(tmp_path: Path) -> None:
    set_current(Heartbeat(tmp_path, ME))
    context = multiprocessing.get_context("fork")
    is_over = context.Event()
    workers = []
    for _ in range(2):
        started = context.Event()
        workers.append(context.Process(target=wait_in_worker, args=(started, is_over)))
        workers[-1].start()
        assert started.wait(20)
    pids = [reading_of(tmp_path, name).pid for name in ("rank-3.worker-0", "rank-3.worker-0.2")]
    is_over.set()
    for worker in workers:
        worker.join(20)
    assert pids == [worker.pid for worker in workers]
