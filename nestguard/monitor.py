"""The monitor process of one node: observes its processes, diagnoses the run, reports a stall and ends the ranks.

The first local rank of the node starts it. It does not import torch and uses no GPU. If the monitor itself dies,
training continues unwatched.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nestguard.connect.coordinator import Coordinator
from nestguard.connect.follower import Follower
from nestguard.connect.peers import LocalOnly, PeerConfig, SharedToken, StopDecision
from nestguard.diagnose.run_diagnosis import RunDiagnosis, diagnose
from nestguard.diagnose.stall_limits import StallLimits, too_long
from nestguard.observe.directory import TRACE_SUFFIX, DirectoryLock
from nestguard.observe.process import EXIT_STALLED
from nestguard.observe.view import Identity, Phase, ProcessState, ProcessView, missing_ranks
from nestguard.observe.watch import NodeWatch
from nestguard.stall_report import Report, write_report, write_torchrun_error
from nestguard.termination import collect_dumps, terminate

_log = logging.getLogger(__name__)
_DUMPS_TIMEOUT_S = 3.0
"""How long the coordinator waits for the stacks of the other nodes."""

_BIND_TIMEOUT_S = 10.0
"""How long node 0 waits for its port, which the monitor of an earlier attempt may still hold."""

_BIND_RETRY_S = 0.25


class Monitor:
    """Observes the ranks of a node until they have ended, or until it has terminated them.

    Args:
        lock: Lock of the directory where the processes of the node write their heartbeats. The monitor removes the
            files there when it exits.
        report_dir: Where a report, `stall-TIME/`, is written.
        identity: Identity of the rank that started the monitor.
        limits: How long a process may go without a heartbeat.
        starter_pid: Process that started the monitor, after its own heartbeat.
        peers: Where the monitors of several nodes connect to each other; None for a single node.
        token: The run token, without which monitors of several nodes do not connect to each other.
    """

    def __init__(
        self,
        lock: DirectoryLock,
        report_dir: Path,
        identity: Identity,
        limits: StallLimits,
        starter_pid: int,
        peers: PeerConfig | None,
        token: SharedToken,
    ) -> None:
        self._lock, self._report_dir, self._identity = lock, report_dir, identity
        self._limits, self._starter_pid = limits, starter_pid
        self._watch = NodeWatch(lock.path, identity)
        self._peers: LocalOnly = connect_peers(peers, identity, limits, token)
        self._has_reported_suspension = False

    def run(self) -> None:
        """Observes the ranks; returns when they have ended or the run was stopped."""
        interval_s = max(0.1, min(1.0, self._limits.shortest_s / 20))
        try:
            while True:
                views = self._watch.scan()
                self._report_suspension()
                self._peers.send_views(views)
                if self._stop_if_needed(views) or _have_ended(views):
                    self._lock.remove()
                    return
                self._watch.wait(interval_s)
        finally:
            self._peers.close()

    def _report_suspension(self) -> None:
        if self._watch.is_suspended and not self._has_reported_suspension:
            _print(
                "stall guard: all ranks of this node are stopped, by Ctrl-Z or a scheduler; this time does not count"
            )
        self._has_reported_suspension = self._watch.is_suspended

    def _stop_if_needed(self, views: list[ProcessView]) -> bool:
        """Ends the ranks of this node if the run has to be stopped; returns whether the monitor is to exit."""
        if all(view.state is ProcessState.NOT_STARTED for view in views):
            if os.getppid() != self._starter_pid:
                return True  # it has ended and its heartbeat is removed, so no rank is left to watch
            if self._watch.age_s > self._limits.first_step_s:
                _print(f"stall guard: no rank has a heartbeat in {self._lock.path}; the run is not watched")
                return True
            return False
        decision = self._peers.decision()
        if decision is not None:
            self._follow(decision, views)
            return True
        return self._decide(views)

    def _decide(self, views: Sequence[ProcessView]) -> bool:
        """Stops the run if its diagnosis demands it and this node may decide; returns whether it has done so."""
        silences = self._peers.silences()
        if self._peers.has_coordinator() and not too_long(silences, self._limits):
            return False
        known = [*views, *self._peers.views()]
        known += missing_ranks(known, self._identity, self._peers.disconnected_s())
        diagnosis = diagnose(known, self._limits, silences)
        if diagnosis.must_stop:
            self._stop(diagnosis, known, views)
        return diagnosis.must_stop

    def _stop(self, diagnosis: RunDiagnosis, known: Sequence[ProcessView], own: Sequence[ProcessView]) -> None:
        """Reports the stall, ends the ranks of this node, and tells the followers to end theirs."""
        report = Report(views=known, diagnosis=diagnosis, limits=self._limits)
        decision = StopDecision(report.to_json(), report.table())
        self._peers.send_stop(decision)
        dumps = collect_dumps(self._lock.path, own) | self._peers.receive_dumps(_DUMPS_TIMEOUT_S)
        self._end_ranks(own, decision, dumps, report.culprit_dumps(dumps))

    def _follow(self, decision: StopDecision, own: Sequence[ProcessView]) -> None:
        """Carries out the coordinator's decision on this node."""
        dumps = collect_dumps(self._lock.path, own)
        self._peers.send_dumps(dumps)
        self._end_ranks(own, decision, dumps)

    def _end_ranks(
        self,
        own: Sequence[ProcessView],
        decision: StopDecision,
        dumps: Mapping[str, str],
        lines: Sequence[str] = (),
    ) -> None:
        """Writes the report, prints its table with some lines below, and ends the processes here, culprits first."""
        closing = f"stall guard: ending all ranks of {self._identity.host} with exit code {EXIT_STALLED}"
        try:
            directory = write_report(self._report_dir, self._identity.node_rank, decision, dumps)
            closing += f"; report and stacks: {directory}"
            if any(name.endswith(TRACE_SUFFIX) for name in dumps):
                closing += f", unfinished collectives: {directory}/*{TRACE_SUFFIX}"
        except (OSError, ValueError) as error:  # a peer may send a name or a text that no file can have
            _print(f"stall guard: cannot write the report: {error}")
        _print("\n".join([decision.table, *lines, closing]))
        names = decision.culprits()
        culprits = [view for view in own if view.name in names]
        for view in culprits:
            write_torchrun_error(view, decision, dumps)
        for view in terminate(culprits + [view for view in own if view not in culprits]):
            _print(f"stall guard: {view.name} (pid {view.reading.pid}) survived SIGKILL: it is blocked in the kernel")


def _have_ended(views: Sequence[ProcessView]) -> bool:
    """Returns whether all started ranks have ended.

    A rank that is DONE or LEAVING counts although its process may still run: it will not wait for another rank.
    """
    ranks = [view for view in views if view.is_rank and view.state is not ProcessState.NOT_STARTED]
    return bool(ranks) and all(view.reading.phase in (Phase.DONE, Phase.LEAVING) for view in ranks)


def _print(text: str) -> None:
    """Writes to standard error, which the ranks share, in one piece, so that their output does not interrupt it."""
    with contextlib.suppress(OSError, ValueError):  # it is closed; the report contains everything
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def connect_peers(config: PeerConfig | None, identity: Identity, limits: StallLimits, token: SharedToken) -> LocalOnly:
    """Returns the role of this node's monitor.

    Args:
        config: Where the monitors connect to each other; None for a single node.
        identity: Identity of the rank that started this monitor.
        limits: How long a process may go without a heartbeat.
        token: The run token; the monitors connect once it is known.

    Returns:
        `Coordinator` on node 0 and `Follower` on the others. `LocalOnly` without `config`, and, with a warning, on a
        node 0 that cannot listen on its port.
    """
    if config is None:
        return LocalOnly()
    if identity.node_rank > 0:
        return Follower(config, identity, limits, token)
    deadline = time.monotonic() + _BIND_TIMEOUT_S
    while True:
        try:
            return Coordinator(config, identity, token)
        except OSError as error:
            if time.monotonic() > deadline:
                _log.warning(
                    "cannot listen at %s, port %d; each node decides for itself and prints its own table: %s",
                    config.host,
                    config.port,
                    error,
                )
                return LocalOnly()
        time.sleep(_BIND_RETRY_S)
