"""The process that watches one node: looks, judges, and where it has to be, reports and ends.

It imports no torch, holds no device, and is started by the first local rank. Its own death is no reason to stop a run.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nestguard.ending import end_processes, take_stacks, texts
from nestguard.limits import StallLimits
from nestguard.peers import LocalOnly, PeerConfig, Stop, meet
from nestguard.process import EXIT_STALLED, ProcessState
from nestguard.record import Identity, Phase
from nestguard.report import Report, last_stack, torchrun_error
from nestguard.verdict import Judgement, diagnose
from nestguard.view import ProcessView, missing_ranks
from nestguard.watch import NodeWatch

_log = logging.getLogger(__name__)
_NO_DECISION_S = 5.0
"""A node that sees a stall acts by itself where node 0 has decided nothing for so long."""

_TEXTS_S = 3.0


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What a monitor watches."""

    directory: Path
    """Where the heartbeats of the node lie."""

    report_dir: Path
    """Under which a stall is written down."""

    identity: Identity
    """Of the rank that started it."""

    limits: StallLimits
    peers: PeerConfig | None = None


class Monitor:
    """Watches until the ranks of the node are done, or until it has ended them."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._watch = NodeWatch(config.directory, config.identity)
        self._peers: LocalOnly = meet(config.peers, config.identity, config.limits.first_step_s)
        self._undecided_since: float | None = None

    def run(self) -> None:
        """Returns when there is nothing left to watch."""
        interval_s = max(0.1, min(1.0, self._config.limits.shortest_s / 20))
        try:
            while True:
                views = self._watch.look()
                self._peers.tell(views)
                if self._has_stopped(views) or _are_done(views):
                    self._watch.clear()
                    return
                self._watch.wait(interval_s)
        finally:
            self._peers.close()

    def _has_stopped(self, views: list[ProcessView]) -> bool:
        limits = self._config.limits
        if all(view.state is ProcessState.NOT_STARTED for view in views):
            if self._watch.age_s > limits.first_step_s:
                _say(f"stall guard: no rank was seen for {limits.first_step_s:g} s, so nothing is watched")
                return True
            return False
        decision = self._peers.decision()
        if decision is not None:
            self._follow(decision, views)
            return True
        known = views + self._peers.views()
        known += missing_ranks(known, self._config.identity, self._peers.out_of_touch_s())
        judgement = diagnose(known, limits, self._peers.silences())
        if not judgement.stop:
            self._undecided_since = None
        elif self._is_ours_to_judge():
            self._stop(judgement, known, views)
            return True
        return False

    def _is_ours_to_judge(self) -> bool:
        is_silent = any(
            silence.seconds > self._config.limits.node_silence_s for silence in self._peers.silences().values()
        )
        if is_silent or not self._peers.leaves_judging():
            return True
        self._undecided_since = self._undecided_since or time.monotonic()
        return time.monotonic() - self._undecided_since > _NO_DECISION_S

    def _stop(self, judgement: Judgement, known: Sequence[ProcessView], own: Sequence[ProcessView]) -> None:
        """Reports, and ends the ranks of this node, and of the others where this one decides."""
        report = Report(views=known, judgement=judgement, limits=self._config.limits)
        decision = Stop(report.to_json(), report.table())
        self._peers.stop(decision)
        take_stacks(self._config.directory, own)
        found = texts(self._config.directory, own) | self._peers.texts(_TEXTS_S)
        directory = self._write(decision, found)
        _say("\n".join([decision.table, *report.told(found), self._ending(directory)]))
        self._end(own, decision, found)

    def _follow(self, decision: Stop, own: Sequence[ProcessView]) -> None:
        """Does what node 0 has decided."""
        take_stacks(self._config.directory, own)
        found = texts(self._config.directory, own)
        self._peers.send_texts(found)
        directory = self._write(decision, found)
        _say("\n".join([decision.table, self._ending(directory)]))
        self._end(own, decision, found)

    def _ending(self, directory: Path | None) -> str:
        host = self._config.identity.host
        where = f"; stacks and everything else: {directory}" if directory is not None else ""
        return f"stall guard: all ranks of {host} are ended with exit code {EXIT_STALLED}{where}"

    def _end(self, own: Sequence[ProcessView], decision: Stop, found: Mapping[str, str]) -> None:
        to_blame = decision.culprits()
        blamed = [view for view in own if view.name in to_blame]
        for view in blamed:
            self._tell_torchrun(view, decision, found)
        for view in end_processes(blamed + [view for view in own if view not in blamed]):
            _say(f"stall guard: {view.name} (pid {view.reading.pid}) is in the kernel and does not end")
        self._watch.clear()

    def _write(self, decision: Stop, found: Mapping[str, str]) -> Path | None:
        node = self._config.identity.node_rank
        name = f"stall-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}" + (f"-node-{node}" if node else "")
        try:
            directory = _new_directory(self._config.report_dir, name)
            (directory / "stall.json").write_text(json.dumps(decision.report, indent=1), encoding="utf-8")
            (directory / "table.txt").write_text(decision.table + "\n", encoding="utf-8")
            for file, text in found.items():
                (directory / Path(file).name).write_text(text, encoding="utf-8")
        except OSError as error:
            _say(f"stall guard: the report cannot be written: {error}")
            return None
        return directory

    def _tell_torchrun(self, view: ProcessView, decision: Stop, found: Mapping[str, str]) -> None:
        path = view.reading.error_file
        if path is None or not view.is_rank or Path(path).exists():
            return
        reason = f"stall guard: {decision.reason_of(view.name)}"
        where = found.get(f"{view.name}.traceback.txt") or last_stack(found.get(f"{view.name}.stack.txt", ""))
        # The earliest is taken for the cause, and its stack, not its message, is what torchrun prints.
        told = torchrun_error(reason, f"{reason}\n{where}", time.time() - view.age_s)
        try:
            Path(path).write_text(json.dumps(told), encoding="utf-8")
        except OSError as error:
            _log.warning("%s: torchrun is not told: %s", path, error)


def _are_done(views: Sequence[ProcessView]) -> bool:
    """Whether nothing is to be watched any more: a rank that is done may live on, one that was asked to leave not."""
    ranks = [view for view in views if view.is_rank and view.state is not ProcessState.NOT_STARTED]
    return bool(ranks) and all(
        view.reading.phase is Phase.DONE or (view.reading.phase is Phase.LEAVING and view.state.has_ended)
        for view in ranks
    )


def _new_directory(parent: Path, name: str) -> Path:
    for attempt in range(100):
        directory = parent / (name if not attempt else f"{name}-{attempt}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise FileExistsError(f"{parent / name} is there a hundred times")


def _say(text: str) -> None:
    """To the standard error of the ranks, in one piece, so that their own output does not come in between."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # Nobody listens any more; the report directory has it all.
        return
