"""Who is to blame when a run stands still: pure functions of what all processes say and of their state.

Two things stop a run: a rank that has failed or died, and silence for longer than its limit. In a silence, whoever has
got least far holds up the rest, unless a rank has skipped a collective, or is stopped.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from nestguard.limits import StallLimits
from nestguard.process import ProcessState
from nestguard.record import Phase, Reading

DEAD_GRACE_S = 0.5
"""After a death, for others to say what they know of it."""

FAILED_GRACE_S = 2.0
"""For a rank that has failed to leave by itself."""

_DEATH_CREDIT_S = 0.2
"""Connections break before a death is seen, so that what others make of it may come first."""

_WAITS = (Phase.BACKWARD, Phase.COLLECTIVE)
_STEP_PHASES = (Phase.LOADING, Phase.FORWARD, Phase.BACKWARD)


class Word(StrEnum):
    """A verdict, in a word."""

    STUCK = "stuck"
    STOPPED = "stopped"
    DEAD = "dead"
    FAILED = "failed"
    SILENT = "silent"
    """On a node that is not heard from."""

    NOT_STARTED = "not started"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    LEAVING = "leaving"


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """A process as its node sees it."""

    reading: Reading
    state: ProcessState
    age_s: float
    """Seconds since its last sign of life."""

    ended_s: float = 0.0
    """Seconds since it was found gone."""

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return self.reading.name

    @property
    def rank(self) -> int:
        """Its rank, or that of the rank whose worker it is."""
        return self.reading.identity.rank

    @property
    def is_rank(self) -> bool:
        """Whether it is a rank and no loader worker."""
        return self.reading.identity.worker is None

    @property
    def is_live(self) -> bool:
        """Whether it takes part in the run."""
        return not self.reading.phase.is_final and not self.state.has_ended

    @property
    def is_dead(self) -> bool:
        """Whether it is gone without having said how it ends."""
        return self.state.has_ended and not self.reading.phase.is_final


class Silence(NamedTuple):
    """Another node that is not heard from."""

    host: str
    seconds: float


class Verdict(NamedTuple):
    """What is said of one process."""

    word: Word
    reason: str = ""
    is_culprit: bool = False


class Judgement(NamedTuple):
    """What is said of the run."""

    stop: bool
    cause: str
    """A line that says what happened; empty where the run goes on."""

    verdicts: tuple[Verdict, ...]
    """One for each view, in their order."""


def judge(
    views: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, Silence] | None = None
) -> Judgement:
    """Judges a run.

    Args:
        views: Of ranks and of loader workers, of this node or of all.
        limits: How long a process may be silent.
        silences: Other nodes that say nothing, by their number.
    """
    silences = {node: silence for node, silence in (silences or {}).items() if silence.seconds > limits.node_silence_s}
    ranks = [view for view in views if view.is_rank]
    found, stop = _ended(ranks)
    found_silent = {} if found else _silent(ranks, limits, silences)
    if not found:
        found = found_silent or _stalled(ranks, limits)
        stop = bool(found)
    _blame_workers(views, found, limits)
    verdicts = tuple(found.get(view.name, _plain(view)) for view in views)
    return Judgement(stop, _cause(views, verdicts, silences if found_silent else {}) if stop else "", verdicts)


_Found = dict[str, Verdict]
"""By the name of the process."""


def _plain(view: ProcessView) -> Verdict:
    """What is said of a process where nothing else is."""
    if view.reading.phase is Phase.FAILED:
        return Verdict(Word.FAILED, view.reading.detail)
    if view.is_dead:
        return Verdict(Word.DEAD)
    if view.reading.phase.is_final:
        return Verdict(Word.DONE if view.reading.phase is Phase.DONE else Word.LEAVING, view.reading.detail)
    if view.state is ProcessState.STOPPED:
        return Verdict(Word.STOPPED)
    if view.state is ProcessState.NOT_STARTED:
        return Verdict(Word.NOT_STARTED)
    return Verdict(Word.RUNNING)


def _ended(ranks: Sequence[ProcessView]) -> tuple[_Found, bool]:
    """Ranks that have died or failed, the first of them to blame; and whether it is time to stop."""
    since = {}
    stop = False
    for view in ranks:
        if view.is_dead:
            since[view.name] = view.ended_s + _DEATH_CREDIT_S
            stop |= view.ended_s >= DEAD_GRACE_S
        elif view.reading.phase is Phase.FAILED:
            since[view.name] = view.age_s
            stop |= view.age_s >= FAILED_GRACE_S or (view.state.has_ended and view.ended_s >= DEAD_GRACE_S)
    if not since:
        return {}, False
    first = max((view for view in ranks if view.name in since), key=lambda view: (since[view.name], -view.rank))
    found: _Found = {}
    for view in ranks:
        if view.name in since:
            word = Word.DEAD if view.is_dead else Word.FAILED
            reason = _end_reason(view)
            if view is not first:
                reason = f"after rank {first.rank}" + (f": {view.reading.detail}" if view.reading.detail else "")
            found[view.name] = Verdict(word, reason, view is first)
        elif view.is_live and view.reading.phase in _WAITS:
            found[view.name] = Verdict(Word.WAITING, f"for rank {first.rank}")
    return found, stop or all(view.state.has_ended for view in ranks)


def _end_reason(view: ProcessView) -> str:
    if view.is_dead:
        return (
            f"gone in {view.reading.phase.name} without a word, as after SIGKILL, a lack of memory, or a crash"
            f"{_at_cuts(view)}"
        )
    return view.reading.detail or f"in step {view.reading.step}"


def _silent(ranks: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, Silence]) -> _Found:
    """Ranks of nodes that are not heard from, if it holds up the others: a monitor alone may be what is silent."""
    others = [view for view in ranks if view.is_live and view.reading.identity.node_rank not in silences]
    if not silences or all(view.age_s <= limits.node_silence_s for view in others):
        return {}
    nodes = ", ".join(f"node {node}" for node in sorted(silences))
    found: _Found = {}
    for view in ranks:
        silence = silences.get(view.reading.identity.node_rank)
        if silence is not None and view.is_live:
            reason = f"its node has not been heard from for {silence.seconds:.0f} s"
            found[view.name] = Verdict(Word.SILENT, reason, True)
        elif view.is_live:
            found[view.name] = Verdict(Word.WAITING, f"for {nodes}")
    return found


def _stalled(ranks: Sequence[ProcessView], limits: StallLimits) -> _Found:
    live = [view for view in ranks if view.is_live]
    late = _late(live, limits)
    if not late:
        return {}
    reasons = _held_up(live, late, limits)
    # Loading waits for no rank: whoever is late in it is so by itself.
    for view in late:
        if view.reading.phase is Phase.LOADING:
            reasons.setdefault(view.name, _silent_for(view, limits))
    reasons = {name: reason + _without(ranks) for name, reason in reasons.items()}
    waited_for = _ranks_text([view.rank for view in live if view.name in reasons])
    found: _Found = {}
    for view in live:
        if view.name in reasons:
            word = _plain(view).word
            found[view.name] = Verdict(Word.STUCK if word is Word.RUNNING else word, reasons[view.name], True)
        elif view.reading.phase in _WAITS or view in late:
            found[view.name] = Verdict(Word.WAITING, f"for {waited_for}")
    return found


def _without(ranks: Sequence[ProcessView]) -> str:
    """Who takes part no more, for others may be waiting for them."""
    done = [view.rank for view in ranks if view.reading.phase is Phase.DONE]
    leaving = [view.rank for view in ranks if view.reading.phase is Phase.LEAVING]
    said = [f"; done already: {_ranks_text(done)}"] if done else []
    return "".join([*said, f"; asked to leave: {_ranks_text(leaving)}"] if leaving else said)


def _late(live: Sequence[ProcessView], limits: StallLimits) -> list[ProcessView]:
    """Ranks that are over their limit. Whoever may be waiting for others has theirs, too."""
    longest: dict[_PlaceKey, float] = {}
    for view in live:
        longest[_place(view)] = max(longest.get(_place(view), 0.0), limits.limit_of(view.reading))
    behind_s = 0.0
    patience = {}
    for place in sorted(longest):
        patience[place] = behind_s
        behind_s = max(behind_s, longest[place])
    return [
        view
        for view in live
        if view.age_s > limits.limit_of(view.reading)
        and (view.reading.phase is Phase.LOADING or view.age_s > patience[_place(view)])
    ]


def _held_up(live: Sequence[ProcessView], late: Sequence[ProcessView], limits: StallLimits) -> dict[str, str]:
    """Who holds up the others, and why."""
    if stopped := [view for view in live if view.state is ProcessState.STOPPED]:
        return {
            view.name: f"in {view.reading.phase.name} by SIGSTOP, a terminal or a debugger, "
            f"silent for {view.age_s:.0f} s"
            for view in stopped
        }
    if skipped := _skipped(live):
        return skipped
    first = min(_place(view) for view in live)
    least = [view for view in live if _place(view) == first]
    phase = least[0].reading.phase
    if len(least) == len(live) > 1 and phase in _WAITS:
        return {view.name: _together(view, live) for view in least}
    behind = [view for view in least if view.age_s > limits.limit_of(view.reading) / 2]
    if not behind and any(view.reading.phase is Phase.LOADING for view in late):
        return {}
    if behind:
        return {view.name: _silent_for(view, limits) for view in behind}
    waited_s = max(view.age_s for view in late)
    return {view.name: f"alive in {phase.name}, but behind: others have waited for {waited_s:.0f} s" for view in least}


_PlaceKey = tuple[int, int, int, int]


def _place(view: ProcessView) -> _PlaceKey:
    """How far a rank has got. Loading, forward and backward take turns within a step, the other phases do not."""
    reading = view.reading
    if view.state is ProcessState.NOT_STARTED:
        return -2, 0, 0, 0
    step = -1 if reading.step is None else reading.step
    if reading.phase in _STEP_PHASES:
        return step, int(Phase.LOADING), -1 if reading.microbatch is None else reading.microbatch, int(reading.phase)
    return step, int(reading.phase), 0, 0


def _skipped(live: Sequence[ProcessView]) -> dict[str, str]:
    """Ranks that are no less far than another and have entered too few collectives for it."""
    found = {}
    # Of thousands of ranks in a few places, one of each tells as much as all.
    distinct = {(_place(view), view.reading.collectives, view.reading.first_step): view for view in reversed(live)}
    for view in live:
        for other in distinct.values():
            if _place(view) >= _place(other) and _has_skipped(view, other):
                found[view.name] = (
                    f"has skipped a collective: it has entered {view.reading.collectives} and is in step "
                    f"{view.reading.step}, while rank {other.rank} has entered {other.reading.collectives} and is in "
                    f"step {other.reading.step}"
                )
                break
    return found


def _has_skipped(view: ProcessView, other: ProcessView) -> bool:
    """Compares a rank with one that is no further; by steps, too, if that one has entered one in each of them."""
    if view.reading.collectives < other.reading.collectives:
        return True
    return 0 < other.reading.collectives == _expected(other) and view.reading.collectives < _expected(view)


def _expected(view: ProcessView) -> int:
    """The collectives that a rank has entered if there is one in each step."""
    reading = view.reading
    if reading.step is None or reading.first_step is None:
        return 0
    return reading.step - reading.first_step + (reading.phase >= Phase.COLLECTIVE)


def _together(view: ProcessView, live: Sequence[ProcessView]) -> str:
    reading = view.reading
    where = "collective" if reading.phase is Phase.COLLECTIVE else "backward pass"
    if len(live) < reading.identity.world_size:
        return (
            f"all ranks that are known are in the same {where}: one that is not, the network, or a collective that one "
            "of them entered otherwise"
        )
    return f"all ranks are in the same {where}: the network, or a collective that one of them entered otherwise"


def _silent_for(view: ProcessView, limits: StallLimits) -> str:
    if view.state is ProcessState.NOT_STARTED:
        return f"not seen for {view.age_s:.0f} s"
    limit = limits.limit_of(view.reading)
    blocked = ", blocked in the kernel (disk or network file system)" if view.state is ProcessState.BLOCKED else ""
    return f"in {view.reading.phase.name} for {view.age_s:.0f} s (limit {limit:g} s){blocked}{_at_cuts(view)}"


def _at_cuts(view: ProcessView) -> str:
    cuts = view.reading.cuts
    if not cuts or view.reading.phase is not Phase.LOADING:
        return ""
    return f", at cut {cuts[0]}" if len(cuts) == 1 else f", among {len(cuts)} cuts from {cuts[0]} on"


def _blame_workers(views: Sequence[ProcessView], found: _Found, limits: StallLimits) -> None:
    """Writes into `found` which loader workers are to blame for ranks that are stuck in loading."""
    loading = {
        view.rank: view
        for view in views
        if view.is_rank and view.reading.phase is Phase.LOADING and _is_stuck(found.get(view.name))
    }
    for view in views:
        if view.is_rank or view.rank not in loading:
            continue
        rank = loading[view.rank]
        verdict = _worker_verdict(view, rank, limits)
        if verdict is not None:
            found[view.name] = verdict
            blames = f"; worker {view.reading.identity.worker} is {verdict.word}{_at_cuts(view)}"
            found[rank.name] = found[rank.name]._replace(reason=found[rank.name].reason + blames)


def _is_stuck(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.word is Word.STUCK


def _worker_verdict(view: ProcessView, rank: ProcessView, limits: StallLimits) -> Verdict | None:
    silent = f"silent for {view.age_s:.0f} s{_at_cuts(view)}"
    if view.is_dead:
        # One that died long before belongs to an earlier epoch.
        is_recent = view.ended_s < rank.age_s + limits.step_s
        return Verdict(Word.DEAD, f"gone without a word{_at_cuts(view)}", True) if is_recent else None
    if view.state is ProcessState.STOPPED:
        return Verdict(Word.STOPPED, silent, True)
    is_late = view.age_s > limits.limit_of(rank.reading) / 2
    # A worker without cuts waits for its rank to want something.
    return Verdict(Word.STUCK, silent, True) if view.is_live and view.reading.cuts and is_late else None


def _cause(views: Sequence[ProcessView], verdicts: Sequence[Verdict], silences: Mapping[int, Silence]) -> str:
    lines = [
        f"node {node} (host {silence.host}) has not been heard from for {silence.seconds:.0f} s"
        for node, silence in sorted(silences.items())
    ]
    if lines:
        return "; ".join(lines)
    blamed = [
        (view, verdict) for view, verdict in zip(views, verdicts, strict=True) if verdict.is_culprit and view.is_rank
    ]
    words = {verdict.word for _, verdict in blamed}
    view, verdict = blamed[0]
    if len(words) > 1:
        return "; ".join(f"rank {view.rank} is {verdict.word}" for view, verdict in blamed)
    ranks = _ranks_text([view.rank for view, _ in blamed])
    are = "is" if len(blamed) == 1 else "are"
    have = {"dead": "has died", "failed": "has failed"}.get(str(verdict.word), f"{are} {verdict.word}")
    at = f" in {view.reading.phase.name}" if not view.reading.phase.is_final else ""
    step = f", step {view.reading.step}" if view.reading.step is not None else ""
    return f"{ranks} {have}{at}{step}" if len(blamed) == 1 else f"{ranks} {have}"


def _ranks_text(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 1, 3`, `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + text
