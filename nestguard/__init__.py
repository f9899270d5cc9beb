"""Watches the processes of a training run and reports which one is responsible when the run stalls."""

from nestguard.authentication import new_token
from nestguard.current_heartbeat import current, set_current, start_worker
from nestguard.directory import run_directory
from nestguard.errors import GuardError
from nestguard.heartbeat import Heartbeat, HeartbeatSlot, NoHeartbeat
from nestguard.launch import MonitorHandle, start_monitor
from nestguard.limits import StallLimits
from nestguard.peers import PeerConfig
from nestguard.process import EXIT_STALLED
from nestguard.record import Identity, Phase, Reading, read_heartbeat

__all__ = [
    "EXIT_STALLED",
    "GuardError",
    "Heartbeat",
    "HeartbeatSlot",
    "Identity",
    "MonitorHandle",
    "NoHeartbeat",
    "PeerConfig",
    "Phase",
    "Reading",
    "StallLimits",
    "current",
    "new_token",
    "read_heartbeat",
    "run_directory",
    "set_current",
    "start_monitor",
    "start_worker",
]
