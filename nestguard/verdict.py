"""Who is to blame when a run stands still: pure functions of what all processes say and of their state.

Two things stop a run: a rank that has failed or died, and silence for longer than its limit. In a silence, whoever has
got least far holds up the rest, unless a rank has skipped a collective, or is stopped. A rank of which nothing is known
stops nothing, and is to blame where all the others wait.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from nestguard.limits import StallLimits
from nestguard.process import ProcessState
from nestguard.progress import PlaceKey, place, skipped
from nestguard.record import Phase
from nestguard.view import ProcessView

DEAD_GRACE_S = 0.5
"""After a death, for others to say what they know of it."""

FAILED_GRACE_S = 2.0
"""For a rank that has failed to leave by itself."""

_DEATH_CREDIT_S = 0.2
"""Connections break before a death is seen, so that what others make of it may come first."""

_LOST_S = 10.0
"""What fails so soon after its node has lost touch with another may fail for that."""

_WAITS = (Phase.BACKWARD, Phase.COLLECTIVE)


class DiagnosisKind(StrEnum):
    """A verdict, in a word."""

    STUCK = "stuck"
    STOPPED = "stopped"
    DEAD = "dead"
    FAILED = "failed"
    SILENT = "silent"
    """On a node that is not heard from."""

    UNSEEN = "unseen"
    """On a node that is not in touch."""

    NOT_STARTED = "not started"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    LEAVING = "leaving"


class Silence(NamedTuple):
    """Another node that is not heard from."""

    host: str
    seconds: float


class Diagnosis(NamedTuple):
    """What is said of one process."""

    word: DiagnosisKind
    reason: str = ""
    is_culprit: bool = False


class Judgement(NamedTuple):
    """What is said of the run."""

    stop: bool
    cause: str
    """A line that says what happened; empty where the run goes on."""

    verdicts: tuple[Diagnosis, ...]
    """One for each view, in their order."""


def diagnose(
    views: Sequence[ProcessView], limits: StallLimits, silences: Mapping[int, Silence] | None = None
) -> Judgement:
    """Judges a run.

    Args:
        views: Of ranks and of loader workers, of this node or of all.
        limits: How long a process may be silent.
        silences: Other nodes that say nothing, by their number.
    """
    silences = {node: silence for node, silence in (silences or {}).items() if silence.seconds > limits.node_silence_s}
    views = _known(views)
    ranks = [view for view in views if view.is_rank]
    found, stop = _ended(ranks)
    found_silent = {} if found else _silent(ranks, limits, silences)
    if not found:
        found = found_silent or _stalled(_in_touch(ranks, silences), limits)
        stop = bool(found)
    _blame_workers(views, found, limits)
    verdicts = tuple(found.get(view.name, _plain(view)) for view in views)
    return Judgement(stop, _cause(views, verdicts, silences if found_silent else {}) if stop else "", verdicts)


_Found = dict[str, Diagnosis]
"""By the name of the process."""


def _known(views: Sequence[ProcessView]) -> list[ProcessView]:
    """No step is finished without all ranks: one that was never seen by then is there, and unseen."""
    if not any(view.is_rank and view.reading.has_stepped for view in views):
        return list(views)
    return [
        replace(view, state=ProcessState.UNSEEN) if view.state is ProcessState.NOT_STARTED else view for view in views
    ]


def _in_touch(ranks: Sequence[ProcessView], silences: Mapping[int, Silence]) -> list[ProcessView]:
    """What the ranks of a silent node were last known to do says nothing of what they do now."""
    return [
        replace(view, state=ProcessState.UNSEEN, ended_s=silences[view.reading.identity.node_rank].seconds)
        if view.is_live and view.reading.identity.node_rank in silences
        else view
        for view in ranks
    ]


def _plain(view: ProcessView) -> Diagnosis:
    """What is said of a process where nothing else is."""
    if view.reading.phase is Phase.FAILED:
        return Diagnosis(DiagnosisKind.FAILED, view.reading.detail)
    if view.is_dead:
        return Diagnosis(DiagnosisKind.DEAD)
    if view.reading.phase.is_final:
        return Diagnosis(
            DiagnosisKind.DONE if view.reading.phase is Phase.DONE else DiagnosisKind.LEAVING, view.reading.detail
        )
    if view.state is ProcessState.STOPPED:
        return Diagnosis(DiagnosisKind.STOPPED)
    if view.state is ProcessState.NOT_STARTED:
        return Diagnosis(DiagnosisKind.NOT_STARTED)
    if view.is_unseen:
        return Diagnosis(DiagnosisKind.UNSEEN, _out_of_touch(view))
    return Diagnosis(DiagnosisKind.RUNNING)


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
    # Others may break at a collective that a rank has skipped, or at the connection to a node that is lost.
    fewer = skipped([view for view in ranks if view.is_live or view.name in since])
    blamed = dict(fewer) or {first.name: _end_reason(first)}
    lost = [view for view in ranks if view.is_unseen and 0 < view.ended_s <= since[first.name] + _LOST_S]
    blamed |= {view.name: _out_of_touch(view) for view in lost}
    waited_for = _ranks_text([view.rank for view in ranks if view.name in blamed])
    found: _Found = {}
    for view in ranks:
        if view.name in blamed:
            word = _plain(view).word
            reason = blamed[view.name]
            if view.name in fewer and view.reading.detail:
                reason += f"; then {view.reading.detail}"
            found[view.name] = Diagnosis(DiagnosisKind.STUCK if word is DiagnosisKind.RUNNING else word, reason, True)
        elif view.name in since:
            reason = f"after {waited_for}" + (f": {view.reading.detail}" if view.reading.detail else "")
            found[view.name] = Diagnosis(_plain(view).word, reason)
        elif view.is_live and view.reading.phase in _WAITS:
            found[view.name] = Diagnosis(DiagnosisKind.WAITING, f"for {waited_for}")
    return found, stop or all(view.state.has_ended for view in ranks if not view.is_unseen)


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
    # They get no further if they are over their limits with this one for a step.
    if not silences or not _late(others, replace(limits, step_s=min(limits.step_s, limits.node_silence_s))):
        return {}
    nodes = ", ".join(f"node {node}" for node in sorted(silences))
    found: _Found = {}
    for view in ranks:
        silence = silences.get(view.reading.identity.node_rank)
        if silence is not None and (view.is_live or view.is_unseen):
            reason = f"its node has not been heard from for {silence.seconds:.0f} s"
            found[view.name] = Diagnosis(DiagnosisKind.SILENT, reason, True)
        elif view.is_live:
            found[view.name] = Diagnosis(DiagnosisKind.WAITING, f"for {nodes}")
    return found


def _stalled(ranks: Sequence[ProcessView], limits: StallLimits) -> _Found:
    live = [view for view in ranks if view.is_live]
    late = _late(live, limits)
    if not late:
        return {}
    unseen = [view for view in ranks if view.is_unseen]
    reasons = _held_up(live, late, unseen, limits)
    # Loading waits for no rank: whoever is late in it is so by itself.
    for view in late:
        if view.reading.phase is Phase.LOADING:
            reasons.setdefault(view.name, _silent_for(view, limits))
    reasons = {name: reason + _without(ranks) for name, reason in reasons.items()}
    waited_for = _ranks_text([view.rank for view in ranks if view.name in reasons])
    found: _Found = {}
    for view in live + unseen:
        if view.name in reasons:
            word = _plain(view).word
            found[view.name] = Diagnosis(
                DiagnosisKind.STUCK if word is DiagnosisKind.RUNNING else word, reasons[view.name], True
            )
        elif view.reading.phase in _WAITS or view in late:
            found[view.name] = Diagnosis(DiagnosisKind.WAITING, f"for {waited_for}")
    return found


def _without(ranks: Sequence[ProcessView]) -> str:
    """Who takes part no more, for others may be waiting for them."""
    done = [view.rank for view in ranks if view.reading.phase is Phase.DONE]
    leaving = [view.rank for view in ranks if view.reading.phase is Phase.LEAVING]
    said = [f"; done already: {_ranks_text(done)}"] if done else []
    return "".join([*said, f"; asked to leave: {_ranks_text(leaving)}"] if leaving else said)


def _late(live: Sequence[ProcessView], limits: StallLimits) -> list[ProcessView]:
    """Ranks that are over their limit. Whoever may be waiting for others has theirs, too.

    Others that are within theirs may just have come out of a phase that takes long, in which they were waited for.
    """
    before_s = max(limits.validation_s, limits.checkpoint_s)
    longest: dict[PlaceKey, float] = {}
    for view in live:
        limit = limits.limit_of(view.reading)
        allowed_s = limit if view.age_s > limit else limit + before_s
        longest[place(view)] = max(longest.get(place(view), 0.0), allowed_s)
    behind_s = 0.0
    patience = {}
    for key in sorted(longest):
        patience[key] = behind_s
        behind_s = max(behind_s, longest[key])
    return [
        view
        for view in live
        if view.age_s > limits.limit_of(view.reading)
        and (view.reading.phase is Phase.LOADING or view.age_s > patience[place(view)])
    ]


def _held_up(
    live: Sequence[ProcessView], late: Sequence[ProcessView], unseen: Sequence[ProcessView], limits: StallLimits
) -> dict[str, str]:
    """Who holds up the others, and why."""
    if stopped := [view for view in live if view.state is ProcessState.STOPPED]:
        return {
            view.name: f"in {view.reading.phase.name} by SIGSTOP, a terminal or a debugger, "
            f"silent for {view.age_s:.0f} s"
            for view in stopped
        }
    if fewer := skipped(live):
        return fewer
    first = min(place(view) for view in live)
    least = [view for view in live if place(view) == first]
    phase = least[0].reading.phase
    if unseen and phase in _WAITS:
        return {view.name: _out_of_touch(view) for view in unseen}
    if len(least) == len(live) > 1 and phase in _WAITS:
        return {view.name: _together(view, live) for view in least}
    behind = [view for view in least if view.age_s > limits.limit_of(view.reading) / 2]
    if not behind and any(view.reading.phase is Phase.LOADING for view in late):
        return {}
    if behind:
        return {view.name: _silent_for(view, limits) for view in behind}
    waited_s = max(view.age_s for view in late)
    return {view.name: f"alive in {phase.name}, but behind: others have waited for {waited_s:.0f} s" for view in least}


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


def _out_of_touch(view: ProcessView) -> str:
    if not view.ended_s:
        return "nothing was ever heard of it"
    return f"the monitors of the nodes have been out of touch for {view.ended_s:.0f} s"


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


def _is_stuck(verdict: Diagnosis | None) -> bool:
    return verdict is not None and verdict.word is DiagnosisKind.STUCK


def _worker_verdict(view: ProcessView, rank: ProcessView, limits: StallLimits) -> Diagnosis | None:
    silent = f"silent for {view.age_s:.0f} s{_at_cuts(view)}"
    if view.is_dead:
        # One that died long before belongs to an earlier epoch.
        is_recent = view.ended_s < rank.age_s + limits.step_s
        return Diagnosis(DiagnosisKind.DEAD, f"gone without a word{_at_cuts(view)}", True) if is_recent else None
    if view.state is ProcessState.STOPPED:
        return Diagnosis(DiagnosisKind.STOPPED, silent, True)
    is_late = view.age_s > limits.limit_of(rank.reading) / 2
    # A worker without cuts waits for its rank to want something.
    return Diagnosis(DiagnosisKind.STUCK, silent, True) if view.is_live and view.reading.cuts and is_late else None


def _cause(views: Sequence[ProcessView], verdicts: Sequence[Diagnosis], silences: Mapping[int, Silence]) -> str:
    lines = [
        f"node {node} (host {silence.host}) has not been heard from for {silence.seconds:.0f} s"
        for node, silence in sorted(silences.items())
    ]
    if lines:
        return "; ".join(lines)
    blamed: dict[DiagnosisKind, list[ProcessView]] = {}
    for view, verdict in zip(views, verdicts, strict=True):
        if verdict.is_culprit and view.is_rank:
            blamed.setdefault(verdict.word, []).append(view)
    return "; ".join(
        _said(word, those) for word, those in sorted(blamed.items(), key=lambda item: item[0] != DiagnosisKind.UNSEEN)
    )


def _said(word: DiagnosisKind, views: Sequence[ProcessView]) -> str:
    is_one, view = len(views) == 1, views[0]
    are, have = ("is", "has") if is_one else ("are", "have")
    told = {
        DiagnosisKind.DEAD: f"{have} died",
        DiagnosisKind.FAILED: f"{have} failed",
        DiagnosisKind.UNSEEN: f"{are} out of sight",
    }
    said = f"{_ranks_text([view.rank for view in views])} {told.get(word, f'{are} {word}')}"
    if not is_one or word is DiagnosisKind.UNSEEN:
        return said
    at = f" in {view.reading.phase.name}" if not view.reading.phase.is_final else ""
    return said + at + (f", step {view.reading.step}" if view.reading.step is not None else "")


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
