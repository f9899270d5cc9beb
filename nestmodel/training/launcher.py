"""The start and the end of a process that is a rank.

Who started it: what its siblings on this machine agree on before they have met. And how it parts from them.
"""

import atexit
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

STARTER = "NESTMODEL_STARTER"
"""Holds the process that starts ranks by way of Lightning. Whoever starts ranks from it otherwise takes it out."""


class _Start(NamedTuple):
    name: str
    is_by_lightning: bool


@cache
def _start() -> _Start:
    """Decided once, since Lightning sets LOCAL_RANK in the process that starts the others, too."""
    if "LOCAL_RANK" not in os.environ:
        os.environ[STARTER] = str(os.getpid())  # for the ranks that Lightning starts from here
        return _Start(str(os.getpid()), False)
    parent = str(os.getppid())
    if os.environ.get(STARTER) == parent:
        return _Start(parent, True)
    return _Start(f"{parent}-{os.environ.get('MASTER_PORT', '')}", False)


def record_launcher() -> None:
    """Takes note of how this process was started; to be called before any `fit`."""
    _start()


def is_started_by_lightning() -> bool:
    """Whether another rank of this machine started this one."""
    return _start().is_by_lightning


@cache
def destroy_process_group_at_exit() -> None:
    """Has the process group destroyed when the process exits, for one whose collectives are all done.

    Otherwise a thread of gloo may meet an interpreter that is gone, and a run that ended well exits with SIGABRT
    (pytorch#179291). With a collective under way it would wait for the others, so a rank that failed is left alone.
    """
    atexit.register(_part)


def _part() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def node_run_id(cluster_environment: Any) -> str:
    """Returns a name that the ranks of a node have in common, and no other run on it at the same time.

    Args:
        cluster_environment: Lightning's, or None where there is none.
    """
    known = os.environ
    if isinstance(cluster_environment, TorchElasticEnvironment):
        return "-".join(
            known.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        )
    if isinstance(cluster_environment, SLURMEnvironment):
        return "-".join(known.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return _start().name
