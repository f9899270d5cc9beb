import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from nestguard import Heartbeat, Identity, NoHeartbeat, Phase, current, set_current
from nestguard.observe.heartbeat import start_worker
from tests.nestguard.views import reading_of

ME = Identity(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, host="gpu-b")


@pytest.fixture(autouse=True)
def _reset_current_heartbeat() -> Iterator[None]:
    yield
    set_current(NoHeartbeat())


def in_worker(number: int) -> None:
    assert isinstance(current(), NoHeartbeat)  # a forked process does not inherit the heartbeat of its rank
    start_worker(number, 2)
    current().note_cut("a")


@pytest.mark.multiprocess
def test_a_forked_worker_writes_its_own_heartbeat_and_records_its_end(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, ME)
    set_current(heartbeat)
    heartbeat.beat(Phase.FORWARD, 3)
    before = reading_of(tmp_path, "rank-3")
    worker = multiprocessing.get_context("fork").Process(target=in_worker, args=(1,))
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0
    reading = reading_of(tmp_path, "rank-3.worker-1")
    assert (reading.identity.worker, reading.pid, reading.phase) == (1, worker.pid, Phase.DONE)
    assert reading.is_armed
    assert reading_of(tmp_path, "rank-3") == before


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
