"""Builds process views for tests, and reads heartbeats."""

from pathlib import Path
from typing import Any

from nestguard import Identity, Phase, Reading, read_heartbeat
from nestguard.observe.view import ProcessState, ProcessView


def view(
    rank: int = 0,
    phase: Phase = Phase.FORWARD,
    step: int | None = 5,
    age_s: float = 1.0,
    *,
    state: ProcessState = ProcessState.SLEEPING,
    microbatch: int | None = 0,
    collectives: int | None = None,
    worker: int | None = None,
    world_size: int = 2,
    cuts: tuple[str, ...] = (),
    detail: str = "",
    ended_s: float = 0.0,
    first_step: int | None = 0,
    node_rank: int = 0,
    last_phase: Phase | None = None,
    exit_signal: int | None = None,
    **other: Any,
) -> ProcessView:
    """Returns a view of a process; by default, it has entered one collective in each step."""
    identity = Identity(
        rank=rank,
        local_rank=rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=world_size,
        host=f"host-{node_rank}",
        worker=worker,
    )
    if collectives is None:
        collectives = 0 if step is None else step + (phase >= Phase.COLLECTIVE)
    reading = Reading(
        identity=identity,
        name=identity.name,
        pid=1000 + rank,
        start_ticks=1,
        is_armed=True,
        error_file=None,
        beat_ns=0,
        phase=phase,
        last_phase=last_phase or phase,
        step=step,
        microbatch=microbatch,
        collectives=collectives,
        first_step=first_step,
        cuts=cuts,
        detail=detail,
        **other,
    )
    return ProcessView(reading=reading, state=state, age_s=age_s, ended_s=ended_s, exit_signal=exit_signal)


def reading_of(directory: Path, name: str) -> Reading:
    """Returns what a process has written of itself."""
    reading = read_heartbeat(directory / f"{name}.beat")
    assert reading is not None
    return reading
