"""Watches the processes of a training run and reports which one is responsible when the run stalls."""

from nestguard.connect.peers import PeerConfig, new_token
from nestguard.diagnose.stall_limits import StallLimits
from nestguard.launch import MonitorHandle, start_monitor
from nestguard.observe.directory import run_directory
from nestguard.observe.heartbeat import Heartbeat, HeartbeatSlot, NoHeartbeat, current, set_current, start_worker
from nestguard.observe.heartbeat_file import read_heartbeat
from nestguard.observe.process import EXIT_STALLED, describe_exit
from nestguard.observe.view import GuardError, Identity, Phase, Reading

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
    "describe_exit",
    "new_token",
    "read_heartbeat",
    "run_directory",
    "set_current",
    "start_monitor",
    "start_worker",
]
