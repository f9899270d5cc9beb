import threading
from functools import partial
from pathlib import Path

import pytest

import nestguard.observe.device
from nestguard import Heartbeat, Identity, Phase
from nestguard.observe.device import write_trace_if_requested
from nestguard.observe.directory import TRACES_REQUEST, lock_directory
from nestguard.observe.view import DevicePosition
from nestguard.observe.watch import NodeWatch
from tests.nestguard.runs import wait_until
from tests.nestguard.views import reading_of

ME = Identity(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host="gpu-a")


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nestguard.observe.device, "POLL_S", 0.01)


class Event:
    """An event that a test sets."""

    def __init__(self) -> None:
        self.done = False
        self.error = ""

    def record(self) -> None:
        self.done = False

    def is_done(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.done


class Events(list[Event]):
    """Creates events, and keeps them."""

    def __call__(self) -> Event:
        self.append(Event())
        return self[-1]


def position(directory: Path) -> DevicePosition | None:
    return reading_of(directory, "rank-0").device


def observers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nestguard-device"]


def wait_for(directory: Path, expected: DevicePosition | None) -> None:
    wait_until(lambda: position(directory) == expected, 20)


def test_the_device_is_in_the_newest_phase_whose_event_is_done(tmp_path: Path) -> None:
    heartbeat, events = Heartbeat(tmp_path, ME), Events()
    heartbeat.watch_device(events)
    heartbeat.beat(Phase.FORWARD, 7, 1)
    heartbeat.beat(Phase.BACKWARD)
    heartbeat.beat_collective()
    assert len(events) == 3
    assert position(tmp_path) is None
    events[0].done = True
    wait_for(tmp_path, DevicePosition(Phase.FORWARD, 7, 1))
    events[2].done = True  # out of order, which no stream does: the first phase that is not over counts
    events[1].done = True
    wait_for(tmp_path, DevicePosition(Phase.COLLECTIVE, 7, 1))
    reading = reading_of(tmp_path, "rank-0")
    assert (reading.phase, reading.actual_phase) == (Phase.COLLECTIVE, Phase.COLLECTIVE)
    heartbeat.close()


def test_a_phase_of_the_device_can_end_without_a_heartbeat(tmp_path: Path) -> None:
    heartbeat, events = Heartbeat(tmp_path, ME), Events()
    heartbeat.watch_device(events)
    heartbeat.beat(Phase.BACKWARD, 7, 1)
    heartbeat.mark_device(Phase.COLLECTIVE)
    for event in events:
        event.done = True
    wait_for(tmp_path, DevicePosition(Phase.COLLECTIVE, 7, 1))
    reading = reading_of(tmp_path, "rank-0")
    assert reading.phase is Phase.BACKWARD
    heartbeat.close()


def test_a_device_that_hangs_does_not_take_up_events_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nestguard.observe.device, "_MAX_PENDING", 3)
    heartbeat, events = Heartbeat(tmp_path, ME), Events()
    heartbeat.watch_device(events)
    for step in range(10):
        heartbeat.beat(Phase.FORWARD, step)
    assert len(events) == 3
    for event in events:
        event.done = True
    wait_for(tmp_path, DevicePosition(Phase.FORWARD, 2, None))
    heartbeat.beat(Phase.BACKWARD, 10)
    events[0].done = events[1].done = events[2].done = True
    wait_for(tmp_path, DevicePosition(Phase.BACKWARD, 10, None))
    assert len(events) == 3
    heartbeat.close()


def test_the_thread_ends_with_the_run(tmp_path: Path) -> None:
    heartbeat, events = Heartbeat(tmp_path, ME), Events()
    heartbeat.watch_device(events)
    heartbeat.watch_device(events)
    heartbeat.beat(Phase.FORWARD, 1, 0)
    assert len(observers()) == 1
    heartbeat.finish(Phase.DONE)
    heartbeat.beat(Phase.BACKWARD)
    heartbeat.mark_device(Phase.COLLECTIVE)
    heartbeat.close()
    assert observers() == []
    assert len(events) == 1
    heartbeat.watch_device(events)
    assert observers() == []


def test_a_device_that_fails_is_no_longer_observed(tmp_path: Path) -> None:
    heartbeat, events = Heartbeat(tmp_path, ME), Events()
    heartbeat.watch_device(events)
    heartbeat.beat(Phase.FORWARD, 1, 0)
    events[0].error = "an illegal memory access"
    wait_until(lambda: not observers(), 20)
    heartbeat.beat(Phase.BACKWARD)
    heartbeat.close()


def test_a_position_that_is_no_longer_observed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, events = Heartbeat(tmp_path, ME), Events()
    heartbeat.watch_device(events)
    heartbeat.beat(Phase.FORWARD, 1, 0)
    events[0].done = True
    wait_for(tmp_path, DevicePosition(Phase.FORWARD, 1, 0))
    lock = lock_directory(tmp_path)  # as a monitor has one, so that the files are kept
    heartbeat.close()
    watch = NodeWatch(tmp_path, ME)
    (view,) = watch.scan()
    assert view.reading.device == DevicePosition(Phase.FORWARD, 1, 0)
    monkeypatch.setattr("nestguard.observe.watch._UNOBSERVED_NS", 0)
    (view,) = watch.scan()
    assert view.reading.device is None
    assert view.reading.actual_phase is Phase.FORWARD
    lock.release()


def test_the_trace_of_the_flight_recorder_is_written_once_when_the_monitor_requests_it(tmp_path: Path) -> None:
    traces = iter(['{"entries": []}', "another one"])
    write = partial(write_trace_if_requested, tmp_path, "rank-1", lambda: next(traces))
    write()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / TRACES_REQUEST).touch()
    write()
    write()
    assert (tmp_path / "rank-1.flight-recorder.json").read_text() == '{"entries": []}'
    assert len(list(tmp_path.iterdir())) == 2
