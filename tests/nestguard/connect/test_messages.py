"""The coordinator knows as much from updates as it would from the full state of all processes."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestguard import Phase, StallLimits
from nestguard.connect.frames import pack
from nestguard.connect.messages import NodeRanks, UpdateEncoder, aged, view_from_json, view_to_json
from nestguard.diagnose.limits import quick_limits, view_may_stop_run
from nestguard.diagnose.run import diagnose
from nestguard.observe.view import DevicePosition, NodeSilence, ProcessState, ProcessView, missing_ranks
from tests.nestguard.views import view

LIMITS = StallLimits(step_s=30, first_step_s=90, validation_s=60, checkpoint_s=60, finishing_s=30, node_silence_s=10)
NUM_NODES = 3
STATES = (
    ProcessState.RUNNING,
    ProcessState.SLEEPING,
    ProcessState.BLOCKED,
    ProcessState.STOPPED,
    ProcessState.ZOMBIE,
    ProcessState.GONE,
    ProcessState.NOT_STARTED,
)


class Process:
    """A rank or loader worker whose clock and state a test moves on. Its clock has an offset of its node's own."""

    def __init__(self, rank: int, worker: int | None, clock_s: float) -> None:
        self.view = view(rank, Phase.STARTING, None, 0.0, worker=worker, node_rank=rank, world_size=1, first_step=None)
        identity = replace(self.view.reading.identity, world_size=NUM_NODES)
        self.view = replace(self.view, reading=replace(self.view.reading, identity=identity))
        self.beat_s = clock_s

    def at(self, now_s: float) -> ProcessView:
        ended_s = min(1.0, now_s - self.beat_s) if self.view.state.has_ended else 0.0
        return replace(self.view, age_s=now_s - self.beat_s, ended_s=ended_s)


def as_sent(view: ProcessView) -> ProcessView:
    """Returns what arrives of a view in full."""
    return view_from_json(json.loads(json.dumps(view_to_json(view))))


def rounded(views: list[ProcessView]) -> list[ProcessView]:
    """Leaves out cuts and loader workers, and rounds times to 0.1 s: an update has them in ms."""
    return [
        replace(
            process,
            reading=replace(process.reading, cuts=()),
            age_s=round(process.age_s, 1),
            ended_s=round(process.ended_s, 1),
        )
        for process in views
        if process.is_rank
    ]


class Node:
    """One node, and what two coordinators know about it: one receives full states, the other updates."""

    def __init__(self, rank: int) -> None:
        self.offset_s = 1000.0 * rank
        """The clock of this node is ahead of that of the coordinator by this many seconds."""

        self.processes = [Process(rank, worker, self.offset_s) for worker in (None, 0, 1)]
        self.connect()

    def connect(self) -> None:
        self.encoder, self.ranks = UpdateEncoder(), NodeRanks()
        self.full: list[ProcessView] = []
        self.full_at = 0.0
        self.is_lost = False

    def observe(self, now: float) -> list[ProcessView]:
        return [process.at(now + self.offset_s) for process in self.processes]

    def send(self, now: float) -> None:
        if self.is_lost:
            return
        views = self.observe(now)
        self.full, self.full_at = [as_sent(view) for view in views], now
        message = json.loads(pack(self.encoder.encode(views, now + self.offset_s)))
        self.ranks.apply(message, now)

    def from_full(self, now: float) -> list[ProcessView]:
        return self._seen([aged(view, now - self.full_at) for view in self.full], now)

    def from_updates(self, now: float) -> list[ProcessView]:
        return self._seen(list(self.ranks.views(now)), now)

    def _seen(self, views: list[ProcessView], now: float) -> list[ProcessView]:
        if not self.is_lost:
            return views
        lost_s = now - self.full_at
        return [replace(process, state=ProcessState.UNSEEN, ended_s=lost_s) for process in views if process.is_rank]


def sequence(draw: Callable[[st.SearchStrategy[int]], int], nodes: list[Node], now: float) -> float:
    """Makes one of the things happen that happen in a run; returns the time after it, in tenths of a second."""
    node = nodes[draw(st.integers(0, NUM_NODES - 1))]
    process = node.processes[draw(st.integers(0, 2))]
    reading = process.view.reading
    what = draw(st.integers(0, 9))
    if what <= 2:  # progress
        process.beat_s = now + node.offset_s
        phase = Phase(draw(st.integers(1, 8)))
        step = draw(st.integers(0, 3)) + (reading.step or 0)
        reading = replace(
            reading,
            phase=phase,
            last_phase=phase,
            step=step,
            microbatch=draw(st.integers(0, 2)),
            collectives=max(reading.collectives, step + draw(st.integers(0, 1))),
            first_step=0,
            cuts=("a", "b"),
            device=DevicePosition(Phase(draw(st.integers(1, 4))), step, 0) if draw(st.integers(0, 1)) else None,
        )
        process.view = replace(process.view, reading=reading, state=ProcessState.SLEEPING)
    elif what == 3:  # a heartbeat without progress
        process.beat_s = now + node.offset_s
    elif what == 4:
        state = STATES[draw(st.integers(0, len(STATES) - 1))]
        number = 6 if state.has_ended and draw(st.integers(0, 1)) else None
        process.view = replace(process.view, state=state, exit_signal=number)
    elif what == 5:
        process.beat_s = now + node.offset_s
        final = Phase(draw(st.integers(Phase.DONE, Phase.LEAVING)))
        process.view = replace(process.view, reading=replace(reading, phase=final, detail="the end"))
    elif what == 6:
        node.is_lost = True
    elif what == 7:  # the follower connects again, and its first update arrives
        node.connect()
        node.send(now)
    else:
        now += draw(st.integers(1, 400)) / 10
    return now


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_updates_lead_to_the_same_views_and_the_same_diagnoses_as_full_states(data: st.DataObject) -> None:
    nodes = [Node(rank) for rank in range(NUM_NODES)]
    now = 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        now = round(sequence(data.draw, nodes, now), 1)
        for node in nodes:
            if data.draw(st.booleans()):
                node.send(now)
        later = now + 0.02
        full = [view for node in nodes for view in node.from_full(later)]
        ranks = [view for node in nodes for view in node.from_updates(later)]
        assert rounded(ranks) == rounded(full)
        identity = nodes[0].processes[0].view.reading.identity
        known = ranks + missing_ranks(ranks, identity, 0.0)
        silences = {node: NodeSilence("b", later - one.full_at) for node, one in enumerate(nodes) if not one.is_lost}
        expected = diagnose(full + missing_ranks(full, identity, 0.0), LIMITS, silences)
        found = diagnose(known, LIMITS, silences)
        assert (found.must_stop, found.cause) == (expected.must_stop, expected.cause)
        kinds = {
            view.name: (one.kind, one.is_culprit)
            for view, one in zip(full, expected.diagnoses[: len(full)], strict=True)
            if view.is_rank
        }
        assert {
            view.name: (one.kind, one.is_culprit)
            for view, one in zip(ranks, found.diagnoses[: len(ranks)], strict=True)
        } == kinds
        quick = quick_limits(LIMITS, silences)
        may_stop = any(node.ranks.may_stop_run(quick, later, is_lost=node.is_lost) for node in nodes)
        assert may_stop == any(view_may_stop_run(view, quick) for view in ranks)
        assert may_stop or not expected.must_stop


def test_a_silent_node_lowers_the_limits_of_the_quick_check() -> None:
    waiting = view(0, Phase.COLLECTIVE, age_s=15)
    silences = {1: NodeSilence("b", 12.0)}
    assert not view_may_stop_run(waiting, quick_limits(LIMITS, {}))
    assert view_may_stop_run(waiting, quick_limits(LIMITS, silences))
    assert diagnose([waiting, view(1, node_rank=1)], LIMITS, silences).must_stop


def test_an_update_contains_only_ranks_that_have_changed() -> None:
    encoder = UpdateEncoder()
    first, second = view(0, age_s=10, cuts=("a",)), view(1, age_s=10)
    worker = view(1, worker=0)
    message = encoder.encode([first, second, worker], 100.0)
    assert [described["reading"]["identity"]["rank"] for described in message["full"]] == [0, 1]
    assert [row[0] for row in message["rows"]] == [0, 1]
    assert message["full"][0]["reading"]["cuts"] == ()
    unchanged = [replace(rank, age_s=11.0) for rank in (first, second)]
    assert encoder.encode(unchanged, 101.0) == {"type": "update", "at_ms": 101_000}
    beat = replace(second, age_s=0.25)
    message = encoder.encode([replace(first, age_s=12.0), beat], 102.0)
    assert "full" not in message
    assert [(row[0], row[1]) for row in message["rows"]] == [(1, 101_750)]


def test_a_silent_rank_ages_although_nothing_is_sent_about_it() -> None:
    encoder, ranks = UpdateEncoder(), NodeRanks()
    ranks.apply(encoder.encode([view(0, age_s=10)], 100.0), 5.0)
    assert [rank.age_s for rank in ranks.views(5.0)] == [10.0]
    assert [rank.age_s for rank in ranks.views(6.5)] == [11.5]
    # This update was 2 s on its way, during which the coordinator cannot know better.
    ranks.apply(encoder.encode([view(0, age_s=40)], 130.0), 37.0)
    assert [rank.age_s for rank in ranks.views(37.0)] == [40.0]


def test_a_heartbeat_without_progress_makes_a_rank_young_again() -> None:
    encoder, ranks = UpdateEncoder(), NodeRanks()
    ranks.apply(encoder.encode([view(0, age_s=50)], 100.0), 5.0)
    ranks.apply(encoder.encode([view(0, age_s=0.5)], 101.0), 6.0)
    assert [rank.age_s for rank in ranks.views(6.0)] == [0.5]


def test_an_invalid_update_changes_nothing() -> None:
    encoder, ranks = UpdateEncoder(), NodeRanks()
    ranks.apply(encoder.encode([view(0, step=5)], 100.0), 5.0)
    invalid = {"type": "update", "at_ms": 0, "rows": [[0, 0, 0, 1, 2, 2, 5, 6, 0, 0], [1, 0, 0, 1, 2, 2, 5, 6, 0, 0]]}
    with pytest.raises(ValueError, match="not described"):
        ranks.apply(invalid, 6.0)
    assert [(rank.reading.step, rank.age_s) for rank in ranks.views(5.0)] == [(5, 1.0)]


def test_only_the_row_of_a_rank_with_a_device_contains_its_position() -> None:
    encoder, ranks = UpdateEncoder(), NodeRanks()
    device = DevicePosition(Phase.FORWARD, 5, None)
    message = encoder.encode([view(0), view(1, device=device)], 100.0)
    assert [len(row) for row in message["rows"]] == [10, 11]
    ranks.apply(json.loads(pack(message)), 5.0)
    assert [rank.reading.device for rank in ranks.views(5.0)] == [None, device]


@pytest.mark.parametrize("device", [1, [2], [2, 5, "a"], [99, 5, 0], ["a", 5, 0]])
def test_an_invalid_position_of_a_device_is_rejected(device: object) -> None:
    encoder, ranks = UpdateEncoder(), NodeRanks()
    ranks.apply(encoder.encode([view(0)], 100.0), 5.0)
    message = {"type": "update", "at_ms": 0, "rows": [[0, 0, 0, 1, 2, 2, 5, 6, 0, 0, device]]}
    with pytest.raises((TypeError, ValueError)):
        ranks.apply(message, 6.0)
    full = {**view_to_json(view(0)), "reading": {**view_to_json(view(0))["reading"], "device": device}}
    with pytest.raises((TypeError, ValueError)):
        view_from_json(full)
